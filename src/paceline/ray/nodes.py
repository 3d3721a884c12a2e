"""Nodes of a Ray cluster. Ray places one actor on each, which carries lines of text to and from
this process.

An actor only starts a process beside it and passes lines on, because ranks are forks and Ray's
workers have threads. Paceline sends only text. Ray packs its own calls with pickle, which Paceline
does not control.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from paceline.base.errors import ClusterError, MissingPackage, UsageError, with_extra

_CONNECT_S = 30.0
_LINE_BYTES = 2**26  # length of the longest line
_PLACE_S = 5.0  # seconds for Ray to place ranks in one way, before another way is tried

# Ray tries for minutes to reach an address without a cluster, and may then end its process.
# Therefore another process asks.
_ASK = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("nodes " + json.dumps(ray.nodes()))
"""


@dataclass(frozen=True)
class Node:
    """A node of a Ray cluster."""

    id: str
    address: str
    kind: str  # of the devices that ranks get: "cuda" or "cpu"
    count: int  # how many of them Ray has
    name: str  # for people


def find_nodes(address: str) -> list[Node]:
    """Return the nodes of the cluster that have GPUs; if none has, those that have CPUs.

    Raises:
        UsageError: Ray is not installed, or the address is not one of a cluster's head.
        ClusterError: no cluster answers, or it has neither CPUs nor GPUs.
    """
    _ray()
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdigit() and "/" not in host):
        raise UsageError(
            f"'{address}' is not the address of a Ray cluster",
            hint="auto, on a machine of the cluster, or HOST:PORT of its head",
        )
    hint = "run the command on a machine of the cluster; `ray status` there says whether it is up"
    try:
        completed = subprocess.run(
            [sys.executable, "-c", _ASK, address],
            capture_output=True,
            text=True,
            timeout=_CONNECT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"no Ray cluster answers at '{address}' within {_CONNECT_S:.0f} s", hint=hint
        ) from error
    listed = [line for line in completed.stdout.splitlines() if line.startswith("nodes ")]
    if not listed:
        reason = (completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"])[
            -1
        ]
        raise ClusterError(f"can't use the Ray cluster at '{address}': {reason}", hint=hint)
    return _with_devices(json.loads(listed[0].removeprefix("nodes ")), address)


def nodes_now(address: str) -> list[Node]:
    """Return the nodes of the cluster that this process is connected to, as `find_nodes` does.

    Raises:
        ClusterError: the cluster has neither CPUs nor GPUs.
    """
    return _with_devices(_ray().nodes(), address)


def _with_devices(listed: Sequence[dict[str, Any]], address: str) -> list[Node]:
    """Return the nodes of Ray's list that are there and have devices."""
    for kind, resource in (("cuda", "GPU"), ("cpu", "CPU")):
        nodes = [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                kind,
                int(node["Resources"][resource]),
                node["NodeManagerAddress"],
            )
            for node in listed
            if node["Alive"] and node["Resources"].get(resource, 0) >= 1
        ]
        if nodes:
            return _named_apart(sorted(nodes, key=lambda node: (node.name, node.id)))
    raise ClusterError(
        f"the Ray cluster at '{address}' has nodes without CPUs and GPUs alone",
        hint="`ray status` shows what it has",
    )


def _named_apart(nodes: list[Node]) -> list[Node]:
    """Give different names to nodes of one host, which have the same address, as in tests."""
    addresses = [node.address for node in nodes]
    return [
        replace(
            node,
            name=node.address
            if addresses.count(node.address) == 1
            else f"{node.address}/{node.id[:6]}",
        )
        for node in nodes
    ]


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Make this process a driver of the cluster inside the context, unless it is one already."""
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class Place:
    """A place at which Ray puts an actor."""

    name: str  # for people
    address: str
    options: Mapping[str, Any]  # of the actor: what it takes there, and the node


def at_nodes(nodes: Sequence[Node], take: Sequence[int]) -> list[Place]:
    """Return a place at each node.

    Args:
        take: The number of CPUs or GPUs that Ray takes from each node.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return [
        Place(
            node.name,
            node.address,
            {
                **_resources(node.kind, count),
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
            },
        )
        for node, count in zip(nodes, take, strict=True)
    ]


def layouts(world_size: int, nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Return how many nodes can have how many ranks each, the fewest nodes first; empty if there
    are too few devices.

    >>> a, b, c = (Node(name, name, "cpu", count, name) for name, count in (("a", 4), ("b", 2), ("c", 2)))
    >>> layouts(4, [a, b, c]), layouts(6, [a, b, c]), layouts(8, [a, b, c])
    ([(1, 4), (2, 2)], [(3, 2)], [])
    """
    return [
        (count, world_size // count)
        for count in range(1, len(nodes) + 1)
        if world_size % count == 0
        and sum(node.count >= world_size // count for node in nodes) >= count
    ]


@contextmanager
def placed(
    world_size: int, nodes: Sequence[Node], *, timeout_s: float
) -> Iterator[list[Place] | None]:
    """Reserve places for ranks by a placement group, with equally many ranks at each place.

    The places are on as few nodes as have enough free devices. The value is None if there are none
    within the timeout.
    """
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kind, deadline_s, by_id = (
        nodes[0].kind,
        time.monotonic() + timeout_s,
        {node.id: node for node in nodes},
    )
    for count, each in itertools.cycle(layouts(world_size, nodes)):
        bundle = {"GPU": each} if kind == "cuda" else {"CPU": each}
        group = placement_group([bundle] * count, strategy="STRICT_SPREAD")
        try:
            if group.wait(timeout_seconds=min(_PLACE_S, max(0.1, deadline_s - time.monotonic()))):
                homes = placement_group_table(group)["bundles_to_node_id"]
                chosen = [by_id[homes[bundle]] for bundle in range(count) if homes[bundle] in by_id]
                if len(chosen) == count:  # else a node has joined meanwhile
                    yield [
                        Place(
                            node.name,
                            node.address,
                            {
                                **_resources(kind, each),
                                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                                    group, bundle
                                ),
                            },
                        )
                        for bundle, node in enumerate(chosen)
                    ]
                    return
        finally:
            remove_placement_group(group)
        if time.monotonic() > deadline_s:
            break
    yield None


def _resources(kind: str, count: int) -> dict[str, int]:
    """Return the resources that an actor takes."""
    return {"num_cpus": count if kind == "cpu" else 0, "num_gpus": count if kind == "cuda" else 0}


class Outpost:
    """The actor in a node. It starts a program beside it, writes lines to it, and passes on the
    lines that it prints.
    """

    def __init__(self, words: str) -> None:
        """Store the program's arguments to Python, which `words` gives as a JSON list."""
        self._words, self._next, self._early = json.loads(words), 0, {}  # type: ignore[var-annotated]
        self._process: Any = None
        self._starting = asyncio.Lock()

    async def _program(self) -> Any:
        async with self._starting:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *self._words,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=_LINE_BYTES,
                )
        return self._process

    async def tell(self, number: int, line: str) -> None:
        """Write a line.

        Args:
            number: The position of the line, because Ray may bring calls in another order than they
                were made.
        """
        program = await self._program()
        self._early[number] = line
        while self._next in self._early:
            with suppress(ConnectionError):  # it has ended, which `hear` tells
                program.stdin.write(self._early.pop(self._next).encode() + b"\n")
            self._next += 1

    async def hear(self) -> str:
        """Return the next line; empty when the program has ended."""
        line: bytes = await (await self._program()).stdout.readline()
        return line.decode()


class RayTransport:
    """A `NodeTransport` to a program at each of some places.

    Args:
        words: The program's arguments to Python.
    """

    def __init__(self, places: Sequence[Place], words: Sequence[str]) -> None:
        self._ray = _ray()
        self.names = [place.name for place in places]
        self._num_told = [0] * len(places)
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, int] = {}  # calls that wait for a line
        for number, place in enumerate(places):
            actor = (
                self._ray.remote(Outpost)
                .options(**place.options, max_restarts=0)
                .remote(json.dumps(list(words)))
            )
            self._actors[number] = actor
            self._pending[actor.hear.remote()] = number

    def tell(self, node: int, line: str) -> None:
        if node in self._actors:
            self._actors[node].tell.remote(self._num_told[node], line)
            self._num_told[node] += 1

    def hear(self, timeout_s: float) -> list[tuple[int, str | None]]:
        from ray.exceptions import RayError

        lines: list[tuple[int, str | None]] = []
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        for call in ready:
            node = self._pending.pop(call)
            try:
                line = self._ray.get(call)
            except RayError:
                line = ""
            if line:
                self._pending[self._actors[node].hear.remote()] = node
            lines.append((node, line or None))
        return lines

    def drop(self, node: int) -> None:
        actor = self._actors.pop(node, None)
        self._pending = {call: number for call, number in self._pending.items() if number != node}
        if actor is not None:
            self._ray.kill(actor)

    def close(self) -> None:
        for node in list(self._actors):
            self.drop(node)


def _ray() -> Any:
    """Import Ray.

    Raises:
        MissingPackage: Ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "placing ranks by Ray", "ray", install=f"{with_extra('ray')}, on all nodes"
        ) from error
    return ray
