"""Keras losses of a part of a batch: normalised by the whole batch.

A rank's loss is such that the mean of all ranks' losses, weighted by their samples, is the loss of the whole batch. A
mean over samples is that as it is. A sum, a mean over sample weights and a mean over what a mask leaves are corrected
by the sums over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from keras.src import ops
from keras.src.losses import loss as keras_loss

from paceline.keras.part import Part, in_part
from paceline.keras.patches import Patch

_OVER_SAMPLES = ("sum_over_batch_size", "mean")


def patches() -> list[Patch]:
    """(owner, name, replacement): the two functions by which every `keras.Loss` reduces its values."""
    return [
        (keras_loss, "reduce_values", in_part(keras_loss.reduce_values, _reduced)),
        (keras_loss, "apply_mask", in_part(keras_loss.apply_mask, _masked)),
    ]


def _reduced(
    part: Part,
    original: Any,
    values: Any,
    sample_weight: Any = None,
    reduction: Any = "sum_over_batch_size",
) -> Any:
    if reduction in (None, "none") or tuple(values.shape) in ((), (0,)):
        return original(values, sample_weight, reduction)
    if not part.count and reduction == "sum":
        return ops.sum(values) * 0
    if reduction == "sum":
        return ops.sum(values) / part.weight
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        divisor = part.sum(ops.cast(ops.sum(sample_weight), values.dtype)) * part.weight
        return ops.divide_no_nan(ops.sum(values), divisor)
    return original(values, sample_weight, reduction)


def _masked(
    part: Part, original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: Any
) -> Any:
    """Keras weighs what a mask leaves so that a mean over all values is the mean over these; here over all ranks'."""
    weights = original(sample_weight, mask, dtype, reduction)
    if mask is not None and reduction in _OVER_SAMPLES:
        size = torch.tensor(float(mask.numel()), dtype=torch.float64, device=mask.device)
        valid = mask.to(torch.float64).sum()
        all_size, all_valid = part.sum(torch.stack([size, valid]))
        # In place, as Keras changes the sample weights that it was given.
        weights.mul_(
            torch.where(all_valid > 0, valid / size * all_size / all_valid, 0).to(weights.dtype)
        )
    return weights
