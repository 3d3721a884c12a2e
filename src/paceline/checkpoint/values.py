"""Converts Python values (numbers, text, tensors, containers of these) to JSON and named tensors,
and back.
"""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from paceline.base.errors import JobError
from paceline.model.attributes import is_same
from paceline.model.copy_on_write import TensorSnapshot

_TAG = "__kind__"  # key of a JSON object that represents a value for which JSON has no notation


def pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON can hold it. Its tensors are added to `tensors`, as NAME, NAME.KEY or
    NAME.INDEX.

    Raises:
        JobError: the value holds an object that only pickle could keep.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {_TAG: "tensor", "name": name}
    if isinstance(value, torch.Generator):
        tensors[name] = value.get_state()
        return {_TAG: "generator", "name": name}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        tensors[name] = torch.from_numpy(np.array(value))
        return {_TAG: "array" if isinstance(value, np.ndarray) else "number", "name": name}
    if isinstance(value, np.random.Generator | random.Random):
        state = value.getstate() if isinstance(value, random.Random) else value.bit_generator.state
        return {_TAG: "draws", "state": pack(state, name, tensors)}
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "float", "value": repr(value)}
    if isinstance(value, complex):
        return {_TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": value.hex()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {
            _TAG: "dict",
            "items": [
                [pack(key, f"{name}.key", tensors), pack(item, f"{name}.{key}", tensors)]
                for key, item in value.items()
            ],
        }
    for kind in (list, tuple, set, deque):
        if isinstance(value, kind):
            items = [pack(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
            if kind is list:
                return items
            return {_TAG: kind.__name__, "items": items} | (
                {"maxlen": value.maxlen} if isinstance(value, deque) else {}
            )
    raise JobError(
        f"'{name}' holds a {type(value).__name__}, which a checkpoint can't keep without pickle",
        hint="keep numbers, text, tensors, or lists, tuples and dicts of these",
    )


class SeenPlain:
    """A value at one moment, kept to compare it with a later one. Tensors that torch copies lazily
    take no memory until something writes to them.
    """

    def __init__(self, value: Any) -> None:
        tensors: dict[str, torch.Tensor] = {}
        self._packed = pack(value, "", tensors)
        self._tensors = {name: TensorSnapshot(tensor.detach()) for name, tensor in tensors.items()}

    def is_same(self, value: Any) -> bool:
        """Whether the value equals the one that was kept."""
        tensors: dict[str, torch.Tensor] = {}
        return is_same(pack(value, "", tensors), self._packed) and all(
            is_same(tensor.detach(), self._tensors[name].value) for name, tensor in tensors.items()
        )


def can_pack(value: Any) -> bool:
    """Whether `pack` accepts a value."""
    try:
        pack(value, "", {})
    except JobError:
        return False
    return True


def unpack(packed: Any, read: Callable[[str, Any], torch.Tensor], like: Any = None) -> Any:
    """Return the value that was packed.

    If `like` is of the same kind, it is filled in place, because other objects may refer to it: a
    tensor of the same shape and dtype, a list, a dict, a set, a generator.

    Args:
        read: Gives the tensor of a name. Its second argument is the value that is in its place now.
    """
    if isinstance(packed, list):
        return _filled(
            [unpack(item, read, _at(like, index)) for index, item in enumerate(packed)], like
        )
    if not isinstance(packed, dict):
        return packed
    kind = packed[_TAG]
    if kind == "tensor":
        return _tensor(read(packed["name"], like), like)
    if kind == "generator":
        generator = like if isinstance(like, torch.Generator) else torch.Generator()
        generator.set_state(read(packed["name"], None).cpu())
        return generator
    if kind in ("array", "number"):
        array = read(packed["name"], None).numpy()
        if isinstance(like, np.ndarray) and like.shape == array.shape and like.dtype == array.dtype:
            like[...] = array
            return like
        return array if kind == "array" else array[()]
    if kind == "draws":
        return _drawing(unpack(packed["state"], read), like)
    if kind == "float":
        return float(packed["value"])
    if kind == "complex":
        return complex(*map(float, packed["value"]))
    if kind == "bytes":
        return bytes.fromhex(packed["value"])
    if kind == "dict":
        keys = [unpack(key, read) for key, _ in packed["items"]]
        return _filled(
            {
                key: unpack(item, read, like.get(key) if isinstance(like, dict) else None)
                for key, (_, item) in zip(keys, packed["items"], strict=True)
            },
            like,
        )
    items = [unpack(item, read, _at(like, index)) for index, item in enumerate(packed["items"])]
    if kind == "tuple":
        return type(like)(*items) if hasattr(like, "_fields") else tuple(items)
    return _filled(set(items) if kind == "set" else deque(items, maxlen=packed["maxlen"]), like)


def _drawing(state: Any, like: Any) -> Any:
    """Return NumPy's or Python's generator in this state."""
    if isinstance(state, tuple):
        generator = like if isinstance(like, random.Random) else random.Random()
        generator.setstate(state)
        return generator
    numpy_generator = (
        like
        if isinstance(like, np.random.Generator)
        else np.random.Generator(getattr(np.random, state["bit_generator"])())
    )
    numpy_generator.bit_generator.state = state
    return numpy_generator


def _at(like: Any, index: int) -> Any:
    return like[index] if isinstance(like, list | tuple | deque) and index < len(like) else None


def _tensor(stored: torch.Tensor, like: Any) -> torch.Tensor:
    if not isinstance(like, torch.Tensor):
        return stored
    if like.shape != stored.shape or like.dtype != stored.dtype:
        return stored.to(like.device)
    with torch.no_grad():
        return like.copy_(stored)


def _filled(value: Any, like: Any) -> Any:
    """Put the contents into the existing object and return it, if it is a container of the same
    kind.
    """
    if isinstance(value, list) and isinstance(like, list):
        like[:] = value
    elif isinstance(value, dict | set) and isinstance(
        like, dict if isinstance(value, dict) else set
    ):
        like.clear()
        like.update(value)
    elif isinstance(value, deque) and isinstance(like, deque) and like.maxlen == value.maxlen:
        like.clear()
        like.extend(value)
    else:
        return value
    return like


def stored_values(values: Mapping[str, Any], prefix: str, key: str) -> dict[str, torch.Tensor]:
    """Return values as tensors for a checkpoint. Their own tensors have this prefix, and the rest
    is in a text tensor under the key.
    """
    tensors: dict[str, torch.Tensor] = {}
    packed = {name: pack(value, f"{prefix}{name}", tensors) for name, value in values.items()}
    return tensors | ({key: text_tensor(packed)} if packed else {})


def text_tensor(packed: Any) -> torch.Tensor:
    """Return packed values as the bytes of their JSON. Any rank can write a tensor, but only rank 0
    writes the document.
    """
    return torch.frombuffer(bytearray(json.dumps(packed).encode()), dtype=torch.uint8)


def from_text_tensor(text: torch.Tensor) -> Any:
    """Return the packed values that `text_tensor` was given."""
    return json.loads(bytes(text.tolist()))
