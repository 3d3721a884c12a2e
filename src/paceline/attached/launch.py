"""Starts the ranks of a script with its own loop, each of which runs it from its first line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.api.claims import agreed_folder
from paceline.attached.script import run_script
from paceline.attached.session import ScriptProcess
from paceline.base.errors import UsageError
from paceline.base.files import write_json
from paceline.callbacks.loggers import loggers_of
from paceline.launch.hosts.environment import current
from paceline.launch.local.launcher import Launcher
from paceline.launch.process.failure import RankFailed
from paceline.planner.resolve import Resolved, resolve
from paceline.runs import folder
from paceline.strategies.compose import load
from paceline.strategies.plan import Plan
from paceline.training.drivers import fault_policy
from paceline.training.settings import Settings

if TYPE_CHECKING:
    from paceline.launch.process.context import RankContext
    from paceline.proof.first_update import FirstUpdate


def run(
    script: str | Path,
    plan: str | Plan | None = None,
    *,
    arguments: Sequence[str] = (),
    run: str | Path | None = None,
    resume: bool = False,
    timeout_s: float = 300.0,
    restarts: int | None = None,
    log: str | Sequence[str] | None = None,
    check: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Run a script that calls `pl.attach` on every rank of a plan, and leave a run folder.

    Args:
        script: A Python file that calls `pl.attach`. Each rank runs it as `__main__`.
        plan: A plan such as "data=2", or the name of a plan file; by default one replica a device.
        arguments: The script's own arguments, in `sys.argv`.
        run, resume, timeout_s, restarts, log: As for `paceline.train`.
        check: Whether the first update is compared with one device's, if its loss is a function. This
            is done before the run; see `first_update.py`.
        options: `devices`, `procs` and `memory` as there, and fields of `Settings`.

    Returns:
        The figures of the run.

    Raises:
        UsageError: the request makes no sense; nothing was started.
        RankFailed: a rank failed; its report names rank, step and line.
    """
    machine = {name: options.pop(name, None) for name in ("devices", "procs", "memory")}
    path = Path(script)
    if not path.is_file():
        raise UsageError(f"there is no script {path}")
    if resume and run is None:
        raise UsageError("resume needs the run folder to go on in", hint="--run DIR --resume")
    resolved = resolve(None, plan, environment=current(), **machine)
    load(resolved.plan)
    launcher = Launcher(
        current(),
        resolved.cluster.devices,
        timeout_s=timeout_s,
        fault_policy=fault_policy(resolved.plan),
    )
    loggers = loggers_of(log)
    if launcher.is_first:
        for logger in loggers:
            logger.check()
    with ExitStack() as claims:
        run_dir, is_resumed = agreed_folder(
            launcher, claims, run, resolved, path, resume=resume, timeout_s=timeout_s
        )
        if launcher.is_first:
            print(
                f"plan {resolved.plan} on {resolved.devices}, each running {path}\nrun folder {run_dir}",
                file=sys.stderr,
                flush=True,
            )
        checked = None
        if check and not is_resumed:  # a run that goes on has taken its first update
            checked = _checked(launcher, path, arguments, resolved)
        settings = Settings(
            run_dir=run_dir,
            shares=resolved.shares,
            resume=is_resumed,
            devices=resolved.rank_devices,
            **options,
        )

        def body(context: RankContext) -> Any:
            folder.unclaim_in_forks()
            session = ScriptProcess(
                context,
                resolved.plan,
                replace(settings, resume=is_resumed or context.num_starts > 1),
                loggers=loggers,
            )
            return run_script(session, path, arguments)

        def ended(failed: RankFailed) -> None:
            folder.write_failure(run_dir, str(resolved.plan), failed)
            failed.run_dir = run_dir

        figures = launcher.run(body, run_dir=run_dir, restarts=restarts, ended=ended)
        if launcher.is_first:
            figures |= {"devices": resolved.devices, "check": checked and checked.to_dict()}
            write_json(run_dir / folder.SUMMARY, figures)
    return dict(figures)


def _checked(
    launcher: Launcher, path: Path, arguments: Sequence[str], resolved: Resolved
) -> FirstUpdate | None:
    """Check the first update before the run, and say what was not. Rank 0 checks for all."""
    from paceline.api.checks import agreed_update
    from paceline.api.train import tell_check
    from paceline.attached.first_update import OF_TENSOR, check_script

    def check() -> FirstUpdate | None:
        return check_script(
            path,
            arguments,
            resolved,
            environment=launcher.environment,
            timeout_s=launcher.timeout_s,
        )

    update = agreed_update(launcher, check)
    if launcher.is_first and update is not None:
        tell_check(update, resolved)
        if update.reason == OF_TENSOR:
            print(
                f"paceline verify {path} --plan '{resolved.plan}' compares its updates",
                file=sys.stderr,
            )
    return update
