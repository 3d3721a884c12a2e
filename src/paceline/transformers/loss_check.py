"""Check that the loss of a Trainer's script is a mean, which it must be if a plan cuts batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.base.errors import PlanRefused

# micro-batches of a run that are checked; the labels of one may have equal weights by chance
_LOOKED_AT = 4
# Relative differences that sums in another order may have.
_NEAR = {
    "float32": 1e-4,
    "tf32": 1e-3,
    "bf16": 2e-2,
    "fp16": 2e-3,
}


class MeanCheck:
    """Compares the loss of some micro-batches with the losses of their parts. No model runs for it.

    Args:
        name: Of the function that computes the loss.
    """

    def __init__(self, trainer: Any, name: str, precision: str) -> None:
        self._trainer, self.name, self.near = trainer, name, _NEAR[precision]
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
        if not torch.isfinite(loss).all():  # the run says so
            return
        third = max(1, samples // 3)
        for first in sorted({third, min(samples - 1, third + 1)}):
            parts = (range(first), range(first, samples))
            try:
                values = [of_part(part) for part in parts]
            except Exception:  # the user's code does not only run the model once
                self.looks_left = 0
                return
            total = counted = 0.0
            for part, (value, count) in zip(parts, values, strict=True):
                number = float(len(part) if count is None else count)
                total, counted = (
                    total + (float(value) * number if number else 0.0),
                    counted + number,
                )
            mixed = total / counted if counted else float(loss)
            if not abs(mixed - float(loss)) <= self.near * max(1.0, abs(float(loss))):
                raise PlanRefused(
                    f"{self.name} is no mean over its labels or samples: {float(loss):.6g} of {samples} samples at "
                    f"once, {mixed:.6g} as the mean of its parts. Class weights do this, as torch divides by the sum "
                    f"of the weights. Under '{self._trainer._plan_in_use}' a batch is computed in parts",
                    hint="divide by what counts in every part alike: torch.nn.CrossEntropyLoss(weight=..., "
                    'reduction="sum")(...) / num_items_in_batch, or / len(labels). plan="single" and tensor=N '
                    "compute the loss as it is",
                )
