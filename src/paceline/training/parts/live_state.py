"""The state of a rank in memory that outlives it: whoever takes the place of a lost rank loses no step.

Copies of a large state are many steps apart (`copies.py`). But weights and optimizer state change in an update alone,
so for most of a step what a rank holds is the state after the step before. This moves their memory into the rank's
arena (`launch/process/live_states.py`), and after each step notes the rest: buffers, small tensors,
the document. A rank that is lost between two updates then leaves its whole state. One that is lost
in an update does not: where replicas hold the same, theirs is read, and else the newest copy."""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import statistics
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.long_work import long_work
from paceline.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from paceline.checkpoint.files import bytes_of, is_plain
from paceline.checkpoint.pieces import Region, TensorPiece
from paceline.checkpoint.read import Checkpoint, StoredPiece, TensorEntry
from paceline.cluster.limits import free_memory_bytes
from paceline.launch.process.live_states import LiveStates
from paceline.launch.process.malloc import trim_heap
from paceline.launch.process.memory_store import DoubleBuffer
from paceline.training import state
from paceline.training.parts.drift import fingerprint
from paceline.training.parts.structure import Structure

if TYPE_CHECKING:
    from paceline.training.stepper import Stepper

MOVE_SHARE = 0.02  # of the time that a launch has trained, for the move into the arena
SEARCH_S = 0.25  # for what refers to the memory: 0.1 s for 300,000 objects of Python, twice and more if busy
MOVE_TENSOR_S = 3e-4  # of a move, for each tensor: 0.1 to 0.2 ms to find it, and as much to move it, on a busy core
MOVE_BYTES_PER_S = 1e9  # of a move, into new pages
_REMEMBERED, _ENOUGH = 32, 16  # notes
GIVEN_BACK_BYTES = 256 * 2**20  # moved before freed memory is given back
MEMORY_SHARE = 0.5  # of this host's free memory that the move of all its ranks may take in between
_ALIGNMENT = 64  # bytes, as torch allocates
_ARENA, _NOTE = "arena", "note"
_UPDATED = "parameters/", "optimizer/"  # names of what an update alone writes to, as is looked at


class LiveState:
    """One rank's state where others find it.

    num_bytes: in the arena. has_ended: whether it was given up, as a forward writes to parameters or as there is no
    memory.
    """

    def __init__(
        self,
        states: LiveStates,
        stepper: Stepper,
        slot: int,
        *,
        host_ranks: int | None = None,
        origin: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """slot: this rank's place in the memory. host_ranks: see `state.pieces`. origin: what notes say of the rank."""
        self.states, self.stepper, self.slot, self.host_ranks, self.origin = (
            states,
            stepper,
            slot,
            host_ranks,
            origin,
        )
        self.num_bytes, self.has_ended = 0, False
        self._latest_s: deque[float] = deque(maxlen=_REMEMBERED)  # that notes took
        self._address, self._is_clean, self._is_proved = 0, False, False
        self._versions: list[int] = []
        self._fingerprints: list[int] = []
        self._structure: Structure | None = None
        self._num_looks = 0  # one after the other
        self._small_tensors: list[memoryview | torch.Tensor] = []

    @staticmethod
    def is_possible(states: LiveStates, stepper: Stepper) -> bool:
        """Whether updates alone write to what could be moved, on a CPU where replicas step together; for one training
        of a process.

        An optimizer that evaluates the loss itself looks at weights by lazy copies, as recompute=full does. torch makes
        these of its own memory alone; of other memory they are whole ones.
        """
        return (
            stepper.device.type == "cpu"
            and hasattr(os, "posix_fallocate")
            and not (stepper.step_sync.has_own_steps or stepper.needs_closure or states.is_mapped)
        )

    def move_s(self, num_ranks: int) -> float:
        """Seconds that a move is likely to take; infinite where forwards write to parameters, or without memory.

        num_ranks: of this host, each of which moves about as much.
        """
        storages, available_bytes = self._movable(), free_memory_bytes()
        sizes = [storage.nbytes() for storage in storages.values()]
        in_between = num_ranks * min(sum(sizes), max(sizes, default=0) + GIVEN_BACK_BYTES)
        # The next ranks build their own state beside the one that these leave.
        if (
            self.stepper.edits.names
            or max(in_between / MEMORY_SHARE, num_ranks * sum(sizes)) > available_bytes
        ):
            return math.inf
        known = self._known(storages)
        is_known = all(_is_all_in(storages[key], known[key]) for key in known)
        return (
            (0.0 if is_known else SEARCH_S)
            + MOVE_TENSOR_S * len(sizes)
            + sum(sizes) / MOVE_BYTES_PER_S
        )

    def move(self) -> None:
        """Move what only updates write to into the arena. Who refers to that memory goes on to do so.

        Memory that something unknown refers to stays where it is, and what lies in it is copied into notes. Without
        memory for it, it is given up.
        """
        storages = self._movable()
        places, end = {}, 0
        for key, storage in storages.items():
            places[key] = end
            end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        if not end:
            return
        aliases, kept_bytes = self._tensors_in(storages), 0
        try:
            arena = self.states.arena(self.slot, end)
            self.num_bytes, self._address = end, _address_of(arena)
            for key in list(storages):
                storage = storages.pop(key)
                self.states.reserve(self.slot, places[key], storage.nbytes())
                kept_bytes += storage.nbytes()
                _move(storage, aliases.pop(key), arena, places[key])
                del storage
                long_work.advanced()
                if kept_bytes > GIVEN_BACK_BYTES:
                    trim_heap()
                    kept_bytes = 0
        except OSError:
            self.end()
        trim_heap()
        self.stepper.edits.updated()  # no forward has moved them

    def _movable(self) -> dict[int, torch.UntypedStorage]:
        """Storages of large tensors that only updates write to, by their identity."""
        used_bytes: dict[int, int] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        for piece in self._pieces():
            if (
                piece.name.startswith(_UPDATED)
                and piece.tensor.device.type == "cpu"
                and _is_plain(piece.tensor)
            ):
                storage = piece.tensor.untyped_storage()
                storages[storage._cdata] = storage
                used_bytes[storage._cdata] = used_bytes.get(storage._cdata, 0) + piece.tensor.nbytes
        return {
            key: storage
            for key, storage in storages.items()
            if used_bytes[key] and 2 * used_bytes[key] >= storage.nbytes()
        }

    def _pieces(self) -> Iterator[TensorPiece]:
        return state.pieces(self.stepper, of_others=True, host_ranks=self.host_ranks)

    def _known(self, storages: Collection[int]) -> dict[int, list[torch.Tensor]]:
        """The parameters, and the tensors of the optimizer's state, in each storage."""
        values = chain(
            self.stepper.local_parameters.values(),
            *(
                entry.values()
                for entry in self.stepper.optimizer.state.values()
                if isinstance(entry, dict)
            ),
        )
        known: dict[int, list[torch.Tensor]] = {key: [] for key in storages}
        for tensor in {
            id(each): each for each in values if isinstance(each, torch.Tensor)
        }.values():
            if _is_plain(tensor) and (key := tensor.untyped_storage()._cdata) in known:
                known[key].append(tensor)
        return known

    def _tensors_in(
        self, storages: Mapping[int, torch.UntypedStorage]
    ) -> dict[int, list[torch.Tensor]]:
        """All tensors in each storage, as far as Python knows of them."""
        known = self._known(storages)
        return known | _tensors_of_python(
            [key for key in known if not _is_all_in(storages[key], known[key])]
        )

    def change(self) -> None:
        """The state is about to change."""
        if not self._is_clean:
            return
        self._is_clean = False
        self.states.change(self.slot)
        if self._versions != self._versions_now() or (
            self._fingerprints and self._fingerprints != self._prints()
        ):
            self.end()  # a forward has written to a parameter: the state before an update is none
        self._is_proved, self._fingerprints = True, []

    @property
    def note_s(self) -> float:
        """Seconds of a note, the median of the latest; 0 until there are enough, as the first ones take longer."""
        return statistics.median(self._latest_s) if len(self._latest_s) >= _ENOUGH else 0.0

    def note(self, step: int, document: Mapping[str, Any] | None, *, began_s: float) -> None:
        """The state is that after a step. document: what is no tensor, or what steps change of that, on the first rank.
        began_s: when it was begun to be made.

        The first note is kept back until the next update, which looks whether the forwards before it wrote to a
        parameter: also through `parameter.data`, which later ones are not looked at for.
        """
        if self.has_ended:
            return
        self._versions = self._versions_now()
        if not self._is_proved:
            self._fingerprints = self._prints()
        try:
            self._look(step)
            # One buffer, as a call for each tensor would take longer than the copies.
            rest = b"".join(
                [
                    bytes_of(each) if isinstance(each, torch.Tensor) else each
                    for each in self._small_tensors
                ]
            )
            self.states.note(
                self.slot,
                step,
                memoryview(rest),
                json.dumps(document).encode(),
                is_whole=self._is_proved,
            )
        except (OSError, MemoryError):
            self.end()
            return
        self._is_clean = True
        if self._is_proved:  # the first one has looked at every bit
            self._latest_s.append(time.perf_counter() - began_s)

    def _look(self, step: int) -> None:
        """Know what the state is made of. What others need to know of it is written down if it is new.

        Raises:
            OSError: there is no memory for that.
        """
        if self._structure is not None and self._structure.is_current():
            self._num_looks = 0
            return
        structure = Structure(self.stepper, host_ranks=self.host_ranks)
        places = [self._place(piece) for piece in structure.pieces]
        self.states.describe(
            self.slot, step, _index(structure, places, self.stepper.mesh, self.origin)
        )
        small = [
            piece.tensor
            for piece, place in zip(structure.pieces, places, strict=True)
            if place is None
        ]
        self._small_tensors = [bytes_of(tensor) if is_plain(tensor) else tensor for tensor in small]
        self._num_looks += 1
        # An optimizer that makes its tensors anew in each update would have both in memory.
        self._structure = structure if self._num_looks == 1 else None

    def _place(self, piece: TensorPiece) -> int | None:
        """Where in the arena a piece lies; None if it does not."""
        place = piece.tensor.data_ptr() - self._address
        is_moved = (
            0 <= place < self.num_bytes
            and piece.tensor.is_contiguous()
            and piece.name.startswith(_UPDATED)
        )
        return place if is_moved else None

    def end(self) -> None:
        """Give it up. What was moved stays where it is."""
        self.has_ended, self._is_clean = True, False
        self.states.change(self.slot)

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self.stepper.local_parameters.values()]

    def _prints(self) -> list[int]:
        return [int(fingerprint(parameter)) for parameter in self.stepper.local_parameters.values()]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it lies in memory as it is: a wrapper, such as a quantised tensor, has others inside."""
    return type(tensor) is torch.Tensor or issubclass(type(tensor), torch.nn.Parameter)


def _address_of(arena: mmap.mmap) -> int:
    return torch.frombuffer(arena, dtype=torch.uint8).data_ptr()


def _tensors_of_python(storages: Collection[int]) -> dict[int, list[torch.Tensor]]:
    """All tensors that Python knows of in each storage."""
    tensors: dict[int, list[torch.Tensor]] = {key: [] for key in storages}
    if not storages:
        return tensors
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor):
                continue
            try:
                key = thing.untyped_storage()._cdata
            except (RuntimeError, NotImplementedError):  # it has none
                continue
            if key in tensors:
                tensors[key].append(thing)
    return tensors


def _is_all_in(storage: torch.UntypedStorage, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no other tensor lies in a storage."""
    return bool(torch._C._storage_Use_Count(storage._cdata) == len(tensors) + 1)


def _move(
    storage: torch.UntypedStorage, aliases: Sequence[torch.Tensor], arena: mmap.mmap, place: int
) -> None:
    """Let all of these tensors lie in the arena, if there are no others in their storage."""
    # A storage that NumPy looks into can't be resized: an array would be left with memory that is free.
    if (
        not storage.resizable()
        or not _is_all_in(storage, aliases)
        or not all(
            _is_plain(tensor)
            and tensor.layout == torch.strided
            and not tensor.is_inference()
            and not tensor.is_conj()
            and not tensor.is_neg()
            for tensor in aliases
        )
    ):
        return
    moved = torch.frombuffer(arena, dtype=torch.uint8, count=storage.nbytes(), offset=place)
    moved.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    for tensor in aliases:
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
            moved.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def _index(
    structure: Structure, places: Sequence[int | None], mesh: Any, origin: Mapping[str, Any]
) -> bytes:
    """What a rank holds, and where. places: in the arena; what has none lies in the note, one after the other."""
    tensors: dict[str, dict[str, Any]] = {}
    offset = 0
    for piece, place in zip(structure.pieces, places, strict=True):
        entry = tensors.setdefault(
            piece.name,
            {"shape": piece.shape, "dtype": DTYPE_NAMES[piece.tensor.dtype], "pieces": []},
        )
        container = [_NOTE, offset] if place is None else [_ARENA, place]
        entry["pieces"].append([*container, piece.offsets, tuple(piece.tensor.shape)])
        offset += piece.tensor.nbytes if place is None else 0
    part = mesh.number(axis for axis in mesh.sizes if axis not in mesh.copy_axes)
    return json.dumps(
        {
            "part": part,
            "origin": dict(origin),
            "tensors": tensors,
            "document": structure.fixed_document,
        }
    ).encode()


# --- Reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StoredBox:
    """A box of a tensor that a rank holds, and where."""

    rank: int
    part: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    region: Region
    container: str
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.region.numel * self.dtype.itemsize


@dataclass(frozen=True)
class LiveCheckpoint(Checkpoint):
    """What ranks that were lost, or ended, have left in memory, to be read as a checkpoint is."""

    states: LiveStates | None = None

    def _open(self, file: str) -> Any:
        assert self.states is not None
        return _RankState(self.states, int(file))


@dataclass(frozen=True, slots=True)
class _RankState:
    states: LiveStates
    rank: int

    def read(self, piece: StoredPiece, dtype: torch.dtype, part: tuple[slice, ...]) -> torch.Tensor:
        container, _, offset = piece.key.partition(":")
        flat = torch.empty(piece.region.numel, dtype=dtype, device="cpu")
        _read(self.states, self.rank, container, int(offset), bytes_of(flat))
        return flat.reshape(piece.region.shape)[part]


def _read(states: LiveStates, rank: int, container: str, offset: int, target: memoryview) -> None:
    (states.read_arena if container == _ARENA else states.read_note)(rank, offset, target)


def live_step(states: LiveStates, ranks: Sequence[int]) -> int | None:
    """The step after which these ranks have left the whole state; None if they have not.

    The first rank must have its own: it is the one that has the document, and rank 0 records steps. What another rank
    had not whole is read from its replicas, if they hold all of it.
    """
    step = states.step(0)
    return step if step is not None and _is_whole(states, ranks, step) else None


def _is_whole(states: LiveStates, ranks: Sequence[int], step: int) -> bool:
    """Whether ranks whose state is that after this step hold all that the others held."""
    others = [_boxes(states, rank) for rank in ranks if states.step(rank) != step]
    there = _boxes_at(states, ranks, step) if others else {}
    return all(boxes is not None and boxes.keys() <= there.keys() for boxes in others)


def _boxes_at(
    states: LiveStates, ranks: Iterable[int], step: int
) -> dict[tuple[str, Region], _StoredBox]:
    """From where each box of each tensor after this step is read: of the first rank that has it."""
    chosen: dict[tuple[str, Region], _StoredBox] = {}
    for rank in ranks:
        if states.step(rank) == step:
            for key, box in (_boxes(states, rank) or {}).items():
                chosen.setdefault(key, box)
    return chosen


def _boxes(states: LiveStates, rank: int) -> dict[tuple[str, Region], _StoredBox] | None:
    """What a rank held after its newest note; None if it has none."""
    text = states.index(rank)
    if text is None:
        return None
    index = json.loads(text)
    boxes: dict[tuple[str, Region], _StoredBox] = {}
    for name, entry in index["tensors"].items():
        for container, offset, offsets, shape in entry["pieces"]:
            region = Region(tuple(offsets), tuple(shape))
            boxes[name, region] = _StoredBox(
                rank,
                index["part"],
                DTYPES[entry["dtype"]],
                tuple(entry["shape"]),
                region,
                container,
                offset,
            )
    return boxes


def open_live(states: LiveStates, ranks: Iterable[int], step: int) -> LiveCheckpoint:
    """What ranks have left after this step; see `live_step`."""
    chosen = _boxes_at(states, ranks, step)
    document = _document(states, 0)
    assert document is not None
    tensors: dict[str, TensorEntry] = {}
    for (name, region), box in chosen.items():
        before = tensors[name].pieces if name in tensors else ()
        piece = StoredPiece(str(box.rank), f"{box.container}:{box.offset}", region)
        tensors[name] = TensorEntry(box.shape, box.dtype, (*before, piece))
    return LiveCheckpoint(Path(f"live-{step}"), step, document, tensors, states)


def _document(states: LiveStates, rank: int) -> dict[str, Any] | None:
    """What is no tensor, after the newest note of a rank; None on a rank that does not have it."""
    noted: dict[str, Any] | None = json.loads(states.document(rank))
    if noted is None or "optimizer" in noted:
        return noted
    return state.joined_document(json.loads(states.index(rank) or b"")["document"], noted)


def copy_live(
    states: LiveStates,
    copies: DoubleBuffer,
    slots: Sequence[int],
    step: int,
    *,
    keep: Collection[int],
) -> None:
    """Make copies of what the ranks of a host have left after this step, of each box once, and give its memory back.
    keep: steps whose copies stay."""
    boxes = _boxes_at(states, slots, step)
    for slot in slots:
        live_index = json.loads(states.index(slot) or b"")
        tensors: dict[str, dict[str, Any]] = {}
        offset = 0
        slot_boxes = [(name, box) for (name, _), box in boxes.items() if box.rank == slot]
        for name, box in slot_boxes:
            entry = tensors.setdefault(
                name, {"shape": box.shape, "dtype": DTYPE_NAMES[box.dtype], "pieces": []}
            )
            entry["pieces"].append((offset, box.region.offsets, box.region.shape))
            offset += box.num_bytes
        copy_index = {
            "document": _document(states, slot),
            "origin": live_index["origin"],
            "tensors": tensors,
        }
        copies.write(
            slot,
            step,
            (bytes_of(_read_box(states, box)) for _, box in slot_boxes),
            json.dumps(copy_index).encode(),
            keep=keep,
        )
    for slot in slots:
        states.forget(slot)


def live_prints(states: LiveStates, slots: Sequence[int], step: int) -> dict[int, int]:
    """A number for each part that the ranks of a host have left after this step, alike where they held the same."""
    prints: dict[int, int] = {}
    for _, box in sorted(_boxes_at(states, slots, step).items(), key=lambda item: repr(item[0])):
        if box.container == _ARENA:
            number = int(fingerprint(_read_box(states, box)))
            prints[box.part] = (31 * prints.get(box.part, 0) + number) % 2**63
    return prints


def live_disagreement(states: LiveStates, ranks: Iterable[int], step: int) -> str | None:
    """Which tensor in the arenas of replicas is not the same after this step; None if all are."""
    first: dict[tuple[int, str, Region], _StoredBox] = {}
    for rank in (rank for rank in ranks if states.step(rank) == step):
        for (name, region), box in (_boxes(states, rank) or {}).items():
            if box.container != _ARENA:
                continue
            other = first.setdefault((box.part, name, region), box)
            if other is not box and not _are_equal(states, box, other):
                return f"'{name}' differs between rank {other.rank} and rank {rank}"
    return None


def _are_equal(states: LiveStates, box: _StoredBox, other: _StoredBox) -> bool:
    """A tensor at a time, as it is read."""
    return torch.equal(_read_box(states, box), _read_box(states, other))


def _read_box(states: LiveStates, box: _StoredBox) -> torch.Tensor:
    flat = torch.empty(box.num_bytes, dtype=torch.uint8, device="cpu")
    _read(states, box.rank, box.container, box.offset, bytes_of(flat))
    return flat
