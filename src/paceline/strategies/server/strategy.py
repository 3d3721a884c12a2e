"""The strategy `server`: servers keep parameters and optimizer state, and workers send them
gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from paceline.launch.process.fault_policy import FaultPolicy
from paceline.strategies.costs import CostModel
from paceline.strategies.plan import Plan
from paceline.strategies.server.cost import enter, hold, ranks_apart
from paceline.strategies.server.keys import KEYS, Servers
from paceline.strategies.strategy import Conflict, Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.strategies.limits import DeviceCounts, Limits

STALENESS = (1, 4, "inf")  # values that a search tries


def _is_served(plan: Plan) -> bool:
    return isinstance(plan.sync, Servers)


def _is_stale(plan: Plan) -> bool:
    return isinstance(plan.sync, Servers) and plan.sync.staleness != 0


def _family(plan: Plan) -> str:
    assert isinstance(plan.sync, Servers)
    return "servers" + (f" staleness={plan.sync.staleness}" if plan.sync.staleness != 0 else "")


def _code(plan: Plan) -> tuple[object, ...]:
    assert isinstance(plan.sync, Servers)
    return plan.sync.servers, plan.sync.colocate


def _plans(limits: Limits, shape: DeviceCounts) -> Iterator[Plan]:
    """Yield plans with a server in each worker, with one server in a worker, and with one on its
    own rank, then relaxed ones."""
    workers = shape.num_devices
    yield Plan.of(servers=workers, workers=workers, colocate="yes")
    yield Plan.of(servers=1, workers=workers, colocate="yes")
    if workers > 2:
        yield Plan.of(servers=1, workers=workers - 1)
    yield Plan.of(servers=workers, workers=workers, colocate="yes", compress="bf16")
    for staleness in STALENESS:
        yield Plan.of(servers=workers, workers=workers, colocate="yes", staleness=staleness)


def _fault_policy(plan: Plan) -> FaultPolicy:
    """Under staleness, the others can do without a worker that is no server, and it may come
    back."""
    assert isinstance(plan.sync, Servers)
    can_go = range(plan.sync.servers, plan.world_size) if _is_stale(plan) else ()
    return FaultPolicy(uses_process_group=False, optional_ranks=frozenset(can_go))


def _held_elsewhere(model: nn.Module) -> Iterable[torch.Tensor]:
    """Return the tables whose rows are on servers."""
    from paceline.strategies.server.tables import tables

    return [module.weight for module in tables(model).values()]


STRATEGY = Strategy(
    name="servers=S",
    is_active=_is_served,
    keys=KEYS,
    conflicts=(
        Conflict(
            "servers=S with compress=int8, topk or powersgd",
            "workers fetch weights, not sums of gradients, and these forms are too coarse for weights",
            "compress=bf16",
            lambda plan: _is_served(plan) and plan.modifiers.compress not in ("none", "bf16"),
        ),
        Conflict(
            "deterministic=yes with staleness=K or inf",
            "which worker's update comes first depends on how fast each was, and that is another in every run",
            "staleness=0, under which runs repeat to the bit",
            lambda plan: plan.modifiers.deterministic == "yes" and _is_stale(plan),
        ),
        Conflict(
            "servers=S",
            "whether a step's gradients overflow is known when all servers have them, and by then "
            "workers compute the next step with the old loss scale",
            'data=N or shard=N, or precision="bf16" in the job',
            _is_served,
            of_job='precision="fp16"',
        ),
        Conflict(
            "servers=S with staleness=K or inf",
            "a step reads the weights of its own updates, and with staleness they have those of other steps",
            "staleness=0, or a data=N or shard=N plan",
            _is_stale,
            of_job="a job with models=",
        ),
        Conflict(
            "servers=S",
            "its ranks take steps in a loop of their own, which has no such parts",
            "data=N, shard=N, or callbacks= in place of parts=",
            _is_served,
            of_job="a job with parts=",
        ),
    ),
    family=_family,
    code=_code,
    plans=_plans,
    cost=CostModel(enter, hold=hold, ranks_apart=ranks_apart),
    trainer="paceline.servers.train",
    fault_policy=_fault_policy,
    held_elsewhere=_held_elsewhere,
    observes=lambda plan: frozenset({"writes"}),
    refuses={
        "edits": "servers, which keep the parameters, would not learn of it",
        "modes": "servers, which keep the parameters, hand out those that are trained",
        "closures": "servers, which keep the parameters, get one gradient a step from each worker",
        "spikes": "servers update with each part of a gradient when it comes, before the loss of the whole "
        "batch is known",
    },
)
