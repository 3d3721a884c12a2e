"""Tensors, arrays and variables in nested values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch

PLAIN = (bool, int, float, str, type(None))
_TENSORS = (torch.Tensor, np.ndarray, np.generic, keras.Variable)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A value with each tensor, array and Keras variable in its tuples, lists and dictionaries replaced.

    Raises:
        TypeError: something in it is neither that nor a plain value.
    """

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, _TENSORS):
            leaf = leaf.value if isinstance(leaf, keras.Variable) else leaf
            return function(torch.as_tensor(leaf))
        if isinstance(leaf, PLAIN):
            return leaf
        raise TypeError(f"a {type(leaf).__name__}")

    return keras.tree.map_structure(mapped, value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """In a fixed order."""
    tensors: list[torch.Tensor] = []
    map_tensors(tensors.append, value)
    return tensors
