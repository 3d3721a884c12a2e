"""The state that a module's forward reads and changes besides its inputs, so that the same forward
can run again.

This state consists of buffers, parameters that a forward edits in place, plain attributes
(counters, temperatures, tensors that are no buffers), and Python's and NumPy's random streams.
`torch.utils.checkpoint` restores torch's own generators.
"""

from __future__ import annotations

import copy
import ctypes
import operator
import random
from collections import deque
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.model.copy_on_write import TensorSnapshot

OF_TORCH = frozenset(nn.Module().__dict__)
_MT19937_WORDS = 625  # a table of 624 and the place in it
_CONTAINERS = (list, tuple, dict, set, deque)
_COPIED = (
    torch.Tensor,
    *_CONTAINERS,
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)


@dataclass(frozen=True, slots=True)
class MappingSnapshot:
    """The content of one mapping of a module at one moment: its attributes, buffers or
    parameters.
    """

    mapping: MutableMapping[str, Any]
    names: tuple[str, ...] | None  # names that belong to the state; None if all of them do
    values: dict[str, Any]  # by reference
    copies: dict[str, Any]  # of values that can be written to, as `_copied` makes them

    @classmethod
    def of(
        cls, mapping: MutableMapping[str, Any], names: tuple[str, ...] | None = None
    ) -> MappingSnapshot:
        values = _content(mapping, names)
        return cls(
            mapping,
            names,
            values,
            {
                key: _copied(value)
                for key, value in values.items()
                if _can_be_written(value) and key not in OF_TORCH
            },
        )

    def is_current(self) -> bool:
        """Whether the mapping is known to hold the same objects with the same values."""
        if self.copies and any(
            _may_be_written(copy, self.values[key]) for key, copy in self.copies.items()
        ):
            return False
        return _is_alike(
            _content(self.mapping, self.names) if self.names is not None else self.mapping,
            self.values,
        )

    def then(self, key: str) -> Any:
        """Return a value as it was."""
        return _refreshed(self.copies[key], {}) if key in self.copies else self.values[key]

    def put_back(self, fresh: dict[int, torch.Tensor]) -> None:
        """Restore the content of the mapping, with values that may be written to.

        Args:
            fresh: The replacement of each tensor that was written to since, by the id of the
                tensor.
        """
        values = self.values | {key: _refreshed(copy, fresh) for key, copy in self.copies.items()}
        _replace(self.mapping, self.names, values)


def _content(mapping: MutableMapping[str, Any], names: tuple[str, ...] | None) -> dict[str, Any]:
    return dict(mapping) if names is None else {name: mapping[name] for name in names}


def _is_alike(mapping: MutableMapping[str, Any], values: dict[str, Any]) -> bool:
    """Whether the mapping has the same objects under as many keys.

    This takes a few nanoseconds for each.
    """
    return len(mapping) == len(values) and all(map(operator.is_, mapping.values(), values.values()))


def _replace(
    mapping: MutableMapping[str, Any], names: tuple[str, ...] | None, values: dict[str, Any]
) -> None:
    if names is None:
        mapping.clear()
    mapping.update(values)


class ForwardState:
    """The state of a module's forward, and of the modules inside it.

    Args:
        buffers: Buffers by name, if the forward takes them from this mapping and not from the
            module.
        edited: Whether a forward may edit a parameter in place.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        buffers: MutableMapping[str, torch.Tensor] | None = None,
        edited: Callable[[nn.Parameter], bool] = lambda parameter: True,
    ) -> None:
        self.buffers = buffers
        inside = list(module.modules())
        self.mappings: list[MutableMapping[str, Any]] = [vars(part) for part in inside]
        self.mappings += [part._buffers for part in inside if part._buffers]
        self.parameters = [
            (part._parameters, names)
            for part in inside
            if (
                names := tuple(
                    name
                    for name, parameter in part._parameters.items()
                    if parameter is not None and edited(parameter)
                )
            )
        ]
        self.known: dict[int, MappingSnapshot] = {}

    def now(self, *, buffers: tuple[str, ...] = ()) -> ForwardSnapshot:
        """Return the state at this moment.

        Args:
            buffers: Names of the buffers that the forward takes from elsewhere.
        """
        parts = [self._part(mapping) for mapping in self.mappings]
        if buffers:
            assert self.buffers is not None
            parts.append(MappingSnapshot.of(self.buffers, buffers))
        # Parameters are written to in every update, and would be copied then if they were still
        # looked at.
        parts += [MappingSnapshot.of(mapping, names) for mapping, names in self.parameters]
        return ForwardSnapshot(parts, Streams.now())

    def _part(self, mapping: MutableMapping[str, Any]) -> MappingSnapshot:
        known = self.known.get(id(mapping))
        if known is None or not known.is_current():
            known = self.known[id(mapping)] = MappingSnapshot.of(mapping)
        return known


@dataclass(frozen=True, slots=True)
class Streams:
    """The states of Python's and NumPy's random streams. `place` is the result of `_place`."""

    python: Any
    numpy: Any
    place: tuple[int, ...] | None

    @classmethod
    def now(cls) -> Streams:
        place = _place()
        if place is None or _latest.get("place") != place:  # asking NumPy takes 30 us
            _latest.update(place=place, state=np.random.get_state())
        return cls(random.getstate(), _latest["state"], place)

    def put_back(self) -> None:
        random.setstate(self.python)
        if self.place is None or self.place != _place():
            np.random.set_state(self.numpy)


_latest: dict[str, Any] = {}


def _place() -> tuple[int, ...] | None:
    """Return the position of NumPy's generator: two words of its table, which identify it, and the
    place in the table.

    The result is None if the generator is not of NumPy's default kind.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return None
    words = (ctypes.c_uint32 * _MT19937_WORDS).from_address(generator.ctypes.state_address)
    return words[0], words[_MT19937_WORDS // 2], words[_MT19937_WORDS - 1]


@dataclass(frozen=True)
class ForwardSnapshot:
    """A forward's state at one moment, and that of the random streams."""

    parts: list[MappingSnapshot]
    streams: Streams

    def again(self) -> AbstractContextManager[None]:
        """Return a context in which the state is that of this moment.

        Writes to it in the context are dropped.
        """
        return _Again(self)


class _Again(AbstractContextManager[None]):
    """The context of `ForwardSnapshot.again`, which can be entered several times, one after the
    other.
    """

    def __init__(self, moment: ForwardSnapshot) -> None:
        self.moment = moment

    def __enter__(self) -> None:
        self.before = [_content(part.mapping, part.names) for part in self.moment.parts]
        self.streams = Streams.now()
        self.moment.streams.put_back()
        fresh: dict[int, torch.Tensor] = {}
        for part in self.moment.parts:
            if not part.is_current():
                part.put_back(fresh)

    def __exit__(self, *_: object) -> None:
        for part, values in zip(self.moment.parts, self.before, strict=True):
            if part.names is not None or not _is_alike(part.mapping, values):
                _replace(part.mapping, part.names, values)
        self.streams.put_back()


def _can_be_written(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_can_be_written, value))
    return isinstance(value, _COPIED)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSnapshot(value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, list) and value and all(isinstance(item, nn.Parameter) for item in value):
        return list(
            value
        )  # a module's own parameters once more (an LSTM's); those of FSDP2 can't be looked at
    if isinstance(value, _CONTAINERS):
        return _mapped(value, _copied)
    return copy.deepcopy(value) if isinstance(value, _COPIED) else value


def _may_be_written(copied: Any, original: Any) -> bool:
    """Whether the original of a copy by `_copied` may have another value, such as new items in an
    empty container.
    """
    if isinstance(copied, TensorSnapshot):
        return copied.is_written()
    return not isinstance(copied, _CONTAINERS) or bool(copied) or bool(original)


def _refreshed(value: Any, fresh: dict[int, torch.Tensor]) -> Any:
    """Return a copy by `_copied` as values that may be written to."""
    if isinstance(value, TensorSnapshot):
        if not value.is_written():
            return value.tensor
        return fresh.setdefault(id(value.tensor), _twin(value))
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, _CONTAINERS):
        return _mapped(value, lambda item: _refreshed(item, fresh))
    return _copied(value)


def _twin(seen: TensorSnapshot) -> torch.Tensor:
    tensor, original = TensorSnapshot(seen.value).value, seen.tensor
    if isinstance(original, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=original.requires_grad)
    return tensor.requires_grad_(original.requires_grad)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container of the same kind with the function applied to every item.

    Sets keep their members.
    """
    if isinstance(value, tuple):
        items = map(function, value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    twin = copy.copy(value)
    if not isinstance(value, set):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            twin[key] = function(value[key])
    return twin
