"""Values with tensors as bytes, which processes of one host send to each other: JSON and the bytes
of tensors, no pickle.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from paceline.base.values import plain, value_of

_HEAD_BYTES = 8  # bytes of a number: the length of the JSON part


def encode(value: Any) -> bytes:
    """Return the value as bytes. It may have all that `plain` takes, arrays, and tensors, which may
    lie on any device.

    Raises:
        TypeError: the value has an object of another type, which the message names.
    """
    head, tensors = _parts(value)
    return b"".join([len(head).to_bytes(_HEAD_BYTES, "big"), head, *map(_bytes_of, tensors)])


def decode(data: bytes) -> Any:
    """Return the value that `encode` was given. Tensors lie on the CPU, and mappings are dicts."""
    view = memoryview(bytearray(data))  # tensors can be written to
    start = _HEAD_BYTES + int.from_bytes(view[:_HEAD_BYTES], "big")
    document, heads = json.loads(bytes(view[_HEAD_BYTES:start]))
    tensors = []
    for dtype, shape, _ in heads:
        tensors.append(torch.empty(shape, dtype=getattr(torch, dtype)))
        target = _bytes_of(tensors[-1])
        target[:] = view[start : start + len(target)]
        start += len(target)
    return _value(document, tensors)


def send(connection: Connection, value: Any) -> None:
    """Send a value to a process that calls `receive`. The bytes of its tensors are not copied.

    Raises:
        TypeError: as `encode`. OSError: nobody reads.
    """
    head, tensors = _parts(value)
    connection.send_bytes(head)
    for tensor in tensors:
        if tensor.numel():
            connection.send_bytes(_bytes_of(tensor))


def receive(connection: Connection) -> Any:
    """Return what was sent. Tensors of a GPU are on this process's own.

    Raises:
        EOFError: the other end is closed.
    """
    document, heads = json.loads(connection.recv_bytes())
    tensors = []
    for dtype, shape, is_cuda in heads:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            connection.recv_bytes_into(_bytes_of(tensor))
        tensors.append(tensor.to("cuda" if is_cuda else "cpu"))
    return _value(document, tensors)


def _parts(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return the JSON of a value, which numbers its tensors and describes them, and the tensors."""
    tensors: list[torch.Tensor] = []
    heads = []

    def numbered(leaf: Any) -> dict[str, Any]:
        if isinstance(leaf, np.ndarray | np.generic):
            leaf = torch.as_tensor(leaf)
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"a {type(leaf).__name__} can't be told to another process: a batch may have tensors, numbers and text"
            )
        heads.append([str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.is_cuda])
        tensors.append(leaf.detach().cpu().contiguous())
        return {"tensor": len(tensors) - 1}

    return json.dumps([plain(value, numbered), heads]).encode(), tensors


def _value(document: Any, tensors: list[torch.Tensor]) -> Any:
    return value_of(document, lambda leaf: tensors[leaf["tensor"]])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
