"""Claims the folder of a run, and writes what is known before its first rank starts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from paceline.base.files import write_json
from paceline.job.file import JobFile
from paceline.launch.local.launcher import Launcher
from paceline.planner.resolve import Resolved
from paceline.runs import folder
from paceline.runs.provenance import origin


def agreed_folder(
    launcher: Launcher,
    claims: ExitStack,
    run: str | Path | None,
    resolved: Resolved,
    source: JobFile | Path | None,
    *,
    resume: bool,
    timeout_s: float,
) -> tuple[Path, bool]:
    """Claim the run folder by the first host, and return it with whether the run goes on. Collective
    over hosts. See `_claim`.

    Args:
        timeout_s: Seconds to wait until lost ranks end, if a launcher has started this one again.
    """
    is_again = launcher.environment is not None and launcher.environment.num_starts > 1
    is_resumed = resume or is_again
    lost_s = timeout_s if is_again else 0.0
    run_dir = launcher.agree(
        "run folder",
        lambda: _claim(claims, run, resolved, source, resume=is_resumed, lost_s=lost_s),
    )
    return Path(run_dir), is_resumed


def _claim(
    claims: ExitStack,
    run: str | Path | None,
    resolved: Resolved,
    source: JobFile | Path | None,
    *,
    resume: bool,
    lost_s: float,
) -> str:
    """Claim the run folder, and return it as text. The results of a finished run are removed.

    Args:
        claims: Hold the folder until they are closed.
        source: The job's file, or a script with its own loop; None for a job made in Python.
        lost_s: Seconds to wait until lost ranks of an earlier start end.
    """
    path = source.path if isinstance(source, JobFile) else source
    run_dir = Path(run) if run is not None else folder.fresh_name(path.stem if path else "job")
    folder.check_free(run_dir, resume=resume)
    if lost_s:
        folder.wait_until_unclaimed(run_dir, timeout_s=lost_s)
    claims.enter_context(folder.claimed(run_dir))
    if resume:
        claims.enter_context(folder.kept_unless_trained(run_dir))
    for name in (folder.SUMMARY, folder.MODEL, folder.PREDICTED, folder.SPLIT):
        (run_dir / name).unlink(missing_ok=True)
    plan = {
        "plan": str(resolved.plan),
        "world_size": resolved.plan.world_size,
        "shares": list(resolved.shares),
        "devices": resolved.devices,
    }
    write_json(run_dir / folder.PLAN, plan)
    write_json(run_dir / folder.ORIGIN, origin(path))
    if isinstance(source, JobFile):
        write_json(run_dir / folder.JOB, source.to_dict())
    return str(run_dir)
