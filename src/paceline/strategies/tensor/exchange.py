"""Exchanges between ranks in a split layer, each with the exchange that its gradient needs.

Gradients follow one rule: the gradient of a part is a part, and the gradient of a whole value, or
of a pending sum, is whole on every rank. If ranks use a whole value together with their different
parts, they must sum its gradient. Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti
et al. 2022 for parts of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from paceline.base.errors import PlanRefused
from paceline.launch.collectives.group import all_gather, reduce_scatter
from paceline.strategies.tensor.cut import Cut
from paceline.torch_private.dtensor import part_of, spec_of, with_spec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Sum:
    """The placement of a pending sum: the values of all ranks must still be added up."""

    mean: bool = False  # whether the sum must also be divided by the number of ranks


# How a tensor is distributed over the ranks; None if each rank has all of it.
Placement = Cut | Sum | None
Function = Callable[[torch.Tensor], torch.Tensor]


class _Exchange(torch.autograd.Function):
    """A function of this rank's part, with another function for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Function, back: Function) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.back(gradient), None, None


class _SumGradients(torch.autograd.Function):
    """Passes tensors on unchanged, and sums their gradients over the ranks in one message."""

    @staticmethod
    def forward(ctx: Any, exchanges: Exchanges, *whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchanges = exchanges
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return None, *gradients
        flat = torch.cat([gradient.reshape(-1) for gradient in present])
        ctx.exchanges.all_reduce(flat)
        parts = iter(flat.split([gradient.numel() for gradient in present]))
        return None, *(
            None if gradient is None else next(parts).view(gradient.shape) for gradient in gradients
        )


@once_differentiable
def _sum_once(exchanges: Exchanges, gradient: torch.Tensor) -> torch.Tensor:
    return exchanges.summed()(gradient)


class _Local(torch.autograd.Function):
    """Returns this rank's part of a DTensor. Its gradient is a DTensor with the same cut."""

    @staticmethod
    def forward(ctx: Any, whole: Any) -> torch.Tensor:
        ctx.kind, ctx.spec = type(whole), spec_of(whole)
        part = part_of(whole)
        return part.view_as(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return with_spec(ctx.kind, gradient.contiguous(), ctx.spec)


def local_part(whole: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, through which gradients reach the DTensor."""
    part: torch.Tensor = _Local.apply(whole)
    return part


@dataclass(frozen=True)
class Move:
    """A function that moves a value from one placement to another."""

    before: Placement
    after: Placement
    there: Function  # moves the value
    back: Function  # moves its gradient

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = _Exchange.apply(x, self.there, self.back)
        return moved


def not_in_parts(what: str) -> PlanRefused:
    """Make the error for a layer that ranks can't run in parts.

    `derive` keeps such a layer whole.
    """
    return PlanRefused(what, hint="data=N and shard=N plans run the model as it is")


class Exchanges:
    """The exchanges over a mesh of one dim.

    All are collective, except for taking a rank's own part.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self._options = dist.AllreduceOptions()
        self._options.asyncOp = False

    def between(self, before: Placement, after: Placement) -> Move:
        """Return the move from one placement to another. For the source of the pairs, see the
        module.

        Raises:
            PlanRefused: there is no such exchange.
        """
        match before, after:
            case Cut() as cut, None:
                return Move(cut, None, self.gather(cut), self.local_slice(cut))
            case None, Cut() as cut:
                return Move(None, cut, self.local_slice(cut), self.gather(cut))
            case Cut() as first, Cut() as second:
                return Move(first, second, self.swap(first, second), self.swap(second, first))
            case Sum(), None:
                return Move(before, None, self.summed(before.mean), self.kept(before.mean))
            case Sum(), Cut() as cut:
                return Move(
                    before, cut, self.scatter(cut, before.mean), self.gather(cut, before.mean)
                )
            case None, Sum(mean=False):
                return Move(None, after, self.once, _same)
        raise not_in_parts(f"there is no exchange from {before} to {after}")

    def summing_gradients(self, *, in_place: bool = False) -> Move:
        """Return a move that sums only gradients.

        in_place: whether only the sum needs the gradients.
        """
        return Move(None, None, _same, self.summed(in_place=in_place))

    def hook_summing_gradients(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the gradient of a tensor in place, by a hook on it. Returns the tensor itself.

        This replaces `summing_gradients` for a tensor that only products with parts use.
        """
        if x.requires_grad:
            x.register_hook(self._gradient_summed)
        return x

    def _gradient_summed(self, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.requires_grad:  # for second derivatives
            once: torch.Tensor = _sum_once(self, gradient)
            return once
        sums = gradient if gradient.is_contiguous() else gradient.contiguous()
        self.all_reduce(sums)
        return sums

    def sum_in_place(self, x: torch.Tensor) -> torch.Tensor:
        """Sum a tensor in its own memory, which nothing else needs.

        Its gradient is that of the sum.
        """
        if not x.is_contiguous():
            return self.between(Sum(), None)(x)
        self.all_reduce(x.detach())
        return x

    def gather_summing_gradients(self, cut: Cut) -> Move:
        """Return a gather for a value that ranks then use with different parts.

        The sums of its gradients are scattered.
        """
        return Move(cut, None, self.gather(cut), self.scatter(cut))

    def sum_all_gradients(self, *whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        summed: tuple[torch.Tensor, ...] = _SumGradients.apply(self, *whole)
        return summed

    # --- What is sent -----------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor) -> None:
        # The same call as in `dist.all_reduce`, without its checks, which take more host time than
        # the rest.
        work = self.group.allreduce([torch.view_as_real(x) if x.is_complex() else x], self._options)
        if work is not None:
            work.wait()

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        all_gather(whole, part, self.group)

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        reduce_scatter(part, whole, group=self.group)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        dist.all_to_all_single(received, sent, group=self.group)

    # --- Of tensors without autograd --------------------------------------------------------------

    def gather(self, cut: Cut, mean: bool = False) -> Function:
        """Return a function that gathers a cut tensor.

        mean: divide by the number of ranks, for the gradient of a mean.
        """

        def gathered(x: torch.Tensor) -> torch.Tensor:
            flat = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
            self.all_gather(flat, x.contiguous())
            if mean:
                flat /= self.size
            parts = flat.unflatten(0, (self.size, -1))
            if cut.blocks == 1:
                return parts.movedim(0, cut.dim).flatten(cut.dim, cut.dim + 1)
            apart = parts.unflatten(cut.dim + 1, (cut.blocks, -1)).movedim(0, cut.dim + 1)
            return apart.flatten(cut.dim, cut.dim + 2)

        return gathered

    def local_slice(self, cut: Cut) -> Function:
        def part(
            x: torch.Tensor,
        ) -> torch.Tensor:  # never a view, which could not be edited in place
            mine = cut.local_slice(x, self.rank, self.size)
            return mine.clone(memory_format=torch.contiguous_format)

        return part

    def summed(self, mean: bool = False, *, in_place: bool = False) -> Function:
        def total(x: torch.Tensor) -> torch.Tensor:
            sums = (
                x
                if in_place and x.is_contiguous()
                else x.clone(memory_format=torch.contiguous_format)
            )
            self.all_reduce(sums)
            return sums.div_(self.size) if mean else sums

        return total

    def kept(self, mean: bool = False) -> Function:
        return (lambda x: x / self.size) if mean else _same

    def scatter(self, cut: Cut, mean: bool = False) -> Function:
        """Return a function that computes this rank's part of the sum."""

        def scattered(x: torch.Tensor) -> torch.Tensor:
            parts = (
                x.unflatten(cut.dim, (cut.blocks, self.size, -1))
                .movedim(cut.dim + 1, 0)
                .contiguous()
            )
            part = x.new_empty(parts.shape[1:])
            self.reduce_scatter(part, parts.flatten(0, 1))
            part = part.flatten(cut.dim, cut.dim + 1)
            return part.div_(self.size) if mean else part

        return scattered

    def swap(self, before: Cut, after: Cut) -> Function:
        """Return a function that turns a part by one cut into the part by another cut."""
        if before.blocks > 1 or after.blocks > 1 or before.dim == after.dim:
            gathered, part = self.gather(before), self.local_slice(after)
            return lambda x: part(gathered(x))

        def swapped(x: torch.Tensor) -> torch.Tensor:
            sent = x.unflatten(after.dim, (self.size, -1)).movedim(after.dim, 0).contiguous()
            parts = torch.empty_like(sent)
            self.all_to_all(parts, sent)
            return parts.movedim(0, before.dim).flatten(before.dim, before.dim + 1)

        return swapped

    def once(self, x: torch.Tensor) -> torch.Tensor:
        """Return the value on the first rank and zeros on all others, as terms of a sum."""
        return x.clone() if self.rank == 0 else torch.zeros_like(x)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)
