"""A trial in its ranks. They price or train what the controller says, and choose nothing
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.base.errors import JobError, PlanError, Preempted
from paceline.cluster.cluster import Cluster, names_of
from paceline.job import Job
from paceline.job.choices import Chooser, Option, choosing, pick
from paceline.job.file import JobFunction
from paceline.launch.process.context import RankContext
from paceline.launch.process.messages import Line
from paceline.planner.resolve import Resolved, resolve
from paceline.strategies.plan import Plan

# Entries of a CPU rank's ledger that do not belong to the job: memory of libraries, and holes of
# the heap.
_NOT_THE_JOBS = ("runtime", "holes")


@dataclass(frozen=True)
class TrialDevices:
    """The devices of a trial."""

    devices: Sequence[str]  # by name
    memory: str | None  # the limit of each CPU rank

    def resolve(self, job: Job, plan: str) -> Resolved:
        return resolve(job, plan, devices=",".join(self.devices), memory=self.memory)


class TrialBody:
    """The function that ranks of a pool run in a search.

    A payload is {"do": "price", "train" or "test", "params", "devices", "memory", "plan",
    "figures", "run_dir"}. The result is {"refused": why} if the job's function raises
    `optuna.TrialPruned`.
    """

    def __init__(self, function: JobFunction) -> None:
        self.function = function

    def __call__(self, context: RankContext, payload: Mapping[str, Any], line: Line) -> Any:
        params, devices = payload["params"], TrialDevices(payload["devices"], payload["memory"])
        with choosing(asking(line, {name: value for name, value in params.items() if "." in name})):
            try:
                job = self.function.job(
                    {name: value for name, value in params.items() if "." not in name}
                )
            except JobError as error:
                if type(error.__cause__).__name__ == "TrialPruned":
                    return {"refused": f"the job pruned it: {error.__cause__}"}
                raise
            if payload["do"] == "price":
                return price(job, payload["plan"], devices, payload["figures"])
            if payload["do"] == "test":
                return test(context, job, payload["plan"], devices, Path(payload["run_dir"]))
            return train(context, job, payload, devices, line)


def asking(line: Line, known: Mapping[str, Any]) -> Chooser:
    """Return a function that makes the known choices, and asks the controller once for each of the
    others.
    """
    answers: dict[str, Option] = {}

    def choose(name: str, options: Sequence[Option]) -> Option:
        if name in known:
            return pick(name, options, known[name])
        if name not in answers:
            answer = line.ask({"choice": name, "options": list(options)})
            if "error" in answer:
                raise JobError(answer["error"])
            answers[name] = answer["option"]
        return answers[name]

    return choose


def train(
    context: RankContext, job: Job, payload: Mapping[str, Any], devices: TrialDevices, line: Line
) -> dict[str, Any]:
    """Train on this rank as `paceline train` would; the job's callbacks run on the first rank.

    Returns the summary, or {"preempted": True}.
    """
    from paceline.api.result import Result
    from paceline.callbacks.controller import RunController, controlled
    from paceline.strategies.compose import load
    from paceline.training.drivers import train_rank
    from paceline.training.settings import Settings

    resolved, run_dir = devices.resolve(job, payload["plan"]), Path(payload["run_dir"])
    load(resolved.plan)
    controller = (
        RunController(job.callbacks, job, plan=str(resolved.plan), folder=run_dir)
        if job.callbacks
        else None
    )

    def report(step: int, figures: Mapping[str, float]) -> None:
        line.report({"step": step, "figures": dict(figures)})

    settings = Settings(
        run_dir=run_dir,
        shares=resolved.shares,
        on_evaluation=report,
        save_on_stop=False,
        keep=lambda: bool(line.ask({"keep": True})["keep"]),
        controller=controller,
        devices=resolved.rank_devices,
    )
    is_first = context.rank == 0
    try:
        with controlled(controller, speaks=is_first):
            summary = train_rank(context, job, resolved.plan, settings) or {}
            if controller is not None and is_first:
                controller.ended(Result(summary, run_dir, job))
        return summary
    except Preempted:
        return {"preempted": True}


def test(
    context: RankContext, job: Job, plan: str, devices: TrialDevices, run_dir: Path
) -> dict[str, float]:
    """Return the loss and metrics of a trained trial on the test data, under a plan of forwards.
    Collective.
    """
    from paceline.api.inference import load_trained

    resolved = devices.resolve(job, plan)
    trained = load_trained(context, job, resolved, run_dir)
    figures, refused = trained.evaluator(context).figures(job.test)
    if refused is not None:
        raise refused
    return figures


def price(
    job: Job, plan: str | None, devices: TrialDevices, figures: Sequence[str]
) -> dict[str, Any]:
    """Predict figures of a job, and return them with the plan that they belong to.

    Args:
        plan: None for the planner's choice, on as few of the devices as it needs.

    Raises:
        PlanError: no plan fits the devices.
    """
    record: dict[str, Any] = {"plan": plan, "figures": {}}
    if "parameters" in figures:
        record["figures"]["parameters"] = num_parameters(job.model)
    if plan is not None and not {"step_ms", "memory_mb"} & set(figures):
        return record
    chosen, estimate = _priced(job, plan, devices) if plan is not None else _chosen(job, devices)
    tensor_bytes = sum(size for name, size in estimate.ledger.items() if name not in _NOT_THE_JOBS)
    figured = {"step_ms": 1e3 * estimate.step_s, "memory_mb": tensor_bytes / 1e6}
    record["figures"].update({name: value for name, value in figured.items() if name in figures})
    return {**record, "plan": str(chosen)}


def num_parameters(model: Callable[[], Any]) -> int:
    """Count the parameters of a model, each shared one once; no memory is allocated for them."""
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model().parameters())


def _priced(job: Job, plan: str, devices: TrialDevices) -> tuple[Plan, Any]:
    from paceline.planner.problem import PlanningProblem

    resolved = devices.resolve(job, plan)
    problem = PlanningProblem.of(job, device=resolved.cluster.first_here)
    return resolved.plan, problem.price(resolved.plan, resolved.cluster)


def _chosen(job: Job, devices: TrialDevices) -> tuple[Plan, Any]:
    """Return the planner's fastest plan on the fewest devices that hold the job, and its estimate.

    Few devices are best because independent trials need no links. Nothing is calibrated, because
    other trials are running.
    """
    from paceline.planner.problem import PlanningProblem

    first = devices.devices[0]
    problem = PlanningProblem.of(job, device=first if first.startswith("cuda") else "cpu")
    for count in range(1, len(devices.devices) + 1):
        cluster = Cluster.local(names_of(devices.devices[:count]), memory=devices.memory)
        candidate = problem.search(cluster).chosen
        if candidate is not None:
            return candidate.plan, candidate.estimate
    raise PlanError(
        f"no plan of up to {len(devices.devices)} devices has the memory for this trial",
        hint="a greater --memory, more --devices, or a limit on memory_mb that refuses such trials",
    )
