"""State that training changes outside the model: of losses, metrics, samplers, `collate`, and a
job's own step.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.base.codec import unpack
from paceline.base.user_code import is_users
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.values import SeenPlain, can_pack, from_text_tensor, stored_values
from paceline.job import Job
from paceline.job.foreign_fields import present_name
from paceline.model.attributes import OF_TORCH
from paceline.torch_private.modules import own_buffers, own_modules, own_parameters

_PREFIX, _VALUES = "job/", "job/.values"
_ROOTS = (
    "loss",
    "compute",
    "collate",
    "validation_collate",
    "sampler",
    "training_step",
    "validation_step",
)
_NO_STATE = (type, types.ModuleType, types.BuiltinFunctionType, torch.optim.Optimizer)
_LARGEST_BYTES = (
    2**28
)  # Writes to an array are detected only by comparing it with a copy. A larger one is not copied.


@dataclass(frozen=True, slots=True)
class _Place:
    get: Callable[[], Any]
    put: Callable[[Any], None]


@dataclass
class _Found:
    """The values that were found in a job's objects."""

    places: dict[str, _Place] = field(default_factory=dict)  # of plain values, by name
    nodes: dict[str, Any] = field(default_factory=dict)  # the objects that were searched, by name
    # Names of values that may change and can't be saved.
    unsaved: list[str] = field(default_factory=list)
    # The searched objects by id. They are kept so that no id is used again.
    alive: dict[int, Any] = field(default_factory=dict)


class JobState:
    """The state of a job's functions and objects when this was made, and what training has changed
    of it.

    State is looked for in attributes, containers, buffers, closures and the job file's global
    variables, at any depth. Data sets, objects of Python's own library, and the model that is
    trained are left out. A checkpoint holds only changed values, so that a resumed job may give
    other values to the rest.
    """

    def __init__(self, job: Job, model: nn.Module | None = None) -> None:
        """Record the state of the job's objects.

        model: the model that is trained. A loss may refer to it.
        """
        self.job, self.model = job, model
        self._before = {name: SeenPlain(place.get()) for name, place in self._look().places.items()}

    def _look(self) -> _Found:
        modules = () if self.model is None else self.model.modules()
        apart = (self.job.data, self.job.validation, self.job.test, *modules)
        found = _Found(alive={id(each): each for each in apart})
        for name in _ROOTS:
            root = getattr(self.job, name)
            _visit(getattr(root, "groups", root) if name == "sampler" else root, name, found)
        for name, metric in self.job.metrics.items():
            _visit(metric, f"metrics.{name}", found)
        return found

    @property
    def unsaved(self) -> list[str]:
        """Return names of values that may change and can't be saved: iterators, open files, large
        arrays.
        """
        return self._look().unsaved

    def changed(self) -> dict[str, Any]:
        """Return values that are new or have changed since this was made, by name."""
        values = {name: place.get() for name, place in self._look().places.items()}
        return {
            name: value
            for name, value in values.items()
            if name not in self._before or not self._before[name].is_same(value)
        }

    def stored(self) -> dict[str, torch.Tensor]:
        """Return the changed values as tensors for a checkpoint."""
        return stored_values(self.changed(), _PREFIX, _VALUES)

    def restore(self, checkpoint: Checkpoint) -> Iterator[str]:
        """Put every saved value back. Yields names of values that have no place in this job."""
        if _VALUES not in checkpoint.tensors:
            return
        found = self._look()

        def read(name: str, like: Any) -> torch.Tensor:
            stored = checkpoint.read(name)
            return stored.to(like.device) if isinstance(like, torch.Tensor) else stored

        for stored, packed in from_text_tensor(checkpoint.read(_VALUES)).items():
            name = present_name(stored)
            parent, _, key = name.rpartition(".")
            place, node = found.places.get(name), found.nodes.get(parent)
            if place is not None:
                place.put(unpack(packed, read, place.get()))
            elif isinstance(node, MutableMapping):
                node[key] = unpack(packed, read)
            elif node is not None and not isinstance(node, types.FunctionType):
                setattr(node, key, unpack(packed, read))
            else:
                yield name


def _visit(
    value: Any, name: str, found: _Found, put: Callable[[Any], None] = lambda value: None
) -> None:
    """Find all values inside a value.

    put: replaces the value by another one.
    """
    if isinstance(value, np.ndarray) and value.nbytes > _LARGEST_BYTES:
        found.unsaved.append(name)
    elif can_pack(value):
        found.places[name] = _Place(lambda: value, put)
    elif id(value) not in found.alive and not isinstance(value, _NO_STATE):
        found.alive[id(value)] = found.nodes[name] = value
        if _has_state_dict(value):
            found.places[name] = _Place(value.state_dict, value.load_state_dict)
        elif hasattr(value, "__next__"):
            found.unsaved.append(name)
        else:
            for key, item, put_item in _inside(value):
                _visit(item, f"{name}.{key}" if key else name, found, put_item)


def _has_state_dict(value: Any) -> bool:
    """Whether the object returns its own state, and can load it again."""
    if isinstance(value, nn.Module) or not callable(getattr(value, "load_state_dict", None)):
        return False
    try:
        return can_pack(value.state_dict())
    except Exception:  # the method is the user's
        return False


def _inside(value: Any) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Yield names, values, and functions that replace these values."""
    if isinstance(value, partial):
        yield from (
            ("", part, _nowhere) for part in (value.func, *value.args, *value.keywords.values())
        )
    elif isinstance(value, types.MethodType):
        yield from (("", part, _nowhere) for part in (value.__self__, value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _variables(value)
    elif isinstance(value, nn.Module):
        for store in (own_parameters(value), own_buffers(value)):
            yield from (
                (key, tensor, partial(store.__setitem__, key)) for key, tensor in store.items()
            )
        yield from ((key, module, _nowhere) for key, module in own_modules(value).items())
        yield from (
            (key, item, partial(setattr, value, key))
            for key, item in vars(value).items()
            if key not in OF_TORCH
        )
    elif isinstance(value, Mapping | list | tuple | deque):
        items: Any = value.items() if isinstance(value, Mapping) else enumerate(value)
        put: Any = getattr(value, "__setitem__", None)  # tuples have none
        yield from (
            (str(key), item, partial(put, key) if put is not None else _nowhere)
            for key, item in items
            if isinstance(key, str | int)
        )
    elif _is_looked_into(type(value).__module__):
        names = [
            *getattr(value, "__dict__", ()),
            *(
                name
                for kind in type(value).__mro__
                for name in getattr(kind, "__slots__", ())
                if hasattr(value, name)
            ),
        ]
        yield from ((key, getattr(value, key), partial(setattr, value, key)) for key in names)


def _is_looked_into(module: str) -> bool:
    """Whether objects of classes of this module may be part of what a job trains with. Loggers and
    locks may not.
    """
    package = module.partition(".")[0]
    return module.startswith("paceline.job.") or (
        package not in sys.stdlib_module_names and package != "paceline"
    )


def _nowhere(value: Any) -> None:
    """Do nothing, because no other object ever takes this place."""


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Yield the variables in the closure of a user's function, and the global variables that its
    code names.
    """
    if not is_users(function.__code__.co_filename):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents, partial(setattr, cell, "cell_contents")
        except ValueError:  # the cell is empty
            continue
    codes, names = [function.__code__], dict[str, None]()
    while codes:
        code = codes.pop()
        names |= dict.fromkeys(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    variables = function.__globals__
    yield from (
        (name, variables[name], partial(variables.__setitem__, name))
        for name in names
        if name in variables
    )
