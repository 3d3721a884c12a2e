"""Batch normalisation of a part of a batch: by the mean and the variance of the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from keras.src import backend, ops
from keras.src.layers import BatchNormalization

from paceline.keras.part import Part, in_part
from paceline.keras.patches import Patch


def patches() -> list[Patch]:
    """(owner, name, replacement): where the layer computes its statistics."""
    return [(BatchNormalization, "_moments", in_part(BatchNormalization._moments, _moments))]


def _moments(
    part: Part, original: Any, layer: Any, inputs: torch.Tensor, mask: Any
) -> tuple[Any, Any]:
    """As Keras computes them: without a mask E[x^2] - E[x]^2, with one the mean squared distance."""
    axes = layer._reduction_axes
    values = inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs
    if mask is None:
        total = values.sum(dim=axes)
        count = torch.full_like(total, values.numel() // total.numel())
        total, square, count = _sum(
            part, torch.stack([total, values.square().sum(dim=axes), count])
        )
        mean = total / count
        variance = square / count - mean.square()
    else:
        present = ops.cast(
            ops.broadcast_to(ops.expand_dims(mask, axis=-1), ops.shape(inputs)), "bool"
        )
        values = torch.where(present, values, 0)
        sums = torch.stack([values.sum(dim=axes), present.to(values.dtype).sum(dim=axes)])
        total, count = _sum(part, sums)
        mean = total / (count + backend.epsilon())
        shape = [-1 if axis == layer.axis % values.dim() else 1 for axis in range(values.dim())]
        distance = torch.where(present, values - mean.reshape(shape), 0).square().sum(dim=axes)
        variance = _sum(part, distance) / (count + backend.epsilon())
    return mean.to(inputs.dtype), variance.to(inputs.dtype)


def _sum(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    return _Sum.apply(tensor, part)


class _Sum(torch.autograd.Function):
    """The sum over ranks. Gradients are weighted by a rank's samples once its backward is over, hence the weights."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, part: Part) -> torch.Tensor:
        ctx.part = part
        return part.sum(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        part = ctx.part
        total = _Sum.apply(gradient * part.weight, part)
        return (total / part.weight if part.count else torch.zeros_like(total)), None
