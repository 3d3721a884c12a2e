"""The contract of losses: a mean over the samples, or (sum, count). They are normalised once, by
the window's global count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch

from paceline.base.errors import TrainingError
from paceline.base.nested import tensors_in
from paceline.job.losses import Total
from paceline.job.phases import FIGURES


@dataclass(frozen=True, slots=True)
class LossSum:
    """The value of a loss or metric for some samples, as a sum and the count over which it is
    summed.
    """

    # A scalar as the function gave it: the mean if `is_mean`, otherwise the sum.
    value: torch.Tensor
    count: torch.Tensor | float  # samples, tokens or any other weight; 0 for a padding batch

    is_mean: bool

    @property
    def total(self) -> torch.Tensor:
        """The sum, float64, without gradient."""
        value = self.value.detach().double()
        return value * self.count if self.is_mean else value


def without_total(value: Any, *, samples: int, whole: int) -> Any:
    """Return a total of some samples as what its mean would be if all samples were like them. Other
    results of a loss or metric are returned as they are.

    Args:
        whole: All samples over which results are put together; 0 if their number is not known.

    Raises:
        TrainingError: the number is not known.
    """
    if not isinstance(value, Total):
        return value
    if not whole:
        raise TrainingError(
            "a pl.total is evaluated, and the data is a stream of unknown length",
            hint="return (sum, count) where it is evaluated: validation_step=",
        )
    return value.value * (whole / samples)


def read_tally(value: Any, *, samples: int, name: str = "the loss") -> LossSum:
    """Return the result of a loss or metric function as a sum and a count.

    Raises:
        TrainingError: the result is neither a scalar nor (sum, count).
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        total, count = (
            _scalar(value[0], f"{name} returned a sum"),
            _scalar(value[1], f"{name} returned a count"),
        )
        return LossSum(total, count.detach(), is_mean=False)
    if isinstance(value, Real) and not isinstance(value, bool) and name != "the loss":
        value = torch.as_tensor(float(value), dtype=torch.float64)
    if not isinstance(value, torch.Tensor):
        raise TrainingError(
            f"{name} returned {type(value).__name__}",
            hint="return a scalar tensor, the mean over the samples, or (sum, count)",
        )
    if value.numel() != 1:
        raise TrainingError(
            f"{name} is not a scalar: it has shape {tuple(value.shape)}",
            hint="return its mean over the samples (reduction='mean'), or (sum, count)",
        )
    return LossSum(value.reshape(()), float(samples), is_mean=True)


def _scalar(part: Any, description: str) -> torch.Tensor:
    """Return a part of (sum, count) as a scalar tensor."""
    if isinstance(part, Real):
        return torch.as_tensor(float(part), dtype=torch.float64)
    if not isinstance(part, torch.Tensor):
        raise TrainingError(
            f"{description} that is {type(part).__name__}", hint="(sum, count) are two scalars"
        )
    if part.numel() != 1:
        raise TrainingError(
            f"{description} of shape {tuple(part.shape)}", hint="(sum, count) are two scalars"
        )
    return part.reshape(())


def with_gradient(tally: LossSum, output: Any, *, backward_goes_on: bool) -> LossSum:
    """Return a loss from which backward can start.

    If nothing counts in a micro-batch, its loss may have no gradient, such as (0, 0) of new
    tensors. If a backward must run because other ranks wait in it, such a loss is made to depend on
    the output by zero. Otherwise it stays unchanged.

    Raises:
        TrainingError: the loss counts something and doesn't depend on the model.
    """
    if tally.value.requires_grad:
        return tally
    if tally.is_mean or float(tally.count):
        raise TrainingError(
            "the loss does not depend on the model: it has no gradient",
            hint="compute it from the model's output, without .detach(), .item() or no_grad",
        )
    if not backward_goes_on:
        return tally
    # Use the sum of no elements, because 0 times an infinite output would be NaN.
    nothing = [tensor.flatten()[:0].sum() for tensor in tensors_in(output) if tensor.requires_grad]
    return replace(tally, value=sum((part.to(tally.value) for part in nothing), tally.value))


def refuse_name(name: Any, source: str) -> None:
    """Refuse a name that a figure can't have. source: who gives it, in words.

    Raises:
        TrainingError: it is no text, or the name of a figure of every run.
    """
    if not isinstance(name, str):
        raise TrainingError(f"{source}: the name of a figure is a text")
    if name in FIGURES:
        raise TrainingError(
            f"{source}: every run has a figure of that name", hint="give the figure another name"
        )
