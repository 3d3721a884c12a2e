"""Plain attributes of modules, which a forward may change: counters, temperatures, tensors that are
no buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_OF_TORCH = frozenset(nn.Module().__dict__)
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, dict, set, deque)


def plain_attributes(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield each plain attribute of each module: its name in the model, the module, its own name
    and its value.

    A plain attribute holds numbers, text, tensors, or lists, tuples, dicts, sets and deques of
    these. Parameters and buffers are left out.
    """
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OF_TORCH and is_plain(value):
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


class AttributeSnapshot:
    """The plain attributes of a model at one moment, with copies of their values by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._originals = {name: value for name, _, _, value in plain_attributes(model)}
        self.values = {name: copied(value) for name, value in self._originals.items()}

    def changed(self) -> list[str]:
        """Return the names of attributes that are new or have another value now, in the model's
        order.
        """
        return [
            name
            for name, _, _, value in plain_attributes(self.model)
            if name not in self.values or not is_same(value, self.values[name])
        ]

    def restore(self) -> None:
        """Put every attribute back as it was: the same objects with their former contents; new ones
        are deleted.
        """
        for name, module, attribute, _ in list(plain_attributes(self.model)):
            if name not in self.values:
                delattr(module, attribute)
        for path, module in self.model.named_modules():
            prefix = f"{path}." if path else ""
            for attribute in [key for key in vars(module) if f"{prefix}{key}" in self.values]:
                name = f"{prefix}{attribute}"
                if not is_same(vars(module)[attribute], self.values[name]):
                    vars(module)[attribute] = _refilled(self._originals[name], self.values[name])


class StateOfForward:
    """The buffers, the plain attributes and the given parameters of a model at one moment."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._attributes = AttributeSnapshot(model)
        self._buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._values = [
            (tensor, tensor.detach().clone())
            for tensor in [*(buffer for _, _, buffer in self._buffers), *parameters]
        ]

    def restore(self) -> None:
        """Put all of it back as it was: the same objects with their former contents."""
        self._attributes.restore()
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer
        with torch.no_grad():
            for tensor, value in self._values:
                if not is_same(tensor.detach(), value):
                    tensor.copy_(value)


@contextmanager
def state_of_forward_kept(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restore buffers, plain attributes and these parameters after the block."""
    before = StateOfForward(model, parameters)
    try:
        yield
    finally:
        before.restore()


def is_same(value: Any, other: Any) -> bool:
    """Whether two plain values are equal, element by element and in type; NaN equals NaN."""
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return value is other or (
            value.shape == other.shape
            and value.dtype == other.dtype
            and value.device == other.device
            and bool(((value == other) | ((value != value) & (other != other))).all())
        )
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
    return isinstance(value, _CONTAINERS) and all(map(is_plain, value))


def copied(value: Any) -> Any:
    """Return a copy of a plain value, with copies of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return (
            type(value)((key, copied(item)) for key, item in value.items())
            if type(value) is not dict
            else {key: copied(item) for key, item in value.items()}
        )
    if isinstance(value, tuple):
        return (
            type(value)(*map(copied, value))
            if hasattr(value, "_fields")
            else type(value)(map(copied, value))
        )
    if isinstance(value, deque):
        return deque(map(copied, value), maxlen=value.maxlen)
    return type(value)(map(copied, value)) if isinstance(value, list | set) else value


def _refilled(original: Any, copy: Any) -> Any:
    """Return the original object with the contents of its copy.

    It stays the same object, as others may refer to it.
    """
    if isinstance(original, torch.Tensor):
        with torch.no_grad():
            return original if is_same(original, copy) else original.copy_(copy)
    if isinstance(original, dict | set):
        original.clear()
        original.update(copied(copy))
    elif isinstance(original, list | deque):
        original.clear()
        original.extend(copied(copy))
    else:
        return copied(copy)
    return original
