"""Values with tensors as bytes, which processes of one host send to each other: JSON and
safetensors, no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

_HEAD_BYTES = 8  # bytes of a number: the length of the JSON part
_TENSOR, _TUPLE = "__tensor__", "__tuple__"


def encode(value: Any) -> bytes:
    """Return the value as bytes. It may have all that JSON holds, tuples, and tensors, which may
    lie on any device.

    Raises:
        TypeError: the value has an object of another type, which the message names.
    """
    tensors: dict[str, torch.Tensor] = {}
    head = json.dumps(_packed(value, tensors)).encode()
    return len(head).to_bytes(_HEAD_BYTES, "big") + head + (save(tensors) if tensors else b"")


def decode(data: bytes) -> Any:
    """Return the value that `encode` was given. Tensors lie on the CPU, and mappings are dicts."""
    start = _HEAD_BYTES + int.from_bytes(data[:_HEAD_BYTES], "big")
    tensors = load(data[start:]) if len(data) > start else {}
    return _unpacked(json.loads(data[_HEAD_BYTES:start]), tensors)


def _packed(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _packed(item, tensors) for key, item in value.items()}
    if isinstance(value, tuple | list):
        packed = [_packed(item, tensors) for item in value]
        return {_TUPLE: packed} if isinstance(value, tuple) else packed
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a {type(value).__name__} can't be told to another process: a batch may have tensors, numbers and "
        "text"
    )


def _unpacked(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_unpacked(item, tensors) for item in value[_TUPLE])
    return {key: _unpacked(item, tensors) for key, item in value.items()}
