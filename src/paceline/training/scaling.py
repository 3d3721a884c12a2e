"""Dynamic loss scaling of fp16 jobs: the rules of `torch.amp.GradScaler`, decided alike on every
rank.

Gradients below 6e-8 vanish in float16. The loss is therefore multiplied before backward, and
gradients are divided again before anything looks at them. If a gradient is infinite or NaN on any
rank, the step updates nothing, and the next steps use a smaller scale.

Source: Micikevicius et al. 2018, Mixed Precision Training; figures of torch.amp.GradScaler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.base.errors import TrainingError
from paceline.torch_private.storage import stored_values

FIRST_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000  # torch.amp.GradScaler's
LEAST_SCALE = 1.0  # DeepSpeed's min_loss_scale; below it gradients overflow even unscaled
_LARGEST_SCALE = 2.0**127  # the largest power of two in float32


@dataclass
class LossScale:
    """The factor by which a run's losses are multiplied, and its changes. It is the same on all
    ranks, as numbers on the host, which checkpoints keep.

    Attributes:
        scale: The factor for the next step.
        grown_steps: Number of updates in a row since the scale last changed.
        skipped_steps: Number of skipped steps of the run so far.
        count: Power of two near the last window's count, for losses that are sums; None before the
            first.
    """

    scale: float = FIRST_SCALE
    grown_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    count: float | None = None

    def expected_count(self, samples: int) -> float:
        """Return the number by which a loss that is a sum is divided before backward.

        It makes the gradients about as large as those of a mean. The window's own count is known
        only after backward.

        samples: number of samples in the window.
        """
        return self.count if self.count is not None else power_of_two(samples)

    def unscale(self, gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Divide this rank's gradients by the scale, in place.

        Returns:
            A scalar on the device that is above 0 if one of the gradients is infinite or NaN.
        """
        overflow, factor = (
            torch.full((1,), value, device=device) for value in (0.0, 1.0 / self.scale)
        )
        plain = [stored_values(gradient) for gradient in gradients]
        real = [torch.view_as_real(values) if values.is_complex() else values for values in plain]
        if real:
            torch._amp_foreach_non_finite_check_and_unscale_(real, overflow, factor)
        return overflow.squeeze(0)

    def update(self, *, is_skipped: bool, count: float, loss: float, step: int) -> None:
        """Choose the next step's scale.

        Args:
            is_skipped: Whether any rank's gradient overflowed, or the loss is not finite.
            count: The count of the window.
            loss: The sum of the window.
            step: Number of the step, from 0.

        Raises:
            TrainingError: a smaller scale would not help.
        """
        self.count = power_of_two(count) if count else self.count
        if not is_skipped:
            self.skipped_in_a_row, self.grown_steps = 0, self.grown_steps + 1
            if self.grown_steps == GROWTH_INTERVAL:
                self.scale, self.grown_steps = min(self.scale * GROWTH, _LARGEST_SCALE), 0
            return
        self.skipped_steps, self.skipped_in_a_row, self.grown_steps = (
            self.skipped_steps + 1,
            self.skipped_in_a_row + 1,
            0,
        )
        if self.scale <= LEAST_SCALE:
            problem = (
                "gradients are infinite or not a number (NaN)"
                if math.isfinite(loss)
                else f"the loss is {'infinite' if math.isinf(loss) else 'not a number (NaN)'}"
            )
            raise TrainingError(
                f"{problem} in step {step + 1} at a loss scale of {self.scale:g}, the smallest; "
                f"{self.skipped_in_a_row} steps in a row were skipped, and the weights are those from before them",
                hint='precision="bf16", which has the range of float32; a lower learning rate, clip=1.0, or a look at '
                "the samples of these steps",
            )
        self.scale = max(self.scale * BACKOFF, LEAST_SCALE)


def power_of_two(value: float) -> float:
    """Return the nearest power of two, by which a float can be multiplied without rounding."""
    return 2.0 ** round(math.log2(value))
