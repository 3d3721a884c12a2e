"""The rows of all ranks of a batch, through which gradients pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def gathered(
    rows: torch.Tensor,
    *,
    first: int,
    count: int,
    device: torch.device,
    add_up: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the rows of all ranks, in the order of the batch. Collective, and so is a backward through them.

    A rank's rows get the sum of the gradients that the ranks' losses have for them. If ranks weigh their
    losses so that these add up to one, it is the gradient of that one loss: also if each rank has
    computed it whole, and its weights add up to 1.

    Args:
        rows: This rank's rows; empty if it has none.
        first: The place of the first of them in the batch.
        count: The number of rows of all ranks.
        device: Where ranks sum.
        add_up: Returns the sum of a tensor over ranks; it may write to the tensor.
    """
    is_truth = rows.dtype is torch.bool  # truth values have no sum
    numbers = rows.byte() if is_truth else rows
    before, after = (
        numbers.new_zeros(places, *rows.shape[1:]) for places in (first, count - first - len(rows))
    )
    everyone = _Sum.apply(torch.cat([before, numbers, after]).to(device), add_up).to(rows.device)
    return everyone.bool() if is_truth else everyone


class _Sum(torch.autograd.Function):
    """A sum over ranks. Its gradient is the sum of the ranks' gradients, of every order."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, add_up: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.add_up = add_up
        return add_up(rows.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.apply(gradient, ctx.add_up), None
