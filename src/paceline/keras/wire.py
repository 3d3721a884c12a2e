"""Tensors, arrays and variables in nested values, and their way to another process of this host."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from keras import Variable

from paceline.base import codec

_PLAIN = (bool, int, float, str, type(None))
_TENSORS = (torch.Tensor, np.ndarray, np.generic, Variable)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A value with each tensor, array and Keras variable in its tuples, lists and dictionaries replaced.

    Raises:
        TypeError: something in it is neither that nor a plain value.
    """
    if isinstance(value, _TENSORS):
        return function(_tensor_of(value))
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [map_tensors(function, item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(f"a {type(value).__name__}")


def _tensor_of(value: Any) -> torch.Tensor:
    if isinstance(value, Variable):
        value = value.value
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """In a fixed order."""
    tensors: list[torch.Tensor] = []
    map_tensors(tensors.append, value)
    return tensors


def send(connection: Connection, value: Any) -> None:
    """Send a value; see `base/codec.py`. Variables arrive as tensors."""
    codec.send(connection, map_tensors(lambda tensor: tensor, value))
