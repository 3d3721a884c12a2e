"""A plan with the strategies that it uses, and what a run or a price asks of all of them together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.strategies.plan import Plan
from paceline.strategies.registry import BUILT_IN, strategies
from paceline.strategies.strategy import Observation, Refusal

if TYPE_CHECKING:
    import torch
    from torch import nn

USUAL_LOOP = "paceline.training.loop"  # the module that runs a plan whose strategies bring none


class ActivePlan:
    """A plan whose strategies are known.

    Attributes:
        strategies: The strategies that the plan uses, innermost first.
        costs: What they add to a step, in the same order.
        trainer: The module whose `train_rank` runs the plan; "" for the usual loop.
        keeps_weights_elsewhere: Whether weights are on ranks that don't compute with them.
        holds_parts: Whether a rank holds a part of the model, at least between steps.
    """

    def __init__(self, plan: Plan) -> None:
        known = strategies() if plan.uses_extensions else BUILT_IN
        self.plan = plan
        self.strategies = [strategy for strategy in known if strategy.is_active(plan)]
        self.costs = [strategy.cost for strategy in self.strategies if strategy.cost]
        self.trainer = next(filter(None, (strategy.trainer for strategy in self.strategies)), "")
        self.keeps_weights_elsewhere = any(strategy.held_elsewhere for strategy in self.strategies)
        self.holds_parts = (
            plan.axes.num_ranks(lambda axis: not axis.copies_weights) > 1
            or self.keeps_weights_elsewhere
        )

    @property
    def runs_again(self) -> bool:
        """Whether the plan runs parts of the model's own code a second time in a step."""
        return any(strategy.runs_forward_again(self.plan) for strategy in self.strategies)

    @property
    def observes(self) -> frozenset[Observation]:
        """The observations of a model's forward that are needed before strategies change it."""
        return frozenset().union(*(strategy.observes(self.plan) for strategy in self.strategies))

    def refusal(self, of: Refusal) -> str:
        """Return the reason why something is not possible under the plan; "" if it is possible."""
        return next(filter(None, (strategy.refuses.get(of) for strategy in self.strategies)), "")

    def held_elsewhere(self, model: nn.Module) -> set[torch.Tensor]:
        """Return the weights that a rank uses and never holds, such as tables whose rows are on
        servers."""
        holders = (strategy.held_elsewhere for strategy in self.strategies)
        return {weight for holder in holders if holder for weight in holder(model)}
