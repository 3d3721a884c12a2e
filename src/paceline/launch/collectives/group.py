"""The process group of CPU ranks: ranks on one host exchange tensors in memory that they share.

gloo moves a message through sockets, also between processes of one host. Here a rank says where its
tensor lies, and the others read it. Tensors that `allocate` has made are read where they are;
others are copied to the rank's shared memory part by part. All ranks wait at a barrier before
they read, and again where memory is used that a rank may change afterwards.

The group serves all-reduces, all-gathers and reduce-scatters of single tensors. Other messages
travel over gloo, and so do all messages of a group whose ranks share no memory, for example on
several hosts. A collective is complete on return. As with torch's own groups, it does not count as a
change of its tensors for autograd.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import RanksDisagree, TrainingError
from paceline.base.waiting import waiting
from paceline.cluster.limits import usable_cores
from paceline.launch.collectives.barrier import (
    AWAKE_S,
    SMALL_BYTES,
    SharedBarrier,
    is_possible,
)
from paceline.launch.collectives.memory import Address, OwnMemory, SharedMemory, mapped, own_memory
from paceline.torch_private.dispatch import entered_modes, without_all_modes
from paceline.torch_private.fake_tensors import is_fake
from paceline.torch_private.process_groups import send_over

BACKEND = "shared"
# Bytes of a tensor outside shared memory that are copied there at a time, to one of two places. A
# wait takes some 20 us, 1 % of the time of copying one.
_PART_BYTES = 2**23
# Bytes that are summed at a time: a block of each rank's memory stays in a core's cache until it is
# written.
_BLOCK_BYTES = 2**18

# The beginning of a group's memory on each rank: the counter of its barrier, then two slots. A slot
# has a text that describes an exchange, the place of the rank's tensor, and a small tensor itself.
_HEADER_BYTES, _LABEL_BYTES, _PLACE = 64, 128, struct.Struct("=qqq")
_SLOT_BYTES = 256 + SMALL_BYTES
_AREA_BYTES = _HEADER_BYTES + 2 * _SLOT_BYTES
_COMBINE: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}
# torch 2.13 renamed these functions, and warns of the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ProcessGroup: Any = dist.ProcessGroup  # whose signatures differ between versions


def register() -> str:
    """Make the backend known to torch in this process. Returns its name for `init_process_group`."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    return BACKEND


def _create(given: Any, options: Any) -> SharedMemoryGroup:
    return SharedMemoryGroup(given.store, given.group_rank, given.group_size, given.timeout)


# What modes see of exchanges in memory; see `SharedMemoryGroup._exchanging`.
_OPERATORS = torch.library.Library("c10d_shared", "FRAGMENT")
for _name in ("allreduce_", "allgather_", "reduce_scatter_"):
    if not hasattr(torch.ops.c10d_shared, _name):  # a process may import this module twice
        _OPERATORS.define(f"{_name}(Tensor tensor) -> ()")
        _OPERATORS.impl(_name, lambda tensor: None, "CompositeExplicitAutograd")


class SharedMemoryGroup(_ProcessGroup):
    """A process group of CPU ranks; see the module. Making one is collective.

    Collectives raise PeerLost if a rank's process ended before it called them, and RanksDisagree if
    it called another one. Sums are added in the order of ranks, so that all ranks get the same bits.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # A group that carries all other messages.
        self.over_gloo: Any = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        for group in (self, self.over_gloo):
            send_over(group, gloo)
        # What this rank shares with others, as long as it has groups.
        self.memory = _own_memory()
        self._exchange = _exchange(self.memory, self.over_gloo, rank, size, timeout.total_seconds())
        self._lock = threading.Lock()

    def getBackendName(self) -> str:
        return BACKEND

    def shutdown(self) -> None:
        self.over_gloo.shutdown()

    def abort(self) -> None:
        self.over_gloo.abort()

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks of the group read each other's memory."""
        return self._exchange is not None

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        exchange, combine = self._exchange, _COMBINE.get(opts.reduceOp.op)
        if exchange is None or combine is None or tensor.layout is not torch.strided:
            complexes = tensor.layout is torch.strided and tensor.is_complex()
            return self.over_gloo.allreduce(
                [torch.view_as_real(tensor) if complexes else tensor], opts
            )
        with self._exchanging("allreduce_", tensor) as is_real:
            if is_real:
                dense = tensor.data.contiguous()
                exchange.all_reduce(dense.view(-1), opts.reduceOp.op, combine)
                if not tensor.is_contiguous():
                    tensor.data.copy_(dense)
        return _DONE

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        for tensor in tensors:
            self.allreduce([tensor], opts).wait()
        return _DONE

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        if self._exchange is None:
            self._gather_by_broadcasts(_as_bytes(output), _as_bytes(input.contiguous()))
            return _DONE
        with self._exchanging("allgather_", output) as is_real:
            if is_real:
                self._exchange.all_gather(_as_bytes(output), _as_bytes(input.contiguous()))
        return _DONE

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input, opts)
        return _DONE

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        exchange, combine = self._exchange, _COMBINE.get(opts.reduceOp.op)
        if exchange is None or combine is None:
            self._scatter_by_all_reduce(output, input, opts.reduceOp)
            return _DONE
        with self._exchanging("reduce_scatter_", output) as is_real:
            if is_real:
                whole = input.data.contiguous().view(-1)
                exchange.reduce_scatter(output.data.view(-1), whole, opts.reduceOp.op, combine)
        return _DONE

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)
        return _DONE

    @contextmanager
    def _exchanging(self, name: str, tensor: Tensor) -> Iterator[bool]:
        """Exchange tensors in memory inside the block, one at a time. Yields whether they have
        contents: fake tensors have none.

        Modes see one operator and not those of the exchange, as with torch's own groups.
        """
        modes = entered_modes()
        if modes:
            getattr(torch.ops.c10d_shared, name)(tensor)
        with self._lock, torch.no_grad(), without_all_modes() if modes else nullcontext():
            yield not (modes and is_fake(tensor))

    # What torch calls these in older versions.
    _allgather_base, allgather_into_tensor_coalesced = (
        all_gather_single,
        all_gather_single_coalesced,
    )
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = (
        reduce_scatter_single,
        reduce_scatter_single_coalesced,
    )

    # gloo's own all-gather copies the data that it sends and receives, and its reduce-scatter sums
    # a copy of the whole tensor (`allgather_into_tensor_coalesced` and
    # `reduce_scatter_tensor_coalesced` in torch's ProcessGroupGloo.cpp, torch 2.13). On two ranks
    # over loopback, gathering 32 MiB took 56 ms by an all-gather and 16 ms by broadcasts. Summing
    # and scattering them took 72 ms by a reduce-scatter and 34 ms by an all-reduce.

    def _gather_by_broadcasts(self, whole: Tensor, part: Tensor) -> None:
        parts = whole.view(self.size(), -1)
        if parts[self.rank()].data_ptr() != part.data_ptr():
            parts[self.rank()].copy_(part)
        works = []
        for rank in range(self.size()) if part.numel() else ():
            options = dist.BroadcastOptions()
            options.rootRank, options.asyncOp = rank, True
            works.append(self.over_gloo.broadcast([parts[rank]], options))
        with waiting:
            for work in works:
                work.wait()

    def _scatter_by_all_reduce(self, part: Tensor, whole: Tensor, op: Any) -> None:
        if not part.numel():
            return
        options = dist.AllreduceOptions()
        options.reduceOp = op
        sums = whole.data.clone(memory_format=torch.contiguous_format)
        work = self.over_gloo.allreduce(
            [torch.view_as_real(sums) if sums.is_complex() else sums], options
        )
        with waiting:
            work.wait()
        part.data.copy_(sums.view(self.size(), -1)[self.rank()].view_as(part))


def _over_gloo(name: str) -> Callable[..., Any]:
    def message(self: SharedMemoryGroup, *arguments: Any, **options: Any) -> Any:
        return getattr(self.over_gloo, name)(*arguments, **options)

    return message


# A subclass's own methods run torch's code with the interpreter's lock held, which a thread of gloo
# may wait for while it holds gloo's.
for _name in (
    "allgather",
    "allgather_coalesced",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(SharedMemoryGroup, _name, _over_gloo(_name))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.data.view(-1).view(torch.uint8)


class _Done(dist.Work):
    """The work of a collective that is complete."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


_DONE = _Done()


def allocate(num_bytes: int, group: dist.ProcessGroup) -> Tensor:
    """Return a flat tensor of `num_bytes` bytes, zeros at first, that ranks of the group read where
    it is.

    It lies in usual memory if they share none.
    """
    shared = group.memory.allocate(num_bytes) if shares_memory(group) else None  # type: ignore[attr-defined]
    return torch.zeros(num_bytes, dtype=torch.uint8) if shared is None else shared


def shares_memory(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of a group are on one host and exchange tensors in memory."""
    return isinstance(group, SharedMemoryGroup) and group.shares_memory


class _Peer(NamedTuple):
    """A rank's memory, and where the group's part of it begins."""

    memory: SharedMemory
    start: int


def _own_memory() -> OwnMemory | None:
    """Return the memory of this rank for a new group: that of the group of all ranks, if it has
    one."""
    if not is_possible():
        return None
    everyone: Any = dist.group.WORLD if dist.is_initialized() else None
    return everyone.memory if isinstance(everyone, SharedMemoryGroup) else own_memory()


def _exchange(
    own: OwnMemory | None, gloo: Any, rank: int, size: int, timeout_s: float
) -> _Exchange | None:
    """Return the exchange of a group; None if its ranks don't share memory. Collective."""
    if size == 1:
        return None
    start = None if own is None else own.reserve(_AREA_BYTES)
    world_size = dist.get_world_size() if dist.is_initialized() else size
    here = torch.tensor([0, 0, 0, 0, 0])
    if own is not None and start is not None:
        here = torch.tensor([*own.address, start, int(world_size <= usable_cores())])
    everyone = [torch.zeros_like(here) for _ in range(size)]
    gloo.allgather([everyone], [here]).wait()
    peers, stay_awake = [], True
    for number, figures in enumerate(everyone):
        process, descriptor, mark, area, is_awake = figures.tolist()
        stay_awake &= bool(is_awake)
        memory = own if number == rank else mapped(Address(process, descriptor, mark))
        if area and memory is not None:
            peers.append(_Peer(memory, area))
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN
    complete = torch.tensor(int(len(peers) == size))
    gloo.allreduce([complete], options).wait()
    if not complete or own is None:
        return None
    return _Exchange(own, peers, rank, awake_s=AWAKE_S * stay_awake, timeout_s=timeout_s)


class _Place(NamedTuple):
    """Where a rank's tensor lies in its memory."""

    start: int
    stride: int  # bytes between the parts for one rank and for the next
    is_kept: bool  # whether it is the caller's memory, which may change after the collective


class _Exchange:
    """The collectives of ranks that map each other's memory. All are collective.

    A rank that is done with one exchange may write for the next before others have read. So slots,
    and memory for copies of other tensors, are used in turn. Ranks whose slots have different texts
    end with an error, as they do under gloo.
    """

    def __init__(
        self,
        own: OwnMemory,
        peers: Sequence[_Peer],
        rank: int,
        *,
        awake_s: float,
        timeout_s: float,
    ) -> None:
        self._own, self._peers, self._rank, self._ranks = own, peers, rank, len(peers)
        self._turn = 0
        # Where memory for parts of tensors begins that lie elsewhere.
        self._copies: list[int] = []
        self._views: dict[Any, Tensor] = {}
        self._labels: dict[Any, bytes] = {}
        self._barrier = SharedBarrier(
            [peer.memory.bytes(peer.start, 8) for peer in peers],
            [peer.memory.address.process for peer in peers],
            rank,
            awake_s=awake_s,
            timeout_s=timeout_s,
        )

    def all_reduce(self, flat: Tensor, op: Any, combine: Callable[..., Tensor]) -> None:
        if not flat.numel():
            return
        if flat.nbytes <= SMALL_BYTES:
            self._all_reduce_small(flat, op, combine)
            return
        item_bytes = flat.element_size()
        for part in flat.split(_PART_BYTES // item_bytes):
            place = self._place(part)
            shared = part if place.is_kept else self._copy_of(place, part)
            places = self._meet("all_reduce", op, flat, place)
            tensors = [
                self._view(rank, places[rank].start, len(part), flat.dtype)
                for rank in range(self._ranks)
            ]
            first, end = (len(part) * (self._rank + i) // self._ranks for i in (0, 1))
            for total, *others in _blocks([tensor[first:end] for tensor in tensors]):
                for other in others:
                    combine(total, other, out=total)
                for other in others:
                    other.copy_(total)
            self._barrier.wait()
            if not place.is_kept:
                part.copy_(shared)

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """Gather tensors of bytes."""
        if not part.numel():
            return
        parts = whole.view(self._ranks, -1)
        own, are_kept = parts[self._rank], False
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        for start in range(0, len(part), _PART_BYTES):
            place = self._place(own[start : start + _PART_BYTES])
            if not place.is_kept:
                self._copy_of(place, own[start : start + _PART_BYTES])
            places = self._meet("all_gather", "", whole, place)
            for rank, (place, row) in enumerate(zip(places, parts, strict=True)):
                are_kept |= place.is_kept
                if rank != self._rank:
                    received = row[start : start + _PART_BYTES]
                    received.copy_(self._view(rank, place.start, len(received), torch.uint8))
        if are_kept:
            self._barrier.wait()

    def reduce_scatter(
        self, part: Tensor, whole: Tensor, op: Any, combine: Callable[..., Tensor]
    ) -> None:
        if not part.numel():
            return
        parts, are_kept, item_bytes = whole.view(self._ranks, -1), False, part.element_size()
        step = max(1, _PART_BYTES // self._ranks // item_bytes)
        for start in range(0, len(part), step):
            sums, sent = part[start : start + step], parts[:, start : start + step]
            place = self._place(sent)
            if not place.is_kept:
                self._copy_of(place, sent)
            places = self._meet("reduce_scatter", op, whole, place)
            are_kept |= any(place.is_kept for place in places)
            tensors = [
                self._view(rank, place.start + self._rank * place.stride, len(sums), part.dtype)
                for rank, place in enumerate(places)
            ]
            for total, first, *others in _blocks([sums, *tensors]):
                for other in others:
                    first = combine(first, other, out=total)
        if are_kept:
            self._barrier.wait()

    def _all_reduce_small(self, flat: Tensor, op: Any, combine: Callable[..., Tensor]) -> None:
        offset = self._slot + _SLOT_BYTES - SMALL_BYTES
        slots = [
            self._view(rank, peer.start + offset, len(flat), flat.dtype)
            for rank, peer in enumerate(self._peers)
        ]
        slots[self._rank].copy_(flat)
        self._meet("all_reduce", op, flat, _NOWHERE)
        result = slots[0]
        for slot in slots[1:]:
            result = combine(result, slot, out=flat)

    @property
    def _slot(self) -> int:
        """Where the slot of the next exchange begins in the group's part of a rank's memory."""
        return _HEADER_BYTES + self._turn * _SLOT_BYTES

    def _place(self, tensor: Tensor) -> _Place:
        """Return where a tensor is, or where its copy will be."""
        stride = tensor.stride(0) * tensor.element_size()
        start = self._own.offset_of(tensor)
        if start is not None:
            return _Place(start, stride, is_kept=True)
        while len(self._copies) < 2:
            start = self._own.reserve(_PART_BYTES)
            if start is None:
                raise TrainingError(
                    "this host has no memory left for the tensors that ranks exchange",
                    hint="run fewer ranks on this host, or end other work that holds its memory",
                )
            self._copies.append(start)
        return _Place(self._copies[self._turn], tensor[0].nbytes, is_kept=False)

    def _copy_of(self, place: _Place, tensor: Tensor) -> Tensor:
        copy = self._view(self._rank, place.start, tensor.numel(), tensor.dtype)
        copy.view(tensor.shape).copy_(tensor)
        return copy

    def _meet(self, name: str, op: Any, tensor: Tensor, place: _Place) -> list[_Place]:
        """Tell the other ranks where this rank's tensor is, and return where those of all are."""
        kind = (name, op, tensor.shape, tensor.dtype)
        if kind not in self._labels:
            text = f"{name} {op} of {tensor.numel()} {tensor.dtype}"
            self._labels[kind] = text[:_LABEL_BYTES].ljust(_LABEL_BYTES).encode()
        label, slot = self._labels[kind], self._slot
        self._turn = 1 - self._turn
        end = slot + _LABEL_BYTES + _PLACE.size
        mine = self._peers[self._rank]
        mine.memory.bytes(mine.start + slot, end - slot)[:] = label + _PLACE.pack(*place)
        self._barrier.wait()
        slots = [bytes(peer.memory.bytes(peer.start + slot, end - slot)) for peer in self._peers]
        labels = {slot[:_LABEL_BYTES] for slot in slots}
        if len(labels) > 1:
            listed = ", ".join(sorted(label.decode().strip() for label in labels))
            raise RanksDisagree(
                f"ranks exchange different tensors: {listed}",
                hint="the job's code depends on the rank, its samples or its host: all ranks must take the same path",
                heard=True,  # the other rank's own error may say more
            )
        return [_Place(*_PLACE.unpack(slot[_LABEL_BYTES:])) for slot in slots]

    def _view(self, rank: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return the flat tensor at an offset in a rank's memory."""
        key = (rank, start, count, dtype)
        if key not in self._views:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            self._views[key] = self._peers[rank].memory.tensor(start, count, dtype)
        return self._views[key]


_NOWHERE = _Place(0, 0, is_kept=False)
_MOST_VIEWS = 4096  # of some 200 bytes


def _blocks(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield flat tensors of equal length in blocks that stay in a core's cache."""
    step = max(1, _BLOCK_BYTES // tensors[0].element_size())
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)
