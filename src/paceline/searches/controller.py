"""The controller of a search. It alone samples, observes and prunes; ranks only train.

The controller gets a trial from Optuna, prices it on one device if necessary, and trains it under
its plan on some of the free devices. Everything that must outlive this process is in Optuna's
storage.
"""

from __future__ import annotations

import math
import re
import shutil
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import JobError, PacelineError, PlanError
from paceline.base.user_code import user_frames
from paceline.job.choices import pick
from paceline.job.file import JobFile
from paceline.launch.local.worker_pool import WorkerPool, largest, node_of, room
from paceline.launch.process.messages import Message
from paceline.runs import folder
from paceline.searches.objectives import PREDICTED, Limit, Objective, final_figures
from paceline.searches.space import Numbers, Options, Space
from paceline.searches.storage import Heartbeats
from paceline.searches.trials import OWNER, RECORD, SURPLUS, counted, dominates, front
from paceline.strategies.plan import Plan
from paceline.training.drivers import fault_policy

if TYPE_CHECKING:
    import optuna

AUTO = "auto"
_LOOK_S = 0.25  # seconds to wait for messages of ranks, between checks for requests to stop
_OWNED_WITHIN = timedelta(seconds=10)
# The search ends if this many trials fail of one cause before one has ended well.
_ALIKE_TO_GIVE_UP = 5
_FAILED_TO_GIVE_UP = 20  # the same for different causes

PlanOf = Callable[[Mapping[str, Any]], str]


@dataclass
class Running:
    """A trial that Optuna has given and whose result it does not have yet."""

    trial: optuna.trial.Trial
    params: dict[str, Any]  # settings of the job, and the model's choices so far
    plan: str | None  # None until the planner has chosen
    wrong: str | None = None  # why `plan_of` gives no valid plan, if so
    refused: str | None = None  # why the user's space pruned it, if so
    predicted: dict[str, float] | None = None  # the priced figures; None before pricing
    slots: tuple[int, ...] = ()
    began_s: float = field(default_factory=time.monotonic)
    num_evaluations: int = 0
    # evaluations that Optuna already has from before this controller
    num_reported: int = 0
    step: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    is_pruned: bool = False
    # ranks that asked whether the trial's weights are worth keeping
    curious: list[Message] = field(default_factory=list)
    keeps: bool | None = None  # the answer to them

    @property
    def number(self) -> int:
        return int(self.trial.number)


@dataclass(frozen=True)
class Request:
    """The request for a search."""

    space: Space
    objectives: Sequence[Objective]
    limits: Sequence[Limit]
    num_trials: int
    # gives the plan of a trial from its parameters; `AUTO` leaves it to the planner
    plan_of: PlanOf
    # samples parameters that depend on each other, from Optuna's trial
    define: Callable[[Any], Mapping[str, Any]] | None
    memory: str | None
    source: JobFile | None


class AllFailed(PacelineError):
    """No trial ended well."""


class Controller:
    """Runs the remaining trials of a study.

    Args:
        owner: Names this run folder among the controllers that share a study.
        is_shared: Whether other controllers may use the study at the same time.
        heed: Called after each change with the controller; returns whether to stop.
    """

    def __init__(
        self,
        study: optuna.Study,
        pool: WorkerPool,
        request: Request,
        run_dir: Path,
        *,
        owner: str,
        is_shared: bool,
        heed: Callable[[Controller], bool],
    ) -> None:
        self.study, self.pool, self.request, self.run_dir = study, pool, request, run_dir
        self.owner, self.is_shared, self.heed = owner, is_shared, heed
        self._beats = Heartbeats(study) if is_shared else None
        self.running: dict[int, Running] = {}  # by the pool's number
        self.waiting: deque[Running] = deque()  # trials that wait for enough free devices
        # unfinished trials of earlier controllers, to be started anew
        self.adopted: deque[optuna.trial.Trial] = deque()
        self.num_done = 0
        self.failures: dict[int, str] = {}  # why a trial failed, by its number
        self.has_success = False
        self.choices_met: set[str] = set()
        figures = {limit.name for limit in request.limits} | {
            each.name for each in request.objectives
        }
        self._figures = sorted(figures & set(PREDICTED))

    def run(self) -> None:
        """Run trials until there are as many as were asked for, or the sampler has no more.

        If `heed` says to stop, running trials keep their state in the study.

        Raises:
            AllFailed: trial after trial failed, and none ended well.
        """
        # A sampler or a pruner may stop the study, as GridSampler does at the end of its grid.
        self.study._thread_local.in_optimize_loop, self.study._stop_flag = True, False
        try:
            self._run()
        finally:
            self.study._thread_local.in_optimize_loop = False

    def _run(self) -> None:
        trials = counted(self.study)
        self.num_done = sum(trial.state.is_finished() for trial in trials)
        self.has_success = any(trial.state.name in ("COMPLETE", "PRUNED") for trial in trials)
        self.adopted.extend(self._left_running())
        while True:
            self._fill()
            if self.heed(self):
                return
            if not (self.running or self.waiting):
                self.adopted.extend(self._left_running())  # nobody has claimed them meanwhile
                if not self.adopted and not self._ownerless():
                    return
            if self._beats is not None:
                self._beats.beat(
                    [each.trial._trial_id for each in (*self.running.values(), *self.waiting)]
                )
            for event in self.pool.wait(_LOOK_S):
                self._handle(event)

    # --- Starting -----------------------------------------------------------------------------------------------

    def _left_running(self) -> list[optuna.trial.Trial]:
        """Return the trials that a killed controller of this run folder left; they start anew with
        their parameters.
        """
        import optuna

        now = datetime.now()
        unfinished = self._unfinished()
        left = [trial for trial in unfinished if trial.user_attrs.get(OWNER) == self.owner]
        left += [
            trial
            for trial in self._ownerless()
            if not self.is_shared or now - (trial.datetime_start or now) > _OWNED_WITHIN
        ]
        return [optuna.trial.Trial(self.study, trial._trial_id) for trial in left]

    def _unfinished(self) -> list[optuna.trial.FrozenTrial]:
        return [trial for trial in counted(self.study) if trial.state.name == "RUNNING"]

    def _ownerless(self) -> list[optuna.trial.FrozenTrial]:
        """Return the unfinished trials that have no owner yet.

        Their controller has not claimed them yet, or was killed before it could.
        """
        return [trial for trial in self._unfinished() if OWNER not in trial.user_attrs]

    def _fill(self) -> None:
        """Start trials while there are devices for them."""
        while self.pool.free:
            if not self.waiting:
                running = self._next()
                if running is None:
                    return
                self.waiting.append(running)
            if not self._start(self.waiting[0]):
                return
            self.waiting.popleft()

    def _next(self) -> Running | None:
        if self.adopted:
            return self._prepare(self.adopted.popleft())
        import optuna

        if self.study._stop_flag or len(counted(self.study)) >= self.request.num_trials:
            return None
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Heartbeat of storage"
            )  # `Heartbeats` keeps it
            trial = self.study.ask()
        if (
            sum(each.number <= trial.number for each in counted(self.study))
            > self.request.num_trials
        ):
            # Another controller asked for the last trial at the same time.
            trial.set_user_attr(SURPLUS, True)
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return None
        return self._prepare(trial)

    def _prepare(self, trial: optuna.trial.Trial) -> Running:
        """Claim a trial, and sample the parameters that are known before its model is built."""
        import optuna

        trial.set_user_attr(OWNER, self.owner)
        try:
            params = dict(self.request.define(trial)) if self.request.define is not None else {}
        except optuna.TrialPruned as pruned:
            return Running(
                trial, dict(trial.params), None, refused=f"the space pruned it: {pruned}"
            )
        params = {
            **params,
            **{
                name: suggest(trial, name, domain)
                for name, domain in self.request.space.domains.items()
                if name not in params
            },
            **self.request.space.fixed,
        }
        plan, wrong = self._plan_of(params)
        reported = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        return Running(trial, params, plan, wrong, num_reported=len(reported))

    def _plan_of(self, params: Mapping[str, Any]) -> tuple[str | None, str | None]:
        """Return the plan, or None if the planner chooses it; and the error, or None."""
        try:
            plan = self.request.plan_of(params)
            return (None if plan == AUTO else str(Plan.read(plan))), None
        except PlanError as error:
            return None, error.args[0]
        except Exception as error:  # the user's code may raise anything
            return None, f"plan= raised {type(error).__name__} at {user_frames(error)[0]}: {error}"

    def _start(self, running: Running) -> bool:
        """Start a trial, or its pricing, if the devices that it needs are free. Return False if
        they are not.

        A trial that can't run at all fails at once.
        """
        if running.refused is not None:
            self._tell(running, "PRUNED", {"refused": running.refused})
            return True
        needed = Plan.read(running.plan).world_size if running.plan is not None else 1
        wrong = running.wrong
        if needed > largest(self.pool):
            wrong = (
                f"plan '{running.plan}' needs {needed} devices and {largest(self.pool)} is the most that a trial "
                "can have"
            )
        if wrong is not None:
            self._fail(running, wrong, PlanError.__name__)
            return True
        prices = running.predicted is None and bool(running.plan is None or self._figures)
        slots = room(self.pool, 1 if prices else needed)
        if slots is None:
            return False
        running.slots = slots
        trial_dir = self._begin(running)
        names = [
            self.pool.names[slot] for slot in (node_of(self.pool, slots[0]) if prices else slots)
        ]
        if prices and running.plan is not None:
            names = names[: Plan.read(running.plan).world_size]
        payload = {
            "do": "price" if prices else "train",
            "params": running.params,
            "plan": running.plan,
            "devices": names,
            "memory": self.request.memory,
            "figures": self._figures,
            "run_dir": str(trial_dir),
        }
        plan = Plan.read(running.plan) if running.plan is not None and not prices else Plan()
        number = self.pool.start(
            payload, running.slots, fault_policy=fault_policy(plan), log_dir=trial_dir / "logs"
        )
        self.running[number] = running
        return True

    def _begin(self, running: Running) -> Path:
        """Create the trial's folder, which is a run folder, without anything of an earlier
        start.
        """
        trial_dir = self._trial_dir(running.number)
        if running.predicted is None:
            shutil.rmtree(trial_dir, ignore_errors=True)
        trial_dir.mkdir(parents=True, exist_ok=True)
        return trial_dir

    def _trial_dir(self, number: int) -> Path:
        return self.run_dir / "trials" / str(number)

    # --- Hearing ------------------------------------------------------------------------------------------------

    def _handle(self, event: Message) -> None:
        running = self.running[event.task]
        if event.kind == "question" and "keep" in event.value:
            self._answer_keep(running, event)
        elif event.kind == "question":
            self.pool.answer(
                event, self._choose(running, event.value["choice"], event.value["options"])
            )
        elif event.kind == "report":
            self._report(event.task, running, event.value)
        elif event.kind == "lost":
            del self.running[event.task]
            self._again(running)
        else:
            del self.running[event.task]
            self._end(running, event)

    def _again(self, running: Running) -> None:
        """Start a trial again, under its number and with its parameters, because its node was
        lost.
        """
        import optuna

        shutil.rmtree(self._trial_dir(running.number), ignore_errors=True)
        if running.is_pruned:
            self._tell(running, "PRUNED", {})
        else:
            self.adopted.append(optuna.trial.Trial(self.study, running.trial._trial_id))

    def _choose(self, running: Running, name: str, options: list[Any]) -> dict[str, Any]:
        """Return the option of a choice inside the model; it is the same for every rank of the
        trial.
        """
        self.choices_met.add(name)
        try:
            if name not in running.params:
                running.params[name] = running.trial.suggest_categorical(name, options)
            return {"option": pick(name, options, running.params[name])}
        except (ValueError, JobError) as error:
            return {"error": f"choice '{name}' can't have the options {options}: {error}"}

    def _answer_keep(self, running: Running, event: Message) -> None:
        """Tell all ranks whether to save, once rank 0 has reported its last figures.

        They save unless an earlier trial dominates this one.
        """
        running.curious.append(event)
        if running.keeps is None and event.rank == 0:
            values = self._values({**(running.predicted or {}), **running.figures})
            running.keeps = not any(
                dominates(trial.values, values, self.study.directions)
                for trial in front(self.study)
            )
        if running.keeps is not None:
            for each in running.curious:
                self.pool.answer(each, {"keep": running.keeps})
            running.curious.clear()

    def _values(self, figures: Mapping[str, float]) -> list[float]:
        """Return the figures that are objectives, in their order."""
        return [figures.get(objective.name, math.nan) for objective in self.request.objectives]

    def _report(self, task: int, running: Running, progress: Mapping[str, Any]) -> None:
        running.num_evaluations += 1
        running.step, running.figures = progress["step"], dict(progress["figures"])
        name = self.request.objectives[0].name
        if running.is_pruned or len(self.request.objectives) > 1 or name not in running.figures:
            return
        value = running.figures[name]
        if math.isfinite(value) and running.num_evaluations > running.num_reported:
            running.trial.report(value, running.num_evaluations)
            if running.trial.should_prune():
                running.is_pruned = True
                self.pool.stop(task)

    def _end(self, running: Running, event: Message) -> None:
        if event.failure is not None:
            where = f"{event.failure.where}: " if event.failure.where else ""
            self._fail(running, f"{where}{event.failure.message}", event.failure.kind)
        elif "refused" in (event.value or {}):
            self._tell(running, "PRUNED", event.value)
        elif "figures" in (event.value or {}):
            self._price(running, event.value)
        elif event.value and not event.value.get("preempted"):
            self._complete(running, event.value)
        elif running.is_pruned:
            self._tell(running, "PRUNED", {})
        else:
            self._tell(running, "FAIL", {"reason": "its ranks were stopped from outside"})

    def _price(self, running: Running, priced: Mapping[str, Any]) -> None:
        running.plan, running.predicted = priced["plan"], dict(priced["figures"])
        breaches = [
            breach for limit in self.request.limits if (breach := limit.breach(running.predicted))
        ]
        if breaches:
            self._tell(running, "PRUNED", {"refused": "; ".join(breaches)})
        else:
            self.waiting.append(running)

    def _complete(self, running: Running, summary: Mapping[str, Any]) -> None:
        from paceline.base.files import write_json

        figures = {**final_figures(summary), **(running.predicted or {})}
        values = self._values(figures)
        running.figures, running.step = figures, summary["steps"]
        trial_dir = self._trial_dir(running.number)
        write_json(trial_dir / folder.SUMMARY, summary)
        write_json(
            trial_dir / folder.PLAN, {"plan": running.plan, "world_size": summary["world_size"]}
        )
        if self.request.source is not None:
            write_json(
                trial_dir / folder.JOB,
                replace(self.request.source, settings=running.params).to_dict(),
            )
        wrong = [
            f"{objective.name} is {value}"
            for objective, value in zip(self.request.objectives, values, strict=True)
            if not math.isfinite(value)
        ]
        if wrong:
            self._tell(running, "FAIL", {"reason": "; ".join(wrong)})
        else:
            self._tell(running, "COMPLETE", {}, values)
            self._drop_weights()

    def _drop_weights(self) -> None:
        """Keep only the weights of the best trials: with several objectives, those of the Pareto
        front.
        """
        kept = {trial.number for trial in front(self.study)}
        ended = {trial.number for trial in counted(self.study) if trial.state.is_finished()}
        for number in ended - kept:  # a trial that has just saved may not have told its value yet
            trial_dir = self._trial_dir(number)
            if (trial_dir / folder.MODEL).exists():
                (trial_dir / folder.MODEL).unlink()
                shutil.rmtree(trial_dir / folder.CHECKPOINTS, ignore_errors=True)

    def _fail(self, running: Running, reason: str, kind: str) -> None:
        self._tell(running, "FAIL", {"reason": reason, "kind": kind})
        if not self.has_success:
            self._give_up_if_hopeless()

    def _give_up_if_hopeless(self) -> None:
        """Stop the search if the first trials have all failed.

        Trials that fail do so sooner than those that work. Therefore only failures of trials that
        began before the oldest running one count.

        Raises:
            AllFailed: enough of the first trials failed.
        """
        oldest = min((running.number for running in self.running.values()), default=math.inf)
        first = [reason for number, reason in self.failures.items() if number < oldest]
        enough = (
            _ALIKE_TO_GIVE_UP
            if len({cause_of(reason) for reason in first}) == 1
            else _FAILED_TO_GIVE_UP
        )
        if len(first) >= enough:
            raise AllFailed(
                f"the first {len(first)} trials all failed; {common_cause(first)}",
                hint=f"the logs are in {self.run_dir / 'trials'}",
            )

    def _tell(
        self,
        running: Running,
        state: str,
        outcome: Mapping[str, Any],
        values: Sequence[float] | None = None,
    ) -> None:
        import optuna

        record = {
            "params": running.params,
            "plan": running.plan,
            "devices": [self.pool.place(slot) for slot in running.slots],
            "seconds": time.monotonic() - running.began_s,
            "steps": running.step,
            "figures": {**(running.predicted or {}), **running.figures},
            **outcome,
        }
        running.trial.set_user_attr(RECORD, record)
        self.study.tell(running.trial, values, state=optuna.trial.TrialState[state])
        self.num_done += 1
        if state == "FAIL":
            self.failures[running.number] = outcome["reason"]
        else:
            self.has_success = True


def suggest(trial: optuna.trial.Trial, name: str, domain: Numbers | Options) -> Any:
    """Sample a value of the domain with the study's sampler."""
    if isinstance(domain, Options):
        return trial.suggest_categorical(name, domain.options)
    if domain.whole:
        return trial.suggest_int(
            name, int(domain.low), int(domain.high), step=int(domain.step or 1), log=domain.is_log
        )
    return trial.suggest_float(name, domain.low, domain.high, step=domain.step, log=domain.is_log)


def domain_of(distribution: Any) -> Numbers | Options:
    """Return the domain from which `suggest` made a distribution."""
    if hasattr(distribution, "choices"):
        return Options(tuple(distribution.choices))
    return Numbers(
        distribution.low,
        distribution.high,
        distribution.step,
        distribution.log,
        whole=isinstance(distribution.low, int),
    )


def common_cause(reasons: Sequence[str]) -> str:
    """Return a text about the most frequent cause of the failed trials."""
    heads = [cause_of(reason) for reason in reasons]
    most = max(heads, key=heads.count)
    return f"{heads.count(most)} of them of this: {reasons[heads.index(most)]}"


def cause_of(reason: str) -> str:
    """Return a reason's first line without parts that may differ between trials: paths, numbers,
    and quoted words.
    """
    return re.sub(
        r"'[^']*'|\"[^\"]*\"|[^\s:]*/[^\s:]*|[-+]?\d[\w.+-]*", "_", reason.partition("\n")[0]
    )
