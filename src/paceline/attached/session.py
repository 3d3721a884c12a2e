"""A script with its own loop runs as a rank of `paceline run`, or as a process by itself."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.api.result import Result
from paceline.base.errors import PlanError
from paceline.cluster.cluster import Cluster
from paceline.job import Job, Precision
from paceline.job.callback import Callback
from paceline.launch.hosts.environment import Environment, current
from paceline.launch.local.launcher import Launcher
from paceline.launch.process.context import RankContext
from paceline.launch.process.fault_policy import ALL_NEEDED
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.launch.process.rank_process import among_peers, set_up_device
from paceline.planner.resolve import check_job, resolve
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.compose import load
from paceline.strategies.plan import Plan
from paceline.training.settings import Settings

if TYPE_CHECKING:
    from paceline.callbacks.controller import RunController

_TIMEOUT_S = (
    300.0  # without a sign of life, after which a rank that torchrun started is taken for lost
)
_here: list[ScriptProcess] = []  # the session of this process, if one has begun


@dataclass(eq=False)
class ScriptProcess:
    """This holds what a script's process is told: its rank, the plan, and how the run is written.

    Attributes:
        change: Makes another job of the script's, for a proof.
        around: What is entered while the script's loop runs, for a proof.
        loggers: Callbacks beside those of the script.
        look: Is given the run, the first loss and its batch, and leaves the script, which trains nothing.
    """

    context: RankContext
    plan: Plan
    settings: Settings
    precision: Precision = "float32"
    change: Callable[[Job], Job] = lambda job: job
    around: AbstractContextManager[Any] = field(default_factory=nullcontext)
    loggers: Sequence[Callback] = ()
    look: Callable[[Any, Any, Any], None] | None = None
    run: Any = None  # the `AttachedRun` of the script
    summary: dict[str, Any] | None = None
    controller: RunController | None = None  # of the run's callbacks
    stack: ExitStack = field(default_factory=ExitStack)  # left at the run's end
    leaving: ExitStack = field(default_factory=ExitStack)  # left at the process's end

    @classmethod
    def current(cls) -> ScriptProcess:
        """Return the session of this process; begin one if it is a script that was started by itself."""
        if not _here:
            _here.append(_begun())
        return _here[-1]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let `pl.attach` inside the block find this session."""
        _here.append(self)
        try:
            with self.stack:
                yield
                self.close()
        finally:
            _here.remove(self)

    def close(self) -> None:
        """End the script's run where it is, if the script has not. Collective."""
        if self.run is not None:
            self.run.finish()

    def check(self, job: Job) -> None:
        """Refuse a plan under which a script's loop can't run.

        Raises:
            PlanError: the message says why, and what to choose instead.
        """
        plan = self.plan
        if ActivePlan(plan).trainer or plan.outer_steps is not None:
            raise PlanError(
                f"plan '{plan}' takes steps in a loop of its own, and this script has its own",
                hint="data=N, shard=N or a product of them; a pl.Job runs under every plan",
            )
        if plan.splits_model and job.models:
            raise PlanError(
                f"plan '{plan}' splits the model over ranks, and this script's loop runs several models",
                hint="data=N, shard=N or a product of them; the training_step= of a pl.Job may split several models",
            )
        check_job(plan, job)

    def settings_of(self, job: Job) -> Settings:
        """Return the settings of a run of this session, with a controller if it has callbacks."""
        workers = job.loading.num_workers if job.loading is not None else 0
        settings = replace(self.settings, loader_workers=workers)
        callbacks = [*job.callbacks, *self.loggers]
        if not callbacks:
            return settings
        if settings.run_dir is None:
            print(
                "note: callbacks look at a run folder, and are not called here: paceline run SCRIPT makes one",
                file=sys.stderr,
            )
            return settings
        from paceline.callbacks.controller import RunController, controlled

        controller = self.controller = RunController(
            callbacks,
            job,
            plan=str(self.plan),
            folder=settings.run_dir,
            save_every=settings.save_every,
        )
        self.stack.enter_context(controlled(controller, speaks=not self.context.rank))
        return replace(settings, controller=controller)

    def enter(self) -> None:
        """Let requests to stop wait for the end of a step, from here to the run's end."""
        self.stack.enter_context(self.around)
        self.stack.enter_context(self.context.stoppable())

    def finished(self, summary: dict[str, Any]) -> None:
        """End the run: what the script does now is no part of it."""
        self.summary = summary
        if self.controller is not None and not self.context.rank:
            self.controller.ended(Result(summary, self.controller.run.folder, None))
        self.stack.close()


def _begun() -> ScriptProcess:
    """Begin the session of a process that a launcher or a person has started."""
    environment = current()
    session = _begun_alone() if environment is None else _joined(environment)
    atexit.register(_close_unless_failed, session)
    return session


def _begun_alone() -> ScriptProcess:
    device = Cluster.local(num_ranks=1).devices[0]
    context = RankContext(0, 1, 1, set_up_device(device, 1), None, HeartbeatTable(1), 0, "alone")
    return ScriptProcess(context, Plan.read("single"), Settings(run_dir=None, shares=(1,)))


def _joined(environment: Environment) -> ScriptProcess:
    """Join the ranks that torchrun or Slurm started, one replica each. Collective."""
    resolved = resolve(None, None, environment=environment)
    load(resolved.plan)
    launcher = Launcher(environment, resolved.cluster.devices, timeout_s=_TIMEOUT_S)
    rank, device = launcher.joined()
    settings = Settings(run_dir=None, shares=resolved.shares)
    session = ScriptProcess(rank.context, resolved.plan, settings)
    session.leaving.callback(rank.end, None, None)
    session.leaving.enter_context(
        among_peers(
            rank.context,
            device=device,
            make_store=lambda: rank.store,
            terminal=sys.stderr,
            report=rank.report_end,
            fault_policy=ALL_NEEDED,
        )
    )
    return session


def _close_unless_failed(session: ScriptProcess) -> None:
    """End the run of a script that has come to its end. After an error, other ranks hear of this one's end."""
    if getattr(sys, "last_value", None) is None:
        with session.leaving, session.stack:
            session.close()
