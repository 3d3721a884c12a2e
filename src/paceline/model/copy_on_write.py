"""A tensor's value at one moment, kept without a copy until something writes to the tensor.

torch keeps two tensors in one memory until one of them is written to (copy on write). Keeping a
value therefore costs a microsecond and no memory, and every write is seen, even one through
`tensor.data`, which version counters miss. Of a distributed tensor (DTensor) only this rank's part
is kept, so nothing here is a collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from paceline.torch_private import pytree
from paceline.torch_private.dispatch import OperatorMode, written
from paceline.torch_private.dtensor import part_of, spec_of, with_spec
from paceline.torch_private.storage import address, lazy_clone, storage_key


class TensorSnapshot:
    """The value of a tensor at one moment. A later write to `tensor` leaves `value` as it was."""

    __slots__ = ("_shares_memory", "tensor", "value")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        part, spec = part_of(tensor).detach(), spec_of(tensor)
        value = lazy_clone(part)
        self._shares_memory = value is not None
        if value is None:
            value = part.clone()
        self.value: torch.Tensor = value if spec is None else with_spec(type(tensor), value, spec)

    def is_written(self) -> bool:
        """Whether the tensor may have been written to since. If that can't be told, whether its
        value has changed.

        A few operators count as writers although they do not write, such as an LSTM on a CPU.
        """
        if self._shares_memory:
            return address(part_of(self.tensor)) != address(part_of(self.value))
        return not self.is_same()

    def is_changed(self) -> bool:
        """Whether the tensor holds another value now."""
        return self.is_written() and not self.is_same()

    def restore(self) -> torch.Tensor:
        """Write the value to the tensor, if it holds another one, and return the tensor."""
        if self.is_changed():
            with torch.no_grad():
                self.tensor.copy_(self.value)
        return self.tensor

    def is_same(self) -> bool:
        """Whether shape, dtype and every bit of the tensor's value are as they were; NaN equals
        NaN.
        """
        return has_same_values(part_of(self.tensor).detach(), part_of(self.value))


class UndoneWrites(OperatorMode):
    """A mode that copies a tensor when an operator is about to change it, until `undo`.

    Unlike `TensorSnapshot` it takes no memory for other tensors whose memory torch did not allocate
    itself, such as weights in files.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = {storage_key(tensor): tensor for tensor in tensors}
        self._before: dict[int, torch.Tensor] = {}

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        for leaf in written(func, args, kwargs):
            key = storage_key(leaf) if isinstance(leaf, torch.Tensor) else 0
            if key in self._tensors and key not in self._before:
                self._before[key] = self._tensors[key].detach().clone()
        return func(*args, **kwargs)

    @torch.no_grad()
    def undo(self) -> None:
        """Put back the tensors that were changed since the last time."""
        for key, value in self._before.items():
            self._tensors[key].copy_(value)
        self._before.clear()


def has_same_values(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether shape, dtype and every element of two tensors are equal; NaN equals NaN."""
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype) and bool(
        torch.equal(tensor, other)
        or ((tensor == other) | ((tensor != tensor) & (other != other))).all()
    )


def lazy_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a differentiable copy that takes memory only when one of the two is written to.

    If torch can't make such a copy, it takes memory at once.
    """
    copy = lazy_clone(tensor)
    return tensor.clone() if copy is None else copy


def lazy_copies(value: Any) -> Any:
    """Return the same containers with copies of their tensors, to which a model may write; see
    `lazy_copy`.
    """
    return pytree.tree_map_only(torch.Tensor, lazy_copy, value)
