"""Nodes of a Ray cluster: Ray places one actor on each, which carries lines of text to and from this process.

An actor only starts a process beside it and passes lines on, because ranks are forks and Ray's workers have threads.
Paceline sends only text. Ray packs its own calls with pickle, which Paceline does not control.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from paceline.errors import ClusterError, MissingPackage, UsageError

_CONNECT_S = 30.0
_LINE_BYTES = 2**26  # the longest line

# Ray tries for minutes to reach an address where no cluster is, and may end its process then; so another one asks.
_ASK = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("nodes " + json.dumps([[node["NodeID"], node["NodeManagerAddress"], node["Resources"]]
                             for node in ray.nodes() if node["Alive"]]))
"""


@dataclass(frozen=True)
class Node:
    """A node of a Ray cluster. kind: of the devices that ranks get. count: how many Ray has."""

    id: str
    name: str
    kind: str
    count: int


def find_nodes(address: str) -> list[Node]:
    """The nodes of the cluster that have GPUs; if none has, those that have CPUs.

    Raises:
        UsageError: Ray is not installed, or the address is not one of a cluster's head. ClusterError: no cluster
            answers, or it has neither CPUs nor GPUs.
    """
    _ray()
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdigit() and "/" not in host):
        raise UsageError(f"'{address}' is not the address of a Ray cluster",
                         hint="auto, on a machine of the cluster, or HOST:PORT of its head")
    hint = "run the search on a machine of the cluster; `ray status` there says whether it is up"
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK, address], capture_output=True, text=True,
                               timeout=_CONNECT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"no Ray cluster answers at '{address}' within {_CONNECT_S:.0f} s", hint=hint) from error
    listed = [line for line in asked.stdout.splitlines() if line.startswith("nodes ")]
    if not listed:
        reason = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise ClusterError(f"can't use the Ray cluster at '{address}': {reason}", hint=hint)
    return _with_devices(json.loads(listed[0].removeprefix("nodes ")), address)


def _with_devices(listed: Sequence[tuple[str, str, dict[str, float]]], address: str) -> list[Node]:
    for kind, resource in (("cuda", "GPU"), ("cpu", "CPU")):
        nodes = [Node(node_id, name, kind, int(resources[resource])) for node_id, name, resources in listed
                 if resources.get(resource, 0) >= 1]
        if nodes:
            return _named_apart(sorted(nodes, key=lambda node: (node.name, node.id)))
    raise ClusterError(f"the Ray cluster at '{address}' has nodes without CPUs and GPUs alone",
                       hint="`ray status` shows what it has")


def _named_apart(nodes: list[Node]) -> list[Node]:
    """Nodes of one host, as in tests, have the same address."""
    names = [node.name for node in nodes]
    return [Node(node.id, node.name if names.count(node.name) == 1 else f"{node.name}/{node.id[:6]}", node.kind,
                 node.count) for node in nodes]


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Within the block, this process is a driver of the cluster, unless it was one before."""
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()


class Outpost:
    """The actor in a node: starts a program beside it, writes lines to it, and hands on those that it prints."""

    def __init__(self, words: str) -> None:
        """words: the program's arguments to Python, as a JSON list."""
        self._words, self._next, self._early = json.loads(words), 0, {}  # type: ignore[var-annotated]
        self._process: Any = None
        self._starting = asyncio.Lock()

    async def _program(self) -> Any:
        async with self._starting:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, *self._words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                    limit=_LINE_BYTES)
        return self._process

    async def tell(self, number: int, line: str) -> None:
        """Write a line. number: Ray may bring calls in another order than they were made."""
        program = await self._program()
        self._early[number] = line
        while self._next in self._early:
            with suppress(ConnectionError):  # it has ended, which `hear` tells
                program.stdin.write(self._early.pop(self._next).encode() + b"\n")
            self._next += 1

    async def hear(self) -> str:
        """The next line; empty when the program has ended."""
        line: bytes = await (await self._program()).stdout.readline()
        return line.decode()


class RayTransport:
    """A `Wire` to a program on each of some nodes.

    Args:
        take: CPUs or GPUs that Ray takes from each node for it.
        words: The program's arguments to Python.
    """

    def __init__(self, nodes: Sequence[Node], take: Sequence[int], words: Sequence[str]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray = _ray()
        self.names = [node.name for node in nodes]
        self._told = [0] * len(nodes)
        self._actors: dict[int, Any] = {}
        self._heard: dict[Any, int] = {}  # calls that wait for a line
        for number, (node, count) in enumerate(zip(nodes, take, strict=True)):
            actor = self._ray.remote(Outpost).options(
                num_cpus=count if node.kind == "cpu" else 0, num_gpus=count if node.kind == "cuda" else 0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False), max_restarts=0).remote(
                    json.dumps(list(words)))
            self._actors[number] = actor
            self._heard[actor.hear.remote()] = number

    def tell(self, node: int, line: str) -> None:
        if node in self._actors:
            self._actors[node].tell.remote(self._told[node], line)
            self._told[node] += 1

    def hear(self, timeout_s: float) -> list[tuple[int, str | None]]:
        from ray.exceptions import RayError

        lines: list[tuple[int, str | None]] = []
        ready, _ = self._ray.wait(list(self._heard), num_returns=1, timeout=timeout_s)
        for call in ready:
            node = self._heard.pop(call)
            try:
                line = self._ray.get(call)
            except RayError:
                line = ""
            if line:
                self._heard[self._actors[node].hear.remote()] = node
            lines.append((node, line or None))
        return lines

    def drop(self, node: int) -> None:
        actor = self._actors.pop(node, None)
        self._heard = {call: number for call, number in self._heard.items() if number != node}
        if actor is not None:
            self._ray.kill(actor)

    def close(self) -> None:
        for node in list(self._actors):
            self.drop(node)


def _ray() -> Any:
    """The package.

    Raises:
        MissingPackage: it is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingPackage("placing trials by Ray", "ray", install="'paceline[ray]', on all nodes") from error
    return ray
