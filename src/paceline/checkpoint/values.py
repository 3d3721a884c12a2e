"""Python values in checkpoints, as JSON and named tensors (`base/codec.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from paceline.base import codec
from paceline.base.codec import as_plain
from paceline.base.errors import JobError
from paceline.model.attributes import is_same
from paceline.model.copy_on_write import TensorSnapshot


def pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON can hold it; see `codec.pack`. Subclasses of containers are packed as
    those.

    Raises:
        JobError: the value holds an object that only pickle could keep.
    """
    return codec.pack(value, name, tensors, _opened)


def _opened(value: Any, name: str) -> Any:
    if (plain := as_plain(value)) is value:
        raise JobError(
            f"'{name}' holds a {type(value).__name__}, which a checkpoint can't keep without pickle",
            hint="keep numbers, text, tensors, or lists, tuples and dicts of these",
        )
    return plain


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
