"""Writes checkpoints in the background. Every rank writes its pieces; rank 0 writes the index and,
last of all, COMMIT.

Ranks communicate only through files, so a save never waits inside a collective and can't disturb
one. A save happens in a hidden folder that gets its real name when it is complete.
docs/checkpoints.md describes the result.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import xxhash

from paceline.base.errors import CheckpointError
from paceline.base.files import fsync, remove, write_json, write_text
from paceline.base.long_work import long_work
from paceline.base.waiting import waiting
from paceline.checkpoint.files import CHECKSUM, write_tensors
from paceline.checkpoint.index import add_piece, file_of, merged
from paceline.checkpoint.pieces import TensorPiece
from paceline.checkpoint.staging import Staging
from paceline.cluster.limits import free_memory_bytes
from paceline.runs.folder import CHECKPOINTS, COMMIT, remove_unfinished

FORMAT = "paceline-checkpoint"
VERSION = 2  # 1 had sha256 for checksums
INDEX, DOCUMENT = "index.json", "document.json"

FIRST_POLL_S, LAST_POLL_S = (
    0.005,
    0.25,
)  # between looks at the other ranks' files; doubled after each
LOOK_S = 0.2  # between looks at how far work on other threads has come: a patience has 1 s at least
# The share of this host's free memory that copies for saves may take. Steps and loaders need the
# rest. Copies of the state in memory may take half.
_MEMORY_SHARE = 0.8
# Seconds between a waiting rank's looks at the progress of others, and between rank 0's reports of
# progress.
_TOUCH_S = 1.0
# Added to the niceness of a thread that writes beside the steps. A busy core then gives the thread a
# sixteenth of its time (weights of 70 and 1024, sched_prio_to_weight in Linux's
# kernel/sched/core.c).
_NICER = 12
EXIT_WAIT_S = (
    10.0  # for a file that is being written when the process exits; it can't be interrupted
)


class Writer:
    """Saves one run's checkpoints from one rank, in the background. Every rank makes one Writer and
    saves the same steps.

    Rank 0's Writer removes what earlier launches left unfinished in the run folder.

    Args:
        run_dir: The run's folder; checkpoints go to `checkpoints/step-N` in it. All ranks must see
            it.
        attempt: A token of letters, digits, "-" and "_". It is equal on all ranks and different for
            every launch.
        num_ranks: Number of ranks of this host that save as much as this one.
        meanwhile: Called repeatedly while somebody waits for a save.
        timeout_s: Seconds to wait for the other ranks' parts while none of them grows.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        world_size: int,
        attempt: str,
        num_ranks: int = 1,
        meanwhile: Callable[[], None] = lambda: None,
        timeout_s: float = 600.0,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.folder = self.run_dir / CHECKPOINTS
        self.rank = rank
        self.world_size = world_size
        self.attempt = attempt
        self.num_ranks, self.meanwhile = num_ranks, meanwhile
        # Whether saves write from copies; None before anybody has asked for memory. It must be
        # equal on all ranks. Otherwise some ranks would wait for parts that others write beside
        # their steps.
        self.takes_snapshots: bool | None = None
        self.timeout_s = timeout_s
        self._num_saves = 0
        self._save: _Save | None = None
        self._staging = Staging()
        if rank == 0:
            remove_unfinished(self.run_dir, but=attempt)

    def save(
        self,
        step: int,
        pieces: Iterable[TensorPiece],
        document: Mapping[str, Any] | None = None,
        *,
        snapshot: bool = True,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy the pieces to CPU memory and start to write them. It first waits for a save that
        still runs.

        The host does not wait for copies from a GPU. If `takes_snapshots` is False, the tensors
        themselves are written, and this returns when they are.

        Args:
            pieces: The pieces that this rank owns. The pieces of all ranks must cover every tensor
                without overlap; equal pieces from several ranks are allowed.
            document: Anything JSON can hold, to be read back with the tensors. Only rank 0's
                counts.
            snapshot: If False, the tensors themselves are read, and must not change until `wait`
                returns.
            before_commit: Called on rank 0, on another thread, when all else of the checkpoint is
                on the disk.

        Raises:
            CheckpointError: the previous save failed, this save can't be started, or this save
                failed and the caller waits for it. No rank commits it.
        """
        self._num_saves += (
            1  # counted first, so that ranks stay in step when one of them fails here
        )
        self.wait()
        save = _Save(self, step, f"{self.attempt}-{self._num_saves}", before_commit)
        is_blocking = snapshot and self.takes_snapshots is False
        staging = self._staging if snapshot and not is_blocking else None
        save.start(list(pieces), document, staging)
        self._save = save
        if is_blocking:
            self.wait()

    def has_memory_for(self, pieces: Sequence[TensorPiece]) -> bool:
        """Whether this host has memory for copies of these pieces and of those of its other ranks,
        in addition to the memory that this rank has taken for copies.
        """
        missing_bytes = self._staging.missing_bytes(pieces)
        return (
            not missing_bytes
            or self.num_ranks * missing_bytes <= _MEMORY_SHARE * free_memory_bytes()
        )

    def poll(self) -> None:
        """Raise CheckpointError if the save in the background has failed; return at once in any
        case.
        """
        if self._save is not None and not self._save.is_running:
            self.wait()

    def wait(self) -> None:
        """Return when the last save is committed by all ranks.

        Raises:
            CheckpointError: the save failed, on whichever rank; each failure is raised once.
        """
        if self._save is None:
            return
        self._save.join(self.meanwhile)
        save, self._save = self._save, None
        if save.error is not None:
            raise save.error


def without_snapshots(pieces: Iterable[TensorPiece]) -> str:
    """Return the warning for a user whose host has no memory for copies of such pieces."""
    gib = sum(piece.tensor.nbytes for piece in pieces) / 2**30
    return (
        f"a host has no memory for copies of what its ranks save ({gib:.1f} GiB a rank): each save blocks the run "
        "until it is written"
    )


def be_nice() -> None:
    """Lower this thread's priority, so that threads that compute get busy cores. Only Linux can do
    so for a single thread.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(
                os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER
            )


class _Save:
    """One save in flight on one rank."""

    def __init__(
        self,
        writer: Writer,
        step: int,
        token: str,
        before_commit: Callable[[], None],
    ) -> None:
        self._before_commit = before_commit
        self.rank, self.world_size, self.timeout_s = (
            writer.rank,
            writer.world_size,
            writer.timeout_s,
        )
        self.step, self.token = step, token
        self.final = writer.folder / f"step-{step}"
        self.temp = writer.folder / f".step-{step}.{token}"
        # This file lies outside the save's folder, so that it can still be read after the folder is
        # removed.
        self.failed = writer.folder / f".step-{step}.{token}.failed"
        # An error until the save reaches its end, so that an unforeseen failure can't pass for a
        # commit.
        self.error: CheckpointError | None = CheckpointError(
            f"rank {self.rank}'s save of step {step} never ended"
        )
        self._staging: Staging | None = None  # holds copies of the tensors
        self._tensors: dict[str, torch.Tensor] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._document = "{}"
        self._needed_bytes = 0
        # Number of times that this save made progress, here or on the ranks for which it waits.
        self._num_signs = 0
        self._waits = False  # whether it waits for other ranks now
        self._touched_s = 0.0  # when rank 0 last told the others that the save makes progress

        self._exiting = threading.Event()
        # A daemon, because Python joins other threads before it tells us that the process ends.
        self._thread = threading.Thread(
            target=self._run, name=f"paceline-checkpoint-step-{step}", daemon=True
        )

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(
        self,
        pieces: Sequence[TensorPiece],
        document: Mapping[str, Any] | None,
        staging: Staging | None,
    ) -> None:
        """Copy the pieces and begin to write.

        staging: makes the copies. If it is None, the tensors themselves are written, and the run
        waits for the writing.
        """
        try:
            if self.rank == 0 and document is not None:
                self._document = json.dumps(document, indent=1)
            self._staging = staging
            if staging is not None:
                tensors = staging.copy(pieces)
            else:
                tensors = [piece.tensor.detach() for piece in pieces]
                for device in {piece.tensor.device for piece in pieces if piece.tensor.is_cuda}:
                    torch.cuda.synchronize(
                        device
                    )  # another thread reads what this one has computed
            for piece, tensor in zip(pieces, tensors, strict=True):
                self._take(piece, tensor)
        except Exception as error:
            raise self._give_up(error) from error
        atexit.register(self._leave)
        self._thread.start()

    def join(self, meanwhile: Callable[[], None]) -> None:
        while self.is_running:
            before = self._num_signs
            with waiting if self._waits else nullcontext():
                self._thread.join(LOOK_S)
            if self._num_signs != before:
                long_work.advanced()
            meanwhile()
        atexit.unregister(self._leave)

    def _take(self, piece: TensorPiece, tensor: torch.Tensor) -> None:
        key = piece.name
        while (
            key in self._tensors or key == "__metadata__"
        ):  # the one key that safetensors keeps for itself
            key += "+"
        self._tensors[key] = tensor
        self._needed_bytes += tensor.nbytes
        add_piece(self._entries, piece, file=file_of(self.rank), key=key)

    def _run(self) -> None:
        try:
            self._check_peers()
            if self._staging is not None:
                be_nice()
                self._staging.wait()
            self._write_part()
            self._waits = True
            if self.rank == 0:
                self._wait_for(self._missing_parts)
                self._waits = False
                self._commit()
            else:
                self._wait_for(self._missing_commit)
            self.error = None
        except _Exiting:
            # Rank 0 can commit without us once our part is there; without it, or without rank 0,
            # nobody can.
            if self.rank == 0 or not (self.temp / file_of(self.rank, "json")).exists():
                self._give_up(
                    CheckpointError(
                        f"rank {self.rank} exited before its save of step {self.step} was done"
                    )
                )
        except Exception as error:
            self._give_up(error)

    def _write_part(self) -> None:
        """Write this rank's tensors, then what the index needs to know about them."""
        self.temp.mkdir(parents=True, exist_ok=True)
        if (
            _disk_of(self.temp / COMMIT)[1] < self._needed_bytes
        ):  # checked before writing, so that no other file on the disk is cut short
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.temp))
        path = self.temp / file_of(self.rank)
        summary = write_tensors(path, self._tensors, self._goes_on)
        self._tensors.clear()
        if self._exiting.is_set():
            raise _Exiting
        write_json(
            self.temp / file_of(self.rank, "json"),
            {**summary, "tensors": self._entries},
        )

    def _commit(self) -> None:
        """Write index, document and COMMIT, then give the folder its name. Only rank 0 calls this."""
        part_paths = [self.temp / file_of(rank, "json") for rank in range(self.world_size)]
        parts = [json.loads(path.read_text()) for path in part_paths]
        write_json(self.temp / INDEX, {"tensors": merged(part["tensors"] for part in parts)})
        write_text(self.temp / DOCUMENT, self._document)
        files = {
            file_of(rank): {key: part[key] for key in ("bytes", CHECKSUM)}
            for rank, part in enumerate(parts)
        }
        files |= {name: _summary(self.temp / name) for name in (INDEX, DOCUMENT)}
        for path in part_paths:
            path.unlink()
        self._before_commit()
        write_json(
            self.temp / COMMIT,
            {
                "format": FORMAT,
                "version": VERSION,
                "step": self.step,
                "save": self.token,
                "files": files,
            },
        )
        _publish(self.temp, self.final)

    def _missing_parts(self) -> str:
        there = set(self.temp.iterdir())
        missing = [
            str(rank)
            for rank in range(self.world_size)
            if self.temp / file_of(rank, "json") not in there
        ]
        return f"the parts of ranks {', '.join(missing)}" if missing else ""

    def _missing_commit(self) -> str:
        # The hidden folder vanishes at the moment at which the commit appears, so look for the
        # folder first. List the parent folder, because network file systems answer a listing with
        # fresh names.
        is_open = self.temp in self.temp.parent.iterdir()
        if committed_by(self.final) == self.token:
            return ""
        if not is_open:
            self._check_peers()
            raise self._given_up()
        return "rank 0's commit"

    def _goes_on(self) -> None:
        """Note that a part of this save has grown.

        Rank 0 sees all parts. It tells the others by the modification time of the folder.
        """
        self._num_signs += 1
        if self.rank == 0 and time.monotonic() - self._touched_s > _TOUCH_S:
            self._touched_s = time.monotonic()
            with suppress(OSError):
                os.utime(self.temp)

    def _reached(self) -> int:
        """Return a number that changes while the parts of the ranks for which this one waits grow."""
        try:
            return (
                self.temp.stat().st_mtime_ns
                if self.rank
                else sum(path.stat().st_size for path in self.temp.iterdir())
            )
        except OSError:  # the file was removed just now; the next look tells why
            return -1

    def _wait_for(self, missing: Callable[[], str]) -> None:
        """Look repeatedly until nothing is missing.

        Raises:
            CheckpointError: another rank reports a failure, or no part has grown for the time that
                is allowed.
            _Exiting: the process exits.
        """
        reached, looked_s = self._reached(), time.monotonic()
        deadline_s = looked_s + self.timeout_s
        pause_s = FIRST_POLL_S
        while still := missing():
            self._check_peers()
            if time.monotonic() - looked_s > _TOUCH_S:
                before, reached, looked_s = reached, self._reached(), time.monotonic()
                if reached != before:
                    deadline_s = looked_s + self.timeout_s
                    self._goes_on()
            if time.monotonic() > deadline_s:
                raise CheckpointError(
                    f"rank {self.rank} waited {self.timeout_s:g} s for {still} "
                    f"to save step {self.step}",
                    hint=f"check those ranks' logs, and that every rank sees {self.temp.parent}",
                )
            if self._exiting.wait(pause_s):
                raise _Exiting
            pause_s = min(2 * pause_s, LAST_POLL_S)

    def _given_up(self) -> CheckpointError:
        return CheckpointError(
            f"another rank gave up the save of step {self.step}; its own message says why",
            heard=True,
        )

    def _check_peers(self) -> None:
        if (reported := self._reported()) is not None:
            raise reported

    def _reported(self) -> CheckpointError | None:
        """Return the failure that a rank has reported; None if there is none."""
        try:
            report = json.loads(self.failed.read_text())
        except OSError:
            return None
        return CheckpointError(report["message"], hint=report["hint"], heard=True)

    def _give_up(self, error: Exception) -> CheckpointError:
        """Explain the failure, report it to the other ranks and remove what was written."""
        self._tensors.clear()
        if isinstance(error, CheckpointError):
            explained = error
        elif (
            isinstance(error, FileNotFoundError)
            and self.temp.parent.exists()
            and not self.temp.exists()
        ):
            # The other rank's report may have found no room on the disk.
            explained = self._reported() or self._given_up()
        else:
            # A rank that gave up removes the folder that we use. Its failure is the cause, so
            # report that one.
            failure = f"rank {self.rank} could not save step {self.step}"
            explained = self._reported() or write_failure(
                error, failure, self.final, self._needed_bytes
            )
        # Report before the folder is removed, so that other ranks know why. Report again
        # afterwards, because a full disk may have room only then.
        self._report(explained)
        remove(self.temp)
        self._report(explained)
        self.error = explained
        return explained

    def _report(self, error: CheckpointError) -> None:
        with suppress(OSError):
            if not self.failed.exists():
                self.failed.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.failed, {"message": error.args[0], "hint": error.hint})

    def _leave(self) -> None:
        """Stop waiting for others and remove what can't be completed, because the process exits
        without `wait()`.
        """
        self._exiting.set()
        self._thread.join(EXIT_WAIT_S)


class _Exiting(Exception):
    """Raised if the process ends while a save runs."""


def _summary(path: Path) -> dict[str, Any]:
    """Return the size and the checksum of a file, as COMMIT lists them."""
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            CHECKSUM: hashlib.file_digest(file, xxhash.xxh3_128).hexdigest(),
        }


def committed_by(folder: Path) -> str | None:
    """Return the token of the save that committed a folder; None if there is no such folder, or
    Paceline did not commit it.
    """
    try:
        token: str = json.loads((folder / COMMIT).read_text())["save"]
        return token
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _publish(temp: Path, final: Path) -> None:
    """Give a complete folder its name. At every moment a complete checkpoint of the step exists.

    An older folder of the same name is first set aside, where `newest_checkpoint` still finds it,
    and is removed at the end.
    """
    fsync(temp)
    aside = final.with_name(f".{final.name}.replaced")
    if final.exists():
        remove(aside)
        final.rename(aside)
    temp.rename(final)
    fsync(final.parent)
    remove(aside)


def write_failure(error: Exception, failure: str, path: Path, needed_bytes: int) -> CheckpointError:
    """Return the failure as a message for a user: which rank and path, what the disk has, what to
    do.
    """
    if not isinstance(error, OSError):
        return CheckpointError(f"{failure} to {path}: {type(error).__name__}: {error}")
    folder, free_bytes = _disk_of(path)
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why += f" ({_readable(needed_bytes)} needed, {_readable(free_bytes)} free)"
        hint = "free some space or use another folder (--run DIR)"
    elif error.errno == errno.EFBIG:
        hint = f"raise the limit of a file's size, of this process (ulimit -f) or of what {folder} is on"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = f"make {folder} writable for this user, or use another folder (--run DIR)"
    elif error.errno == errno.ENOENT:
        hint = "was the run folder removed, renamed or unmounted? --run DIR --resume goes on where it is now"
    else:
        hint = f"check {error.filename or folder}"
    return CheckpointError(
        f"{failure} to {path}: {why}",
        hint=f"{hint}; checkpoints that were complete before are untouched",
    )


def _disk_of(path: Path) -> tuple[Path, int]:
    """Return the innermost readable folder on the way to a path, and the free bytes of its disk."""
    for parent in path.absolute().parents:
        with suppress(OSError):
            if parent.is_dir():
                return parent, shutil.disk_usage(parent).free
    return Path(path.absolute().anchor), 0


def _readable(bytes_: int) -> str:
    """Return a number of bytes as text with a unit.

    >>> _readable(3 * 2**20)
    '3.0 MiB'
    """
    power = min(int(math.log(max(bytes_, 1), 1024)), 4)
    return f"{bytes_ / 1024**power:.{1 if power else 0}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
