"""The one loss contract: a mean over the samples, or (sum, count); normalised once by the window's global count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch

from paceline.base.errors import TrainingError
from paceline.model.tensors import tensors_in


@dataclass(frozen=True, slots=True)
class Tally:
    """What a loss or metric is of some samples: a sum, and what it is a sum over.

    value: scalar tensor as the function gave it: the mean if `is_mean`, else the sum.
    count: samples, tokens or any other weight; 0 for a stand-in.
    """

    value: torch.Tensor
    count: torch.Tensor | float
    is_mean: bool

    @property
    def total(self) -> torch.Tensor:
        """The sum, float64, without gradient."""
        value = self.value.detach().double()
        return value * self.count if self.is_mean else value


def read_tally(value: Any, *, samples: int, name: str = "the loss") -> Tally:
    """What a loss or metric function returned, as a sum and a count.

    Raises:
        TrainingError: neither a scalar nor (sum, count).
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        total, count = (
            _scalar(value[0], f"{name} returned a sum"),
            _scalar(value[1], f"{name} returned a count"),
        )
        return Tally(total, count.detach(), is_mean=False)
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
    return Tally(value.reshape(()), float(samples), is_mean=True)


def _scalar(part: Any, description: str) -> torch.Tensor:
    """A part of (sum, count) as a scalar tensor."""
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


def with_gradient(tally: Tally, output: Any, *, backward_goes_on: bool) -> Tally:
    """A loss that backward can start from.

    A micro-batch in which nothing counts may have none, as (0, 0) of new tensors. Then it depends on the output by
    zero where a backward must go on because other ranks wait in it, and else it is left as it is.

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
    # The sum of no elements: 0 times the output would be NaN where the output is infinite.
    nothing = [tensor.flatten()[:0].sum() for tensor in tensors_in(output) if tensor.requires_grad]
    return replace(tally, value=sum((part.to(tally.value) for part in nothing), tally.value))
