"""Check that the loss of a Trainer's script is a mean, which it must be if a plan cuts batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.base.errors import PlanRefused
from paceline.proof.tolerances import exact_mean
from paceline.training.metrics import unlike_its_parts

# micro-batches of a run that are checked; the labels of one may have equal weights by chance
_LOOKED_AT = 4
_MOST = 0.02  # greatest difference that is left to rounding; no model runs in between


class MeanCheck:
    """Compares the loss of some micro-batches with the losses of their parts. No model runs for it.

    Args:
        name: Of the function that computes the loss.
    """

    def __init__(self, trainer: Any, name: str, precision: str) -> None:
        self._trainer, self.name, self.near = trainer, name, min(exact_mean(precision), _MOST)
        self.looks_left = _LOOKED_AT

    def is_due(self, samples: int) -> bool:
        """Whether to check a micro-batch: it is one of the first under a plan that cuts the
        batch.
        """
        plan = self._trainer._plan_in_use
        is_cut = plan is not None and (plan.replicas > 1 or plan.num_microbatches > 1)
        return self.looks_left > 0 and samples > 1 and is_cut

    @torch.no_grad()
    def look(
        self, loss: torch.Tensor, samples: int, of_part: Callable[[range], tuple[Any, Any]]
    ) -> None:
        """Check a loss.

        Args:
            loss: Of all samples.
            of_part: Returns the loss of some of them, and what it is a mean over: a count, or None
                for its samples.

        Raises:
            PlanRefused: the parts give another loss.
        """
        self.looks_left -= 1

        def tally(part: range) -> tuple[float, float]:
            value, count = (loss.detach(), None) if len(part) == samples else of_part(part)
            number = float(len(part) if count is None else count)
            return float(value) * number if number else 0.0, number

        try:
            words = unlike_its_parts(tally, samples, near=self.near)
        except Exception:  # the user's code does not only run the model once
            self.looks_left = 0
            return
        if words:
            raise PlanRefused(
                f"{self.name} is no mean over its labels or samples: {words}. Class weights do this, as torch "
                f"divides by the sum of the weights. Under '{self._trainer._plan_in_use}' a batch is computed in "
                "parts",
                hint="divide by what counts in every part alike: torch.nn.CrossEntropyLoss(weight=..., "
                'reduction="sum")(...) / num_items_in_batch, or / len(labels). plan="single" and tensor=N '
                "compute the loss as it is",
            )
