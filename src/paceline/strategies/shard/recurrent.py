"""Keeps the weights of recurrent layers on GPUs in the memory into which FSDP2 gathers them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch.nn import RNNBase

if TYPE_CHECKING:
    from torch import nn


def keep_in_place(model: nn.Module) -> None:
    """Keep every recurrent layer from moving its weights.

    If a layer finds other weights than in its last forward, it moves them into one block of memory,
    which is fastest for cuDNN (`RNNBase.flatten_parameters`, which does nothing on CPUs). FSDP2
    continues to fill the memory that it knows, so that the layer would compute with the weights of
    its first forward in all others. Without the move, cuDNN copies the weights in each forward, and
    torch warns of that.
    """
    layers = [module for module in model.modules() if isinstance(module, RNNBase)]
    for layer in layers:
        layer.flatten_parameters = _leave_in_place  # type: ignore[method-assign]
    if layers:
        warnings.filterwarnings(
            "ignore", message="RNN module weights are not part of single contiguous chunk"
        )


def _leave_in_place() -> None:
    """Replace `flatten_parameters` and do nothing."""
