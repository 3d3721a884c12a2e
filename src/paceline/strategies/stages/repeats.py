"""Repeated blocks in a capture for pricing.

A block that equals another one is a single call and is not looked into.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.model.cost.blocks import BlockOutput, Repeats, Run, returned
from paceline.model.opaque import Call, GrowingShape, OpaqueModules, Outputs, record
from paceline.model.units import find_units
from paceline.torch_private import pytree
from paceline.torch_private.modules import CONTENTS


class RepeatedBlocks(OpaqueModules):
    """Captures only one of a model's equal blocks in detail. After a capture, `repeats` names the
    others.

    During a capture, the other blocks hold no parameters, because recording takes long for each
    parameter.
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
        # Blocks that are looked into although they equal others, because they are called
        # differently.
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
            # One block that is called differently may be an exception. After another one, all equal
            # blocks are looked into.
            self.looked_into.update(alike if self.looked_into.intersection(alike) else [error.name])
            return True
        # Code around the blocks may read their parameters.
        had_empty, self._are_empty = (
            self._are_empty,
            False,
        )
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
            self._emptied[path] = unit, {name: vars(unit)[name] for name in CONTENTS}
            vars(unit).update({name: {} for name in CONTENTS})
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
        call = Call(
            module,
            spec,
            {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)},
            outputs,
            [shape.fixed for shape in outputs.shapes],
            torch.is_grad_enabled(),
            path,
            *self._names[path],
        )
        made = record(call, pytree.tensor_leaves(leaves))
        return returned(run, leaves, iter(made))


class _IsEmpty(RuntimeError):
    """Raised if a block has to run while it holds no parameters. name: its path."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
