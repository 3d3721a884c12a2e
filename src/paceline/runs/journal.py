"""The journal of a run. It records which samples each applied update consumed, as evidence that
none was lost or repeated.

Each launch appends a line that says after which update it continues, then one line per update.
Lines are never changed: the updates that an interrupted launch applied after its last checkpoint
stay in the file, and the next launch's line says that they were undone. docs/checkpoints.md
describes the file; `api/audit.py` reads it.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.base.errors import CheckpointError
from paceline.job import Job
from paceline.job.order import Window

LINE_BYTES = 4096  # longest line; a journal has no longer ones
MOST = 2**62  # the largest number; the sum of two fits into 64 bits
MOST_SAMPLES = 2**24  # the most samples of an update; an audit makes a list of them

OrderKind = Literal["shuffle", "sampler", "stream"]


class Launch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The line that begins a launch. The lines after it belong to this launch until the next one
    begins.
    """

    launch: int  # its number, from 1
    after: int  # the weights contain the updates of the steps up to this one
    plan: str
    world_size: int
    # `seed` and `order` determine which index is at a position of an epoch.
    seed: int
    order: OrderKind
    num_samples: int | None = None  # of an epoch; None for a stream
    drop_last: bool = False
    time: float = 0.0
    # Parts of later steps that the weights contain in addition, as (step, part). They contain no
    # others.
    also: tuple[tuple[int, int], ...] = ()

    def keeps(self, update: Update) -> bool:
        """Whether the weights contain an update that an earlier launch recorded."""
        return update.step <= self.after or (update.step, update.part) in self.also


class Update(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An applied update, which consumed `count` positions of an epoch, from `start` on."""

    launch: int
    step: int  # counted from 1 over the job
    epoch: int
    start: int
    count: int
    # The sum over what all ranks fetched since the previous line that has a digest; see
    # `order.digest`.
    digest: int | None = None
    part: int | None = None  # of the step's window, if each part is a separate update
    # No weight was changed: gradients overflowed under loss scaling, or the step is a spike. Runs
    # of former versions could also go back to a step before this one.
    skipped: bool = False

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.count)


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """A fingerprint of the weights after a step, which replicas of the run held alike."""

    launch: int
    step: int
    weights: str  # see `drift.ReplicaComparison.weights`


Record = Launch | Update | Fingerprint
_JSON = msgspec.json.Encoder()


def order_of(job: Job) -> OrderKind:
    """Return the kind of order that a job's data has."""
    if job.num_samples is None:
        return "stream"
    return "shuffle" if job.sampler is None else "sampler"


class Journal:
    """Appends the updates of one launch to the journal. Every rank has a Journal, but only rank 0's
    has a file.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.launch = 0
        self._noted: list[Update] = []
        self._descriptor: int | None = None
        self._lock = threading.Lock()  # a checkpoint is completed on another thread

    def begin(
        self,
        job: Job,
        *,
        plan: str,
        world_size: int,
        after: int,
        also: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Begin a launch after the updates that the restored state contains; see `Launch`.

        Raises:
            CheckpointError: the file can't be written.
        """
        if self.path is None:
            return
        self.launch = self._open() + 1
        self._append(
            [
                Launch(
                    launch=self.launch,
                    after=after,
                    plan=plan,
                    world_size=world_size,
                    seed=job.seed,
                    order=order_of(job),
                    num_samples=job.num_samples,
                    drop_last=job.drop_last,
                    time=round(time.time(), 3),
                    also=tuple(also),
                )
            ]
        )

    def note(
        self, step: int, window: Window, *, part: int | None = None, skipped: bool = False
    ) -> None:
        """Note that an update was applied on this rank."""
        self._noted.append(
            Update(
                launch=self.launch,
                step=step,
                epoch=window.epoch,
                start=window.start,
                count=window.count,
                part=part,
                skipped=skipped,
            )
        )

    def settle(self, digest: int) -> None:
        """Append the noted updates, which all ranks have applied now.

        digest: the sum over what all ranks fetched for these updates.

        Raises:
            CheckpointError: the file can't be written.
        """
        if not self._noted:
            return
        *before, last = self._noted
        self._append([*before, msgspec.structs.replace(last, digest=digest)])
        self._noted = []

    def note_weights(self, step: int, weights: str) -> None:
        """Append a fingerprint of the weights after a step, whose update was appended before.

        Raises:
            CheckpointError: the file can't be written.
        """
        self._append([Fingerprint(launch=self.launch, step=step, weights=weights)])

    def sync(self) -> None:
        """Force the appended lines to the disk, because a checkpoint that contains their updates is
        about to be complete.
        """
        with self._lock:
            if self._descriptor is not None:
                os.fsync(self._descriptor)

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.fsync(descriptor)  # a checkpoint that is not complete yet needs these lines
            os.close(descriptor)

    def _open(self) -> int:
        """Open the file after its last whole line, and return the number of the last launch."""
        assert self.path is not None
        try:
            self._descriptor = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
            launch = size = 0
            for line in _lines(self.path):
                if not line.endswith(b"\n"):
                    break  # its writer died in the middle of it
                size += len(line)
                with suppress(ValueError):
                    launch = max(launch, parse(line).launch)
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise self._unwritable(error) from error
        return launch

    def _append(self, records: Sequence[Record]) -> None:
        if self._descriptor is None or not records:
            return
        data = b"".join(_JSON.encode(record) + b"\n" for record in records)
        try:
            if os.write(self._descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"can't write the journal {self.path}: {error.strerror}",
            hint="--resume goes on from the last checkpoint when there is space again",
        )


def parse(line: bytes) -> Record:
    """Parse a line of a journal.

    Raises:
        ValueError: it is not a line of a journal.
    """
    document: Any = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError("it is no object")
    kind: Any = Launch if "after" in document else Fingerprint if "weights" in document else Update
    record: Record = msgspec.convert(document, kind)  # a ValidationError is a ValueError
    if isinstance(record, Launch):
        numbers: tuple[int, ...] = (
            record.launch,
            record.after,
            record.num_samples or 0,
            *(number for each in record.also for number in each),
        )
    elif isinstance(record, Fingerprint):
        numbers = record.launch, record.step
    else:
        numbers = record.launch, record.step - 1, record.epoch, record.start
        if not 0 <= record.count <= MOST_SAMPLES:
            raise ValueError(f"an update of {record.count} samples")
    if not all(0 <= number < MOST for number in numbers):
        raise ValueError("a number is out of its bounds")
    return record


def last_step(path: Path) -> int:
    """Return the step of the last whole line; -1 if there is none."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2 * LINE_BYTES))
        for line in reversed(
            file.read().split(b"\n")[:-1]
        ):  # the text after the last line's end is not a whole line
            with suppress(ValueError, RecursionError):
                record = parse(line)
                return record.after if isinstance(record, Launch) else record.step
    return -1


def applied(path: Path) -> list[Update]:
    """Return the updates that the last launch's weights contain."""
    updates: list[Update] = []
    for _, record in read(path):
        if isinstance(record, Launch):
            updates = [update for update in updates if record.keeps(update)]
        elif isinstance(record, Update):
            updates.append(record)
    return updates


def fingerprints(path: Path) -> dict[int, str]:
    """Return the fingerprints of the weights that the last launch's weights came from, by step."""
    weights: dict[int, str] = {}
    for _, record in read(path):
        if isinstance(record, Launch):
            weights = {step: each for step, each in weights.items() if step <= record.after}
        elif isinstance(record, Fingerprint):
            weights[record.step] = record.weights
    return weights


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while line := file.readline(LINE_BYTES):
            yield line


def read(path: Path) -> Iterator[tuple[int, Record | None]]:
    """Yield number and record of each whole line; the record is None for a line that can't be read.

    The last line may be incomplete, if its writer was killed. Then it is left out.

    Raises:
        OSError: the file can't be read.
    """
    for number, line in enumerate(_lines(path), 1):
        if not line.endswith(b"\n") and len(line) < LINE_BYTES:
            return
        record: Record | None = None
        with suppress(ValueError, RecursionError):
            record = parse(line)
        yield number, record
