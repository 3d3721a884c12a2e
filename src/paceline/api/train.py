"""The verb train: get from a job, a plan and devices to a run folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.api.claims import agreed_folder
from paceline.api.plan_choice import PlanChoice, is_auto
from paceline.api.prediction import Priced, predict_once_started, price, sum_up, what_would_fit
from paceline.api.result import Result
from paceline.api.summary_table import summary_table
from paceline.base.errors import OutOfMemory, UsageError
from paceline.base.logs import unbroken
from paceline.callbacks.loggers import loggers_of, of_cluster
from paceline.job import Job
from paceline.job.file import AnyJob, JobFile, open_job
from paceline.launch.hosts.environment import current, told_to_torchrun
from paceline.launch.local.launcher import Launcher
from paceline.launch.process.failure import RankFailed
from paceline.planner.resolve import Resolved, resolve
from paceline.runs import folder
from paceline.strategies.plan import Plan
from paceline.training.parts.spikes import read_action, refuse_unwatched

if TYPE_CHECKING:
    from paceline.callbacks.controller import RunController
    from paceline.launch.process.context import RankContext
    from paceline.launch.process.rank_process import Body
    from paceline.proof.first_update import FirstUpdate
    from paceline.training.settings import Observer

Follow = Callable[["RankContext", Path], "Observer"]


@unbroken()
@told_to_torchrun()
def train(
    job: AnyJob,
    plan: str | Plan | None = None,
    *,
    devices: str | None = None,
    on: str | None = None,
    procs: int | None = None,
    memory: str | None = None,
    steps: int | None = None,
    save_every: int | None = None,
    keep: int | None = None,
    trace: int = 0,
    run: str | Path | None = None,
    resume: bool = False,
    loader_workers: int | None = None,
    timeout_s: float = 300.0,
    restarts: int | None = None,
    on_spike: Literal["stop", "skip"] | None = None,
    check: bool = True,
    log: str | Sequence[str] | None = None,
    table: bool = True,
) -> Result:
    """Train a job under a plan and leave a run folder.

    Args:
        job: A job, or the Python file of a function that makes one, which is `job` by default.
        plan: A plan such as "data=2", or the name of a plan file. By default, or as "auto", the
            fastest exact plan that fits: predicted, and corrected by short runs if the run is long
            enough. Inside a launcher the default is one replica per rank. A run that is resumed
            keeps its plan.
        devices: Names such as cpu:0-1 or cuda:0-3, one a rank. By default this machine's GPUs, else
            one CPU rank per core.
        on: "ray", or "ray:HOST:PORT" of its head, uses the nodes of a Ray cluster instead of this
            machine.
        procs: Number of ranks, if neither the plan nor the devices say it.
        memory: What each CPU rank may use, such as 512MiB, or one size per rank. A rank that needs
            more is stopped.
        steps: Optimizer steps instead of the job's own length.
        save_every: Optimizer steps between checkpoints; one is always written at the end.
        keep: How many of the newest checkpoints stay; by default all. The one with the least
            validation loss and those that `KeepBest` keeps stay, too.
        trace: Number of steps whose work is recorded in `trace.json` (Perfetto) and `schedule.svg`,
            on every rank and after the first step.
        run: The run folder; by default a new one in `runs/`. All hosts of a run must see it.
        resume: Go on from the newest valid checkpoint in the run folder, under this plan and these
            devices.
        loader_workers: Processes per rank that read samples ahead; 0 reads them in the rank. By
            default as many as the job's `DataLoader` has, or none.
        timeout_s: Seconds without a sign of life from a rank after which the run ends and names it.
        restarts: How often ranks that were killed, or hang, are started again; by default 100 times
            a run. If the others can go on without the rank, only this worker is started again; else
            all ranks, from a copy of their state in memory or the newest checkpoint. A launcher
            such as torchrun starts ranks again itself.
        on_spike: What to do about a step whose loss or gradient is far above those before it. The
            same is done if it is not finite. "stop" ends the run, "skip" leaves the step out. By
            default only a loss that is not finite stops the run; see docs/survive.md.
        check: Whether the first update is compared with one device's before training. Separate
            ranks do this; see `proof/first_update.py`.
        log: Where else the run is logged: tensorboard, mlflow, wandb or trackio. Each may have
            ":WHERE"; see docs/callbacks.md.
        table: Whether the figures are printed at the end.

    Raises:
        UsageError: the request makes no sense (job, plan or cluster); nothing was started or
            written.
        PlanRefused: the plan's first update is not what one device computes; nothing was trained.
        RankFailed: a rank failed; its report names rank, step and line.
    """
    _check(save_every=save_every, keep=keep, steps=steps, procs=procs, timeout_s=timeout_s)
    if restarts is not None and restarts < 0:
        raise UsageError(f"restarts must be 0 or more, got {restarts}")
    if resume and run is None:
        raise UsageError("resume needs the run folder to go on in", hint="--run DIR --resume")
    action = read_action(on_spike)
    loggers = loggers_of(log)
    if on is None and getattr(current(), "rank", 0) == 0:
        for logger in loggers:
            logger.check()
    source, loaded = open_job(job)
    if steps is not None:
        loaded = replace(loaded, steps=steps, epochs=None)
    plan_to_run = _plan_of(run, procs=procs) if resume and is_auto(plan) else plan
    if on is not None:
        from paceline.ray.training import RayRun

        result = RayRun.of(
            on,
            source,
            loaded,
            plan_to_run,
            run=run,
            timeout_s=timeout_s,
            options={
                "devices": devices,
                "procs": procs,
                "memory": memory,
                "steps": steps,
                "save_every": save_every,
                "keep": keep,
                "trace": trace,
                "resume": resume,
                "loader_workers": loader_workers,
                "timeout_s": timeout_s,
                "check": check,
                "log": log,
                "on_spike": on_spike,
            },
        ).train(loaded, restarts=restarts)
    else:
        if loader_workers is None:
            loader_workers = loaded.loading.num_workers if loaded.loading is not None else 0
        loaded = replace(loaded, callbacks=[*loaded.callbacks, *loggers, *of_cluster()])
        request = TrainRequest.of(
            loaded, source, plan_to_run, devices=devices, procs=procs, memory=memory
        )
        result = request.train(
            run,
            timeout_s=timeout_s,
            restarts=restarts,
            check=check,
            save_every=save_every,
            keep_checkpoints=keep,
            resume=resume,
            loader_workers=loader_workers,
            trace_steps=trace,
            on_spike=action,
        )
    if table and getattr(current(), "rank", 0) == 0:
        print(summary_table(result.to_dict()), file=sys.stderr, flush=True)
    return result


@dataclass(frozen=True)
class TrainRequest:
    """A job with the plan and devices to train it on."""

    job: Job
    source: JobFile | None  # the job's file, if it has one
    resolved: Resolved
    chosen: PlanChoice
    by_name: bool  # whether the user named the devices

    @classmethod
    def of(
        cls,
        job: Job,
        source: JobFile | None,
        plan: str | Plan | None,
        *,
        devices: str | None = None,
        procs: int | None = None,
        memory: str | None = None,
    ) -> TrainRequest:
        """Resolve what the user asked for into a request.

        Raises:
            UsageError: the request makes no sense.
        """
        machine: Any = {
            "devices": devices,
            "procs": procs,
            "memory": memory,
            "environment": current(),
        }
        if plan is None or is_auto(plan):
            from paceline.api.auto import choose

            chosen = choose(job, plan, **machine)
        else:
            chosen = PlanChoice(Plan.read(plan))
        resolved = resolve(job, chosen.plan, **machine)
        return cls(job, source, resolved, chosen, by_name=devices is not None)

    def train(
        self,
        run: str | Path | None,
        *,
        timeout_s: float = 300.0,
        restarts: int | None = None,
        check: bool = True,
        follow: Follow | None = None,
        **options: Any,
    ) -> Result:
        """Train the job in a run folder that is claimed meanwhile.

        Args:
            follow: Makes a rank's observer from its context and the run folder.
            options: See `Settings`.
        """
        with ExitStack() as claims:
            result = self._train(
                claims,
                run,
                timeout_s=timeout_s,
                restarts=restarts,
                check=check,
                follow=follow,
                **options,
            )
        if not options.get("resume") or result.to_dict().get("later_step_s") != 0:
            return result
        print(
            f"{result.run_dir} was complete after {result['steps']} steps: nothing was left to train",
            file=sys.stderr,
            flush=True,
        )
        return Result(folder.read_summary(result.run_dir), result.run_dir, self.job)

    def _train(
        self,
        claims: ExitStack,
        run: str | Path | None,
        *,
        timeout_s: float,
        restarts: int | None,
        check: bool,
        follow: Follow | None,
        **options: Any,
    ) -> Result:
        from paceline.strategies.compose import load
        from paceline.training.drivers import fault_policy, train_rank
        from paceline.training.settings import Settings

        job, resolved, chosen = self.job, self.resolved, self.chosen
        on_spike = options.get("on_spike")
        refuse_unwatched(on_spike, resolved.plan)
        load(resolved.plan)
        priced = price(job, resolved, chosen, snapshot=options.get("save_every") is not None)
        launcher = Launcher(
            current(),
            resolved.cluster.devices,
            timeout_s=timeout_s,
            fault_policy=fault_policy(resolved.plan),
        )
        run_dir, _ = agreed_folder(
            launcher,
            claims,
            run,
            resolved,
            self.source,
            resume=options.get("resume", False),
            timeout_s=timeout_s,
        )
        if launcher.is_first:
            print(
                _banner(job, resolved, chosen.why, run_dir, by_name=self.by_name),
                file=sys.stderr,
                flush=True,
            )
        checked = None
        try:
            if check:
                workers = options.get("loader_workers", 0)
                checked = _checked(job, self.source, resolved, launcher, workers)
        except RankFailed as failed:
            if launcher.is_first:
                folder.write_failure(run_dir, str(resolved.plan), failed)
            raise
        controller: RunController | None = None
        control: AbstractContextManager[None] = nullcontext()
        if job.callbacks:
            from paceline.callbacks.controller import RunController, controlled

            controller = RunController(
                job.callbacks,
                job,
                plan=str(resolved.plan),
                folder=run_dir,
                save_every=options.get("save_every"),
            )
            control = controlled(controller, speaks=launcher.is_first)
        settings = Settings(
            run_dir=run_dir,
            shares=resolved.shares,
            devices=resolved.rank_devices,
            controller=controller,
            **options,
        )

        launcher_pid = os.getpid()

        def body(context: RankContext) -> Any:
            folder.unclaim_in_forks()
            if settings.faults:
                from paceline.launch.process.faults import FaultInjector

                context.faults = FaultInjector(
                    settings.faults, rank=context.rank, run_dir=run_dir, launcher_pid=launcher_pid
                )
            observer = settings.observer if follow is None else follow(context, run_dir)
            return train_rank(
                context,
                job,
                resolved.plan,
                replace(
                    settings, resume=settings.resume or context.num_starts > 1, observer=observer
                ),
            )

        with control:
            figures = self._run(
                launcher, body, priced, run_dir, controller=controller, restarts=restarts
            )
            if launcher.is_first:
                if checked is not None and checked.fails_alike:
                    tell_check(checked, resolved)
                figures = sum_up(
                    run_dir,
                    {
                        **figures,
                        "devices": resolved.devices,
                        "check": checked and checked.to_dict(),
                    },
                    priced,
                )
            # With servers and their workers, only rank 0 has figures.
            result = Result(figures or {}, run_dir, job)
            if controller is not None and launcher.is_first:
                controller.ended(result)
        return result

    def _run(
        self,
        launcher: Launcher,
        body: Body,
        priced: Priced,
        run_dir: Path,
        *,
        controller: RunController | None,
        restarts: int | None,
    ) -> Any:
        def ended(failed: RankFailed) -> None:
            for part in run_dir.glob(
                f".{folder.PREDICTED}.*.tmp"
            ):  # the process that predicts is killed at any line
                part.unlink()
            folder.write_failure(run_dir, str(self.resolved.plan), failed)
            failed.run_dir = run_dir
            if failed.exit_code == OutOfMemory.exit_code:
                what, rank = failed.failure.message.partition("\n")[0], failed.failure.rank
                print(
                    f"rank {rank} ran {what}; looking for what would fit",
                    file=sys.stderr,
                    flush=True,
                )
                print(what_would_fit(priced), file=sys.stderr, flush=True)

        return launcher.run(
            body,
            run_dir=run_dir,
            restarts=restarts,
            listener=controller,
            idle=lambda board: predict_once_started(board, priced, run_dir),
            ended=ended,
        )


def _checked(
    job: Job, source: JobFile | None, resolved: Resolved, launcher: Launcher, loader_workers: int
) -> FirstUpdate | None:
    """Check the first update before the run; print a line if the run is not, or may not be, what
    one device computes.

    If the job's own error ended the check both on one device and under the plan, the run itself
    reports that error. Only if the run ends without it, a line reports the check afterwards.

    Inside a launcher rank 0 checks for all.
    """
    from paceline.api import checks

    def check() -> FirstUpdate | None:
        return checks.first_update(
            job,
            source,
            resolved,
            environment=launcher.environment,
            timeout_s=launcher.timeout_s,
            loader_workers=loader_workers,
        )

    update = checks.agreed_update(launcher, check)
    if launcher.is_first and update is not None and not update.fails_alike:
        tell_check(update, resolved)
    return update


def tell_check(update: FirstUpdate, resolved: Resolved) -> None:
    if update.verdict == "coupled" or (
        update.verdict == "unchecked" and resolved.plan.relaxed is None
    ):
        word = "note" if update.verdict == "coupled" else "not checked against one device"
        print(f"{word}: {update.reason}", file=sys.stderr, flush=True)


def _check(**counts: float | None) -> None:
    for name, value in counts.items():
        if value is not None and value <= 0:
            raise UsageError(
                f"{name.removesuffix('_s').replace('_', '-')} must be above 0, got {value}"
            )


def _plan_of(run: str | Path | None, *, procs: int | None) -> Plan | None:
    """Return the plan that a run folder was left with, if it is for as many ranks as were asked
    for.
    """
    path = Path(run or "") / folder.PLAN
    plan = Plan.read(str(path)) if path.exists() else None
    return plan if plan is not None and procs in (None, plan.world_size) else None


def _banner(job: Job, resolved: Resolved, why: str, run_dir: Path, *, by_name: bool) -> str:
    """Return the lines about the run that is about to start, with every derived number.

    Args:
        by_name: Whether the user named the devices.
    """
    from paceline.job.order import split

    plan, microbatches = resolved.plan, resolved.plan.num_microbatches
    per_replica = [len(part) for part in split(job.batch, resolved.shares)]
    shown = str(per_replica[0]) if len(set(per_replica)) == 1 else ":".join(map(str, per_replica))
    length = f"{job.total_steps} steps" if job.total_steps is not None else "until the data ends"
    if job.epochs is not None:
        length += f" ({job.epochs} epoch{'s' if job.epochs != 1 else ''})"
    samples = f"{job.num_samples} samples" if job.num_samples is not None else "a stream of samples"
    return (
        f"plan {plan} on {resolved.devices}{why and f', chosen: {why}'}\n"
        f"global batch {job.batch} = {plan.replicas} x {shown} samples in {microbatches} micro-batch"
        f"{'es' if microbatches != 1 else ''} a rank; {length}, {samples}, {job.precision}\n"
        f"{_all_at_once(job)}{'' if by_name else _unused(resolved)}"
        f"run folder {run_dir}"
    )


def _all_at_once(job: Job) -> str:
    """Return a line about a batch that is larger than the data; empty if it is not."""
    if job.num_samples is None or job.batch <= job.num_samples:
        return ""
    return f"note: a batch of {job.batch} is more than the {job.num_samples} samples: a step is an epoch\n"


def _unused(resolved: Resolved) -> str:
    """Return a line about a GPU that is here and idle; empty if there is none."""
    from paceline.cluster.accelerators import unused

    reason = unused()
    return f"{reason}; --devices {resolved.devices} asks for the CPU by name\n" if reason else ""
