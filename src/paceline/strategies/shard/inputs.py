"""Units that change their inputs, and losses that change the model's output.

FSDP2 passes views of tensors to a unit, in copies of lists and dicts. torch does not allow writes
to these views. FSDP2 also registers hooks on the gradients of a unit's outputs, and loses the hook
of a view that is written to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.base.errors import PlanRefused
from paceline.model.copy_on_write import lazy_copy
from paceline.torch_private import pytree
from paceline.torch_private.autograd import is_view_of_other, version_of

if TYPE_CHECKING:
    from torch import nn


def writable_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """Replace views in the model's output by lazy copies, so that a loss may write to it. A forward
    hook.

    A copy shares memory with its view until it is written to.
    """

    def is_view(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_view_of_other(leaf)

    if not torch.is_grad_enabled() or not any(map(is_view, pytree.tree_leaves(output))):
        return output
    return pytree.tree_map(lambda leaf: lazy_copy(leaf) if is_view(leaf) else leaf, output)


class WritableInputs:
    """Passes lazy copies of FSDP2's views to a unit, and writes changes of a copy to the caller's
    tensor.

    Raises:
        PlanRefused: the forward adds to a list or dict among its arguments, or removes from it.
            Raised in the forward.
    """

    def __init__(self, unit: nn.Module, path: str) -> None:
        self.path = path
        # Whether the unit's first forward with gradients wrote to an input; None before that. A
        # unit that did not write gets the views from then on.
        self.writes: bool | None = None
        self.forward, self.input_leaves = unit.forward, list[Any]()
        # This hook runs before FSDP2's.
        unit.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        unit.forward = self._run

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.writes is not False and torch.is_grad_enabled():
            self.input_leaves = pytree.tree_leaves((args, kwargs))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self.input_leaves:
            return self.forward(*args, **kwargs)
        input_leaves, self.input_leaves = self.input_leaves, []
        leaves, structure = pytree.tree_flatten((args, kwargs))
        copies = {
            number: lazy_copy(leaf)
            for number, leaf in enumerate(leaves)
            if leaf is not input_leaves[number]
        }
        args, kwargs = pytree.tree_unflatten(
            [copies.get(number, leaf) for number, leaf in enumerate(leaves)], structure
        )
        versions = {number: version_of(copy) for number, copy in copies.items()}
        output = self.forward(*args, **kwargs)
        if pytree.tree_structure((args, kwargs)) != structure:
            raise PlanRefused(
                f"'{self.path}' adds to a list or dict that it is given, or takes from it, and under "
                "shard=N it is given a copy of that",
                hint="return what is added, or use a data=N plan",
            )
        edited = [number for number, copy in copies.items() if version_of(copy) != versions[number]]
        for number in edited:
            input_leaves[number].copy_(copies[number])
        self.writes = bool(edited)
        return output
