"""The state that a module's forward reads and changes, at one moment: to find what
has changed since, to restore it, or to run the same forward again.

This state consists of buffers, parameters that a forward edits in place, attributes (counters,
temperatures, tensors that are no buffers, generators), and the global random streams of Python,
NumPy and torch's CPU. Values are kept without a copy until something writes to them.
"""

from __future__ import annotations

import copy
import inspect
import operator
import random
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.base.nested import items_of, with_items
from paceline.base.streams import set_streams, stream_states
from paceline.model.attributes import CONTAINERS, OF_TORCH, is_plain, is_same
from paceline.model.copy_on_write import TensorSnapshot, UndoneWrites
from paceline.torch_private.fake_tensors import FakeTensor
from paceline.torch_private.modules import own_buffers, own_parameters

_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


@dataclass(frozen=True, slots=True)
class _ObjectSnapshot:
    """A container or a generator at one moment: the object, and a twin that nothing else refers to.

    The items of a container's twin are what `_snapshot` makes of them.
    """

    original: Any
    twin: Any

    def is_written(self) -> bool:
        """Whether the object may have another value: only containers that were empty and still are
        can't have.
        """
        return bool(self.twin) or bool(self.original)

    def restore(self) -> Any:
        """Give the object its former value, and those inside it, and return the object."""
        original, twin = self.original, self.twin
        if isinstance(original, np.random.Generator):
            original.bit_generator.state = twin.bit_generator.state
        elif isinstance(original, random.Random):
            original.setstate(twin.getstate())
        elif isinstance(original, torch.Generator | np.random.RandomState):
            original.set_state(twin.get_state())
        else:
            items = _mapped(twin, _restored)
            if isinstance(original, list):  # Keras's lists refuse what a built model gains
                list.__setitem__(original, slice(None), items)
            elif not isinstance(items, tuple):
                original.clear()
                (original.update if isinstance(items, dict | set) else original.extend)(items)
        return original


@dataclass(frozen=True, slots=True)
class MappingSnapshot:
    """The content of one mapping of a module at one moment: its attributes, buffers or
    parameters.
    """

    mapping: MutableMapping[Any, Any]
    prefix: str  # of the full names of what the mapping has
    names: tuple[str, ...] | None  # names that belong to the state; None if all of them do
    values: dict[Any, Any]  # by reference
    copies: dict[Any, Any]  # of values that can be written to, as `_snapshot` makes them

    @classmethod
    def of(
        cls,
        mapping: MutableMapping[Any, Any],
        prefix: str = "",
        names: tuple[str, ...] | None = None,
    ) -> MappingSnapshot:
        values = _content(mapping, names)
        copies = {
            key: seen
            for key, value in values.items()
            if key not in OF_TORCH and (seen := _snapshot(value)) is not value
        }
        return cls(mapping, prefix, names, values, copies)

    def is_current(self) -> bool:
        """Whether the mapping is known to hold the same objects with the same values."""
        if any(seen.is_written() for seen in self.copies.values()):
            return False
        return _is_alike(
            _content(self.mapping, self.names) if self.names is not None else self.mapping,
            self.values,
        )

    def then(self, key: str) -> Any:
        """Return a value as it was."""
        return _refreshed(self.copies[key], {}) if key in self.copies else self.values[key]

    def had(self, key: str, value: Any) -> bool:
        """Whether the mapping had an equal plain value."""
        return key in self.values and is_same(value, self.then(key))

    def changed(self) -> Iterator[str]:
        """Yield the names of plain values that are new or others now."""
        if self.is_current():
            return
        for key, value in self.mapping.items():
            if key not in OF_TORCH and is_plain(value) and not self.had(key, value):
                yield self.prefix + key

    def restore(self) -> None:
        """Restore the content of the mapping: the same objects with their former values."""
        for seen in self.copies.values():
            seen.restore()
        self.put(self.values)

    def put(self, values: dict[Any, Any]) -> None:
        """Let the mapping hold these objects."""
        if self.names is not None:
            self.mapping.update(values)
        elif not _is_alike(self.mapping, values):
            self.mapping.clear()
            self.mapping.update(values)

    def put_back(self, fresh: dict[int, Any]) -> None:
        """Restore the content of the mapping, with other objects in place of those that may be
        written to.

        Args:
            fresh: The replacement of each object so far, by the id of the object.
        """
        self.put(self.values | {key: _refreshed(seen, fresh) for key, seen in self.copies.items()})


def _content(mapping: MutableMapping[Any, Any], names: tuple[str, ...] | None) -> dict[Any, Any]:
    return dict(mapping) if names is None else {name: mapping[name] for name in names}


def _is_alike(mapping: MutableMapping[Any, Any], values: dict[Any, Any]) -> bool:
    """Whether the mapping has the same objects under as many keys.

    This takes a few nanoseconds for each.
    """
    return len(mapping) == len(values) and all(map(operator.is_, mapping.values(), values.values()))


def _values(mappings: Sequence[MutableMapping[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(operator.methodcaller("values"), mappings))


class MappingSnapshots:
    """Some mappings of a model's modules at one moment."""

    def __init__(self, parts: Sequence[MappingSnapshot]) -> None:
        self.parts = parts

    def written(self) -> Sequence[MappingSnapshot]:
        """Return the mappings that may hold other objects or values.

        One look at all of them takes a fraction of the time of a look at each.
        """
        then, now = [part.values for part in self.parts], [part.mapping for part in self.parts]
        are_alike = list(map(len, now)) == list(map(len, then)) and all(
            map(operator.is_, _values(now), _values(then))
        )
        return [p for p in self.parts if (p.copies or not are_alike) and not p.is_current()]

    def values(self) -> dict[str, Any]:
        """Return the plain values as they were, by name."""
        return {
            part.prefix + key: part.then(key)
            for part in self.parts
            for key, value in part.values.items()
            if key not in OF_TORCH and is_plain(value)
        }

    def changed(self) -> list[str]:
        """Return the names of plain values that are new or others now, in the model's order."""
        return [name for part in self.parts for name in part.changed()]

    def restore(self) -> None:
        """Restore everything: the same objects with their former values. New attributes are
        deleted.
        """
        for part in self.parts:
            part.restore()


class ForwardState:
    """The state of a module's forward, and of the modules inside it.

    Args:
        edited: The parameters that a forward may edit in place.
    """

    def __init__(
        self, module: nn.Module, *, edited: Collection[nn.Parameter] = frozenset()
    ) -> None:
        self._modules = [
            (f"{path}." if path else "", part) for path, part in module.named_modules()
        ]
        self._edited = [
            (own_parameters(part), prefix, names)
            for prefix, part in self._modules
            if (names := tuple(name for name, p in own_parameters(part).items() if p in edited))
        ]
        self._known: dict[int, MappingSnapshot] = {}

    def now(self, inputs: dict[str, Any] | None = None) -> ForwardSnapshot:
        """Return the state at this moment.

        Args:
            inputs: What the forward takes as arguments, by any names.
        """
        tensors = [self._part(own_buffers(part), prefix) for prefix, part in self._modules]
        tensors += [MappingSnapshot.of(inputs)] if inputs else []
        # Parameters are written to in every update, and would be copied then if they were still
        # looked at.
        tensors += [MappingSnapshot.of(*each) for each in self._edited]
        attributes = [self._part(vars(part), prefix) for prefix, part in self._modules]
        return ForwardSnapshot(
            MappingSnapshots(attributes), MappingSnapshots(tensors), stream_states()
        )

    def _part(self, mapping: MutableMapping[str, Any], prefix: str) -> MappingSnapshot:
        known = self._known.get(id(mapping))
        if known is None or not known.is_current():
            known = self._known[id(mapping)] = MappingSnapshot.of(mapping, prefix)
        return known


@dataclass(frozen=True)
class ForwardSnapshot:
    """A forward's state at one moment, and that of the random streams."""

    attributes: MappingSnapshots
    tensors: MappingSnapshots  # buffers, and parameters that a forward may edit
    streams: tuple[Any, ...]
    writes: UndoneWrites | None = None  # to other parameters, if these are watched

    def restore(self, *, with_attributes: bool = True) -> None:
        """Restore everything: the same objects with their former values."""
        if self.writes is not None:
            self.writes.undo()
        self.tensors.restore()
        if with_attributes:
            self.attributes.restore()
        set_streams(self.streams)

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
        self.parts, self.streams = (
            [*moment.attributes.parts, *moment.tensors.parts],
            moment.streams,
        )

    def __enter__(self) -> None:
        self.before = [_content(part.mapping, part.names) for part in self.parts]
        self.streams_before = stream_states()
        set_streams(self.streams)
        fresh: dict[int, Any] = {}
        for part in self.parts:
            if not part.is_current():
                part.put_back(fresh)

    def __exit__(self, *_: object) -> None:
        for part, values in zip(self.parts, self.before, strict=True):
            part.put(values)
        set_streams(self.streams_before)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[ForwardSnapshot]:
    """Restore a model's state after the block, whatever forwards do to it, and yield the state.

    Parameters are copied when an operator is about to change one.
    """
    writes = UndoneWrites(model.parameters())
    snapshot = replace(ForwardState(model).now(), writes=writes)
    try:
        with writes:
            yield snapshot
    finally:
        snapshot.restore()


@contextmanager
def function_kept(function: Any, apart_from: nn.Module) -> Iterator[None]:
    """Restore the state of a function after the block: attributes of its object or modules,
    variables of its closure.

    Args:
        apart_from: A model whose state is restored elsewhere.
    """
    known = set(map(id, apart_from.modules()))
    objects = [value for value in _behind(function) if id(value) not in known]
    cells = [pair for value in (function, *objects) for pair in cells_of(value)]
    variables = {number: value for number, (_, value) in enumerate(cells)}
    kept = MappingSnapshots(
        [
            MappingSnapshot.of(variables),
            *(
                MappingSnapshot.of(vars(value))
                for value in objects
                if type(getattr(value, "__dict__", None)) is dict
                and not isinstance(value, nn.Module | type)
                and not inspect.isroutine(value)
            ),
        ]
    )
    with ExitStack() as modules_kept:
        for module in objects:
            if isinstance(module, nn.Module):
                modules_kept.enter_context(state_kept(module))
        try:
            yield
        finally:
            kept.restore()
            for number, (cell, _) in enumerate(cells):
                cell.cell_contents = variables[number]


def _behind(function: Any) -> list[Any]:
    """Return the function without its wrappers, the object of which it is a method, and the values
    of its closure.
    """
    if isinstance(function, partial):
        return [
            value
            for part in (function.func, *function.args)
            if callable(part)
            for value in _behind(part)
        ]
    owner = getattr(function, "__self__", None)
    return [
        function,
        *([] if owner is None else [owner]),
        *(value for _, value in cells_of(function) if callable(value)),
    ]


def cells_of(function: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the cells of a function's closure, and their values."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # its variable has no value yet
            yield cell, cell.cell_contents


def _snapshot(value: Any, *, is_inside: bool = False) -> Any:
    """Return a snapshot of a value that can be written to, and any other value itself.

    Args:
        is_inside: Whether it is in a container. Of those there only plain tensors are kept:
            parameters are a module's own once more (an LSTM's), and those of FSDP2 can't be looked
            at.
    """
    if isinstance(value, torch.Tensor):
        is_kept = type(value) is torch.Tensor if is_inside else not isinstance(value, FakeTensor)
        return TensorSnapshot(value) if is_kept else value
    if isinstance(value, CONTAINERS):
        twin = _mapped(value, partial(_snapshot, is_inside=True))
        is_fixed = isinstance(value, tuple) and all(map(operator.is_, twin, value))
        return value if is_fixed else _ObjectSnapshot(value, twin)
    if isinstance(value, _GENERATORS):
        return _ObjectSnapshot(value, _apart(value))
    return value


def _apart(generator: Any) -> Any:
    """Return another generator of the same state."""
    is_of_torch = isinstance(generator, torch.Generator)
    return generator.clone_state() if is_of_torch else copy.deepcopy(generator)


def _restored(seen: Any) -> Any:
    """Return the value of which `_snapshot` made this, as it was."""
    return seen.restore() if isinstance(seen, TensorSnapshot | _ObjectSnapshot) else seen


def _refreshed(seen: Any, fresh: dict[int, Any]) -> Any:
    """Return the value of which `_snapshot` made this, or one like it if it may be written to."""
    if isinstance(seen, TensorSnapshot):
        if not seen.is_written():
            return seen.tensor
        original, make = seen.tensor, partial(_twin, seen)
    elif isinstance(seen, _ObjectSnapshot):
        original = seen.original
        make = (
            partial(_apart, seen.twin)
            if isinstance(original, _GENERATORS)
            else partial(_mapped, seen.twin, lambda item: _refreshed(item, fresh))
        )
    else:
        return seen
    if id(original) not in fresh:
        fresh[id(original)] = make()
    return fresh[id(original)]


def _twin(seen: TensorSnapshot) -> torch.Tensor:
    tensor, original = TensorSnapshot(seen.value).value, seen.tensor
    if isinstance(original, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=original.requires_grad)
    # A leaf that needs a gradient can't be written to.
    return tensor.requires_grad_().clone() if original.requires_grad else tensor


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container of the same class with the function applied to every item.

    Sets keep their members.
    """
    return with_items(value, [function(item) for _, item in items_of(value) or ()])
