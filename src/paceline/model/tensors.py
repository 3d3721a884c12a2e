"""The tensors in the arguments or the result of a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors in a module's result."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for entry in fields(value):
            yield from tensors_in(getattr(value, entry.name))
