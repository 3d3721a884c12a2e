"""Recurrent layers on GPUs: they must leave their weights in the memory that FSDP2 gathers them in."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch.nn import RNNBase

if TYPE_CHECKING:
    from torch import nn


def keep_in_place(model: nn.Module) -> None:
    """Keep every recurrent layer from moving its weights.

    A layer that finds other weights than in its last forward moves them into one piece of memory, as cuDNN computes
    fastest with them (`RNNBase.flatten_parameters`, which does nothing on CPUs). FSDP2 fills the memory that it knows:
    the layer would compute with the weights of its first forward in all others. Without the move, cuDNN copies the
    weights in each forward, and torch warns of that.
    """
    layers = [module for module in model.modules() if isinstance(module, RNNBase)]
    for layer in layers:
        layer.flatten_parameters = _leave_in_place  # type: ignore[method-assign]
    if layers:
        warnings.filterwarnings(
            "ignore", message="RNN module weights are not part of single contiguous chunk"
        )


def _leave_in_place() -> None:
    """In place of `flatten_parameters`."""
