"""What a strategy is to the rest of the program: one value a folder, read by checks, search, prices and runs.

The code that ranks run is named here and not imported, so plans are parsed and priced without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from paceline.strategies.keys import PlanKeys

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.job import Precision
    from paceline.model.cost.profile import Profile
    from paceline.strategies.costs import CostModel
    from paceline.strategies.limits import DeviceCounts, Limits
    from paceline.strategies.plan import Plan

# Which parameters a forward writes to, and which of them only while their block isn't running, so that the parts that
# ranks hold can be written to; whether its values choose between blocks; which parameters autocast casts.
Observation = Literal["writes", "writes to parts", "choices", "casts"]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two choices that exclude each other.

    choices: as a user writes them. why: what goes wrong. instead: what to do.
    """

    choices: str
    why: str
    instead: str
    is_met: Callable[[Plan], bool]


def no_plans(limits: Limits, shape: DeviceCounts) -> Iterator[Plan]:
    yield from ()


def no_variants(plan: Plan, limits: Limits) -> Iterator[Plan]:
    yield from ()


def nothing_observed(plan: Plan) -> frozenset[Observation]:
    return frozenset()


def nothing_held(model: nn.Module) -> Iterable[torch.Tensor]:
    return ()


def no_words(plan: Plan) -> str:
    return ""


def no_lines(plan: Plan) -> Iterable[str]:
    return ()


def no_code(plan: Plan) -> tuple[object, ...]:
    return ()


def no_ranks_apart(profile: Profile, plan: Plan) -> Mapping[str, Mapping[str, int]]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to spread a job, with all that is known of it but the code that its ranks run.

    Of a plan:
        name: as messages call it.
        keys: what it brings to the text of plans, with checks of its values.
        is_active: whether a plan uses it.
        conflicts: what it doesn't compose with. precision_conflicts: the same of a job's precision.
        own_step_conflicts: the same of a step of the job's own.
        family: what it adds to the words by which plans of one kind are told from others.
        code: what tells plans apart whose ranks run other code, beside their family; calibrations carry over between
            plans that are alike.

    Of the search:
        plans: plans that use it, from the job's limits and the devices. relaxed_plans: those of them that give
            something up against one device.
        variants: the same plan in its other forms.
        is_priced_on_paper: whether plans are priced for clusters that are not here.

    Of the price:
        cost: what it adds to a step; None if it adds nothing.
        ranks_apart: bytes by ledger of ranks that compute no gradients, by what they are called.

    Of the run:
        run: module with `prepare`, see `compose.Runner`; "" if it is not entered.
        takes_all_models: whether that is given all of a job's models together, and not each by itself.
        imports: modules that its ranks need, for a parent to import once for all that it forks.
        trainer: module with the `train_rank` that runs its plans; "" for the usual loop.
        fault_policy: function from the plan to its ranks' `FaultPolicy`, as MODULE:NAME; "" for ranks that all need
            each other.
        observes: what must be seen of a model's forward before it is prepared.
        keeps_weights_elsewhere: whether weights are with ranks that don't compute with them. held_elsewhere: those of a
            model that this rank uses and never holds.
        runs_forward_again: whether a plan runs parts of the model's own code a second time in a step.
        copies_weights_lazily: whether forwards keep lazy copies of weights, which torch makes of its own memory alone.
        no_edits, no_closure, no_modes: why a forward can't edit parameters in place, an optimizer can't evaluate the
            loss itself, and can't have other weights for evaluations; "" where they can. no_spikes: why ranks can't
            decide together about a step before its update.
        lines: what a user is told of the plan when a run begins.
    """

    name: str
    is_active: Callable[[Plan], bool]
    keys: PlanKeys = field(default_factory=PlanKeys)
    conflicts: tuple[Conflict, ...] = ()
    precision_conflicts: Mapping[Precision, tuple[Conflict, ...]] = field(default_factory=dict)
    own_step_conflicts: tuple[Conflict, ...] = ()
    family: Callable[[Plan], str] = no_words
    code: Callable[[Plan], tuple[object, ...]] = no_code
    plans: Callable[[Limits, DeviceCounts], Iterator[Plan]] = no_plans
    relaxed_plans: Callable[[Limits, DeviceCounts], Iterator[Plan]] = no_plans
    variants: Callable[[Plan, Limits], Iterator[Plan]] = no_variants
    is_priced_on_paper: bool = True
    cost: CostModel | None = None
    ranks_apart: Callable[[Profile, Plan], Mapping[str, Mapping[str, int]]] = no_ranks_apart
    run: str = ""
    takes_all_models: bool = False
    imports: tuple[str, ...] = ()
    trainer: str = ""
    fault_policy: str = ""
    keeps_weights_elsewhere: bool = False
    held_elsewhere: Callable[[nn.Module], Iterable[torch.Tensor]] = nothing_held
    observes: Callable[[Plan], frozenset[Observation]] = nothing_observed
    runs_forward_again: Callable[[Plan], bool] = lambda plan: False
    copies_weights_lazily: Callable[[Plan], bool] = lambda plan: False
    no_edits: str = ""
    no_closure: str = ""
    no_modes: str = ""
    no_spikes: str = ""
    lines: Callable[[Plan], Iterable[str]] = no_lines
