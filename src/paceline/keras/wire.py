"""Batches and variables on their way to another process of this host: JSON and the bytes of tensors, no pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from keras import Variable

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
    """
    Raises:
        TypeError: something in the value can't be sent. OSError: nobody reads.
    """
    tensors = [tensor.detach().cpu().contiguous() for tensor in tensors_of(value)]
    heads = [
        [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), given.is_cuda]
        for tensor, given in zip(tensors, tensors_of(value), strict=True)
    ]
    connection.send_bytes(json.dumps([_document(value, iter(range(len(tensors)))), heads]).encode())
    for tensor in tensors:
        if tensor.numel():
            connection.send_bytes(tensor.reshape(-1).view(torch.uint8).numpy().data)


def receive(connection: Connection) -> Any:
    """What was sent. Tensors of a GPU are on this process's own.

    Raises:
        EOFError: the other end is closed.
    """
    document, heads = json.loads(connection.recv_bytes())
    return _value(
        document,
        [
            _tensor(connection, dtype, shape).to("cuda" if is_cuda else "cpu")
            for dtype, shape, is_cuda in heads
        ],
    )


def _tensor(connection: Connection, dtype: str, shape: list[int]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(connection.recv_bytes()), dtype=kind).reshape(shape)


def _document(value: Any, numbers: Any) -> Any:
    """What JSON can say: containers with their kind, tensors by number."""
    if isinstance(value, _TENSORS):
        return {"tensor": next(numbers)}
    if isinstance(value, dict):
        return {"dict": [[key, _document(item, numbers)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        return {
            "tuple" if isinstance(value, tuple) else "list": [
                _document(item, numbers) for item in value
            ]
        }
    return value


def _value(document: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(document, dict):
        return document
    ((kind, content),) = document.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _value(item, tensors) for key, item in content}
    items = [_value(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
