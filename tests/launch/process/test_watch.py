"""When ranks wait for each other, the one they wait for is named."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conditions import until

from paceline.base.errors import PeerLost
from paceline.base.waiting import waiting
from paceline.launch.local import ranks
from paceline.launch.process import outside_watch, watchdog
from paceline.launch.process.context import RankContext
from paceline.launch.process.failure import Failure, RankFailed
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.launch.process.outside_watch import (
    OutsideWatch,
    RankPosition,
    SeenByAll,
    be_watched,
    hang_failure,
)
from paceline.servers.wire import WireError

pytestmark = [pytest.mark.usefixtures("nothing_left")]


def at(*, waits: bool, step: int = 5, phase: str = "reduce", where: str = "") -> RankPosition:
    return RankPosition(
        step, phase, "node", reacts=True, waits=waits, where=where, stack="  File x, line 1\n"
    )


# --- What is concluded from where the ranks are -----------------------------------------------------------------


def test_a_rank_stuck_in_its_own_code():
    """The rank that doesn't wait is the culprit; its place and its stack are told."""
    seen = {
        0: at(waits=True),
        1: at(waits=False, phase="input", where="data.py:9"),
        2: at(waits=True),
    }
    failure = hang_failure(seen, timeout_s=60)
    assert (failure.rank, failure.step, failure.phase, failure.where) == (
        1,
        5,
        "input",
        "data.py:9",
    )
    assert failure.message == (
        "rank 1 did not reach the collective that the others wait for in 60 s; "
        "rank 0, 2 waited for it"
    )
    assert str(failure.hint).startswith("--timeout SECONDS")
    assert failure.trace == "Stack of rank 1:\n  File x, line 1"
    assert (failure.exit_code, failure.heard) == (PeerLost.exit_code, False)


def test_a_rank_that_says_nothing():
    """A rank that is stopped or holds the interpreter gives no answer, and that is the answer."""
    failure = hang_failure({0: at(waits=True), 1: RankPosition()}, timeout_s=2.5)
    assert "rank 1 gave no sign of life for 2.5 s; rank 0 waited for it" in failure.message


def test_a_rank_that_is_stuck_while_another_host_says_nothing():
    """The ranks there may have waited for less than the patience, or work."""
    seen = {0: RankPosition(), 1: at(waits=False, where="data.py:9"), 2: at(waits=True)}
    failure = hang_failure(seen, timeout_s=60)
    assert (failure.rank, failure.where) == (1, "data.py:9")
    held = replace(seen[1], reacts=False)
    assert hang_failure({**seen, 2: held}, timeout_s=60).rank == 2


def test_collectives_that_do_not_match():
    """Where all wait, each rank's step and phase are told."""
    failure = hang_failure(
        {0: at(waits=True), 1: at(waits=True, step=6, phase="evaluate")}, timeout_s=60
    )
    assert "all ranks wait in collectives that don't match for 60 s" in failure.message
    assert "rank 0: step 5 (reduce), rank 1: step 6 (evaluate)" in failure.message


def test_hosts_tell_each_other_where_their_ranks_are(monkeypatch: pytest.MonkeyPatch):
    """Who is asked answers, also with ranks that work. Ranks of a host that says nothing are silent, rank 0's where the
    store gives no answer; what was told in another round does not count."""
    monkeypatch.setattr(outside_watch, "ANSWER_S", 0.5)
    monkeypatch.setattr(outside_watch, "_ASKED_S", 0.0)
    store, waits, works = (
        dist.HashStore(),
        at(waits=True),
        replace(at(waits=False), is_silent=False),
    )
    first, second = SeenByAll(store, 3), SeenByAll(store, 3)
    assert not first.is_asked() and not second.is_asked()
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(first, {0: waits})
        until(second.is_asked)
        assert not first.is_asked()
        assert second({1: works})[1] == works
        assert asked.result() == {0: waits, 1: works, 2: RankPosition()}
        assert not second.is_asked()
        both = [pool.submit(first, {0: waits}), pool.submit(second, {1: waits})]
        assert all(each.result() == {0: waits, 1: waits, 2: RankPosition()} for each in both)
    seen = second({1: at(waits=False, phase="input")})
    assert seen[0] == RankPosition()
    assert not SeenByAll(store, 3).is_asked()  # of an earlier start of the run

    monkeypatch.setattr(outside_watch, "STORE_S", 0.1)

    def wait_in_vain(*_: Any) -> None:
        time.sleep(1.5)
        raise RuntimeError

    stopped = SeenByAll(SimpleNamespace(add=wait_in_vain), 3)
    assert not stopped.is_asked()
    assert stopped({1: waits}) == {0: RankPosition(), 1: waits}


class Elsewhere(SeenByAll):
    """Other hosts, whose ranks are there."""

    def __init__(self, positions: dict[int, RankPosition], *, asks: bool = False) -> None:
        self.positions, self.asks, self.told = positions, asks, list[dict[int, RankPosition]]()

    def is_asked(self) -> bool:
        return self.asks

    def __call__(self, seen: Any) -> Any:
        self.told.append(seen)
        return {**seen, **self.positions}


def seen_on_hosts(board: HeartbeatTable, elsewhere: Elsewhere) -> OutsideWatch:
    """A watch of this process, as rank 0 of several hosts."""
    be_watched(board, 0)
    board.set_waits(0, True)
    return OutsideWatch(board, {0: 0}, patience_s=0.01, seen_by_all=elsewhere)


def test_a_host_whose_ranks_work_answers_one_that_asks(monkeypatch: pytest.MonkeyPatch):
    """Its ranks would be taken for silent; no report of its own comes of it."""
    monkeypatch.setattr(waiting, "tell", waiting.tell)
    board = HeartbeatTable(1)
    elsewhere = Elsewhere({1: at(waits=True)}, asks=True)
    watch = seen_on_hosts(board, elsewhere)
    watch.patience_s = 60.0
    board.set_waits(0, False)
    assert watch.look({0: os.getpid()}) is None
    assert [position.is_silent for told in elsewhere.told for position in told.values()] == [False]
    elsewhere.asks = False
    assert watch.look({0: os.getpid()}) is None and len(elsewhere.told) == 1


@pytest.mark.parametrize(
    ("elsewhere", "message"),
    [
        (at(waits=True, step=6), "all ranks wait in collectives that don't match"),
        (at(waits=False), "rank 1 did not reach the collective that the others wait for"),
        (RankPosition(), "rank 1 gave no sign of life"),
        (replace(at(waits=False), is_silent=False), None),
    ],
)
def test_a_rank_waits_for_one_of_another_host(
    elsewhere: RankPosition, message: str | None, monkeypatch: pytest.MonkeyPatch
):
    """Which of them hangs follows from what all hosts see; one that works is waited for."""
    monkeypatch.setattr(waiting, "tell", waiting.tell)
    # Time in which the machine gave this process no core is no silence, and may be all of so short a one.
    monkeypatch.setattr(outside_watch, "delays_s", lambda pid: {})
    board = HeartbeatTable(1)
    watch = seen_on_hosts(board, Elsewhere({1: elsewhere}))
    time.sleep(0.02)
    failure = watch.look({0: os.getpid()})
    assert message is None if failure is None else message and message in failure.message


def test_a_peer_that_sent_what_it_may_not(monkeypatch: pytest.MonkeyPatch):
    """Its words are told too: that it left is only concluded."""
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.1)
    context = RankContext(
        0, 2, 2, torch.device("cpu"), dist.HashStore(), HeartbeatTable(2), 0, "attempt"
    )
    failure = watchdog.peer_loss(context, WireError("a peer sent a frame of unknown kind 99"))
    assert failure.message.startswith(
        "rank 1 is gone: it closed its connections while rank 0 was in "
    )
    assert failure.message.endswith("(a peer sent a frame of unknown kind 99)")
    assert (failure.rank, failure.hint) == (1, watchdog._AFTER_LOSS)


def test_a_stack_inside_a_collective_waits():
    """A frame of torch.distributed near the end of a stack is a wait; one that called the user's code is not."""
    torchs, users = "/venv/torch/distributed/distributed_c10d.py", "/home/me/torch_things/job.py"
    is_in_collective = outside_watch._is_in_collective  # the innermost file comes first
    assert is_in_collective([torchs, users])
    assert is_in_collective([torch.__file__, torchs])
    assert not is_in_collective([users, torchs])
    assert not is_in_collective([users, users])
    assert not is_in_collective([])


# --- Real ranks -------------------------------------------------------------------------------------------------


def step_forever(context: Any, hang_begins: Path, misbehave: Any) -> None:
    """Steps of one collective; in step 3 rank 1 does something else, once rank 0 waits for it."""
    for step in range(1, 6):
        context.step = step
        context.beat("input")
        if step == 3 and context.rank == 1:
            until(
                lambda: context.board.read(0).step == 3 and context.board.read(0).phase == "reduce"
            )
            hang_begins.touch()
            misbehave()
        context.beat("reduce")
        dist.all_reduce(torch.ones(1))


def sleep_in_user_code() -> None:
    time.sleep(1000)


@pytest.fixture
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "ANSWER_S", 1.0)
    monkeypatch.setattr(ranks, "_GRACE_S", 2.0)


@pytest.mark.usefixtures("quick_answers")
def test_a_rank_that_hangs(run_ranks: Any, hang_begins: Path):
    """Rank 1 sleeps in the user's code: rank, step, phase and line are told, and the run ends."""
    with pytest.raises(RankFailed) as raised:
        run_ranks(
            lambda context: step_forever(context, hang_begins, sleep_in_user_code), 2, timeout_s=3.0
        )
    failure = raised.value.failure
    line = sleep_in_user_code.__code__.co_firstlineno + 1
    assert raised.value.exit_code == PeerLost.exit_code
    assert (failure.rank, failure.step, failure.phase, failure.where) == (
        1,
        3,
        "input",
        f"{__file__}:{line}",
    )
    assert (
        "rank 1 did not reach the collective that the others wait for in 3 s; rank 0 waited for it"
        in str(raised.value)
    )
    assert "time.sleep(1000)" in str(raised.value)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_answers")
def test_a_rank_that_is_stopped(run_ranks: Any, hang_begins: Path):
    """A rank that the kernel holds is named by the others and ended with them."""
    expected = (
        r"rank 1 gave no sign of life for 2 s \(its process is stopped.*; rank 0 waited for it"
    )
    with pytest.raises(RankFailed, match=expected) as raised:
        run_ranks(
            lambda context: step_forever(
                context, hang_begins, lambda: os.kill(os.getpid(), signal.SIGSTOP)
            ),
            2,
            timeout_s=2.0,
        )
    assert raised.value.exit_code == PeerLost.exit_code


@pytest.mark.slow
@pytest.mark.usefixtures("quick_answers")
def test_a_rank_that_skips_a_collective(run_ranks: Any, hang_begins: Path):
    """A rank that waits in another collective than the others is found by nobody reaching the end."""

    def body(context: Any) -> None:
        other = dist.new_group([0, 1])
        context.step = 1
        hang_begins.touch()
        context.beat("forward" if context.rank else "evaluate")
        dist.all_reduce(torch.ones(1), group=other if context.rank else None)

    with pytest.raises(
        RankFailed, match=r"don't match for 2 s: rank 0: .*\(evaluate\), rank 1: .*\(forward\)"
    ):
        run_ranks(body, 2, timeout_s=2.0)


def hold_the_interpreter() -> None:
    """Read from a pipe to which nothing is written: a signal ends a sleep, and the kernel begins a read anew."""
    reading, _ = os.pipe()
    ctypes.PyDLL("libc.so.6").read(reading, ctypes.create_string_buffer(1), 1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: calls glibc")
def test_a_rank_in_a_native_call_that_holds_the_interpreter(run_ranks: Any, hang_begins: Path):
    """No thread of the rank can speak; its stack and its line are told all the same, and nobody waits for its end."""
    with pytest.raises(
        RankFailed,
        match="rank 1 did not reach the collective that the others wait for in 2 s; rank 0 "
        "waited for it",
    ) as raised:
        run_ranks(
            lambda context: step_forever(context, hang_begins, hold_the_interpreter),
            2,
            timeout_s=2.0,
        )
    failure = raised.value.failure
    line = hold_the_interpreter.__code__.co_firstlineno + 3
    assert (failure.rank, failure.step, failure.where) == (1, 3, f"{__file__}:{line}")
    assert ".read(reading" in failure.trace and failure.host


@pytest.mark.sweep(1)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_that_nobody_waits_for_are_told_of(
    run_ranks: Any,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
):
    """A rank alone, or all ranks in a long step, go on; where they were silent is told once."""
    told = tmp_path / "told"

    tell_silence = outside_watch.tell_silence

    def tell(failure: Failure) -> None:
        tell_silence(failure)
        told.touch()

    def body(context: Any) -> int:
        context.step = 1
        context.beat("forward")
        while not told.exists():
            time.sleep(0.01 if num_ranks > 1 else 0)
        return 7

    monkeypatch.setattr(outside_watch, "tell_silence", tell)
    assert run_ranks(body, num_ranks, timeout_s=1.0) == [7] * num_ranks
    stderr_text = capfd.readouterr().err
    assert re.search(
        rf"warning: rank [01](, 1)? did not go on for 1 s in step 1 \(forward\), at {__file__}:",
        stderr_text,
    )
    assert stderr_text.count("nobody waits for it, so the run goes on") == 1


@pytest.mark.slow
def test_a_rank_alone_that_computes_nothing_is_ended(run_ranks: Any):
    """It waits for what doesn't come, so the run would never end."""

    def body(context: Any) -> None:
        context.beat("input")
        threading.Event().wait()

    with pytest.raises(RankFailed, match=r"rank 0 did not go on for 1 s"):
        run_ranks(body, 1, timeout_s=1.0)


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux's /proc, which says what a process does"
)
def test_a_rank_alone_that_is_stopped_is_ended(run_ranks: Any):
    """It can't go on by itself, so the run would never end."""

    def body(context: Any) -> None:
        context.beat("input")
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(
        RankFailed, match=r"rank 0 gave no sign of life for 1 s \(its process is stopped"
    ):
        run_ranks(body, 1, timeout_s=1.0)


def test_a_rank_without_a_core_is_not_stuck(monkeypatch: pytest.MonkeyPatch):
    """What it waited for a core doesn't count."""
    board, delays_s = HeartbeatTable(1), {"1": 5.0}
    watch = OutsideWatch(board, {0: 0}, patience_s=2.0)
    monkeypatch.setattr(outside_watch, "delays_s", lambda pid: dict(delays_s))
    sign_s = board.read(0).time_s
    monkeypatch.setattr(time, "monotonic", lambda: sign_s + 1.0)
    assert watch._silent_s(0, 1) == pytest.approx(1.0)
    delays_s["1"] = 8.5
    monkeypatch.setattr(time, "monotonic", lambda: sign_s + 5.0)
    assert watch._silent_s(0, 1) == pytest.approx(1.5)


def test_a_run_that_was_paused_as_a_whole_is_not_stuck(monkeypatch: pytest.MonkeyPatch):
    """After Ctrl-Z and fg, ranks have the whole patience again."""
    board = HeartbeatTable(1)
    watch = OutsideWatch(board, {0: 0}, patience_s=2.0)
    monkeypatch.setattr(outside_watch, "delays_s", lambda pid: {})
    sign_s = board.read(0).time_s
    for passed_s, silent_s in ((1.0, 1.0), (100.0, 0.0), (101.5, 1.5)):
        monkeypatch.setattr(time, "monotonic", lambda passed_s=passed_s: sign_s + passed_s)
        watch.look({})
        assert watch._silent_s(0, os.getpid()) == pytest.approx(silent_s, abs=0.1)


def test_slow_is_not_stuck(monkeypatch: pytest.MonkeyPatch):
    """A rank that gives signs of life may be far slower than the patience."""
    board = HeartbeatTable(1)
    watch = OutsideWatch(board, {0: 0}, patience_s=2.0)
    monkeypatch.setattr(outside_watch, "delays_s", lambda pid: {})  # those of this process are real
    now_s = board.read(0).time_s
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(1e9 * now_s))
    monkeypatch.setattr(watch, "_positions", lambda *_: pytest.fail("taken for stuck"))
    for _ in range(9):
        board.write(0, 1, "evaluate")
        now_s += 1.5
        assert watch.look({0: os.getpid()}) is None
    now_s += 1.0
    assert watch._silent_s(0, os.getpid()) == pytest.approx(2.5, abs=0.1)


def test_the_watch_ends_with_the_run(run_ranks: Any):
    """The process that starts ranks here watches them, and no thread of theirs."""

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "paceline-watch"]

    assert run_ranks(lambda context: threads(), 1) == [[]]
    assert run_ranks(lambda context: threads(), 2) == [[], []]


def test_a_process_with_a_name_in_other_bytes(start_child: Any):
    """What the kernel says of it is read all the same."""
    reading, writing = os.pipe()

    def child() -> None:
        ctypes.CDLL(None).prctl(15, b"\xd1\x80\xd1", 0, 0, 0)  # PR_SET_NAME, cut inside of a letter
        os.write(writing, b".")
        time.sleep(600)

    pid = start_child(child).pid
    assert os.read(reading, 1) == b"."
    outside_watch._writes_stacks(pid)
    assert outside_watch._status(pid) in ("sleeping", "running")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: outside_watch._status(pid) == "stopped")
