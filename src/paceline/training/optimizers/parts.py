"""Finds the parts of an optimizer: the optimizers that it wraps, and attributes beside `state` that
hold values.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.values import SeenPlain, can_pack, pack
from paceline.torch_private.optimizers import STEPPED

_NEVER_STATE = (
    nn.Module,
    torch.Tensor,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    torch.optim.lr_scheduler.LRScheduler,
)


@cache
def _of_torch() -> frozenset[str]:
    """Return attributes that every optimizer has. They are saved in other ways, or an update does
    not depend on them.

    Building an optimizer imports torch._dynamo, which takes a second.
    """
    return frozenset(vars(Optimizer([nn.Parameter(torch.empty(1, device="meta"))], {}))) | {
        STEPPED,
        "step",
    }


@dataclass(frozen=True)
class Slot:
    """A place for a value in an optimizer, or in an object to which it refers."""

    # Attributes, keys and indices on the way from the outermost optimizer, joined by dots.
    path: str
    holder: Any
    key: Any

    @property
    def value(self) -> Any:
        if isinstance(self.holder, MutableMapping | list):
            return self.holder[self.key]
        return getattr(self.holder, self.key)

    def put(self, value: Any) -> None:
        if isinstance(self.holder, MutableMapping | list):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)

    @property
    def is_there(self) -> bool:
        if isinstance(self.holder, MutableMapping):
            return self.key in self.holder
        return isinstance(self.holder, list) or hasattr(self.holder, self.key)

    @property
    def is_by_parameter(self) -> bool:
        """Whether the value is a mapping from parameters to values."""
        return _is_by_parameter(self.value)


@dataclass(frozen=True)
class Parts:
    """The parts of an optimizer."""

    optimizers: dict[str, Optimizer]  # the outermost one under "", those inside it by path
    slots: dict[str, Slot]  # values beside their `state`, by path
    nodes: dict[str, Any]  # every object and container that was searched, by path

    def slot(self, path: str) -> Slot | None:
        """Return the slot of a path, even if it holds no value yet; None if the object to which it
        belongs does not exist.
        """
        if path in self.slots:
            return self.slots[path]
        parent, _, key = path.rpartition(".")
        holder = self.nodes.get(parent)
        if holder is None or isinstance(holder, list | tuple | deque):
            return None
        return Slot(path, holder, key)


def parts_of(optimizer: Optimizer) -> Parts:
    """Find every optimizer and every value that can be reached from an optimizer's attributes.

    Modules, schedules and functions are not searched.
    """
    parts = Parts({}, {}, {})
    _visit(optimizer, "", parts, set())
    return parts


class SeenSlots:
    """The values in an optimizer's slots at the moment at which this is made.

    besides: paths that are ignored.
    """

    def __init__(self, optimizer: Optimizer, besides: Collection[str] = ()) -> None:
        self.optimizer, self.besides = optimizer, frozenset(besides)
        self._values = {path: SeenPlain(_unkeyed(slot.value)) for path, slot in self._slots()}

    def _slots(self) -> Iterator[tuple[str, Slot]]:
        return (
            (path, slot)
            for path, slot in parts_of(self.optimizer).slots.items()
            if path not in self.besides
        )

    def changed(self) -> dict[str, Slot]:
        """Return slots that are new or whose value has changed, by path."""
        return {
            path: slot
            for path, slot in self._slots()
            if path not in self._values or not self._values[path].is_same(_unkeyed(slot.value))
        }


def unnamed_of(slots: Mapping[str, Slot]) -> set[str]:
    """Return the paths of slots that hold tensors by position and not by parameter."""
    unnamed = set()
    for path, slot in slots.items():
        tensors: dict[str, torch.Tensor] = {}
        if not slot.is_by_parameter:
            pack(slot.value, "", tensors)
        unnamed |= {path} if any(tensor.numel() > 1 for tensor in tensors.values()) else set()
    return unnamed


def _unkeyed(value: Any) -> Any:
    """Return a mapping's values without the parameters that are its keys, and any other value
    unchanged.
    """
    return list(value.values()) if _is_by_parameter(value) else value


def groups_of(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups of an optimizer and of those that it wraps, each once."""
    seen: set[int] = set()
    for part in parts_of(optimizer).optimizers.values():
        for group in part.param_groups:
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def _visit(value: Any, path: str, parts: Parts, seen: set[int]) -> None:
    if id(value) in seen or isinstance(value, _NEVER_STATE):
        return
    seen.add(id(value))
    if isinstance(value, Optimizer):
        parts.optimizers[path] = value
        items: list[tuple[Any, Any]] = [
            (name, item) for name, item in vars(value).items() if name not in _of_torch()
        ]
        shared = {
            key: item for key, item in value.state.items() if not isinstance(key, torch.Tensor)
        }
        prefix = f"{path}.state" if path else "state"
        parts.nodes[prefix] = value.state
        parts.slots.update(
            {
                f"{prefix}.{key}": Slot(f"{prefix}.{key}", value.state, key)
                for key, item in shared.items()
                if _is_value(item)
            }
        )
    elif isinstance(value, MutableMapping):
        items = [(key, item) for key, item in value.items() if isinstance(key, str | int)]
    elif isinstance(value, list | tuple | deque):
        items = list(enumerate(value))
    elif hasattr(value, "__dict__"):
        items = list(vars(value).items())
    else:
        return
    parts.nodes[path] = value
    for key, item in items:
        inner = f"{path}.{key}" if path else str(key)
        if _is_value(item):
            if not isinstance(value, tuple | deque):
                parts.slots[inner] = Slot(inner, value, key)
        else:
            _visit(item, inner, parts, seen)


def _is_value(value: Any) -> bool:
    return _is_by_parameter(value) or (not _holds_parameters(value) and can_pack(value))


def _is_by_parameter(value: Any) -> bool:
    return (
        isinstance(value, MutableMapping)
        and len(value) > 0
        and all(isinstance(key, nn.Parameter) for key in value)
        and all(not _holds_parameters(item) and can_pack(item) for item in value.values())
    )


def _holds_parameters(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_parameters, value.values())) or any(
            isinstance(key, nn.Parameter) for key in value
        )
    if isinstance(value, list | tuple | set | deque):
        return any(map(_holds_parameters, value))
    return isinstance(value, nn.Parameter)
