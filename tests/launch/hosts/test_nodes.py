"""Pools of several nodes as one: who runs what, and what is heard of a node that goes."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

from paceline.base.errors import PeerLost
from paceline.launch.hosts import nodes
from paceline.launch.hosts.nodes import STARTED, Lines, NodeRefused, NodesPool
from paceline.launch.local.worker_pool import largest, node_of, room
from paceline.launch.process.fault_policy import ALL_NEEDED
from paceline.launch.process.messages import Message


class Wire:
    """Nodes that say what the test lets them say."""

    def __init__(self, *devices: int) -> None:
        self.names = [f"node{number}" for number in range(len(devices))]
        self.told: list[tuple[int, dict[str, Any]]] = []
        self.dropped: list[int] = []
        self.lines: list[tuple[int, str | None]] = [
            (node, json.dumps({"devices": [f"cpu:{index}" for index in range(count)]}))
            for node, count in reversed([*enumerate(devices)])
        ]

    def tell(self, node: int, line: str) -> None:
        self.told.append((node, json.loads(line)))

    def hear(self, timeout_s: float) -> list[tuple[int, str | None]]:
        heard, self.lines = self.lines, []
        return heard

    def drop(self, node: int) -> None:
        self.dropped.append(node)

    def says(self, node: int, **words: Any) -> None:
        self.lines.append((node, json.dumps({"rank": 0, "value": None, "failure": None, **words})))


def made(*devices: int) -> tuple[Wire, NodesPool]:
    wire = Wire(*devices)
    pool = NodesPool(wire, [{"number": number} for number in range(len(devices))], timeout_s=1)
    assert wire.told == [(number, {"number": number}) for number in range(len(devices))]
    wire.told.clear()
    return wire, pool


def test_slots_are_numbered_node_by_node_and_a_task_has_those_of_one():
    """Of the node with the fewest to spare, under the numbers that the node itself has for them."""
    wire, pool = made(3, 2)
    assert (
        pool.nodes == [range(3), range(3, 5)]
        and list(pool.free) == [0, 1, 2, 3, 4]
        and largest(pool) == 3
    )
    assert (
        pool.place(4) == "node1 cpu:1"
        and pool.describe() == "node0 (cpu:0 cpu:1 cpu:2), node1 (cpu:0 cpu:1)"
    )
    assert (
        room(pool, 1) == (3,)
        and room(pool, 2) == (3, 4)
        and room(pool, 3) == (0, 1, 2)
        and room(pool, 4) is None
    )
    assert node_of(pool, 4) == range(3, 5)
    task = pool.start({"do": "train"}, (3, 4), fault_policy=ALL_NEEDED)
    ((node, told),) = wire.told
    assert (node, told["kind"], told["task"]) == (1, "start", task)
    assert told["value"] == {
        "payload": {"do": "train"},
        "slots": [0, 1],
        "uses_process_group": True,
        "log_dir": None,
    }
    assert pool.free == [0, 1, 2] and room(pool, 3) == (0, 1, 2)


def test_what_nodes_say_becomes_events_until_the_task_ends():
    """Answers and requests to stop go to the task's node; none after its end."""
    wire, pool = made(1, 1)
    task = pool.start({}, (1,), fault_policy=ALL_NEEDED)
    wire.says(1, task=task, kind="question", value="lr")
    question = Message(task, "question", 0, "lr")
    assert pool.wait(1) == [question]
    pool.answer(question, 0.1)
    pool.stop(task, patience_s=0.5)
    wire.says(1, task=task, kind="end", value={"loss": 1})
    assert [event.kind for event in pool.wait(1)] == ["end"] and pool.free == [0, 1]
    pool.stop(task)
    assert [message["kind"] for _, message in wire.told] == ["start", "answer", "stop"]
    wire.says(1, task=task, kind="report")
    assert pool.wait(1) == []


def test_the_tasks_of_a_node_that_goes_are_lost_and_its_slots_gone():
    """The others keep their numbers; when all are gone it is an error."""
    wire, pool = made(1, 2, 1)
    tasks = [pool.start({}, (slot,), fault_policy=ALL_NEEDED) for slot in range(3)]
    wire.lines.append((1, None))
    assert pool.wait(1) == [Message(tasks[1], "lost", 0), Message(tasks[2], "lost", 0)]
    assert wire.dropped == [1] and pool.nodes == [range(1), range(3, 4)] and pool.free == [3]
    pool.start({}, (3,), fault_policy=ALL_NEEDED)
    assert wire.told[-1][0] == 2 and wire.told[-1][1]["value"]["slots"] == [0]
    wire.lines += [(0, None), (2, None)]
    assert len(pool.wait(1)) == 2
    with pytest.raises(PeerLost, match="all nodes are lost"):
        pool.wait(1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            json.dumps({"error": "no such file", "hint": "share it"}),
            "(?s)node1: no such file.*share it",
        ),
        ("", "node1 gave no devices within 0 s: nothing started there"),
        (json.dumps(STARTED), "node1 started and gave no devices within 0 s"),
    ],
)
def test_a_node_that_can_not_start_is_named(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    """With what it said, if it said anything."""
    monkeypatch.setattr(nodes, "LOAD_S", 0.05)
    wire = Wire(1)
    wire.names.append("node1")
    wire.lines += [(1, line)] if line != "" else []
    with pytest.raises(NodeRefused, match=message):
        NodesPool(wire, [{}, {}], timeout_s=0.05)


def test_a_node_that_has_started_may_load_for_longer():
    """Than nodes have to start."""
    wire = Wire(1)
    answers, wire.lines = wire.lines, [(0, json.dumps(STARTED))]
    hear = wire.hear

    def later(timeout_s: float) -> list[tuple[int, str | None]]:
        heard = hear(timeout_s)
        if not heard:
            time.sleep(0.1)
            return answers
        return heard

    wire.hear = later  # type: ignore[method-assign]
    assert NodesPool(wire, [{}], timeout_s=0.05).nodes == [range(1)]


def test_a_node_that_is_lost_while_it_starts_is_left_out():
    """Unless there is no other."""
    wire = Wire(1, 1)
    wire.lines[0] = (1, None)
    pool = NodesPool(wire, [{}, {}], timeout_s=1)
    assert pool.nodes == [range(1)] and wire.dropped == [1]
    wire.lines += [(0, None), (1, None)]
    with pytest.raises(NodeRefused, match="all nodes were lost"):
        NodesPool(wire, [{}, {}], timeout_s=1)


def test_lines_are_whole():
    """However the pipe cuts them."""
    read, write = os.pipe()
    lines = Lines(read)
    for text, expected in (("a\nb", ["a"]), ("c", []), ("\n\nd\n", ["bc", "", "d"])):
        os.write(write, text.encode())
        assert lines.read() == expected
    os.close(write)
    assert lines.read() is None
    os.close(read)
