"""Warm ranks run task after task, alone and together, and are replaced when they die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from conditions import PATIENCE_S, until

from paceline.cluster.cluster import Cluster
from paceline.launch.local.pool import Pool
from paceline.launch.process.context import RankContext
from paceline.launch.process.fault_policy import ALL_NEEDED
from paceline.launch.process.messages import Line, Message


def body(context: RankContext, payload: dict[str, Any], line: Line) -> Any:
    """What the tests ask of a task."""
    does = payload["does"]
    if does == "sum":
        total = torch.tensor([float(context.rank + 1)])
        if context.world_size > 1:
            dist.all_reduce(total)
        return [os.getpid(), total.item()]
    if does == "fail" and context.rank == payload.get("rank", 0):
        raise ValueError("no such luck")
    if does == "die" and context.rank == payload.get("rank", 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if does in ("fail", "die"):
        dist.barrier()
    if does == "ask":
        line.report({"got": line.ask({"name": "lr"}), "rank": context.rank})
    if does == "print":
        print("heard", payload["word"])
    if does == "stop":
        with context.stoppable():
            line.report("ready")
            until(lambda: context.stop_signal)
        return "stopped"
    if does == "lock":
        threading.Event().wait()
    if does == "compute":
        began_s = time.process_time()
        while time.process_time() - began_s < 2:
            pass
        return "computed"
    if does == "hang":
        line.report("ready")
        time.sleep(1000)
    return None


@pytest.fixture
def make_pool(nothing_left: Path) -> Iterator[Callable[[int], Pool]]:
    made: list[Pool] = []

    def make(num_devices: int) -> Pool:
        made.append(
            Pool(body, Cluster.local(f"cpu:0-{num_devices - 1}").devices, timeout_s=PATIENCE_S)
        )
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def until_end(
    pool: Pool, tasks: set[int], heard: Callable[[Message], None] = lambda event: None
) -> dict[int, Message]:
    """The end of each task; `heard` gets all else."""
    ends: dict[int, Message] = {}
    while tasks - ends.keys():
        for event in pool.wait(1.0):
            if event.kind == "end":
                ends[event.task] = event
            else:
                heard(event)
    return ends


def run(pool: Pool, slots: list[int], **payload: Any) -> Message:
    number = pool.start(payload, slots, fault_policy=ALL_NEEDED)
    return until_end(pool, {number})[number]


def test_processes_stay_warm_over_tasks_of_one_and_of_many_ranks(make_pool: Callable[[int], Pool]):
    """Groups of other ranks and sizes follow each other in the same processes."""
    pool = make_pool(3)
    pids = [run(pool, [slot], does="sum").value[0] for slot in range(3)]
    for slots, total in (([0, 1], 3.0), ([1], 1.0), ([2, 0], 3.0), ([0, 1, 2], 6.0), ([1, 2], 3.0)):
        assert run(pool, slots, does="sum").value == [pids[slots[0]], total]
    assert pool.free == [0, 1, 2]


def test_tasks_run_at_the_same_time(make_pool: Callable[[int], Pool]):
    """What one is asked and told is not another's."""
    pool = make_pool(3)
    both = {
        pool.start({"does": "ask"}, [0, 2], fault_policy=ALL_NEEDED),
        pool.start({"does": "ask"}, [1], fault_policy=ALL_NEEDED),
    }
    assert pool.free == []
    answers: list[Any] = []

    def heard(event: Message) -> None:
        if event.kind == "question":
            pool.answer(event, [event.value["name"], event.task])
        else:
            answers.append((event.task, event.value["rank"], event.value["got"]))

    until_end(pool, both, heard)
    assert sorted(answers) == [(0, 0, ["lr", 0]), (0, 1, ["lr", 0]), (1, 0, ["lr", 1])]


@pytest.mark.parametrize(("does", "kind"), [("fail", "ValueError"), ("die", "PeerLost")])
def test_a_failure_is_told_and_its_slots_get_fresh_processes(
    make_pool: Callable[[int], Pool], does: str, kind: str
):
    """All ranks of the task are replaced, as what they hold is not known; those of others stay."""
    pool = make_pool(3)
    before = [run(pool, [slot], does="sum").value[0] for slot in range(3)]
    end = run(pool, [0, 1], does=does, rank=1)
    assert end.failure is not None and (end.failure.kind, end.failure.rank) == (kind, 1)
    assert pool.free == [0, 1, 2]
    after = [run(pool, [slot], does="sum").value[0] for slot in range(3)]
    assert (before[0] != after[0], before[1] != after[1], before[2] == after[2]) == (
        True,
        True,
        True,
    )
    assert run(pool, [0, 1, 2], does="sum").value[1] == 6.0


def test_a_process_that_died_between_tasks_is_replaced(
    make_pool: Callable[[int], Pool], wait_for: Callable[..., None]
):
    """The next task there doesn't notice."""
    pool = make_pool(1)
    pid = run(pool, [0], does="sum").value[0]
    psutil.Process(pid).kill()
    wait_for(lambda: not pool._processes.is_idle(0))  # its last thread has ended, too
    end = run(pool, [0], does="sum")
    assert end.failure is None and end.value[0] != pid


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("does", "value"), [("stop", "stopped"), ("hang", None)])
def test_a_task_that_is_stopped_ends_soon(make_pool: Callable[[int], Pool], does: str, value: Any):
    """By itself if it can, else it is killed; neither is a failure."""
    pool = make_pool(2)
    number, ready = pool.start({"does": does}, [0, 1], fault_policy=ALL_NEEDED), []
    while len(ready) < 2:
        ready += pool.wait(1.0)
    pool.stop(number)
    end = until_end(pool, {number})[number]
    assert (end.value, end.failure, pool.free) == (value, None, [0, 1])
    assert run(pool, [0, 1], does="sum").value[1] == 3.0


def test_each_task_has_its_log(make_pool: Callable[[int], Pool], tmp_path: Path):
    """What a rank prints goes there and nowhere else."""
    pool = make_pool(1)
    for word in ("one", "two"):
        number = pool.start(
            {"does": "print", "word": word}, [0], fault_policy=ALL_NEEDED, log_dir=tmp_path / word
        )
        until_end(pool, {number})
    assert [(tmp_path / word / "rank-0.log").read_text() for word in ("one", "two")] == [
        "heard one\n",
        "heard two\n",
    ]


@pytest.mark.slow
def test_ranks_end_with_the_pool(make_pool: Callable[[int], Pool]):
    """Also those that hang."""
    before = set(psutil.Process().children(recursive=True))
    pool = make_pool(2)
    pool.start({"does": "hang"}, [0], fault_policy=ALL_NEEDED)
    ranks = set(psutil.Process().children(recursive=True)) - before
    assert len(ranks) == 3
    pool.close()
    assert not psutil.wait_procs(ranks, timeout=PATIENCE_S)[1]


@pytest.mark.slow
def test_a_rank_alone_that_computes_nothing_is_ended(nothing_left: Path):
    """Nobody else waits for it, and it would wait for ever; its device is free for the next task."""
    with Pool(body, Cluster.local("cpu:0").devices, timeout_s=1.0) as pool:
        for does in ("lock", "compute"):
            task = pool.start({"does": does}, [0], fault_policy=ALL_NEEDED)
            end = until_end(pool, {task})[task]
            if does == "compute":
                assert (end.value, end.failure) == ("computed", None)
            else:
                assert (
                    end.failure is not None
                    and "rank 0 did not go on for 1 s" in end.failure.message
                )
