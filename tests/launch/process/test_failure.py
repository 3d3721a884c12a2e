"""Of all that goes wrong when a rank fails, one message reaches the user: the first cause, with its place."""

from __future__ import annotations

import pickle
import signal
import socket
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.base.errors import (
    CheckpointError,
    JobError,
    OutOfMemory,
    PacelineError,
    PeerLost,
    Preempted,
    TrainingError,
)
from paceline.base.user_code import is_users
from paceline.launch.process import failure
from paceline.launch.process.failure import (
    Failure,
    RankFailed,
    cause_of,
    failure_of,
    killed,
    stopped,
)
from paceline.launch.process.heartbeats import Heartbeat

SIGN = Heartbeat(4, "forward", 0.0)


def raised(work: Any) -> BaseException:
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def report(error: BaseException | Any, rank: int = 1) -> Failure:
    return failure_of(
        error if isinstance(error, BaseException) else raised(error), rank=rank, sign=SIGN
    )


def test_an_exception_of_the_user():
    """The report says rank, host, step, phase, the user's file and line, and shows the user's frames alone."""
    rank_failure = report(lambda: torch.nn.Linear(3, 2)(torch.zeros(5)))
    assert (
        rank_failure.rank,
        rank_failure.step,
        rank_failure.phase,
        rank_failure.exit_code,
        rank_failure.heard,
    ) == (1, 4, "forward", 1, False)
    assert rank_failure.where.startswith(f"{__file__}:")
    shown = rank_failure.describe(Path("logs/rank-1.log"))
    assert "\n\nTraceback (most recent call last, your code only):\n" in shown
    assert "torch.nn.Linear(3, 2)" in shown
    assert "site-packages" not in shown
    assert shown.startswith(
        f"rank 1 on {socket.gethostname()} failed in step 4 (forward), at {rank_failure.where}:\n"
        "RuntimeError: "
    )
    assert shown.endswith("\n\nfull log: logs/rank-1.log")


def test_an_exception_of_ours_speaks_for_itself():
    """Paceline's own errors keep their exit code and are shown without a traceback."""
    rank_failure = report(CheckpointError("the disk is full", hint="free some"))
    assert (rank_failure.exit_code, rank_failure.trace) == (1, "")
    assert rank_failure.describe().endswith(":\nthe disk is full\n\nhint: free some")
    assert report(Preempted("stop")).exit_code == Preempted.exit_code


def test_the_line_behind_an_error_of_ours():
    """Where our error stands for one of the user's code, that code's line is told."""

    def users_code() -> int:
        return int("x")

    scope: dict[str, Any] = {"users_code": users_code, "TrainingError": TrainingError}
    library_code = """
try:
    users_code()
except ValueError as error:
    failed = TrainingError("sample 3 can't be read")
    failed.__cause__ = error
"""
    exec(compile(library_code, failure.__file__, "exec"), scope)
    line = users_code.__code__.co_firstlineno + 1
    assert report(scope["failed"]).where == f"{__file__}:{line}"


def test_a_line_survives_the_way_from_a_loader_worker():
    """The place noted on an error is told where its frames did not travel."""
    error = TrainingError("sample 3", hint="look at it")
    error.where = "data.py:7"  # type: ignore[attr-defined]
    rank_failure = report(pickle.loads(pickle.dumps(error)))
    assert (rank_failure.where, rank_failure.message, rank_failure.hint) == (
        "data.py:7",
        "sample 3",
        "look at it",
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
        ),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        torch.OutOfMemoryError("Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("HIP out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError(
            "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
        ),
    ],
    ids=str,
)
def test_out_of_memory(error: Exception):
    """Memory that ran out has an exit code and a hint of its own."""
    rank_failure = report(error)
    assert (rank_failure.exit_code, rank_failure.heard) == (OutOfMemory.exit_code, False)
    assert "microbatches=M or recompute=full" in str(rank_failure.hint)


@pytest.mark.parametrize(
    ("error", "is_late"),
    [
        (
            RuntimeError(
                "CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"
            ),
            True,
        ),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (AssertionError("device-side assert"), False),
        (RuntimeError("CUDA error: invalid device ordinal"), False),
    ],
)
def test_an_error_of_a_kernel_may_show_a_wrong_line(error: Exception, is_late: bool):
    """The host hears of it at a later call."""
    rank_failure = report(error)
    assert rank_failure.exit_code == 1 and str(error) in rank_failure.message
    assert ("\n\nhint: a GPU's kernels run later" in rank_failure.describe()) == is_late
    assert ("CUDA_LAUNCH_BLOCKING=1 makes each line wait" in str(rank_failure.hint)) == is_late


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    ],
)
def test_a_gpu_that_fails_is_told_from_a_program_that_does(text: str):
    """The rank is at fault, and other GPUs are the way out."""
    rank_failure = report(RuntimeError(f"{text}\nCompile with TORCH_USE_CUDA_DSA"))
    assert rank_failure.message == f"its GPU failed: RuntimeError: {text}"
    assert (rank_failure.exit_code, rank_failure.heard, rank_failure.trace) == (1, False, "")
    assert "--resume --devices NAMES goes on" in str(rank_failure.hint)
    assert "its GPU failed" not in report(ValueError(text)).message


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41233",
        "Application timeout caused pair closure",
        "NCCL error: ncclRemoteError",
        "Timed out waiting 60000ms for recv",
        "Gloo connectFullMesh failed with Connection refused, remote=[127.0.0.1]:55",
    ],
)
def test_what_a_rank_hears_of_a_peer(text: str):
    """A broken collective is another rank's doing."""
    rank_failure = report(RuntimeError(text))
    assert (rank_failure.heard, rank_failure.exit_code) == (True, PeerLost.exit_code)


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid 123) is killed by signal: Killed. ",
        "DataLoader worker (pid(s) 4355) exited unexpectedly",
    ],
)
def test_a_loader_worker_that_is_killed_is_a_lost_process(text: str):
    """Nothing raised an error, so the rank may start again as if it had been killed itself."""
    rank_failure = report(RuntimeError(text))
    assert (rank_failure.kind, rank_failure.heard, rank_failure.exit_code, rank_failure.trace) == (
        "PeerLost",
        False,
        PeerLost.exit_code,
        "",
    )
    assert rank_failure.message.startswith(
        "a process that reads its data was killed"
    ) and "--loader-workers" in str(rank_failure.hint)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("Connection refused"),
        TimeoutError("timed out after 9 s"),
        BrokenPipeError("Broken pipe"),
    ],
)
def test_the_users_own_network_is_not_a_peer(error: Exception):
    """A data set that can't reach its server is a failure of this rank, though the words are alike."""
    rank_failure = report(error)
    assert (rank_failure.heard, rank_failure.exit_code) == (False, 1)


def test_the_first_cause_wins():
    """Real failures come before those who only heard, whenever they were reported; of two the earlier one."""
    late = replace(report(ValueError("late"), rank=0), time_s=20.0)
    early = replace(report(ValueError("early"), rank=2), time_s=10.0)
    heard = replace(report(RuntimeError("Connection closed by peer"), rank=3), time_s=1.0)
    preempted = replace(report(Preempted("stop"), rank=1), time_s=2.0)
    assert cause_of([late, heard, preempted, early]) is early
    assert cause_of([heard, preempted]) is preempted
    assert cause_of([heard]) is heard


def test_a_report_travels_as_json():
    """Nothing is lost between a rank and its parent."""
    rank_failure = report(lambda: 1 / 0)
    assert Failure.from_json(rank_failure.to_json()) == rank_failure


def test_a_rank_that_was_killed():
    """The signal is named; for SIGKILL the usual sender is, too."""
    rank_failure = killed(2, -signal.SIGKILL, SIGN)
    assert (rank_failure.exit_code, rank_failure.heard) == (PeerLost.exit_code, False)
    shown = rank_failure.describe()
    assert "failed in step 4 (forward):\nit was killed by SIGKILL" in shown
    assert "the kernel may have run out of memory" in shown
    assert "SIGSEGV" in killed(2, -signal.SIGSEGV, SIGN).message
    assert "it ended with exit code 7 and no exception" in killed(2, 7, SIGN).message


def test_a_rank_that_we_stopped():
    """A request to stop that comes where no checkpoint can be saved is no failure of the rank."""
    rank_failure = stopped(0, signal.SIGTERM, Heartbeat(0, "build", 0.0))
    assert (rank_failure.kind, rank_failure.exit_code) == ("Preempted", Preempted.exit_code)
    assert rank_failure.describe().startswith(
        "stopped by SIGTERM in start (build), where no checkpoint can be saved"
    )


def test_a_preempted_run_did_not_fail():
    """The message of a run that stopped as it was asked to says nothing of failure."""
    assert (
        report(Preempted("stopped by SIGTERM after step 4")).describe(Path("log"))
        == "stopped by SIGTERM after step 4"
    )


def test_the_error_that_is_raised():
    """RankFailed keeps message, hint, exit code and report apart."""
    error = RankFailed(report(OutOfMemory("no room", hint="buy some")))
    assert isinstance(error, PacelineError)
    assert (error.exit_code, error.failure.rank, error.hint) == (
        OutOfMemory.exit_code,
        1,
        "buy some",
    )
    assert str(error).count("hint:") == 1


@pytest.mark.parametrize(
    "name",
    [
        "/usr/src/app/job.py",
        "/home/me/paceline/examples/01_digits.py",
        "/opt/ml/train.py",
        "job.py",
        __file__,
    ],
)
def test_files_of_the_user(name: str):
    """Wherever the user's code lies, a clone of this project and a container's /usr/src too."""
    assert is_users(name)


@pytest.mark.parametrize(
    "name",
    [
        torch.__file__,
        pytest.__file__,
        failure.__file__,
        signal.__file__,
        "<string>",
        "<frozen importlib._bootstrap>",
        f"{sysconfig.get_path('scripts')}/paceline",
        "/usr/lib/python3/dist-packages/numpy/core.py",
    ],
)
def test_files_that_are_not_the_users(name: str):
    """Libraries, Python itself, what is made from text, and our own code."""
    assert not is_users(name)


def test_a_hint_does_not_repeat_the_log(tmp_path: Path):
    """The message of a failed rank says once where its log is, and its hint is the hint alone."""
    log = tmp_path / "rank-1.log"
    log.touch()
    error = RankFailed(report(JobError("no such thing", hint="name another")), log)

    assert error.hint == "name another"
    assert str(error).endswith(f"no such thing\n\nhint: name another\n\nfull log: {log}")
    log.unlink()
    assert str(error).endswith("no such thing\n\nhint: name another")


def test_a_stop_is_called_by_the_signal_that_asked_for_it():
    """Ranks hear of each request as SIGTERM, and the report names what the command received."""
    rank_failure = stopped(0, signal.SIGTERM, Heartbeat(3, "forward", 0.0))

    assert rank_failure.asked_by(signal.SIGINT).message == rank_failure.message.replace(
        "SIGTERM", "SIGINT"
    )
    assert rank_failure.asked_by(signal.SIGTERM) == rank_failure


@pytest.mark.parametrize(
    ("error", "reason", "exit_code"),
    [
        (ValueError("no"), "exception", 1),
        (TrainingError("nan"), "training_error", 1),
        (MemoryError(), "out_of_memory", 3),
        (RuntimeError("Connection closed by peer"), "peer_lost", 4),
        (JobError("no"), "job_error", 2),
    ],
)
def test_a_failure_has_a_reason_for_programs(error: Exception, reason: str, exit_code: int):
    document = failure_of(error, rank=3, sign=Heartbeat(7, "forward", 0.0)).to_dict()
    assert (document["reason"], document["exit_code"], document["rank"], document["step"]) == (
        reason,
        exit_code,
        3,
        7,
    )
    assert "hint" not in document["message"]
