"""Warm ranks of several nodes as one pool: each node has a `Pool` and exchanges lines of JSON.

`NodesPool` is the end that starts tasks, `serve` the other end, in a node. A `NodeTransport` carries the lines.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import PacelineError, PeerLost
from paceline.launch.failure import Failure
from paceline.launch.fault_policy import FaultPolicy
from paceline.launch.pool import Pool
from paceline.launch.worker_pool import STOP_S, TaskEvent

_LONG_S = 60.0


class NodeTransport(Protocol):
    """Carries lines of JSON to nodes and from them, in order. Nodes are numbered from 0."""

    @property
    def names(self) -> Sequence[str]:
        """Of the nodes, for people."""

    def tell(self, node: int, line: str) -> None:
        """Send a line; one to a node that is lost goes nowhere."""

    def hear(self, timeout_s: float) -> list[tuple[int, str | None]]:
        """Lines with the nodes that they come from, at once if there are any. None once, when a node is lost."""

    def drop(self, node: int) -> None:
        """Hear no more of a node, and end what it runs if it is there."""


class NodeRefused(PacelineError):
    """A node can't run what it was asked to."""


@dataclass(frozen=True)
class _Task:
    node: int
    slots: tuple[int, ...]


class NodesPool:
    """The slots of all nodes, numbered node by node.

    Args:
        greetings: What each node is told first; it answers {"devices": [names]} or {"error", "hint"}.
        timeout_s: For all nodes to answer.

    Raises:
        NodeRefused: a node said why it can't, or did not answer in time; or all are lost. One that is lost is left out.
    """

    def __init__(self, wire: NodeTransport, greetings: Sequence[Any], *, timeout_s: float) -> None:
        self._wire, self._numbers = wire, itertools.count()
        self._tasks: dict[int, _Task] = {}
        for node, greeting in enumerate(greetings):
            wire.tell(node, json.dumps(greeting))
        found = self._greetings(timeout_s)
        self.names = [name for node in sorted(found) for name in found[node]]
        self._homes = [node for node in sorted(found) for _ in found[node]]
        counts = itertools.accumulate((len(found[node]) for node in sorted(found)), initial=0)
        self._slots = {node: range(first, last)
                       for node, (first, last) in enumerate(itertools.pairwise(counts))
                       if last > first}  # of nodes that are there

    def _greetings(self, timeout_s: float) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        deadline_s = time.monotonic() + timeout_s
        while len(found) < len(self._wire.names):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                silent = [name for node, name in enumerate(self._wire.names) if node not in found]
                raise NodeRefused(f"{' and '.join(silent)} gave no devices within {timeout_s:.0f} s",
                                  hint="is other work holding the node? a smaller --procs takes less of each")
            for node, line in self._wire.hear(left_s):
                said: dict[str, Any] = {"devices": []} if line is None else json.loads(line)
                if "error" in said:
                    raise NodeRefused(f"{self._wire.names[node]}: {said['error']}", hint=said.get("hint"))
                if line is None:
                    print(f"node {self._wire.names[node]} was lost while it started, and is left out", file=sys.stderr,
                          flush=True)
                    self._wire.drop(node)
                found[node] = said["devices"]
        if not any(found.values()):
            raise NodeRefused("all nodes were lost while they started", hint="Ray's logs of its workers say why")
        return found

    @property
    def nodes(self) -> list[range]:
        return list(self._slots.values())

    @property
    def free(self) -> list[int]:
        taken = {slot for task in self._tasks.values() for slot in task.slots}
        return [slot for slots in self._slots.values() for slot in slots if slot not in taken]

    def place(self, slot: int) -> str:
        return f"{self._wire.names[self._homes[slot]]} {self.names[slot]}"

    def describe(self) -> str:
        return ", ".join(f"{self._wire.names[node]} ({' '.join(self.names[slot] for slot in slots)})"
                         for node, slots in self._slots.items())

    def start(self, payload: Any, slots: Sequence[int], *, fault_policy: FaultPolicy,
              log_dir: Path | None = None) -> int:
        node, own = next((node, own) for node, own in self._slots.items() if slots[0] in own)
        assert set(slots) <= set(own) and set(slots) <= set(self.free)
        number = next(self._numbers)
        self._tasks[number] = _Task(node, tuple(slots))
        self._tell(number, "start", payload=payload, slots=[own.index(slot) for slot in slots],
                   uses_process_group=fault_policy.uses_process_group, log_dir=str(log_dir) if log_dir else None)
        return number

    def answer(self, event: TaskEvent, value: Any) -> None:
        self._tell(event.task, "answer", rank=event.rank, value=value)

    def stop(self, number: int, *, patience_s: float = STOP_S) -> None:
        self._tell(number, "stop", patience_s=patience_s)

    def _tell(self, number: int, what: str, **words: Any) -> None:
        task = self._tasks.get(number)
        if task is not None:
            self._wire.tell(task.node, json.dumps({"do": what, "task": number, **words}))

    def wait(self, timeout_s: float) -> list[TaskEvent]:
        """What happened, at once if something has, else within the timeout.

        Raises:
            PeerLost: no node is left.
        """
        if not self._slots:
            raise PeerLost("all nodes are lost", hint="the same command with --resume goes on when nodes are there")
        return [event for node, line in self._wire.hear(timeout_s)
                for event in (self._lose(node) if line is None else self._hear(json.loads(line)))]

    def _hear(self, said: dict[str, Any]) -> list[TaskEvent]:
        if said["task"] not in self._tasks:
            return []
        if said["kind"] == "end":
            del self._tasks[said["task"]]
        failure = Failure.from_json(said["failure"]) if said["failure"] is not None else None
        return [TaskEvent(said["task"], said["kind"], said["rank"], said["value"], failure)]

    def _lose(self, node: int) -> list[TaskEvent]:
        print(f"node {self._wire.names[node]} is lost; its trials start again on those that are left", file=sys.stderr,
              flush=True)
        self._wire.drop(node)
        self._slots.pop(node, None)
        gone = [number for number, task in self._tasks.items() if task.node == node]
        for number in gone:
            del self._tasks[number]
        return [TaskEvent(number, "lost", 0) for number in gone]


class Lines:
    """Whole lines from a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self._rest = descriptor, b""

    def read(self) -> list[str] | None:
        """The lines that are there, at least a part of one; None at the pipe's end."""
        given = os.read(self.descriptor, 2**16)
        if not given:
            return None
        *lines, self._rest = (self._rest + given).split(b"\n")
        return [line.decode() for line in lines]


def serve(pool: Pool, asked: Lines, out: int) -> None:
    """Do what is asked line by line, and say what happens, until the pipe of requests ends."""
    numbers: dict[int, int] = {}  # of the pool's tasks, by those of the other end
    while True:
        for event in pool.wait(_LONG_S, also=[asked.descriptor]):
            theirs = next(number for number, ours in numbers.items() if ours == event.task)
            if event.kind == "end":
                del numbers[theirs]
            say(out, {"task": theirs, "kind": event.kind, "rank": event.rank, "value": event.value,
                      "failure": event.failure.to_json() if event.failure is not None else None})
        while wait([asked.descriptor], 0):
            lines = asked.read()
            if lines is None:
                return
            for line in lines:
                _do(pool, json.loads(line), numbers)


def _do(pool: Pool, asked: dict[str, Any], numbers: dict[int, int]) -> None:
    number = asked["task"]
    if asked["do"] == "start":
        log_dir = Path(asked["log_dir"]) if asked["log_dir"] is not None else None
        numbers[number] = pool.start(asked["payload"], asked["slots"],
                                     fault_policy=FaultPolicy(uses_process_group=asked["uses_process_group"]),
                                     log_dir=log_dir)
    elif number in numbers and asked["do"] == "answer":
        pool.answer(TaskEvent(numbers[number], "question", asked["rank"]), asked["value"])
    elif number in numbers:
        pool.stop(numbers[number], patience_s=asked["patience_s"])


def say(out: int, document: Any) -> None:
    """Write a line of JSON to a pipe."""
    line = memoryview(json.dumps(document).encode() + b"\n")
    while line:
        line = line[os.write(out, line):]
