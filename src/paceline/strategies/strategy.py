"""The interface of a strategy. Each folder defines one value, which checks, search, prices and runs
read.

The value names the code that ranks run, but does not import it, so that plans are parsed and priced
without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from paceline.strategies.keys import PlanKeys

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.model.cost.profile import Profile
    from paceline.strategies.costs import CostModel
    from paceline.strategies.limits import DeviceCounts, Limits
    from paceline.strategies.plan import Plan

# Facts that are observed in a forward.
# "writes": the parameters that the forward writes to.
# "writes to parts": those of them that it writes only while their block isn't running, so that it
# can write to the parts that ranks hold.
# "choices": whether values choose between blocks.
# "casts": the parameters that autocast casts.
Observation = Literal["writes", "writes to parts", "choices", "casts"]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two choices that exclude each other."""

    choices: str  # as a user writes them
    why: str  # says what goes wrong
    instead: str  # says what to do
    is_met: Callable[[Plan], bool]
    # The choice of a job that the plan's choices exclude, as a user writes it, such as
    # 'precision="fp16"'; "" if they exclude each other for every job.
    of_job: str = ""


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
    """One way to distribute a job, with all facts about it except the code that its ranks run."""

    # --- the plan ---
    name: str  # used in messages
    is_active: Callable[[Plan], bool]  # whether a plan uses the strategy
    # The keys that the strategy adds to the text of plans, with checks of their values.
    keys: PlanKeys = field(default_factory=PlanKeys)
    conflicts: tuple[Conflict, ...] = ()  # choices that the strategy doesn't compose with
    # Returns words of the strategy for the name of a plan's family, which separates kinds of plans.
    family: Callable[[Plan], str] = no_words
    # Returns values that differ between plans of one family if their ranks run different code.
    # Plans with equal values share their calibrations.
    code: Callable[[Plan], tuple[object, ...]] = no_code

    # --- the search ---
    # Yield plans that use the strategy, from the job's limits and the devices. `relaxed_plans`
    # yields those that are relaxed.
    plans: Callable[[Limits, DeviceCounts], Iterator[Plan]] = no_plans
    relaxed_plans: Callable[[Limits, DeviceCounts], Iterator[Plan]] = no_plans
    variants: Callable[[Plan, Limits], Iterator[Plan]] = no_variants  # yields other forms of a plan
    is_priced_on_paper: bool = True  # whether plans are priced for described clusters

    # --- the price ---
    cost: CostModel | None = None  # the cost that the strategy adds to a step; None for no cost
    # Returns the memory of ranks that compute no gradients: by the ranks' name, bytes by ledger
    # entry.
    ranks_apart: Callable[[Profile, Plan], Mapping[str, Mapping[str, int]]] = no_ranks_apart

    # --- the run ---
    run: str = ""  # module with `prepare`, see `compose.Runner`; "" if there is none
    # Whether `prepare` receives all of a job's models together, and not each by itself.
    takes_all_models: bool = False
    # Modules that the ranks need. A parent imports them once for all ranks that it forks.
    imports: tuple[str, ...] = ()
    trainer: str = ""  # module with the `train_rank` that runs the plans; "" for the usual loop
    # Function from the plan to its ranks' `FaultPolicy`, as MODULE:NAME; "" if all ranks need each
    # other.
    fault_policy: str = ""
    # Whether weights are on ranks that don't compute with them.
    keeps_weights_elsewhere: bool = False
    # Returns the weights of a model that this rank uses and never holds.
    held_elsewhere: Callable[[nn.Module], Iterable[torch.Tensor]] = nothing_held
    # Returns the observations of a model's forward that are needed before the model is prepared.
    observes: Callable[[Plan], frozenset[Observation]] = nothing_observed
    # Whether a plan runs parts of the model's own code a second time in a step.
    runs_forward_again: Callable[[Plan], bool] = lambda plan: False
    # The reasons why something is not possible under the strategy; "" where it is possible.
    no_edits: str = ""  # a forward can't edit parameters in place
    no_closure: str = ""  # an optimizer can't evaluate the loss itself
    no_modes: str = ""  # an optimizer can't have other weights for evaluations
    no_spikes: str = ""  # ranks can't decide together about a step before its update
    lines: Callable[[Plan], Iterable[str]] = no_lines  # shown to the user when a run begins
