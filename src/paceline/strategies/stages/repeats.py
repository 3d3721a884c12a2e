"""Blocks that equal others, in a capture that is made for a price: each is one call there and is not looked into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.capture.opaque import Call, GrowingShape, ModuleCall, OpaqueModules, Outputs, record
from paceline.profile.blocks import BlockOutput, Repeats, Run, returned
from paceline.strategies.units import find_units


class RepeatedBlocks(OpaqueModules):
    """Of the blocks of a model that are alike one is looked into. repeats: which are not, after a capture."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.repeats = Repeats(find_units(model), lambda: 0, _recorded, is_once=False)

    def __bool__(self) -> bool:
        return True

    @contextmanager
    def standing_in(self, model: nn.Module, samples: int) -> Iterator[list[Call]]:
        with super().standing_in(model, samples) as calls, self.repeats.standing_in():
            yield calls


def _recorded(path: str, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, spec = pytree.tree_flatten((args, kwargs))
    fresh = [one for one in run.made or () if isinstance(one, BlockOutput) and one.source < 0]
    outputs = Outputs(pytree.tree_structure([0] * len(fresh)),
                      tuple(GrowingShape(one.shape, (0,) * len(one.shape), one.dtype) for one in fresh))
    call = ModuleCall(
        path, module, spec, {i: leaf for i, leaf in enumerate(given) if not isinstance(leaf, torch.Tensor)},
        outputs, 0, torch.is_grad_enabled(),
        tuple(f"{path}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)),
        tuple(f"{path}.{name}" for name, _ in module.named_buffers(remove_duplicate=False)))
    made = record(call, [leaf for leaf in given if isinstance(leaf, torch.Tensor)], outputs)
    return returned(run, given, iter(made))
