"""Values (numbers, text, tensors, containers of these) as JSON and tensors, and back: what
checkpoints hold, and what processes send to each other. Nothing is pickled.
"""

from __future__ import annotations

import importlib
import json
import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_TAG = "__kind__"  # key of a JSON object that represents a value for which JSON has no notation
_HEAD_BYTES = 8  # bytes of a number: the length of the JSON part
_PACKAGE = __name__.partition(".")[0]


class ByName(NamedTuple):
    """An object as the name of its class and what it consists of."""

    module: str
    name: str
    parts: dict[Any, Any]


def as_plain(value: Any) -> Any:
    """Return an object of a subclass of a container as that container, and any other value itself."""
    if isinstance(value, deque):
        return deque(value, value.maxlen)
    if isinstance(value, dict):
        return dict(value.items())
    return next((kind(value) for kind in (list, tuple, set) if isinstance(value, kind)), value)


def pack(
    value: Any, name: str, tensors: dict[str, torch.Tensor], opened: Callable[[Any, str], Any]
) -> Any:
    """Return a value as JSON can hold it. Its tensors are added to `tensors`, as NAME, NAME.KEY or
    NAME.INDEX.

    Args:
        opened: Gives what is packed in place of an object of any other class, also of a subclass
            of a container: a value, or a `ByName`. Its second argument is the object's name.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is dict:
        return {
            _TAG: "dict",
            "items": [
                [
                    pack(key, f"{name}.key", tensors, opened),
                    pack(item, f"{name}.{key}", tensors, opened),
                ]
                for key, item in value.items()
            ],
        }
    if kind in (list, tuple, set, deque):
        items = [pack(item, f"{name}.{index}", tensors, opened) for index, item in enumerate(value)]
        if kind is list:
            return items
        limit = {"maxlen": value.maxlen} if kind is deque else {}
        return {_TAG: kind.__name__, "items": items} | limit
    if kind is ByName:
        parts = pack(value.parts, name, tensors, opened)
        return {_TAG: "object", "class": [value.module, value.name], "parts": parts}
    if kind is complex:
        return {_TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    if kind is bytes:
        return {_TAG: "bytes", "value": value.hex()}
    return _pack_other(value, name, tensors, opened)


def _pack_other(
    value: Any, name: str, tensors: dict[str, torch.Tensor], opened: Callable[[Any, str], Any]
) -> Any:
    """Pack a value of torch's or NumPy's, or an object of another class."""
    import numpy as np
    import torch

    def stored(word: str, tensor: torch.Tensor) -> dict[str, str]:
        unique = name
        while unique in tensors:  # the keys 1 and "1" of one mapping
            unique += "'"
        tensors[unique] = tensor
        return {_TAG: word, "name": unique}

    if isinstance(value, torch.Tensor):
        return stored("tensor", value)
    if isinstance(value, torch.Generator):
        return stored("generator", value.get_state())
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        word = "array" if isinstance(value, np.ndarray) else "number"
        return stored(word, torch.from_numpy(np.array(value)))
    if isinstance(value, np.random.Generator | random.Random):
        state = value.getstate() if isinstance(value, random.Random) else value.bit_generator.state
        return {_TAG: "draws", "state": pack(state, name, tensors, opened)}
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "float", "value": float.__repr__(value)}
    if isinstance(value, int | float | str):
        return value
    return pack(opened(value, name), name, tensors, opened)


def unpack(
    packed: Any,
    read: Callable[[str, Any], torch.Tensor],
    like: Any = None,
    made: Callable[[ByName], Any] | None = None,
) -> Any:
    """Return the value that was packed.

    If `like` is of the same kind, it is filled in place, because other objects may refer to it: a
    tensor of the same shape and dtype, a list, a dict, a set, a generator.

    Args:
        read: Gives the tensor of a name. Its second argument is the value that is in its place now.
        made: Gives the object that was packed as this `ByName`; without it there may be none.
    """
    if isinstance(packed, list):
        return _filled(
            [unpack(item, read, _at(like, index), made) for index, item in enumerate(packed)], like
        )
    if not isinstance(packed, dict):
        return packed
    kind = packed[_TAG]
    if kind in ("tensor", "generator", "array", "number"):
        return _of_tensor(kind, read(packed["name"], like if kind == "tensor" else None), like)
    if kind == "draws":
        return _drawing(unpack(packed["state"], read), like)
    if kind == "float":
        return float(packed["value"])
    if kind == "complex":
        return complex(*map(float, packed["value"]))
    if kind == "bytes":
        return bytes.fromhex(packed["value"])
    if kind == "object":
        assert made is not None
        module, class_name = packed["class"]
        return made(ByName(module, class_name, unpack(packed["parts"], read, None, made)))
    if kind == "dict":
        keys = [unpack(key, read, None, made) for key, _ in packed["items"]]
        return _filled(
            {
                key: unpack(item, read, like.get(key) if isinstance(like, dict) else None, made)
                for key, (_, item) in zip(keys, packed["items"], strict=True)
            },
            like,
        )
    items = [
        unpack(item, read, _at(like, index), made) for index, item in enumerate(packed["items"])
    ]
    if kind == "tuple":
        return type(like)(*items) if hasattr(like, "_fields") else tuple(items)
    return _filled(set(items) if kind == "set" else deque(items, maxlen=packed["maxlen"]), like)


def _of_tensor(kind: str, stored: torch.Tensor, like: Any) -> Any:
    """Return a tensor, an array, a number of NumPy's or a generator of torch's."""
    import numpy as np
    import torch

    if kind == "generator":
        generator = like if isinstance(like, torch.Generator) else torch.Generator()
        generator.set_state(stored.cpu())
        return generator
    if kind != "tensor":
        array = stored.numpy()
        if isinstance(like, np.ndarray) and like.shape == array.shape and like.dtype == array.dtype:
            like[...] = array
            return like
        return array if kind == "array" else array[()]
    if not isinstance(like, torch.Tensor):
        return stored
    if like.shape != stored.shape or like.dtype != stored.dtype:
        return stored.to(like.device)
    with torch.no_grad():
        return like.copy_(stored)


def _drawing(state: Any, like: Any) -> Any:
    """Return NumPy's or Python's generator in this state."""
    import numpy as np

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


# --- Between processes ------------------------------------------------------------------------------------------


def _opened(value: Any, name: str) -> Any:
    """Give dataclasses of this package by name, with the fields of which they are made, and any
    mapping as a dict.
    """
    kind = type(value)
    if is_dataclass(kind) and kind.__module__.partition(".")[0] == _PACKAGE:
        parts = {field.name: getattr(value, field.name) for field in fields(kind) if field.init}
        return ByName(kind.__module__, kind.__qualname__, parts)
    plain = dict(value) if isinstance(value, Mapping) else as_plain(value)
    if plain is value:
        raise TypeError(
            f"a {kind.__name__} can't be told to another process: a batch may have tensors, numbers and text"
        )
    return plain


def _made(found: ByName) -> Any:
    if found.module.partition(".")[0] != _PACKAGE:
        raise ValueError(f"{found.module} is not of this package")
    make = getattr(importlib.import_module(found.module), found.name)
    if not (isinstance(make, type) and is_dataclass(make)):
        raise ValueError(f"{found.module}.{found.name} is no dataclass")
    return make(**found.parts)


def head_of(
    value: Any, opened: Callable[[Any, str], Any] = _opened
) -> tuple[bytes, list[torch.Tensor]]:
    """Return a value as JSON, which describes its tensors, and the tensors.

    opened: see `pack`.

    Raises:
        TypeError: the value has an object of a class that is neither of Python's data nor a
            dataclass of this package.
    """
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(value, "", tensors, opened)
    heads = {
        name: [str(tensor.dtype).removeprefix("torch."), [*tensor.shape], tensor.is_cuda]
        for name, tensor in tensors.items()
    }
    return json.dumps([packed, heads]).encode(), [*tensors.values()]


def value_of(
    head: bytes,
    filled: Callable[[torch.Tensor, bool], torch.Tensor],
    made: Callable[[ByName], Any] = _made,
) -> Any:
    """Return the value of which `head_of` returned this JSON.

    Args:
        filled: Gives each tensor in order. It gets an empty one of the CPU, of the same shape and
            dtype, and whether the tensor was one of a GPU.
    """
    packed, heads = json.loads(head)
    tensors = {}
    for name, (dtype, shape, is_cuda) in heads.items():
        import torch

        tensors[name] = filled(torch.empty(shape, dtype=getattr(torch, dtype)), is_cuda)
    return unpack(packed, lambda name, _: tensors[name], None, made)


def encode(value: Any) -> bytes:
    """Return the value as bytes. Its tensors may lie on any device.

    Raises:
        TypeError: see `head_of`.
    """
    head, tensors = head_of(value)
    return b"".join([len(head).to_bytes(_HEAD_BYTES, "big"), head, *map(_bytes_of, tensors)])


def decode(data: bytes) -> Any:
    """Return the value that `encode` was given. Tensors lie on the CPU, and mappings are dicts."""
    view = memoryview(bytearray(data))  # tensors can be written to
    start = _HEAD_BYTES + int.from_bytes(view[:_HEAD_BYTES], "big")

    def filled(tensor: torch.Tensor, is_cuda: bool) -> torch.Tensor:
        nonlocal start
        target = _bytes_of(tensor)
        target[:] = view[start : start + len(target)]
        start += len(target)
        return tensor

    return value_of(bytes(view[_HEAD_BYTES:start]), filled)


def send(connection: Connection, value: Any) -> None:
    """Send a value to a process that calls `receive`. The bytes of its tensors are not copied.

    Raises:
        TypeError: as `encode`. OSError: nobody reads.
    """
    head, tensors = head_of(value)
    connection.send_bytes(head)
    for tensor in tensors:
        if tensor.numel():
            connection.send_bytes(_bytes_of(tensor))


def receive(connection: Connection) -> Any:
    """Return what was sent. Tensors of a GPU are on this process's own.

    Raises:
        EOFError: the other end is closed.
    """

    def filled(tensor: torch.Tensor, is_cuda: bool) -> torch.Tensor:
        if tensor.numel():
            connection.recv_bytes_into(_bytes_of(tensor))
        return tensor.cuda() if is_cuda else tensor

    return value_of(connection.recv_bytes(), filled)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor: its memory, if it is contiguous and on the CPU."""
    import torch

    if not tensor.numel():  # whose stride may be any
        return memoryview(bytearray())
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
