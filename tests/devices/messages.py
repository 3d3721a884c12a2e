"""What ranks of a plan send each other in a step, in order, recorded on gloo, to be held against NCCL's rules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.model.graph import Capture
from paceline.strategies.stages.engine import Engine, Links, cut
from paceline.strategies.stages.schedule import Action


@dataclass(frozen=True)
class Entry:
    """One thing that a rank asked for.

    kind: "send", "recv", "wait" (for an earlier entry), or the name of a collective.
    group: ranks of the process group, and which of the groups with these ranks. peer: the other rank of a message.
    of: which entry is waited for. thread: that asked.
    """

    kind: str
    group: tuple[tuple[int, ...], str] = ((), "")
    peer: int = -1
    shape: tuple[int, ...] = ()
    dtype: str = ""
    of: int = -1
    thread: int = 0

    def to_list(self) -> list[Any]:
        return [
            self.kind,
            [list(self.group[0]), self.group[1]],
            self.peer,
            list(self.shape),
            self.dtype,
            self.of,
            self.thread,
        ]

    @classmethod
    def of_list(cls, given: list[Any]) -> Entry:
        kind, (ranks, name), peer, shape, *rest = given
        return cls(kind, (tuple(ranks), name), peer, tuple(shape), *rest)


class Recording(TorchDispatchMode):
    """Notes the collectives and messages of this rank's thread while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def __enter__(self) -> Recording:
        self._originals = dist.isend, dist.irecv
        dist.isend, dist.irecv = (
            self._message("send", dist.isend),
            self._message("recv", dist.irecv),
        )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        dist.isend, dist.irecv = self._originals
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not func._schema.name.endswith(
            ("send", "recv_", "wait_tensor")
        ):
            self.entries.append(_collective(func, [*args, *(kwargs or {}).values()]))
        return func(*args, **(kwargs or {}))

    def _message(self, kind: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(tensor: torch.Tensor, peer: int, group: Any = None, **options: Any) -> Any:
            self.entries.append(
                Entry(
                    kind,
                    _group(group),
                    peer,
                    tuple(tensor.shape),
                    _dtype(tensor),
                    thread=threading.get_ident(),
                )
            )
            return _Noted(
                ask(tensor, peer, group=group, **options), len(self.entries) - 1, self.entries
            )

        return recorded


@dataclass
class _Noted:
    work: Any
    number: int
    entries: list[Entry]

    def wait(self) -> Any:
        self.entries.append(Entry("wait", of=self.number))
        return self.work.wait()

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


class _Arrived:
    """A message that is there at once."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def of_a_schedule(
    model: torch.nn.Module,
    captured: Capture,
    example: torch.Tensor,
    stage_of: Callable[[int, int], int],
    ranks: Sequence[int],
    orders: Sequence[Sequence[Action]],
    *,
    one_group: bool = False,
) -> list[list[Entry]]:
    """What the engine of each rank asks for in a step of a pipeline, without processes: what it receives is zeros.

    captured: of the model on the example. stage_of: from the place of a piece and the number of pieces. ranks: of the
    stages. one_group: for messages of both directions.
    """
    place = {piece.key: number for number, piece in enumerate(captured.pieces)}
    staged = cut(captured, lambda piece: stage_of(place[piece.key], len(place)), ranks)
    weights = dict(model.named_parameters())
    microbatches = sorted({action.microbatch for order in orders for action in order})
    originals, entries_by_rank = (dist.isend, dist.irecv), []
    for rank in range(len(orders)):
        entries: list[Entry] = []

        def message(kind: str, entries: list[Entry] = entries) -> Callable[..., Any]:
            def ask(tensor: torch.Tensor, peer: int, group: Any = None) -> Any:
                if kind == "recv":
                    tensor.zero_()
                entries.append(
                    Entry(
                        kind,
                        (tuple(range(len(orders))), group),
                        peer,
                        tuple(tensor.shape),
                        _dtype(tensor),
                    )
                )
                return _Noted(_Arrived(), len(entries) - 1, entries)

            return ask

        links = Links(
            range(len(orders)),
            rank,
            torch.device("cpu"),
            ahead="ahead",  # type: ignore[arg-type]
            back="ahead" if one_group else "back",
        )  # type: ignore[arg-type]
        engine = Engine(
            orders,
            links,
            lambda piece, values: piece.run(*map(weights.__getitem__, piece.parameters), *values),
            lambda stage: list(
                {weights[name]: None for piece in stage.pieces for name in piece.parameters}
            ),
        )
        dist.isend, dist.irecv = message("send"), message("recv")
        try:
            engine.run(
                dict.fromkeys(microbatches, staged),
                dict.fromkeys(microbatches, captured.bind((example,), {})),
                lambda number, output: output.sum(),
            )
        finally:
            dist.isend, dist.irecv = originals
        entries_by_rank.append(entries)
    return entries_by_rank


def _collective(func: Any, args: Sequence[Any]) -> Entry:
    tensors = [
        item
        for arg in args
        for item in (arg if isinstance(arg, list | tuple) else [arg])
        if isinstance(item, torch.Tensor)
    ]
    group = next(
        (
            dist.ProcessGroup.unbox(arg)
            for arg in args
            if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
        ),
        None,
    )
    if group is None:  # functional collectives name it
        names = [arg for arg in args if isinstance(arg, str)]
        group = dist.distributed_c10d._resolve_process_group(names[-1])
    shape = tuple(tensors[0].shape) if tensors else ()
    return Entry(
        func._schema.name.partition("::")[2],
        _group(group),
        -1,
        shape,
        _dtype(tensors[0]) if tensors else "",
        thread=threading.get_ident(),
    )


def _group(group: Any) -> tuple[tuple[int, ...], str]:
    group = dist.group.WORLD if group is None else group
    return tuple(dist.get_process_group_ranks(group)), group.group_name


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# What NCCL sums and sends; torch takes complex numbers for pairs of real ones.
NCCL_DTYPES = {
    "int8",
    "uint8",
    "bool",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
}


def unlike_sequences(ranks: Sequence[Sequence[Entry]]) -> list[str]:
    """Groups whose ranks ask for other collectives, or in another order."""
    sequences: dict[Any, dict[int, list[Any]]] = {}
    for rank, entries in enumerate(ranks):
        for entry in entries:
            if entry.peer < 0 and entry.kind != "wait":
                sequences.setdefault(entry.group, {}).setdefault(rank, []).append(
                    (entry.kind, entry.shape, entry.dtype)
                )
    return [
        f"{group}: {of_ranks}"
        for group, of_ranks in sequences.items()
        if set(of_ranks) != set(group[0])
        or len({tuple(sequence) for sequence in of_ranks.values()}) > 1
    ]


def is_cyclic(ranks: Sequence[Sequence[Entry]]) -> bool:
    """Whether ranks could wait for each other over several groups: the collectives of all can't be put in one order."""
    follows: dict[Any, set[Any]] = {}
    for entries in ranks:
        counts: dict[Any, int] = {}
        before = None
        for entry in entries:
            if entry.peer < 0 and entry.kind != "wait":
                counts[entry.group] = counts.get(entry.group, 0) + 1
                now = entry.group, counts[entry.group]
                follows.setdefault(now, set())
                if before is not None:
                    follows[now].add(before)
                before = now
    while ready := [event for event, earlier in follows.items() if not earlier]:
        for event in ready:
            del follows[event]
        for earlier in follows.values():
            earlier.difference_update(ready)
    return bool(follows)


def stuck(ranks: Sequence[Sequence[Entry]]) -> list[str]:
    """Messages that ranks never get to, played by NCCL's rules; [] if all arrive.

    A group has one stream for each pair of ranks on each of them. What is on a stream runs in order, and a send or a
    receive holds it until its partner runs. It also starts only when what the rank waited for before is done.

    Source: ProcessGroupNCCL's point-to-point operations outside of a batch, and NCCL's guide on grouped calls.
    """
    streams: dict[Any, list[tuple[int, Entry, frozenset[int]]]] = {}
    for rank, entries in enumerate(ranks):
        waited: set[int] = set()
        for number, entry in enumerate(entries):
            if entry.kind == "wait":
                waited.add(entry.of)
            elif entry.peer >= 0:
                streams.setdefault((rank, entry.group, entry.peer), []).append(
                    (number, entry, frozenset(waited))
                )
    done: set[tuple[int, int]] = set()
    moved = True
    while moved:
        moved = False
        for (rank, group, peer), mine in streams.items():
            others = streams.get((peer, group, rank), [])
            while (
                mine
                and others
                and _can_meet(rank, mine[0], done)
                and _can_meet(peer, others[0], done)
                and ({mine[0][1].kind, others[0][1].kind} == {"send", "recv"})
            ):
                done |= {(rank, mine.pop(0)[0]), (peer, others.pop(0)[0])}
                moved = True
    return [
        f"rank {rank}: {left[0][1].kind} with rank {peer}"
        for (rank, _, peer), left in streams.items()
        if left
    ]


def _can_meet(
    rank: int, item: tuple[int, Entry, frozenset[int]], done: set[tuple[int, int]]
) -> bool:
    return all((rank, number) in done for number in item[2])
