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


class RepeatedBlocks(OpaqueModules):
    """Captures only one of a model's equal blocks in detail. After a capture, `repeats` names the
    others.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.repeats = Repeats(find_units(model), lambda: 0, self._recorded, is_once=False)

    @contextmanager
    def standing_in(self, model: nn.Module, samples: int) -> Iterator[list[Call]]:
        with super().standing_in(model, samples) as calls, self.repeats.standing_in():
            yield calls

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
            *(
                tuple(f"{path}.{name}" for name, _ in named(remove_duplicate=False))
                for named in (module.named_parameters, module.named_buffers)
            ),
        )
        made = record(call, pytree.tensor_leaves(leaves))
        return returned(run, leaves, iter(made))
