"""What a rank that failed leaves behind, and which of several failures was the cause."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.base import errors, signals
from paceline.base.errors import (
    OutOfMemory,
    PacelineError,
    PeerLost,
    Preempted,
    in_words,
    on_full_disk,
    printable,
    with_hint,
)
from paceline.base.user_code import is_users, user_frames
from paceline.launch.process.heartbeats import Heartbeat

# What torch's communication says, in a RuntimeError, on a rank whose peer went away.
_PEER_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "ncclremoteerror",
    "ncclsystemerror",
    "nccl communicator was aborted",
    "socket timeout",
    "timed out waiting",
    "application timeout caused pair closure",
    "timed out after",
)
_MEMORY_WORDS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "cuda out of memory",
    "cuda error: out of memory",
    "hip out of memory",
    "hip error: out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "failed to cuda calloc",
    "cuda failure 2 'out of memory'",
)
# Errors of a GPU and not of a program: cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable,
# cudaErrorDevicesUnavailable, cudaErrorNoDevice, in the words of cudaGetErrorString, by which torch tells of them.
# Source: "CUDA Runtime API", data types, cudaError.
_DEVICE_WORDS = (
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "no cuda-capable device is detected",
    "cuda-capable device(s) is/are busy or unavailable",
)
# What torch says of a process of a data loader that ended without an exception.
_LOADER_WORDS = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)")
_LOADER_HINT = (
    "if nobody killed it, the kernel may have run out of memory (see dmesg): --loader-workers N sets how "
    "many there are; --resume goes on from the last checkpoint"
)
# Errors of kernels. The host hears of them at a later call, which is then taken for their place.
_LATE_WORDS = (
    "device-side assert",
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
)
# What torch says where a process makes its group again, and what to do: a script for torchrun was made into a job.
_GROUP_WORDS = "initialize the default process group twice"
_GROUP_HINT = (
    "ranks make torch's process group themselves: leave init_process_group out of the job, or put it under "
    "`if __name__ == '__main__':`; 'paceline run' is for a script that keeps its own loop"
)
_DEVICE_HINT = (
    "paceline doctor reads the errors of GPUs; --resume --devices NAMES goes on from the last checkpoint "
    "on other ones, and with a smaller --plan on fewer"
)
_LATE_HINT = (
    "a GPU's kernels run later than the lines that start them, so the place above may be wrong: "
    "CUDA_LAUNCH_BLOCKING=1 makes each line wait for its kernel and shows the true place"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first exception of one rank.

    heard: The rank only learned of what happened elsewhere; another rank's report is the cause.
    where: file:line, in the user's code if any frame is there.
    hint: What to do about it.
    """

    rank: int
    host: str
    kind: str
    message: str
    exit_code: int
    heard: bool
    step: int
    phase: str
    where: str
    trace: str
    time_s: float
    hint: str | None = None

    @property
    def is_stop(self) -> bool:
        """Nothing failed: the run was asked to stop."""
        return self.kind == Preempted.__name__

    @property
    def reason(self) -> str:
        """For programs: "out_of_memory", "peer_lost", "preempted", the name of another error of Paceline's, such as
        "training_error", or "exception"."""
        for error in (OutOfMemory, PeerLost, Preempted):
            if self.exit_code == error.exit_code:
                return _snake(error.__name__)
        return _snake(self.kind) if hasattr(errors, self.kind) else "exception"

    def to_dict(self) -> dict[str, Any]:
        """For programs; see docs/errors.md."""
        return {
            "reason": self.reason,
            "exit_code": self.exit_code,
            "rank": self.rank,
            "host": self.host,
            "step": self.step,
            "phase": self.phase,
            "where": self.where or None,
            "error": self.kind,
            "message": self.message,
            "hint": self.hint,
            "time": self.time_s,
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        return cls(**json.loads(text))

    def asked_by(self, number: int) -> Failure:
        """The report of a stop that this signal asked for: ranks hear of each request as SIGTERM."""
        name = f"stopped by {signal.SIGTERM.name}"
        return replace(
            self, message=self.message.replace(name, f"stopped by {signal.Signals(number).name}", 1)
        )

    @property
    def report(self) -> str:
        """Where it happened, and what."""
        if self.is_stop:
            return self.message
        place = f"rank {self.rank} on {self.host} failed in {Heartbeat(self.step, self.phase, 0.0)}"
        at = f", at {self.where}" if self.where else ""
        return f"{place}{at}:\n{self.message}" + (f"\n\n{self.trace}" if self.trace else "")

    def describe(self, log: Path | None = None) -> str:
        """The message a user reads: where, what, what next."""
        shown = with_hint(self.report, self.hint)
        return shown if self.is_stop else with_log(shown, log)


def _snake(name: str) -> str:
    """
    >>> _snake("OutOfMemory")
    'out_of_memory'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def with_log(message: str, log: Path | None) -> str:
    """The message, and where a rank's log is."""
    return f"{message}\n\nfull log: {log}" if log else message


def failure_of(error: BaseException, *, rank: int, sign: Heartbeat) -> Failure:
    """The report of an exception. Paceline's own errors need no traceback: their message says it all."""
    error = (None if user_frames(error)[0] else on_full_disk(error)) or error
    notes = getattr(error, "__notes__", [])
    text = "\n".join([in_words(error), *notes])
    lowered = text.lower()
    exit_code, heard, message, trace = 1, bool(getattr(error, "heard", False)), text, ""
    hint: str | None = None
    where, frames = user_frames(error)
    if isinstance(error, PacelineError):
        exit_code, message, hint = error.exit_code, Exception.__str__(error), error.hint
        where = where or getattr(error, "where", "")
        trace = traced_cause(error) or getattr(error, "trace", "")
    elif is_about_memory(error):
        exit_code = OutOfMemory.exit_code
        message = f"out of memory: {text.partition(': ')[2]}"
        hint = "microbatches=M or recompute=full need less memory, and shard=N splits the state"
    elif isinstance(error, RuntimeError) and any(words in lowered for words in _PEER_WORDS):
        exit_code, heard = PeerLost.exit_code, True
    elif frames and (
        where or not notes
    ):  # a note says what of the job failed, where no line of it did
        trace = traced(error).rstrip()
    if (
        message == text
        and isinstance(error, RuntimeError)
        and any(words in lowered for words in _LATE_WORDS)
    ):
        hint = _LATE_HINT
    if isinstance(error, ValueError) and _GROUP_WORDS in text:
        hint = _GROUP_HINT
    if isinstance(error, RuntimeError) and any(words in lowered for words in _DEVICE_WORDS):
        heard, trace, hint = False, "", _DEVICE_HINT
        message = f"its GPU failed: {text.partition(chr(10))[0]}"
    kind = next(
        (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__),
        type(error).__name__,
    )
    if isinstance(error, RuntimeError) and _LOADER_WORDS.match(text.partition(": ")[2]):
        kind, exit_code, heard, where, trace = PeerLost.__name__, PeerLost.exit_code, False, "", ""
        message = f"a process that reads its data was killed: {text.partition(': ')[2].strip()}"
        hint = _LOADER_HINT
    culprit = getattr(error, "rank", None) if isinstance(error, PeerLost) else None
    return Failure(
        rank if culprit is None else culprit,
        socket.gethostname(),
        kind,
        printable(message),
        exit_code,
        heard,
        sign.step,
        sign.phase,
        printable(where),
        printable(trace),
        time.time(),
        hint and printable(hint),
    )


def traced_cause(error: PacelineError) -> str:
    """The user's frames of an error of the job's own code that is told in our words."""
    cause = error.__cause__
    return (
        traced(cause).rstrip()
        if cause is not None
        and not isinstance(cause, PacelineError)
        and any(is_users(frame.filename) for frame in traceback.extract_tb(cause.__traceback__))
        else ""
    )


def is_about_memory(error: BaseException) -> bool:
    """Whether something could not be allocated, by the host or by any kind of device."""
    text = in_words(error).lower()
    named = any(
        kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__
    )  # torch's own, without its import
    return isinstance(error, MemoryError) or named or any(words in text for words in _MEMORY_WORDS)


def traced(error: BaseException) -> str:
    """The traceback of an error, of the user's frames where there are any; nothing without frames."""
    where, frames = user_frames(error)
    title = (
        "Traceback (most recent call last, your code only):"
        if where
        else "Traceback (most recent call last):"
    )
    return f"{title}\n{''.join(traceback.format_list(frames))}" if frames else ""


class RankFailed(PacelineError):
    """A rank failed; the message is its report. `failure` is the cause among all ranks' reports.

    log: of that rank; the message ends with its path as long as it is there. run_dir: of the run that it ended, in the
    process that tells of it.
    """

    run_dir: Path | None = None

    def __init__(self, failure: Failure, log: Path | None = None) -> None:
        super().__init__(failure.report, hint=failure.hint)
        self.failure, self.log = failure, None if failure.is_stop else log
        self.exit_code = failure.exit_code

    def __str__(self) -> str:
        return with_log(
            super().__str__(), self.log if self.log is not None and self.log.exists() else None
        )


def ended_by(cause: Failure, log: str | None, interrupted: Sequence[int]) -> RankFailed:
    """The error of a run. interrupted: signals that asked it to stop."""
    if interrupted and cause.is_stop:
        cause = cause.asked_by(interrupted[0])
    error = RankFailed(cause, Path(log) if log else None)
    if interrupted and cause.is_stop and interrupted[0] == signal.SIGINT:
        error.exit_code = 128 + signal.SIGINT
    return error


def killed(
    rank: int, exit_code: int | None, sign: Heartbeat, *, with_server: bool = False
) -> Failure:
    """The report of a rank that ended without one: a signal, or an exit nobody expected. with_server: whether it ended
    because the fork server did."""
    hint = None
    if exit_code is not None and exit_code < 0:
        name = _signal_name(-exit_code)
        how = (
            "the process that forks ranks was killed, and all ranks with it"
            if with_server
            else (f"it was killed by {name}")
        )
        if name == "SIGKILL":
            hint = (
                "if nobody sent it, the kernel may have run out of memory (see dmesg); "
                "--resume goes on from the last checkpoint"
            )
        elif name == "SIGABRT":
            hint = (
                "gloo ends a rank so whose peers exchange another tensor: a condition on a rank's own samples "
                "holds on some ranks alone; the last lines of its log say more"
            )
    else:
        how = f"it ended with exit code {exit_code} and no exception"
    return _ended(PeerLost, rank, how, sign, hint)


def _signal_name(number: int) -> str:
    """Realtime signals have no names, but for the first and the last one.

    >>> _signal_name(9), _signal_name(40)
    ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ended_alone(
    rank: int, exit_code: int | None, sign: Heartbeat, *, with_server: bool = False
) -> Failure:
    """The report of a rank that ended without one: see `killed`, or a scheduler's signal that was sent to it alone."""
    if exit_code is None or -exit_code not in signals.PREEMPTING:
        return killed(rank, exit_code, sign, with_server=with_server)
    alone = stopped(rank, -exit_code, sign)
    return replace(alone, message=f"rank {rank} was {alone.message}")


def _ended(
    kind: type[PacelineError], rank: int, how: str, sign: Heartbeat, hint: str | None
) -> Failure:
    """The report of a rank that could not make one."""
    return Failure(
        rank,
        socket.gethostname(),
        kind.__name__,
        how,
        kind.exit_code,
        heard=False,
        step=sign.step,
        phase=sign.phase,
        where="",
        trace="",
        time_s=time.time(),
        hint=hint,
    )


def stopped(rank: int, number: int, sign: Heartbeat) -> Failure:
    """The report of a rank that our own signal ended where it could not stop by itself."""
    how = f"stopped by {signal.Signals(number).name} in {sign}, where no checkpoint can be saved"
    hint = "--resume goes on from the last checkpoint, if there is one"
    return _ended(Preempted, rank, how, sign, hint)


def left_in(store: Any, numbers: Iterable[int]) -> list[Failure]:
    """Return the reports that ranks, or hosts, of these numbers have left in a store."""
    keys = [f"failure/{number}" for number in numbers]
    return [Failure.from_json(store.get(key).decode()) for key in keys if store.check([key])]


def cause_of(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from: real ones before those who only heard, then the earliest."""
    return min(failures, key=lambda failure: (failure.heard, failure.is_stop, failure.time_s))
