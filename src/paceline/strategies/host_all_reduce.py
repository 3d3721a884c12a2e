"""Small all-reduces of CPU ranks. Ranks on one host use shared memory; others use torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from paceline.cluster.limits import usable_cores
from paceline.strategies.shared_barrier import SLOT_BYTES, SharedBarrier, stays_awake
from paceline.strategies.shared_memory import HEADER_BYTES, MARK_BYTES, SharedMemory, shared_memory

_LABEL_BYTES = 128  # size of the text that describes an exchange; longer text is cut off
_COMBINE: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
}


def all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> None:
    """Reduce a tensor over all ranks in place, like torch's all-reduce. Collective.

    In shared memory, values are added in the order of ranks.

    Args:
        op: torch's `ReduceOp`: SUM or MAX.

    Raises:
        PeerLost: a rank's process ended before it called this, or called it with another tensor or
            operation.
    """
    slots = None
    if tensor.device.type == "cpu" and 0 < tensor.nbytes <= SLOT_BYTES:
        slots = _slots_of(group or dist.group.WORLD)  # type: ignore[arg-type]  # there is one by now
    if slots is None:
        dist.all_reduce(tensor, op, group=group)
    else:
        slots.all_reduce(tensor, op)


class _Slots:
    """Two slots of shared memory for each rank, used in turn.

    A rank that is done with one exchange may write for the next before others have read. A slot
    begins with a label of the exchange. Ranks with different labels end with an error, as they do
    under gloo.
    """

    def __init__(self, memory: SharedMemory, rank: int) -> None:
        counters = [memoryview(mapping)[MARK_BYTES : MARK_BYTES + 8] for mapping in memory.mappings]
        self._mappings, self._rank, self._number = memory.mappings, rank, 0
        self._views: dict[Any, tuple[bytes, list[torch.Tensor]]] = {}  # by kinds of exchanges
        self._barrier = SharedBarrier(counters, memory.processes, rank)

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        self._number += 1
        start = HEADER_BYTES + self._number % 2 * (_LABEL_BYTES + SLOT_BYTES)
        kind = (op, tensor.shape, tensor.dtype, start)
        if kind not in self._views:
            text = f"{op} of {list(tensor.shape)} {tensor.dtype}"[:_LABEL_BYTES]
            places = [
                torch.frombuffer(
                    mapping, dtype=tensor.dtype, count=tensor.numel(), offset=start + _LABEL_BYTES
                ).view(tensor.shape)
                for mapping in self._mappings
            ]
            self._views[kind] = text.ljust(_LABEL_BYTES).encode(), places
        label, slots = self._views[kind]
        self._mappings[self._rank][start : start + _LABEL_BYTES] = label
        slots[self._rank].copy_(tensor)
        self._barrier.wait()
        labels = [mapping[start : start + _LABEL_BYTES] for mapping in self._mappings]
        if labels.count(label) != len(labels):
            error = self._barrier.loss(f"ranks exchange different figures: {_listed(labels)}")
            error.is_mismatch = True  # type: ignore[attr-defined]
            raise error
        result = slots[0]
        for slot in slots[1:]:
            result = _COMBINE[op](result, slot, out=tensor)


def _listed(labels: Sequence[bytes]) -> str:
    return ", ".join(sorted({label.decode().strip() for label in labels}))


# The slots of groups that have called `all_reduce` before; None for groups that share no memory.
_slots: WeakKeyDictionary[dist.ProcessGroup, _Slots | None] = WeakKeyDictionary()


def _slots_of(group: dist.ProcessGroup) -> _Slots | None:
    """Return the slots of a group; None if its ranks share no memory.

    Collective on the first call.
    """
    if group not in _slots:
        memory = None
        if _all_stay_awake(group):
            memory = shared_memory(HEADER_BYTES + 2 * (_LABEL_BYTES + SLOT_BYTES), group)
        _slots[group] = None if memory is None else _Slots(memory, dist.get_rank(group))
    return _slots[group]


def _all_stay_awake(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of a group may wait awake.

    Collective: ranks may see different numbers of cores.
    """
    sleeps = torch.tensor([float(not stays_awake(dist.get_world_size(), usable_cores()))])
    dist.all_reduce(sleeps, dist.ReduceOp.MAX, group=group)
    return not sleeps.item()
