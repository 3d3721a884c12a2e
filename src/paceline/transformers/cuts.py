"""Cut a collated batch into its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from paceline.base.errors import UsageError

_NOT_CUT = (type(None), bool, int, float, str)


def batch_size(batch: Mapping[str, Any]) -> int:
    """Return the number of samples of a batch: the length of its first tensor, or else of its first
    list.

    Raises:
        UsageError: the batch has neither.
    """
    for kinds in ((torch.Tensor, np.ndarray), (list, tuple)):
        for item in batch.values():
            if isinstance(item, kinds) and getattr(item, "ndim", None) != 0:
                return len(item)
    for item in batch.values():
        if isinstance(item, Mapping):
            return batch_size(item)
    raise UsageError(
        f"a batch has neither a tensor nor a list with a part for each sample: it has {list(batch)}",
        hint="let the collator give one, so that the batch can be cut",
    )


def is_cut_by_sample(batch: Any, size: int) -> bool:
    """Whether each item has a part for each sample, or is a number, a text or None, which all
    samples share.
    """
    if isinstance(batch, Mapping):
        return all(is_cut_by_sample(item, size) for item in batch.values())
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch.ndim == 0 or len(batch) == size
    if isinstance(batch, list | tuple):
        return len(batch) == size
    return isinstance(batch, _NOT_CUT)


def samples_of(batch: Any, part: range) -> Any:
    """Return some samples of a batch that can be cut."""
    if isinstance(batch, Mapping):
        return {key: samples_of(item, part) for key, item in batch.items()}
    is_shared = isinstance(batch, _NOT_CUT) or getattr(batch, "ndim", 1) == 0
    return batch if is_shared else batch[part.start : part.stop]
