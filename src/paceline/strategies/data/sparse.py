"""Sums sparse gradients of replicas. Only occurring rows are sent, and every rank computes the same
sparse sum.

A gradient has its rows along dim 0, like those of `nn.Embedding` and `nn.EmbeddingBag` with
`sparse=True`. Sums are also sparse, because SparseAdam and Adagrad update only the rows that occur
in the window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.strategies.compress.size import all_reduce_bytes

if TYPE_CHECKING:
    from torch import nn

# Values that a rank sends instead of a number of rows, if it has no gradient or a dense one.
_ABSENT, _DENSE = -2, -1


class SparseGradients:
    """Sums sparse gradients of parameters over a group, after the last backward of a window."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Store the parameters. They are the same, in the same order, on all ranks of the group."""
        # sent_bytes: what this rank has sent so far.
        self.parameters, self.group, self.sent_bytes = list(parameters), group, 0.0

    def finish(self) -> None:
        """Give every rank of the group the sum of all gradients. Collective.

        A gradient that no rank has stays None. If a gradient is dense on some rank, because another
        layer uses the weight, it becomes dense on all ranks: on one device, too, dense and sparse
        gradients add up to a dense one.
        """
        if not self.parameters:
            return
        gradients = [_with_rows(p.grad) for p in self.parameters]
        all_counts = self._gather(
            torch.tensor(
                [_rows(gradient) for gradient in gradients], device=self.parameters[0].device
            )
        )
        counts = [of_rank.tolist() for of_rank in all_counts]
        parts = self._exchange(gradients, counts)
        for number, (p, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            kinds = {of_rank[number] for of_rank in counts}
            if _DENSE in kinds:
                p.grad = self._dense_sum(p, gradient, [part[number] for part in parts])
            elif kinds != {_ABSENT}:
                p.grad = row_sum([part[number] for part in parts], p)

    def _exchange(
        self, gradients: Sequence[torch.Tensor | None], counts: Sequence[Sequence[int]]
    ) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return (row numbers, values) of every parameter's sparse gradient, by rank. Collective.

        A rank sends all its gradients in one message of bytes. All messages are as long as the
        longest one.
        """
        lengths = [
            sum(_message_bytes(p, count) for p, count in zip(self.parameters, of_rank, strict=True))
            for of_rank in counts
        ]
        message = torch.zeros(max(lengths), dtype=torch.uint8, device=self.parameters[0].device)
        parts = [
            part
            for gradient in gradients
            if gradient is not None and gradient.is_sparse
            for part in (gradient.indices()[0], gradient.values())
        ]
        if parts:
            flat = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
            message[: len(flat)] = flat
        return [
            list(self._unpacked(received, of_rank))
            for received, of_rank in zip(
                self._gather(message) if len(message) else [message] * len(counts),
                counts,
                strict=True,
            )
        ]

    def _unpacked(
        self, message: torch.Tensor, counts: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        gradients, start = [], 0
        for p, count in zip(self.parameters, counts, strict=True):
            middle = start + max(count, 0) * _ROW_NUMBER.itemsize
            end = start + _message_bytes(p, count)
            # Copies are needed because bytes of one dtype may begin where another dtype isn't
            # aligned.
            rows, values = message[start:middle].clone(), message[middle:end].clone()
            shape = max(count, 0), *p.shape[1:]
            gradients.append((rows.view(_ROW_NUMBER), values.view(p.dtype).view(shape)))
            start = end
        return gradients

    def _dense_sum(
        self,
        p: nn.Parameter,
        gradient: torch.Tensor | None,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Return the dense sum of all ranks' gradients.

        parts: the sparse gradients by rank. Collective.
        """
        total = (
            torch.zeros_like(p)
            if gradient is None or gradient.is_sparse
            else gradient.detach().clone()
        )
        real = torch.view_as_real(total) if total.is_complex() else total
        dist.all_reduce(real, group=self.group)
        self.sent_bytes += all_reduce_bytes(real.nbytes, len(parts))
        return total + row_sum(parts, p)

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in the order of ranks. Collective."""
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, tensor, group=self.group)
        self.sent_bytes += tensor.nbytes * (len(everyone) - 1)
        return everyone


_ROW_NUMBER = torch.int64


def row_sum(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """Sum each rank's (row numbers, values) to a sparse tensor. Equal parts in equal order give
    equal bits.

    Args:
        parts: The parts by rank. The row numbers of a rank are distinct.
        like: A tensor with the shape and dtype of the whole.

    >>> parts = [(torch.tensor([0, 2]), torch.ones(2, 1)), (torch.tensor([2]), torch.ones(1, 1))]
    >>> row_sum(parts, torch.zeros(4, 1)).to_dense().flatten()
    tensor([1., 0., 2., 0.])
    """
    rows = torch.cat([of_rank for of_rank, _ in parts]).unique()
    values = torch.zeros(len(rows), *like.shape[1:], dtype=like.dtype, device=like.device)
    for of_rank, added in parts:  # each adds a row at most once, so ranks are added in order
        values.index_add_(0, torch.searchsorted(rows, of_rank), added)
    return torch.sparse_coo_tensor(
        rows[None], values, like.shape, is_coalesced=True, check_invariants=False
    )


def sparse_parameters(
    parameters: Mapping[str, nn.Parameter], names: frozenset[str]
) -> dict[str, nn.Parameter]:
    """Return the named parameters whose gradients can be sparse.

    A distributed tensor's gradient is dense.
    """
    return {
        name: p for name, p in parameters.items() if name in names and not hasattr(p, "to_local")
    }


def with_dense_gradient(p: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a dense gradient, for computing a norm and for scaling.

    That is the parameter itself or, if its gradient is sparse, a tensor whose gradient has the
    values of the sparse one. The values share memory. Rows that occur twice are added up first, in
    place.
    """
    if p.grad is None or not p.grad.is_sparse:
        return p
    p.grad = p.grad.coalesce()
    values = p.grad.values()
    stand_in = torch.empty_like(values)
    stand_in.grad = values
    return stand_in


def _with_rows(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient with each row once; a dense one if it isn't sparse along dim 0 alone."""
    if gradient is None or gradient.layout is torch.strided:
        return gradient
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        return gradient.detach().coalesce()
    return gradient.detach().to_dense()


def _rows(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _ABSENT
    return len(gradient.values()) if gradient.is_sparse else _DENSE


def _message_bytes(p: torch.Tensor, count: int) -> int:
    """Return the bytes of `count` rows of a gradient with their numbers."""
    return max(count, 0) * (_ROW_NUMBER.itemsize + p[:1].numel() * p.element_size())
