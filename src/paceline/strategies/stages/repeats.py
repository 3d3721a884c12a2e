"""Blocks that equal others, in a capture that is made for a price: each is one call there and is not looked into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.model.cost.blocks import BlockOutput, Repeats, Run, returned
from paceline.model.opaque import Call, GrowingShape, ModuleCall, OpaqueModules, Outputs, record
from paceline.model.units import find_units

_HELD = ("_modules", "_parameters", "_buffers")


class RepeatedBlocks(OpaqueModules):
    """Of the blocks of a model that are alike one is looked into. repeats: which are not, after a capture.

    Blocks that nobody will look into hold nothing meanwhile: recording takes long for each parameter.

    looked_into: blocks that are looked into though they are like others, since they are called otherwise.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.repeats = Repeats(
            find_units(model),
            lambda: 0,
            self._recorded,
            is_once=False,
            looking_into=self._looking_into,
        )
        self.looked_into: set[str] = set()
        self._are_empty = True
        self._emptied: dict[str, tuple[nn.Module, dict[str, Any]]] = {}
        self._names = {
            path: tuple(
                tuple(f"{path}.{name}" for name, _ in named(remove_duplicate=False))
                for named in (unit.named_parameters, unit.named_buffers)
            )
            for path, unit in self.repeats.units.items()
        }

    def __bool__(self) -> bool:
        return True

    @contextmanager
    def standing_in(self, model: nn.Module, samples: int) -> Iterator[list[Call]]:
        with (
            super().standing_in(model, samples) as calls,
            self.repeats.standing_in(),
            self._emptying(),
        ):
            yield calls

    def may_look_into_more(self, error: Exception) -> bool:
        if isinstance(error, _IsEmpty):
            alike = self.repeats.alike(error.name)
            # A second block that is called otherwise may be one of two kinds; a third one says that all may be.
            self.looked_into.update(alike if self.looked_into.intersection(alike) else [error.name])
            return True
        had_empty, self._are_empty = (
            self._are_empty,
            False,
        )  # code around the blocks may look at what they hold
        return had_empty

    @contextmanager
    def _emptying(self) -> Iterator[None]:
        paths = (
            [path for path in self.repeats.expected if path not in self.looked_into]
            if self._are_empty
            else []
        )
        for path in paths:
            unit = self.repeats.units[path]
            self._emptied[path] = unit, {name: vars(unit)[name] for name in _HELD}
            vars(unit).update({name: {} for name in _HELD})
        try:
            yield
        finally:
            for unit, contents in self._emptied.values():
                vars(unit).update(contents)
            self._emptied.clear()

    def _looking_into(self, path: str) -> None:
        if path in self._emptied:
            raise _IsEmpty(path)

    def _recorded(
        self, path: str, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        fresh = [
            output
            for output in run.made or ()
            if isinstance(output, BlockOutput) and output.source < 0
        ]
        outputs = Outputs(
            pytree.tree_structure([0] * len(fresh)),
            tuple(
                GrowingShape(output.shape, (0,) * len(output.shape), output.dtype)
                for output in fresh
            ),
        )
        call = ModuleCall(
            path,
            module,
            spec,
            {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)},
            outputs,
            [shape.fixed for shape in outputs.shapes],
            torch.is_grad_enabled(),
            *self._names[path],
        )
        made = record(call, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], outputs)
        return returned(run, leaves, iter(made))


class _IsEmpty(RuntimeError):
    """A block has to run that holds nothing now. name: its path."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
