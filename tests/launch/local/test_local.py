"""Forked ranks: results in order, one message when something fails, and nothing left behind whatever happens."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from conditions import PATIENCE_S, until

from paceline.base import signals
from paceline.base.errors import PacelineError, PeerLost, Preempted
from paceline.base.fork import end_openmp_threads
from paceline.launch.local import ranks as local_ranks
from paceline.launch.process import supervisor, watchdog
from paceline.launch.process.failure import RankFailed
from paceline.launch.process.fault_policy import ALL_NEEDED, FaultPolicy

pytestmark = [pytest.mark.usefixtures("nothing_left")]


def meet(context: Any) -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


def steps_until_stopped(context: Any, begun: Path) -> None:
    """What a run does: finish the step, agree to stop, leave."""
    with context.stoppable():
        meet(context)
        begun.touch()
        for step in range(1, 50_000):
            context.step = step
            context.beat("reduce")
            stop = torch.tensor([float(context.stop_signal is not None)])
            dist.all_reduce(stop)
            if stop:
                raise Preempted(f"stopped by {context.stop_signal} after step {step}")
            time.sleep(0.01)


# --- When all goes well -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
def test_results_come_in_rank_order(run_ranks: Callable[..., Any], count: int):
    """Each rank knows its place; results are JSON and stand in rank order, whoever is first."""

    def body(context: Any) -> dict[str, Any]:
        time.sleep(0.05 * (count - context.rank))
        return {
            "rank": context.rank,
            "of": context.world_size,
            "here": context.local_world_size,
            "device": str(context.device),
            "sum": meet(context) if count > 1 else 1.0,
        }

    assert run_ranks(body, count) == [
        {"rank": rank, "of": count, "here": count, "device": "cpu", "sum": float(count)}
        for rank in range(count)
    ]


def test_a_result_larger_than_a_pipe(run_ranks: Callable[..., Any]):
    """A long result is read while it is written."""
    assert run_ranks(lambda context: [context.rank] * 300_000, 2) == [[0] * 300_000, [1] * 300_000]


def test_all_ranks_of_a_launch_share_its_name(run_ranks: Callable[..., Any]):
    """The attempt is the same on all ranks and another at the next launch."""
    first, second = (run_ranks(lambda context: context.attempt, 2) for _ in range(2))
    assert len(set(first)) == len(set(second)) == 1
    assert first != second


def test_cores_are_cut_over_the_ranks(
    run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """Ranks share the cores evenly, one thread at least; OMP_NUM_THREADS wins."""
    monkeypatch.setattr("paceline.cluster.cluster.usable_cores", lambda: 5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert run_ranks(lambda context: torch.get_num_threads(), 2) == [2, 2]
    assert run_ranks(lambda context: torch.get_num_threads(), 6) == [1] * 6
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run_ranks(lambda context: torch.get_num_threads(), 2) == [3, 3]


def test_ranks_of_a_parent_that_used_threads(run_ranks: Callable[..., Any]):
    """A parent that computed with two threads can still fork ranks that do."""

    def body(context: Any) -> float:
        torch.set_num_threads(2)
        return float((torch.ones(600, 600) @ torch.ones(600, 600))[0, 0])

    torch.set_num_threads(2)
    try:
        torch.ones(600, 600) @ torch.ones(600, 600)
        assert run_ranks(body, 2, timeout_s=PATIENCE_S) == [600.0, 600.0]
    finally:
        end_openmp_threads()
        torch.set_num_threads(1)


def test_ranks_are_started_from_any_thread(run_ranks: Callable[..., Any]):
    """Signals are the main thread's business; the rest works from others too."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run_ranks(meet, 2)))
    thread.start()
    thread.join()
    assert results == [[2.0, 2.0]]


def test_the_first_process_of_a_container(
    run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """A parent with process id 1, as in a container, is not taken for one that died."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 1)
        patched.setattr(os, "getppid", lambda: 1)
        assert run_ranks(lambda context: context.rank, 1) == [0]


def test_signals_are_as_before_when_the_ranks_have_ended(run_ranks: Callable[..., Any]):
    """The caller's own handlers are put back."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run_ranks(lambda context: None, 1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# --- When a rank fails ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_rank_that_raised_is_reported(run_ranks: Callable[..., Any], tmp_path: Path):
    """Others only hear that a peer left; the message is that of the rank that raised, with its log."""

    def body(context: Any) -> None:
        context.step = 9
        context.beat("backward")
        if context.rank == 2:
            raise KeyError("weights")
        meet(context)

    with pytest.raises(RankFailed) as raised:
        run_ranks(body, 3, run_dir=tmp_path)
    failure = raised.value.failure
    assert (failure.rank, failure.step, failure.phase, failure.kind) == (
        2,
        9,
        "backward",
        "KeyError",
    )
    assert failure.where.startswith(f"{__file__}:")
    assert (
        str(raised.value).count("KeyError") == 2
    )  # in the line of code that raised it, and in the message
    assert str(raised.value).endswith(f"full log: {tmp_path}/logs/rank-2.log")
    assert "KeyError: 'weights'" in (tmp_path / "logs" / "rank-2.log").read_text()


def hang_up() -> None:
    """Also where the tests run under nohup, which has the signal ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGHUP)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "it was killed by SIGKILL"),
        (hang_up, "it was killed by SIGHUP"),
        (lambda: os._exit(7), "it ended with exit code 7 and no exception"),
        (lambda: os._exit(0), "it ended with exit code 0 and no exception"),
    ],
    ids=["SIGKILL", "SIGHUP", "exit 7", "exit 0"],
)
def test_a_rank_that_dies(
    run_ranks: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[], None],
    words: str,
):
    """A rank that dies without a word is named with the step it was in. The others end at once: they hear who died,
    and do not wait for what each of them has to say, for which they would have longer than a test."""
    monkeypatch.setattr(watchdog, "ANSWER_S", 1000.0)
    monkeypatch.setattr(local_ranks, "_GRACE_S", 1000.0)

    def body(context: Any) -> None:
        context.step = 6
        context.beat("optimizer")
        meet(context)
        if context.rank == 1:
            end()
        meet(context)

    with pytest.raises(RankFailed, match=r"rank 1 on .* failed in step 6") as raised:
        run_ranks(body, 2)
    assert words in str(raised.value)
    assert raised.value.exit_code == PeerLost.exit_code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_rank_is_preempted_before_it_can_save(
    run_ranks: Callable[..., Any], number: signal.Signals
):
    """A scheduler's signal to one rank is no failure, and nobody starts it again."""
    with pytest.raises(
        RankFailed, match=rf"rank 0 was stopped by {number.name} in start"
    ) as raised:
        run_ranks(lambda context: os.kill(os.getpid(), number), 1)
    assert (
        raised.value.exit_code == Preempted.exit_code and raised.value.failure.reason == "preempted"
    )


def test_a_process_group_that_nothing_refers_to(run_ranks: Callable[..., Any]):
    """A script that trained with DistributedDataParallel leaves its group in a cycle. If a rank collected that, it
    would wait for threads of the group that are not in its process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()
    try:
        cycle: list[Any] = [dist.group.WORLD]
        cycle.append(cycle)
        dist.destroy_process_group()
        del cycle
        assert run_ranks(lambda context: gc.collect() >= 0, 1) == [True]
    finally:
        gc.enable()


def test_the_only_rank_dies(run_ranks: Callable[..., Any]):
    """One rank alone is a process of its own too."""
    with pytest.raises(
        RankFailed, match=r"rank 0 on .* failed in start \(start\):\nit was killed by SIGKILL"
    ):
        run_ranks(lambda context: os.kill(os.getpid(), signal.SIGKILL), 1)


@pytest.mark.parametrize("restarts", [0, 3])
def test_the_process_that_forks_ranks_dies(
    run_ranks: Callable[..., Any], capfd: Any, restarts: int
):
    """Its ranks die with it, and nothing can start them again: the run says so, and how to go on."""

    def body(context: Any) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises(
        RankFailed, match=r"(?s)the process that forks ranks was killed, .*hint: .*--resume goes on"
    ):
        run_ranks(body, 2, restarts=restarts)
    assert "start again" not in capfd.readouterr().err


def test_a_program_that_ends_itself(run_ranks: Callable[..., Any]):
    """sys.exit in a rank is a failure with a place, not an early success."""
    with pytest.raises(RankFailed, match=r"at .*test_local\.py:\d+:\nSystemExit: 0"):
        run_ranks(lambda context: sys.exit(0), 1)


@pytest.mark.slow
def test_a_rank_that_ignores_everything_is_killed(
    run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A rank that neither hears of the failure nor stops when asked does not keep the others from ending; nor do its
    own forks, which keep its ends of pipes open."""
    monkeypatch.setattr(local_ranks, "_GRACE_S", 1.0)
    monkeypatch.setattr(supervisor, "_REAP_S", 1000.0)

    def body(context: Any) -> None:
        if context.rank == 1:
            raise ValueError("first")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        (tmp_path / "fork").write_text(str(psutil.Process().children()[0].pid))
        time.sleep(1000)

    with pytest.raises(RankFailed, match="ValueError: first"):
        run_ranks(body, 2)
    fork = psutil.Process(int((tmp_path / "fork").read_text()))
    assert fork.status() != psutil.STATUS_ZOMBIE
    fork.kill()


@pytest.mark.predicted_runs
def test_work_beside_a_run_is_in_a_process_of_its_own(
    run_ranks: Callable[..., Any], tmp_path: Path
):
    """A thread of the parent might hold a lock of a library in the moment of a fork: the fork would wait for ever."""

    def beside(board: Any) -> None:
        while not board.over:
            time.sleep(0.01)
        (tmp_path / "seen").write_text(str(os.getpid()))

    threads = threading.active_count()
    run_ranks(lambda context: time.sleep(0.1), 1, idle=beside)
    assert int((tmp_path / "seen").read_text()) != os.getpid()
    assert threading.active_count() == threads


def test_a_failure_does_not_wait_for_work_beside_it(run_ranks: Callable[..., Any]):
    """It is told at once, and the other process is ended."""
    with pytest.raises(RankFailed, match="ValueError"):
        run_ranks(lambda context: int("x"), 1, idle=lambda board: time.sleep(600))


@pytest.mark.predicted_runs
def test_work_beside_a_run_sees_its_signs_of_life(run_ranks: Callable[..., Any], tmp_path: Path):
    """The board is shared, and the run does not end before the work did, which no stop of the ranks ends."""

    def beside(board: Any) -> None:
        until(lambda: board.over)
        os.kill(os.getpid(), signal.SIGTERM)
        (tmp_path / "step").write_text(str(board.read(0).step))

    def body(context: Any) -> None:
        context.step = 3
        context.beat("forward")

    run_ranks(body, 1, idle=beside)
    assert (tmp_path / "step").read_text() == "3"


def test_cuda_in_use_is_refused(run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    """Forks can't share a GPU context: the message says what to do instead."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(PacelineError, match=r"CUDA is already in use(?s:.*)the paceline command"):
        run_ranks(meet, 2)


# --- Ranks that are started again -------------------------------------------------------------------------------


def test_all_ranks_start_again(run_ranks: Callable[..., Any], capfd: pytest.CaptureFixture[str]):
    """Under another name, without what the others left in the store, and each knows who died."""

    def body(context: Any) -> list[Any]:
        assert context.store.add("ranks", 1) <= 2
        meet(context)
        if context.rank == 1 and context.num_starts < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return [
            context.num_starts,
            list(context.deaths),
            context.restarts,
            context.attempt[-1],
            meet(context),
        ]

    assert run_ranks(body, 2, restarts=3) == [[3, [0, 2], 1, "3", 2.0]] * 2
    assert "rank 1: it was killed by SIGKILL; all ranks start again" in capfd.readouterr().err
    with pytest.raises(RankFailed, match="killed by SIGKILL") as raised:
        run_ranks(body, 2, restarts=1)
    assert raised.value.exit_code == 4


def test_a_hung_rank_is_named_once_when_all_start_again(
    run_ranks: Callable[..., Any], capfd: pytest.CaptureFixture[str], hang_begins: Path
):
    def body(context: Any) -> None:
        hang_begins.unlink(missing_ok=True)
        if context.num_starts == 1:
            hang_begins.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    run_ranks(body, 1, restarts=1, timeout_s=1.0)
    assert capfd.readouterr().err.startswith(
        "rank 0: it gave no sign of life for 1 s (its process is stopped"
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_starts_again_alone(
    run_ranks: Callable[..., Any], number: int, monkeypatch: pytest.MonkeyPatch
):
    """One that the others go on without, whether it dies or says nothing more."""
    monkeypatch.setattr(local_ranks, "_SPEAK_S", 0.5)

    def body(context: Any) -> list[Any]:
        context.beat("input")
        if context.rank == 1 and not context.deaths[1]:
            os.kill(os.getpid(), number)
        while context.rank == 0 and not context.store.check(["back"]):
            context.beat("input")
            time.sleep(0.05)
        context.store.set("back", "1")
        return [context.num_starts, list(context.deaths)]

    fault_policy = FaultPolicy(uses_process_group=False, optional_ranks=frozenset({1}))
    timeout_s = (
        5.0 if number == signal.SIGSTOP else PATIENCE_S
    )  # also for the rank that starts again
    assert run_ranks(body, 2, restarts=1, fault_policy=fault_policy, timeout_s=timeout_s) == [
        [1, [0, 0]],
        [1, [0, 1]],
    ]


def test_an_error_is_not_tried_again(run_ranks: Callable[..., Any]):
    """Neither by all ranks nor by one that the others go on without."""
    fault_policy = FaultPolicy(uses_process_group=False, optional_ranks=frozenset({1}))
    for policy in (ALL_NEEDED, fault_policy):
        with pytest.raises(RankFailed, match="ValueError"):
            run_ranks(
                lambda context: int("x") if context.rank == 1 else 0,
                2,
                restarts=9,
                fault_policy=policy,
            )


def test_signals_reach_ranks_that_were_started_again(
    start_child: Any, run_ranks: Callable[..., Any], wait_for: Callable[..., None], tmp_path: Path
):
    """A request to stop ends them, and starts nothing."""

    def body(context: Any) -> None:
        if context.rank == 1 and context.num_starts == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        steps_until_stopped(context, tmp_path / f"again-{context.rank}")

    child = start_child(lambda: run_ranks(body, 2, restarts=9))
    wait_for(lambda: len(list(tmp_path.glob("again-*"))) == 2)
    os.kill(child.pid, signal.SIGTERM)
    assert child.exit_code() == 5
    assert child.stderr.count("start again") == 1


# --- Signals ----------------------------------------------------------------------------------------------------


def test_what_a_rank_makes_of_signals(run_ranks: Callable[..., Any]):
    """Ctrl-C is the parent's to answer, SIGTERM ends a rank unless it asks for more, and no signal is held back."""

    def body(context: Any) -> list[bool]:
        return [
            signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            not signal.pthread_sigmask(signal.SIG_BLOCK, []),
        ]

    assert run_ranks(body, 2) == [[True] * 3] * 2
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


STOPS = pytest.mark.parametrize(
    ("number", "kill", "exit_code"),
    [
        (signal.SIGTERM, os.kill, Preempted.exit_code),
        (signal.SIGINT, os.killpg, 130),
        (signal.SIGINT, os.kill, 130),
    ],
    ids=["SIGTERM", "Ctrl-C", "SIGINT to the parent alone"],
)


@STOPS
def test_a_request_to_stop(
    start_child: Any,
    run_ranks: Callable[..., Any],
    wait_for: Callable[..., None],
    tmp_path: Path,
    number: int,
    kill: Callable[[int, int], None],
    exit_code: int,
):
    """A signal to the parent, and Ctrl-C, which a terminal sends to all, stop every rank after the same step."""

    def body(context: Any) -> None:
        steps_until_stopped(context, tmp_path / f"up-{context.rank}")

    child = start_child(lambda: run_ranks(body, 2))
    ranks = child.ranks(2)
    wait_for(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(2)))
    kill(child.pid, number)
    assert child.exit_code() == exit_code
    assert "stopped by" in child.stderr
    assert "failed" not in child.stderr
    assert not psutil.wait_procs(ranks, timeout=PATIENCE_S)[1]


@STOPS
def test_a_request_to_stop_before_the_first_step(
    start_child: Any,
    run_ranks: Callable[..., Any],
    wait_for: Callable[..., None],
    tmp_path: Path,
    number: int,
    kill: Callable[[int, int], None],
    exit_code: int,
):
    """Where no step can be finished the ranks end at once, and the signal is called by its name."""

    def body(context: Any) -> None:
        context.beat("build")
        (tmp_path / f"up-{context.rank}").touch()
        time.sleep(1000)

    child = start_child(lambda: run_ranks(body, 2))
    wait_for(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(2)))
    kill(child.pid, number)
    assert child.exit_code() == exit_code
    name = signal.Signals(number).name
    assert (
        f"error: stopped by {name} in start (build), where no checkpoint can be saved"
        in child.stderr
    )


def test_the_second_request_ends_ranks_at_once(
    start_child: Any, run_ranks: Callable[..., Any], wait_for: Callable[..., None], tmp_path: Path
):
    """A rank that doesn't come to the end of its step can be ended by asking again."""

    def body(context: Any) -> None:
        with context.stoppable():
            context.step = 4
            context.beat("forward")
            (tmp_path / "up").touch()
            until(lambda: context.stop_signal)
            (tmp_path / "asked").touch()
            time.sleep(1000)

    child = start_child(lambda: run_ranks(body, 1))
    wait_for(lambda: (tmp_path / "up").exists())
    os.kill(child.pid, signal.SIGTERM)
    wait_for(lambda: (tmp_path / "asked").exists())
    time.sleep(signals.SAME_REQUEST_S + 0.1)  # what comes before is the same request
    os.kill(child.pid, signal.SIGTERM)
    assert child.exit_code() == Preempted.exit_code
    assert "stopped by SIGTERM in step 4 (forward)" in child.stderr


def test_one_request_comes_several_times(
    start_child: Any,
    run_ranks: Callable[..., Any],
    wait_for: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """timeout(1) signals the command twice and all ranks, to which the command passes it on: they have time to save."""
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 1000.0)

    def body(context: Any) -> None:
        with context.stoppable():
            (tmp_path / f"up-{os.getpid()}").touch()
            until(lambda: context.stop_signal)
            (tmp_path / f"asked-{os.getpid()}").touch()
            until((tmp_path / "again").exists)
            time.sleep(0.1)
            (tmp_path / f"saved-{context.rank}").touch()

    def ranks(word: str) -> list[int]:
        return [int(path.name.partition("-")[2]) for path in tmp_path.glob(f"{word}-*")]

    child = start_child(lambda: run_ranks(body, 2))
    wait_for(lambda: len(ranks("up")) == 2)
    os.kill(child.pid, signal.SIGTERM)
    wait_for(lambda: len(ranks("asked")) == 2)
    for pid in (child.pid, *ranks("up")):
        os.kill(pid, signal.SIGTERM)
    (tmp_path / "again").touch()
    assert child.exit_code() == 0, child.stderr
    assert sorted(ranks("saved")) == [0, 1]


def test_a_request_that_comes_again_later_is_another_one(monkeypatch: pytest.MonkeyPatch):
    heard: list[int] = []
    clock_s = 10.0
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: clock_s))
    with signals.handled([signal.SIGUSR1], heard.append):
        for pause_s in (0.0, signals.SAME_REQUEST_S + 0.1, 0.1, 0.0):  # each comes twice
            signal.raise_signal(signal.SIGUSR1)
            clock_s += pause_s
    assert heard == [signal.SIGUSR1] * 2


def test_ranks_die_with_their_parent(
    start_child: Any,
    run_ranks: Callable[..., Any],
    wait_for: Callable[..., None],
    nothing_left: Path,
):
    """A parent that is killed takes its ranks with it, in whatever they are."""
    child = start_child(lambda: run_ranks(lambda context: time.sleep(1000), 3))
    ranks = child.ranks(3)
    os.kill(child.pid, signal.SIGKILL)
    assert child.exit_code() == -signal.SIGKILL
    wait_for(
        lambda: (
            not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
        )
    )
    for folder in nothing_left.glob("paceline-*"):  # a killed parent can't clean up
        shutil.rmtree(folder)
