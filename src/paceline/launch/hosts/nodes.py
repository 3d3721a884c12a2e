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

from paceline.base.errors import PacelineError, PeerLost
from paceline.launch.local.pool import Pool
from paceline.launch.local.worker_pool import STOP_S
from paceline.launch.process.fault_policy import FaultPolicy
from paceline.launch.process.messages import Kind, Message

_LONG_S = 60.0
STARTED = {"started": True}  # a node's answer to what it is told first, before it loads anything
LOAD_S = 240.0  # for a node to import torch and load the job, then: from a slow filesystem, or beside other work


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
        greetings: What each node is told first; it answers `STARTED` at once, then {"devices": [names]} or
            {"error", "hint"}.
        timeout_s: For all nodes to start.

    Raises:
        NodeRefused: a node said why it can't, or did not answer in time; or all are lost. One that is lost is left out.
    """

    def __init__(self, wire: NodeTransport, greetings: Sequence[Any], *, timeout_s: float) -> None:
        self._wire, self._numbers = wire, itertools.count()
        self._tasks: dict[int, _Task] = {}
        for node, greeting in enumerate(greetings):
            wire.tell(node, json.dumps(greeting))
        devices = self._greetings(timeout_s)
        self.names = [name for node in sorted(devices) for name in devices[node]]
        self._homes = [node for node in sorted(devices) for _ in devices[node]]
        counts = itertools.accumulate((len(devices[node]) for node in sorted(devices)), initial=0)
        self._slots = {
            node: range(first, last)
            for node, (first, last) in enumerate(itertools.pairwise(counts))
            if last > first
        }  # of nodes that are there

    def _greetings(self, timeout_s: float) -> dict[int, list[str]]:
        devices = {
            node: answer["devices"] if answer is not None else []
            for node, answer in answers_to_greetings(
                self._wire, timeout_s, expected="devices"
            ).items()
        }
        if not any(devices.values()):
            raise NodeRefused(
                "all nodes were lost while they started", hint="Ray's logs of its workers say why"
            )
        return devices

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
        return ", ".join(
            f"{self._wire.names[node]} ({' '.join(self.names[slot] for slot in slots)})"
            for node, slots in self._slots.items()
        )

    def start(
        self,
        payload: Any,
        slots: Sequence[int],
        *,
        fault_policy: FaultPolicy,
        log_dir: Path | None = None,
    ) -> int:
        node, home = next((node, home) for node, home in self._slots.items() if slots[0] in home)
        assert set(slots) <= set(home) and set(slots) <= set(self.free)
        number = next(self._numbers)
        self._tasks[number] = _Task(node, tuple(slots))
        self._tell(
            number,
            "start",
            0,
            {
                "payload": payload,
                "slots": [home.index(slot) for slot in slots],
                "uses_process_group": fault_policy.uses_process_group,
                "log_dir": str(log_dir) if log_dir else None,
            },
        )
        return number

    def answer(self, question: Message, value: Any) -> None:
        self._tell(question.task, "answer", question.rank, value)

    def stop(self, number: int, *, patience_s: float = STOP_S) -> None:
        self._tell(number, "stop", 0, patience_s)

    def _tell(self, number: int, kind: Kind, rank: int, value: Any) -> None:
        task = self._tasks.get(number)
        if task is not None:
            self._wire.tell(task.node, Message(number, kind, rank, value).encode())

    def wait(self, timeout_s: float) -> list[Message]:
        """What happened, at once if something has, else within the timeout.

        Raises:
            PeerLost: no node is left.
        """
        if not self._slots:
            raise PeerLost(
                "all nodes are lost",
                hint="the same command with --resume goes on when nodes are there",
            )
        return [
            event
            for node, line in self._wire.hear(timeout_s)
            for event in (self._lose(node) if line is None else self._hear(Message.decode(line)))
        ]

    def _hear(self, message: Message) -> list[Message]:
        if message.task not in self._tasks:
            return []
        if message.kind == "end":
            del self._tasks[message.task]
        return [message]

    def _lose(self, node: int) -> list[Message]:
        print(
            f"node {self._wire.names[node]} is lost; its trials start again on those that are left",
            file=sys.stderr,
            flush=True,
        )
        self._wire.drop(node)
        self._slots.pop(node, None)
        lost = [number for number, task in self._tasks.items() if task.node == node]
        for number in lost:
            del self._tasks[number]
        return [Message(number, "lost", 0) for number in lost]


def answers_to_greetings(
    wire: NodeTransport, timeout_s: float, *, expected: str
) -> dict[int, dict[str, Any] | None]:
    """What each node answers to what it was told first; None of one that was lost, which is dropped.

    timeout_s: for the nodes' programs to start; each then has `LOAD_S` to answer.
    expected: what nodes are to give.

    Raises:
        NodeRefused: a node said why it can't ({"error", "hint"}), or did not answer in time.
    """
    answers: dict[int, dict[str, Any] | None] = {}
    starting = dict.fromkeys(range(len(wire.names)), time.monotonic() + timeout_s)  # until when
    loading: dict[int, float] = {}
    while starting or loading:
        left_s = min([*starting.values(), *loading.values()]) - time.monotonic()
        if left_s <= 0:
            names = " and ".join(wire.names[node] for node in starting or loading)
            raise (
                _not_started(names, expected, timeout_s)
                if starting
                else _not_loaded(names, expected)
            )
        for node, line in wire.hear(left_s):
            answer = None if line is None else json.loads(line)
            starting.pop(node, None)
            if answer == STARTED:
                loading[node] = time.monotonic() + LOAD_S
                continue
            loading.pop(node, None)
            if answer is None:
                print(
                    f"node {wire.names[node]} was lost while it started, and is left out",
                    file=sys.stderr,
                    flush=True,
                )
                wire.drop(node)
            elif "error" in answer:
                raise NodeRefused(f"{wire.names[node]}: {answer['error']}", hint=answer.get("hint"))
            answers[node] = answer
    return answers


def _not_started(names: str, expected: str, timeout_s: float) -> NodeRefused:
    return NodeRefused(
        f"{names} gave no {expected} within {timeout_s:.0f} s: nothing started there",
        hint="is other work holding the node? a smaller --procs takes less of each",
    )


def _not_loaded(names: str, expected: str) -> NodeRefused:
    return NodeRefused(
        f"{names} started and gave no {expected} within {LOAD_S:.0f} s",
        hint="what the job's file does when it is imported takes too long there, or waits for something",
    )


class Lines:
    """Whole lines from a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self._partial_line = descriptor, b""

    def read(self) -> list[str] | None:
        """The lines that are there, at least a part of one; None at the pipe's end."""
        data = os.read(self.descriptor, 2**16)
        if not data:
            return None
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        return [line.decode() for line in lines]


def serve(pool: Pool, requests: Lines, out: int) -> None:
    """Do what is asked line by line, and say what happens, until the pipe of requests ends."""
    while True:
        for message in pool.wait(_LONG_S, also=[requests.descriptor]):
            write_line(out, message.encode())
        while wait([requests.descriptor], 0):
            lines = requests.read()
            if lines is None:
                return
            for line in lines:
                _do(pool, Message.decode(line))


def _do(pool: Pool, request: Message) -> None:
    if request.kind == "start":
        start = request.value
        pool.start(
            start["payload"],
            start["slots"],
            number=request.task,
            fault_policy=FaultPolicy(uses_process_group=start["uses_process_group"]),
            log_dir=None if start["log_dir"] is None else Path(start["log_dir"]),
        )
    elif request.kind == "answer":
        pool.answer(request, request.value)
    else:
        pool.stop(request.task, patience_s=request.value)


def write_line(out: int, text: str) -> None:
    """Write a line to a pipe."""
    line = memoryview(text.encode() + b"\n")
    while line:
        line = line[os.write(out, line) :]
