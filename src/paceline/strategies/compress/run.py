"""Sums over a group of ranks in compressed form, while backward makes further gradients.

    form      on the wire                              left out                source
    bf16      a rank's part of a bucket in bfloat16    nothing; rounded twice  -
    int8      the same in int8 with a scale per block  nothing; rounded twice  Dettmers 2016, in blocks
    topk      1 % of the elements and their indices    the rest, sent later    Lin et al. 2018
    powersgd  two factors of each matrix               the rest, sent later    Vogels et al. 2019

bf16 and int8: every rank sums one part of a bucket, in the order of ranks and in float32 (or
float64), and sends the rounded sum to all. This sends as many bytes as a ring, and rounds twice for
any number of ranks. An all-reduce in bfloat16 rounds a partial sum at every rank. An all-gather
rounds once and sends n / 2 times as much.

PowerSGD does not use torch's hook for DistributedDataParallel. That hook starts its collectives
from callbacks, so that the network determines their order over buckets. It also keeps its state by
bucket in an object that only pickle can save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.base.errors import JobError
from paceline.strategies.compress import codec
from paceline.strategies.compress.size import (
    POWERSGD_RANK,
    all_reduce_bytes,
    is_factored,
    part_elements,
    powersgd_bytes,
    rounded_bytes,
    topk_bytes,
    topk_elements,
)


class Method(Protocol):
    """Sums buckets in one form.

    All ranks of the group call it for the buckets in the same order.
    """

    # The values that this rank has not sent yet, by bucket; empty if the method leaves nothing out.
    residuals: dict[int, torch.Tensor]
    # The factors, by bucket and matrix. They are equal on all ranks.
    factors: dict[tuple[int, int], torch.Tensor]

    def sum(self, number: int, flat: torch.Tensor) -> float:
        """Replace the bucket's values by their sum over the group.

        Returns the bytes that this rank sent.
        """


class Beside(Protocol):
    """Runs sums concurrently with backward, one after the other in the order in which they are
    started."""

    def start(self, sum_: Callable[[], float]) -> None:
        """Run a sum after the earlier ones.

        It enters collectives, and returns the bytes that it sent.
        """

    def finish(self) -> float:
        """Wait for all sums. Returns the bytes that they sent together."""


class OnThread:
    """Runs sums on a thread. Used on CPUs, where a collective blocks its caller."""

    def __init__(self) -> None:
        self.thread: ThreadPoolExecutor | None = None
        self.running: list[Future[float]] = []

    def start(self, sum_: Callable[[], float]) -> None:
        if self.thread is None:
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-compress")
        self.running.append(self.thread.submit(sum_))

    def finish(self) -> float:
        running, self.running = self.running, []
        return sum(future.result() for future in running)


class OnStream:
    """Runs sums on a separate CUDA stream, where they are launched at once. Used on GPUs.

    Collectives of all groups are then launched in program order, which is the same on all ranks. A
    thread would launch its collectives between the others in a different order on each rank, and
    NCCL's ranks would wait for each other.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream, self.sent_bytes = torch.cuda.Stream(device), 0.0

    def start(self, sum_: Callable[[], float]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            self.sent_bytes += sum_()

    def finish(self) -> float:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        sent_bytes, self.sent_bytes = self.sent_bytes, 0.0
        return sent_bytes


def beside(device: torch.device) -> Beside:
    """Return the runner of sums for a device's tensors."""
    return OnStream(device) if device.type == "cuda" else OnThread()


class Compressed:
    """A `Reduction` (strategies/data/reduce.py) in compressed form."""

    overlaps = True

    def __init__(
        self,
        form: str,
        like: Sequence[torch.Tensor],
        shapes: Sequence[Sequence[Sequence[int]]],
        group: dist.ProcessGroup,
    ) -> None:
        """Allocate the buckets and the method's state.

        Args:
            like: A tensor with the dtype and device of each bucket.
            shapes: The shapes of the tensors in each bucket. A matrix has (rows, columns) as in
                memory.
        """
        self.group, self.sent_bytes = group, 0.0
        self.memory = [
            tensor.new_zeros(sum(math.prod(shape) for shape in bucket))
            for tensor, bucket in zip(like, shapes, strict=True)
        ]
        self.method: Method = (
            TopK(self.memory, group)
            if form == "topk"
            else PowerSGD(self.memory, shapes, group)
            if form == "powersgd"
            else Rounded(form, group)
        )
        self.beside = beside(like[0].device if like else torch.device("cpu"))

    def start(self, number: int) -> None:
        self.beside.start(partial(self._sum, number))

    def finish(self) -> None:
        self.sent_bytes += self.beside.finish()

    def _sum(self, number: int) -> float:
        flat = self.memory[number]
        with torch.no_grad():
            return (
                self.method.sum(number, flat)
                if flat.is_floating_point()
                else _all_reduce(flat, self.group)
            )


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> float:
    dist.all_reduce(tensor, group=group)
    return all_reduce_bytes(tensor.nbytes, dist.get_world_size(group))


def _summing_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Rounded:
    """Sums in bf16 or int8."""

    def __init__(self, form: str, group: dist.ProcessGroup) -> None:
        self.form, self.group = form, group
        self.residuals: dict[int, torch.Tensor] = {}
        self.factors: dict[tuple[int, int], torch.Tensor] = {}

    def sum(self, number: int, flat: torch.Tensor) -> float:
        ranks, dtype = dist.get_world_size(self.group), _summing_dtype(flat.dtype)
        if not len(flat):
            return 0.0
        part = part_elements(len(flat), ranks)
        parts = torch.nn.functional.pad(flat.to(dtype), (0, ranks * part - len(flat))).view(
            ranks, part
        )
        sent = codec.encode(self.form, parts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        total, *others = codec.decode(self.form, received, dtype)
        for other in others:
            total += other
        dist.all_gather(list(received), codec.encode(self.form, total), group=self.group)
        flat.copy_(codec.decode(self.form, received, dtype).flatten()[: len(flat)])
        return rounded_bytes(self.form, len(flat), ranks)


def _residuals(memory: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return what is not sent of each bucket; nothing yet."""
    return {
        number: torch.zeros_like(flat)
        for number, flat in enumerate(memory)
        if flat.is_floating_point()
    }


class TopK:
    """Sums the largest elements of each rank.

    The others are added to the rank's next bucket (error feedback).
    """

    def __init__(self, memory: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        if any(len(flat) >= 2**31 for flat in memory):
            raise JobError(
                "compress=topk numbers the elements of a gradient in 32 bits, and one has 2^31 or more",
                hint="compress=int8",
            )
        self.group = group
        self.residuals = _residuals(memory)
        self.factors: dict[tuple[int, int], torch.Tensor] = {}

    def sum(self, number: int, flat: torch.Tensor) -> float:
        if not len(flat):
            return 0.0
        ranks, residual = dist.get_world_size(self.group), self.residuals[number]
        residual += flat
        count = topk_elements(len(flat))
        indices = residual.abs().topk(count, sorted=False).indices.to(torch.int32)
        sent = torch.cat([residual[indices].view(torch.uint8), indices.view(torch.uint8)])
        residual[indices] = 0
        rows = [torch.empty_like(sent) for _ in range(ranks)]
        dist.all_gather(rows, sent, group=self.group)
        flat.zero_()
        for received in rows:
            values, received_indices = (
                received[: count * flat.element_size()],
                received[count * flat.element_size() :],
            )
            flat[received_indices.clone().view(torch.int32)] += values.view(flat.dtype)
        return topk_bytes(len(flat), flat.element_size(), ranks)


class PowerSGD:
    """Sums matrices as products of two factors, by one step of power iteration from the last
    factors."""

    def __init__(
        self,
        memory: Sequence[torch.Tensor],
        shapes: Sequence[Sequence[Sequence[int]]],
        group: dist.ProcessGroup,
    ) -> None:
        self.group, self.shapes = group, shapes
        self.residuals = _residuals(memory)
        self.factors: dict[tuple[int, int], torch.Tensor] = {}
        draw = torch.Generator().manual_seed(0)  # any seed works if it is the same on all ranks
        for number, flat in enumerate(memory):
            for index, shape in enumerate(shapes[number]):
                if is_factored(shape) and number in self.residuals:
                    first = torch.randn(
                        shape[1], POWERSGD_RANK, generator=draw, dtype=torch.float64
                    )
                    self.factors[number, index] = first.to(flat.device, _summing_dtype(flat.dtype))

    def sum(self, number: int, flat: torch.Tensor) -> float:
        residual, shapes, dtype = (
            self.residuals[number],
            self.shapes[number],
            _summing_dtype(flat.dtype),
        )
        residual += flat
        parts = residual.split([math.prod(shape) for shape in shapes])
        matrices = {
            index: part.view(*shape).to(dtype)
            for index, (part, shape) in enumerate(zip(parts, shapes, strict=True))
            if is_factored(shape)
        }
        unfactored = [index for index in range(len(shapes)) if index not in matrices]
        plain = (
            torch.cat([parts[index] for index in unfactored])
            if unfactored
            else residual[:0].clone()
        )
        dist.all_reduce(plain, group=self.group)
        rows = self._summed(
            {index: matrix @ self.factors[number, index] for index, matrix in matrices.items()}
        )
        bases = {index: torch.linalg.qr(factor).Q for index, factor in rows.items()}
        columns = {index: matrix.T @ bases[index] for index, matrix in matrices.items()}
        for index, matrix in matrices.items():
            parts[index].copy_((matrix - bases[index] @ columns[index].T).flatten())
        outs = flat.split([math.prod(shape) for shape in shapes])
        for index, factor in self._summed(columns).items():
            outs[index].copy_((bases[index] @ factor.T).flatten())
            self.factors[number, index].copy_(factor)
        for index, summed in zip(
            unfactored, plain.split([len(parts[index]) for index in unfactored]), strict=True
        ):
            outs[index].copy_(summed)
            parts[index].zero_()
        return powersgd_bytes(shapes, flat.element_size(), dist.get_world_size(self.group))

    def _summed(self, factors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Sum all factors over the ranks, in one message."""
        if not factors:
            return {}
        flat = torch.cat([factor.flatten() for factor in factors.values()])
        dist.all_reduce(flat, group=self.group)
        sums = flat.split([factor.numel() for factor in factors.values()])
        return {
            index: part.view_as(factor)
            for (index, factor), part in zip(factors.items(), sums, strict=True)
        }
