"""The interface of a strategy. Each folder defines one value, which checks, search, prices and runs
read.

The value names the code that ranks run, but does not import it, so that plans are parsed and priced
without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from paceline.strategies.keys import PlanKeys

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.launch.process.fault_policy import FaultPolicy
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
# Things that not every strategy allows.
# "edits": a forward edits parameters in place.
# "closures": an optimizer evaluates the loss itself.
# "modes": an optimizer has other weights for evaluations.
# "spikes": ranks decide together about a step before its update.
Refusal = Literal["edits", "closures", "modes", "spikes"]


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
    family: Callable[[Plan], str] = lambda plan: ""
    # Returns values that differ between plans of one family if their ranks run different code.
    # Plans with equal values share their calibrations.
    code: Callable[[Plan], tuple[object, ...]] = lambda plan: ()

    # --- the search ---
    # Yields plans that use the strategy, exact and relaxed ones, from the job's limits and the
    # devices.
    plans: Callable[[Limits, DeviceCounts], Iterable[Plan]] = lambda limits, shape: ()
    variants: Callable[[Plan, Limits], Iterable[Plan]] = (
        lambda plan, limits: ()
    )  # other forms of a plan
    is_priced_on_paper: bool = True  # whether plans are priced for described clusters

    # --- the price ---
    cost: CostModel | None = None  # the cost that the strategy adds to a step; None for no cost

    # --- the run ---
    run: str = ""  # module with `prepare`, see `compose.Runner`; "" if there is none
    # Whether `prepare` receives all of a job's models together, and not each by itself.
    takes_all_models: bool = False
    # Modules that the ranks need. A parent imports them once for all ranks that it forks.
    imports: tuple[str, ...] = ()
    trainer: str = ""  # module with the `train_rank` that runs the plans; "" for the usual loop
    # Returns which ranks the others can do without; None if all ranks need each other.
    fault_policy: Callable[[Plan], FaultPolicy] | None = None
    # Returns the weights of a model that this rank uses and never holds; None if weights are only
    # on ranks that compute with them.
    held_elsewhere: Callable[[nn.Module], Iterable[torch.Tensor]] | None = None
    # Returns the observations of a model's forward that are needed before the model is prepared.
    observes: Callable[[Plan], frozenset[Observation]] = lambda plan: frozenset()
    # Whether a plan runs parts of the model's own code a second time in a step.
    runs_forward_again: Callable[[Plan], bool] = lambda plan: False
    # The things that are not possible under the strategy, with the reasons.
    refuses: Mapping[Refusal, str] = field(default_factory=dict)
