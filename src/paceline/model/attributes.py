"""Plain attributes of modules, which a forward may change: counters, temperatures, tensors that are
no buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline.model.copy_on_write import has_same_values

OF_TORCH = frozenset(nn.Module().__dict__)
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
CONTAINERS = (list, tuple, dict, set, deque)


def plain_attributes(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield each plain attribute of each module: its name in the model, the module, its own name
    and its value.

    A plain attribute holds numbers, text, tensors, or lists, tuples, dicts, sets and deques of
    these. Parameters and buffers are left out.
    """
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in OF_TORCH and is_plain(value):
                yield f"{path}.{attribute}" if path else attribute, module, attribute, value


def tensor_attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain attributes that are tensors themselves, by name."""
    return (
        (name, value)
        for name, _, _, value in plain_attributes(model)
        if isinstance(value, torch.Tensor)
    )


def in_float64(model: nn.Module) -> nn.Module:
    """Convert a model's parameters, buffers and tensors in attributes to float64 or complex128, in
    place.
    """
    for _, module, attribute, value in list(plain_attributes(model)):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            setattr(module, attribute, value.double())
    return model.double()  # .to(dtype) would cut complex numbers in two


def is_same(value: Any, other: Any) -> bool:
    """Whether two plain values are equal, element by element and in type; NaN equals NaN."""
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return value is other or (value.device == other.device and has_same_values(value, other))
    if isinstance(value, dict):
        return list(value) == list(other) and all(is_same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple | deque):
        return len(value) == len(other) and all(map(is_same, value, other))
    return bool(value == other or (value != value and other != other))


def is_like_a_buffer(before: Any, after: Any) -> bool:
    """Whether an attribute is a tensor without gradient that keeps its shape: state, and no
    activation.
    """
    return (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and not after.requires_grad
        and before.shape == after.shape
        and before.dtype == after.dtype
    )


def is_plain(value: Any) -> bool:
    """Whether a value is a number, text, a tensor that is no parameter, or a container of these."""
    if isinstance(value, nn.Parameter):
        return False
    if isinstance(value, torch.Tensor) or type(value) in _SCALARS:
        return True
    if isinstance(value, dict):
        return all(type(key) in _SCALARS and is_plain(item) for key, item in value.items())
    return isinstance(value, CONTAINERS) and all(map(is_plain, value))
