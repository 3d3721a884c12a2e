"""The verb search: from a job and a budget of trials to the best configuration, trained and tested."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.api.outcome import Outcome
from paceline.base import signals
from paceline.base.errors import JobError, Preempted, UsageError
from paceline.base.inherited import named
from paceline.base.logs import unbroken
from paceline.base.user_code import user_frames
from paceline.job import Job
from paceline.job.file import JobFile, JobFunction
from paceline.launch.local.worker_pool import WorkerPool
from paceline.runs import folder
from paceline.searches import report
from paceline.searches.begin import open_study, probe, refuse_changes
from paceline.searches.controller import AUTO, AllFailed, Controller, PlanOf, Request, common_cause
from paceline.searches.objectives import Limit, parse_objectives
from paceline.searches.samplers import make_pruner, make_sampler
from paceline.searches.space import read
from paceline.searches.storage import JOURNAL, opened, optuna
from paceline.searches.target import ExecutionTarget, here, on_ray
from paceline.searches.trials import RECORD, best_trial, counted, state_of
from paceline.searches.winner import read_test_data
from paceline.strategies.plan import Plan

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

_WRITE_EVERY_S = 10.0  # seconds between writes of study.json during the search


class StudyResult(Outcome):
    """The result of a search; its figures are those of `DIR/study.json`."""


@unbroken()
def search(
    job: JobFile | str | Callable[..., Job],
    trials: int,
    *,
    objective: str | Sequence[str] | None = None,
    limits: Sequence[str] = (),
    settings: Mapping[str, Any] = {},
    vary: Mapping[str, str] = {},
    space: Callable[[Any], Mapping[str, Any]] | None = None,
    plan: str | Plan | Callable[[Mapping[str, Any]], str] | None = None,
    devices: str | None = None,
    procs: int | None = None,
    memory: str | None = None,
    ray: str | None = None,
    sampler: str | BaseSampler | None = None,
    pruner: str | BasePruner | None = None,
    storage: str | None = None,
    study: str | None = None,
    seed: int = 0,
    run: str | Path | None = None,
    resume: bool = False,
    timeout_s: float = 300.0,
) -> StudyResult:
    """Search a job's hyperparameters and its model's choices.

    Args:
        job: The Python file of a function that makes a job, which is `job` by default, or the
            function. Parameters with annotated domains in its signature are varied.
        trials: Number of trials that the study has at its end. Those of earlier parts and of other
            machines count, too.
        objective: What is minimised, or with NAME:max maximised; by default validation_loss. Others are
            a metric, loss, samples_per_s, parameters, step_ms and memory_mb. Several objectives
            give a Pareto front; pruning uses only one objective.
        limits: A limit such as "step_ms<=2", on parameters, step_ms or memory_mb. Trials beyond it are
            refused before they are trained.
        settings: Parameters and choices that are fixed.
        vary: A parameter and its domain, such as lr=1e-5..1e-1:log, layers=2..8 or act=relu,gelu. It is
            used instead of the signature's.
        space: A function of Optuna's trial that returns parameters which depend on each other.
        plan: The plan of each trial; "auto" lets the planner choose. It chooses one on the fewest
            devices that hold the trial. A function of the trial's parameters can give the plan,
            too. By default one device per trial.
        devices: The devices that trials share, named as for `train`.
        procs: Number of ranks that run at a time; with `ray`, per node.
        memory: As in `train`.
        ray: The address of a Ray cluster on whose nodes trials run: auto, or HOST:PORT. The search runs
            on a machine of it, and each trial within one node. All nodes must see the job's file
            and the run folder.
        sampler: random, tpe (the default), cmaes, gp, nsga2, or one of Optuna's.
        pruner: none, median (the default with one objective), halving, hyperband, or one of
            Optuna's.
        storage: The URL of a database, which machines may share; by default a file in the run folder.
        study: The study's name in the database; by default the run folder's.
        seed: The seed of the sampler.
        run: The folder for all results; by default a new folder in `runs/`.
        resume: Go on with the study of the run folder. Trials that a killed search left are started
            again.
        timeout_s: As in `train`.

    Raises:
        UsageError: the request makes no sense; nothing was trained.
        AllFailed: no trial ended well; the message has the common cause.
        StorageError: the database failed.
        Preempted: the search was asked to stop; it can be resumed.
    """
    source, function = _function(job)
    _check(trials, settings, resumes_nothing=resume and run is None)
    domains = read(function, settings=settings, vary=vary)
    objectives, bounds = parse_objectives(objective), tuple(map(Limit.parse, limits))
    machine: Any = {"devices": devices, "procs": procs, "memory": memory, "timeout_s": timeout_s}
    site = here(function, **machine) if ray is None else on_ray(ray, source, **machine)
    request = Request(
        domains,
        objectives,
        bounds,
        trials,
        _plan_of(plan, site),
        _checked(space, function),
        memory,
        source,
    )
    # This refuses a wrong name before anything takes time.
    make_sampler(sampler, num_objectives=len(objectives), seed=seed)
    make_pruner(pruner, num_objectives=len(objectives), evaluations=None)
    example, varied = probe(function, request)
    run_dir = Path(run) if run is not None else folder.fresh_name(f"search-{function.path.stem}")
    _check_free(run_dir, resume=resume)
    with (
        folder.claimed(folder.writable(run_dir)),
        site.open(run_dir) as pool,
        opened(storage, run_dir) as database,
    ):
        begun = open_study(
            database,
            study or run_dir.resolve().name,
            request,
            sampler=sampler,
            pruner=pruner,
            seed=seed,
            example=example,
            function=function,
            joins=resume or storage is not None,
        )
        refuse_changes(begun, varied)
        return _run(begun, pool, request, run_dir, example, is_shared=storage is not None)


def _check(trials: int, settings: Mapping[str, Any], *, resumes_nothing: bool) -> None:
    if trials < 1:
        raise UsageError(f"a search needs at least 1 trial, got {trials}")
    if resumes_nothing:
        raise UsageError("resume needs the run folder to go on in", hint="--run DIR --resume")
    try:
        json.dumps(dict(settings))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"settings must be numbers, text, true or false, None, or lists of those: {error}"
        ) from error


def _function(job: JobFile | str | Callable[..., Job]) -> tuple[JobFile | None, JobFunction]:
    if isinstance(job, str):
        job = JobFile.parse(job)
    if isinstance(job, JobFile):
        with named():
            return job, job.open()
    if not callable(job):
        raise UsageError(
            f"search takes a function that returns a Job, or its file, got {type(job).__name__}"
        )
    return None, JobFunction.of(job)


def _plan_of(
    plan: str | Plan | Callable[[Mapping[str, Any]], str] | None, site: ExecutionTarget
) -> PlanOf:
    if callable(plan):
        return plan
    if plan == AUTO:
        return lambda params: AUTO
    fixed = Plan.read(plan) if plan is not None else Plan()
    site.check(fixed)
    return lambda params: str(fixed)


def _checked(
    define: Callable[[Any], Mapping[str, Any]] | None, function: JobFunction
) -> Callable[[Any], Mapping[str, Any]] | None:
    """Return the user's space, wrapped so that it is refused if it gives what the job doesn't
    take.
    """
    if define is None:
        return None
    if not callable(define):
        raise UsageError(
            f"space= takes a function of Optuna's trial, and got {type(define).__name__}",
            hint="vary={'lr': '1e-5..1e-1:log'} needs no function",
        )

    def checked(trial: Any) -> Mapping[str, Any]:
        try:
            params = define(trial)
        except optuna().TrialPruned:
            raise
        except Exception as error:  # the user's code may raise anything
            raise JobError(
                f"the space raised {type(error).__name__} at {user_frames(error)[0]}: {error}"
            ) from error
        parameters = function.parameters()
        if not isinstance(params, Mapping) or (
            unknown := [name for name in params if name not in parameters]
        ):
            wrong = f"{unknown[0]}" if isinstance(params, Mapping) else type(params).__name__
            raise JobError(
                f"the space gave {wrong}; it must return a dict of parameters of {function.name}(): "
                f"{', '.join(parameters)}"
            )
        return params

    return checked


def _check_free(run_dir: Path, *, resume: bool) -> None:
    if not resume and any((run_dir / name).exists() for name in (JOURNAL, folder.STUDY)):
        raise UsageError(
            f"{run_dir} already holds a search",
            hint="--resume goes on with it; another --run starts anew",
        )
    folder.check_free(run_dir, resume=False)


# --- Running ------------------------------------------------------------------------------------------------------


def _run(
    study: Any, pool: WorkerPool, request: Request, run_dir: Path, example: Job, *, is_shared: bool
) -> StudyResult:
    from paceline.searches.display import StudyDisplay
    from paceline.searches.display import settings as settings_text

    objectives = request.objectives
    print(
        f"study {study.study_name}: {request.num_trials} trials on {pool.describe()}, "
        f"{' and '.join(map(str, objectives))}\nrun folder {run_dir}",
        file=sys.stderr,
        flush=True,
    )
    if request.define is None and request.space.kept:
        print(
            f"not varied: {settings_text(request.space.kept)}; --vary NAME=DOMAIN varies them",
            file=sys.stderr,
        )
    display, written_s = StudyDisplay(), time.monotonic()
    stopped: list[int] = []

    def note(number: int) -> None:
        if number in stopped:  # a second request has its default effect
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stopped.append(number)

    with signals.handled(signals.STOPPING, note):

        def heed(controller: Controller) -> bool:
            nonlocal written_s
            display.update(controller)
            if time.monotonic() - written_s > _WRITE_EVERY_S:
                _write(study, request, run_dir, final=False)
                written_s = time.monotonic()
            return bool(stopped)

        controller = Controller(
            study,
            pool,
            request,
            run_dir,
            heed=heed,
            is_shared=is_shared,
            owner=f"{socket.gethostname()}:{run_dir.resolve()}",
        )
        try:
            controller.run()
        finally:
            display.close()
            _write(study, request, run_dir, final=False)
    if stopped:
        raise Preempted(
            f"stopped by {signal.Signals(stopped[0]).name}: {controller.num_done} of {request.num_trials} "
            "trials are done",
            hint=f"the same command with --run {run_dir} --resume goes on",
        )
    read_test_data(study, pool, example, memory=request.memory)
    return _finish(study, request, run_dir, controller)


def _what_became_of_all(study: Any, controller: Controller) -> Iterator[str]:
    """Yield, for each state, the number of trials in it and why they are in it."""
    trials = counted(study)
    states = [state_of(trial) for trial in trials]
    for state in dict.fromkeys(states):
        why = ""
        if state == "failed" and controller.failures:
            why = f", {common_cause(list(controller.failures.values()))}"
        if state == "refused":
            last = next(trial for trial in reversed(trials) if state_of(trial) == "refused")
            why = f", the last because {last.user_attrs[RECORD]['refused']}"
        yield f"{states.count(state)} {state}{why}"


def _finish(study: Any, request: Request, run_dir: Path, controller: Controller) -> StudyResult:
    if best_trial(study) is None:
        raise AllFailed(
            f"no trial was trained to its end: {'; '.join(_what_became_of_all(study, controller))}",
            hint=f"the logs are in {run_dir / 'trials'}",
        )
    document = _write(study, request, run_dir, final=True)
    if reasons := list(controller.failures.values()):
        print(
            f"{len(reasons)} trial{'s' * (len(reasons) != 1)} failed, {common_cause(reasons)}",
            file=sys.stderr,
        )
    return StudyResult(document, run_dir)


def _write(study: Any, request: Request, run_dir: Path, *, final: bool) -> dict[str, Any]:
    from paceline.base.files import write_json

    document = report.document(
        study,
        objectives=request.objectives,
        source=request.source,
        fixed=request.space.fixed,
        final=final,
    )
    write_json(run_dir / folder.STUDY, document)
    if document["best"] is not None:
        write_json(run_dir / report.BEST, document["best"])
    return document
