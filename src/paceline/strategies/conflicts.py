"""What doesn't compose, and why: one table for every pair of choices that a plan can't make together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.errors import PlanError
from paceline.job import Precision
from paceline.plans import Local, Plan, Servers


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two choices that exclude each other.

    what: as a user writes it. why: what goes wrong. instead: what to do.
    """

    what: str
    why: str
    instead: str
    is_met: Callable[[Plan], bool]


CONFLICTS: tuple[Conflict, ...] = (
    Conflict("schedule=zero-bubble with shard=N",
             "FSDP2 reduces gradients in hooks of a whole backward, and a backward in two parts passes them by: "
             "gradients come out wrong without an error",
             "schedule=1f1b or interleaved, or data=N in place of shard=N",
             lambda plan: plan.schedule.schedule == "zero-bubble" and plan.axes.shard > 1),
    Conflict("schedule=zero-bubble with recompute=full",
             "each half of the backward would compute the forward again",
             "schedule=1f1b, which recomputes once",
             lambda plan: plan.schedule.schedule == "zero-bubble" and plan.modifiers.recompute == "full"),
    Conflict("recompute=selective with running a model",
             "it is priced for models that keep attention's scores, and torch's attention keeps none",
             "recompute=none, which keeps as little, or recompute=full",
             lambda plan: plan.modifiers.recompute == "selective"),
    Conflict("compile=blocks with tensor=N",
             "split layers run programs that are recorded when the model is built, and those are not compiled yet",
             "compile=blocks with data=N, shard=N or pipeline=N, or tensor=N without it",
             lambda plan: plan.modifiers.compile == "blocks" and plan.axes.tensor > 1),
    Conflict("compile=blocks with schedule=zero-bubble",
             "the backward of a compiled block is one operator, and this schedule runs each backward in two parts",
             "schedule=1f1b or interleaved",
             lambda plan: plan.modifiers.compile == "blocks" and plan.schedule.schedule == "zero-bubble"),
    Conflict("local=H with shard=N, tensor=N, pipeline=N or parts=N",
             "a local step is taken by one rank alone; ranks that hold parts of a replica would have to meet in it",
             "local=H with data=N, and accumulate=K or recompute=full where memory is short",
             lambda plan: isinstance(plan.sync, Local) and plan.world_size > plan.axes.data),
    Conflict("local=H with compress=topk or powersgd",
             "what they leave out of a difference comes an outer step later, hundreds of local steps",
             "compress=int8 or bf16",
             lambda plan: plan.outer_steps is not None and plan.modifiers.compress in ("topk", "powersgd")),
    Conflict("server=S with compress=int8, topk or powersgd",
             "workers fetch weights, not sums of gradients, and these forms are too coarse for weights",
             "compress=bf16",
             lambda plan: isinstance(plan.sync, Servers) and plan.modifiers.compress not in ("none", "bf16")),
    Conflict("compress=powersgd with shard=N or tensor=N",
             "it approximates whole matrices, and ranks hold parts of them",
             "compress=int8 or topk",
             lambda plan: plan.modifiers.compress == "powersgd" and max(plan.axes.shard, plan.axes.tensor) > 1),
    Conflict("deterministic=yes with staleness=K or inf",
             "which worker's update comes first depends on how fast each was, and that is another in every run",
             "staleness=0, under which runs repeat to the bit",
             lambda plan: _is_deterministic(plan) and isinstance(plan.sync, Servers) and plan.sync.staleness != 0),
    Conflict("deterministic=yes with shares=speed or memory",
             "they are measured when a run starts, and another run may cut the batch in other parts",
             "shares=A:B with numbers, or equal shares",
             lambda plan: _is_deterministic(plan) and plan.modifiers.shares in ("speed", "memory")),
)

# What a job's precision does not compose with: part of the experiment, so the plan is what has to change.
OF_PRECISION: Mapping[Precision, tuple[Conflict, ...]] = {
    "fp16": (
        Conflict("server=S", "whether a step's gradients overflow is known when all servers have them, and by then "
                 "workers compute the next step with the old loss scale",
                 'data=N or shard=N, or precision="bf16" in the job',
                 lambda plan: isinstance(plan.sync, Servers)),
        Conflict("local=H", "each replica would skip steps of its own, at a loss scale of its own",
                 'data=N or shard=N, or precision="bf16" in the job',
                 lambda plan: plan.outer_steps is not None),
        Conflict("compress=topk or powersgd", "what a step leaves out of a gradient is added to the next one, and an "
                 "infinite one would stay there for good",
                 'compress=int8 or bf16, or precision="bf16" in the job',
                 lambda plan: plan.modifiers.compress in ("topk", "powersgd")),
    ),
    "fp8": (
        Conflict("tensor=N, pipeline=N and place=", "the model is recorded operator by operator there, and torchao's "
                 "float8 layers can't be recorded",
                 'data=N, shard=N or both, with recompute=full where memory is short, or precision="bf16" in the job',
                 lambda plan: plan.splits_model),
    ),
}


def _is_deterministic(plan: Plan) -> bool:
    return plan.modifiers.deterministic == "yes"


def check(plan: Plan) -> None:
    """Refuse a plan whose choices don't compose.

    Raises:
        PlanError: says which, why, and what to choose instead.
    """
    for conflict in CONFLICTS:
        if conflict.is_met(plan):
            raise PlanError(f"plan '{plan}': {conflict.what} don't compose: {conflict.why}", hint=conflict.instead)


def check_precision(plan: Plan, precision: Precision) -> None:
    """Refuse a plan that a job of this precision can't run under.

    Raises:
        PlanError: says which choice, why, and what to choose instead.
    """
    for conflict in OF_PRECISION.get(precision, ()):
        if conflict.is_met(plan):
            raise PlanError(f"plan '{plan}': {conflict.what} and precision=\"{precision}\" don't compose: "
                            f"{conflict.why}", hint=conflict.instead)
