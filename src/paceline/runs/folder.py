"""The run folder: one run has one folder, to which one process writes. Its files record how the run
was made.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.base.errors import PacelineError, PeerLost, UsageError
from paceline.base.files import remove, write_json, write_text
from paceline.launch.process.failure import RankFailed

# The files that a run writes into its folder. `check_free` takes any of these as the sign of an
# earlier run.
(
    PLAN,
    SUMMARY,
    METRICS,
    MODEL,
    JOB,
    CHECKPOINTS,
    PREDICTED,
    SPLIT,
    EVENTS,
    BEST,
    LOGGED,
    LOGGERS,
    ORIGIN,
    JOURNAL,
    SPIKES,
    STUDY,
) = (
    "plan.json",
    "summary.json",
    "metrics.jsonl",
    "model.safetensors",
    "job.json",
    "checkpoints",
    "predicted.json",
    "split.json",
    "events.jsonl",
    "best.json",
    "logged.jsonl",
    "loggers.json",
    "origin.json",
    "journal.jsonl",
    "spikes",
    "study.json",
)

COMMIT = "COMMIT"  # the file of a checkpoint that is written last
_LOCK_POLL_S = 0.2
_ORPHANS_S = 10.0  # that processes of a killed run may take to end, on a busy machine
# Locks of folders that are held by this process, or by a process from which it was forked.
_locks: list[int] = []
_BUILDING = ("start", "build", "input")  # phases of a rank before its first forward


def fresh_name(stem: str) -> Path:
    """Return `runs/STEM-DATE-TIME`, a folder that doesn't exist yet."""
    base = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    tries = [base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 1000))]
    return next(path for path in tries if not path.exists())


def checkpoint_of(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return Path(run_dir) / CHECKPOINTS / f"step-{step}"


def checkpoints_of(run_dir: Path) -> dict[int, Path]:
    """Return the folders of the checkpoints that were written to their end, damaged or not, by
    step.
    """
    return {
        int(number): path
        for path in (Path(run_dir) / CHECKPOINTS).glob("step-*")
        if (number := path.name.removeprefix("step-")).isdecimal() and (path / COMMIT).is_file()
    }


def check_free(run_dir: Path, *, resume: bool) -> None:
    """Refuse a folder that holds an earlier run, unless that run is resumed.

    Raises:
        UsageError: the folder can't be used; its hint says what to do.
    """
    try:
        if run_dir.exists() and not run_dir.is_dir():
            raise UsageError(f"{run_dir} is a file and not a run folder")
        for path in run_dir.iterdir() if run_dir.exists() else ():
            if (
                path.exists() and not path.is_file() and not path.is_dir()
            ):  # opening a pipe would wait for its other end
                raise UsageError(
                    f"{path} is a pipe, a socket or a device, and no file of a run",
                    hint="remove it",
                )
    except OSError as error:  # the folder can't be read, or its name is too long
        raise _unwritable(run_dir, error) from error
    if not resume and any((run_dir / name).exists() for name in (METRICS, SUMMARY, CHECKPOINTS)):
        raise UsageError(
            f"{run_dir} already holds a run",
            hint="--resume goes on with it; another --run starts anew",
        )


def writable(folder: Path) -> Path:
    """Return the folder, and create it if it doesn't exist.

    Raises:
        UsageError: the folder can't be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def write_page(path: Path, text: str) -> Path:
    """Write a page where the user wants it, and return its path. Its folder is created if it
    doesn't exist.

    Raises:
        UsageError: the folder or the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UsageError(
            f"can't write the page {path}: {error.strerror}", hint="name another file"
        ) from error
    return path


@contextmanager
def claimed(run_dir: Path) -> Iterator[Path]:
    """Hold the folder for one live run.

    The lock belongs to the kernel. If a run is killed, its lock ends with its last process, which
    is waited for, as it may end a little later than the first one. On a file system without locks
    nobody is refused. A run that fails leaves no unfinished checkpoint behind. If its job can't be
    built, it leaves no new folder behind either.

    Raises:
        UsageError: a live run holds the folder, or the folder can't be written to.
    """
    own_pid, is_new = os.getpid(), not run_dir.exists()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(run_dir / ".lock", os.O_WRONLY | os.O_CREAT, 0o666)  # forks keep the lock
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    try:
        deadline_s = time.monotonic() + _ORPHANS_S
        while not _locked(lock):
            holder = (run_dir / ".lock").read_text().strip()
            if _runs(holder) or time.monotonic() > deadline_s:
                raise UsageError(
                    f"{run_dir} is in use by a live run (process {holder or 'unknown'})",
                    hint="wait for it, or name another folder with --run",
                )
            time.sleep(_LOCK_POLL_S)
        try:
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
        except OSError as error:
            raise _unwritable(run_dir, error) from error
        _locks.append(lock)
        try:
            yield run_dir
        except BaseException as error:
            if is_new and _never_began(run_dir, error):
                shutil.rmtree(run_dir, ignore_errors=True)
            else:
                remove_unfinished(run_dir)
            raise
    finally:
        if lock in _locks:
            _locks.remove(lock)
        if (
            os.getpid() == own_pid
        ):  # the run is over, although forks of this process may end a little later
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _runs(pid: str) -> bool:
    """Return whether a process of this host has this number; True for a text that is none."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except (PermissionError, ValueError):
        pass
    return True


def _locked(descriptor: int) -> bool:
    """Lock an open file, and return whether nobody else holds its lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass  # a file system without locks, as Lustre can be
    return True


def unclaim_in_forks() -> None:
    """Let forks of this process, from now on, hold no folder.

    A rank calls this, because processes that its job starts may outlive it, such as those of a pool
    that hang.
    """

    def close() -> None:
        while _locks:
            os.close(_locks.pop())

    os.register_at_fork(after_in_child=close)


@contextmanager
def kept_unless_trained(run_dir: Path) -> Iterator[None]:
    """Keep the figures, the plan and the model of a run that was complete, unless the block takes a
    step of it.
    """
    try:
        is_complete = bool(read_summary(run_dir))
    except UsageError:  # a resumed run writes a new summary
        is_complete = False
    model, aside, last = run_dir / MODEL, run_dir / f".{MODEL}.before", _last_step(run_dir)
    aside.unlink(missing_ok=True)  # left by a run that was killed inside this block
    if not is_complete:
        yield
        return
    documents = {
        path: path.read_bytes()
        for name in (PLAN, SUMMARY, PREDICTED, SPLIT, ORIGIN, JOB)
        if (path := run_dir / name).exists()
    }
    if model.exists():
        model.replace(aside)
    try:
        yield
    finally:
        if _last_step(run_dir) == last:
            for path, content in documents.items():
                path.write_bytes(content)
            if aside.exists():
                aside.replace(model)
        aside.unlink(missing_ok=True)


def _last_step(run_dir: Path) -> bytes:
    """Return the line of the newest step."""
    lines = (run_dir / METRICS).read_bytes().splitlines() if (run_dir / METRICS).exists() else []
    return next((line for line in reversed(lines) if b'"step_s"' in line), b"")


def wait_until_unclaimed(run_dir: Path, *, timeout_s: float) -> None:
    """Wait until no live run holds the folder. If a host is lost, its last ranks may hold the
    folder for a while.

    Raises:
        PeerLost: a run still holds the folder after the timeout.
    """
    if not run_dir.exists():  # the ranks were lost before they had made it
        return
    deadline_s = time.monotonic() + timeout_s
    with open(run_dir / ".lock", "a+") as lock:
        while not _locked(lock.fileno()):
            if time.monotonic() > deadline_s:
                raise PeerLost(
                    f"{run_dir} is still held by ranks that were lost {timeout_s:.0f} s ago",
                    hint="end them, then --resume goes on from the newest checkpoint",
                )
            time.sleep(_LOCK_POLL_S)


def remove_if_never_began(run_dir: Path, error: BaseException) -> None:
    """Remove a folder that holds no more information than this error; see `_never_began`."""
    if _never_began(run_dir, error):
        shutil.rmtree(run_dir, ignore_errors=True)


def _never_began(run_dir: Path, error: BaseException) -> bool:
    """Whether an error of the job or the request ended a run before its first step.

    Such an error is in the model, the optimizer or the first batch. The folder then holds no more
    information than the error.
    """
    metrics = run_dir / METRICS
    if (run_dir / CHECKPOINTS).exists() or (metrics.exists() and metrics.stat().st_size):
        return False
    failure = error.failure if isinstance(error, RankFailed) else None
    if failure is None or failure.exit_code != PacelineError.exit_code:
        return isinstance(error, PacelineError) and error.exit_code == UsageError.exit_code
    return failure.phase in _BUILDING and failure.step <= 1


def _unwritable(run_dir: Path, error: OSError) -> UsageError:
    return UsageError(
        f"can't write the run folder {run_dir}: {error.strerror}", hint="--run DIR names another"
    )


def remove_unfinished(run_dir: Path, *, but: str | None = None) -> None:
    """Remove the unfinished saves that earlier launches left.

    but: the attempt whose saves are kept.
    """
    for path in (run_dir / CHECKPOINTS).glob(".step-*"):
        name, _, owner = path.name[1:].removesuffix(".failed").partition(".")
        # If a replacement was interrupted, the folder that it set aside is the only copy until the
        # step exists again.
        if owner == "replaced" and not (run_dir / CHECKPOINTS / name).exists():
            continue
        if owner.rpartition("-")[0] != but:
            remove(path)
    # A model whose export was interrupted, and weights that were written for callbacks.
    for path in (*run_dir.glob(f".{MODEL}.*.tmp"), *run_dir.glob(".weights-*")):
        remove(path)


def write_failure(run_dir: Path, plan: str, failed: RankFailed) -> None:
    """Write why a run failed, in place of its summary. If the disk is full, nothing is written."""
    with suppress(OSError):
        write_json(run_dir / SUMMARY, {"plan": plan, "failure": failed.failure.to_dict()})


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the figures of a run that ended; empty for a run that did not.

    Raises:
        UsageError: the file is damaged.
    """
    document = read_document(run_dir, SUMMARY) if (run_dir / SUMMARY).exists() else {}
    if document and not {"failure", "steps"} & document.keys():
        raise UsageError(f"{run_dir / SUMMARY} is damaged: it has no 'steps'")
    return {} if "failure" in document else document


def read_failure(run_dir: Path) -> dict[str, Any]:
    """Return why a run failed, as `write_failure` wrote it; empty for any other run.

    Raises:
        UsageError: the file is damaged.
    """
    document = read_document(run_dir, SUMMARY) if (run_dir / SUMMARY).exists() else {}
    return dict(document.get("failure") or {})


def read_document(run_dir: Path, name: str) -> dict[str, Any]:
    """Read a JSON document of a run folder.

    Raises:
        UsageError: the folder or the document doesn't exist or can't be read.
    """
    if name == JOB and not (run_dir / name).exists() and (run_dir / PLAN).exists():
        raise UsageError(
            f"{run_dir} does not say which job it is of: pl.train was given a Job, and no file",
            hint="pl.open(run, job=...).model() builds its model",
        )
    if not (run_dir / name).exists():
        raise UsageError(
            f"{run_dir} is not the folder of a run: it has no {name}",
            hint="paceline train FILE --run DIR makes one",
        )
    from paceline.runs import documents  # msgspec takes a moment to load

    kinds: dict[str, Any] = {
        PLAN: documents.PlanDocument,
        JOB: documents.JobDocument,
        SUMMARY: documents.SummaryDocument,
        PREDICTED: documents.PredictedDocument,
    }
    return documents.read(run_dir / name, kinds.get(name, dict[str, Any]))
