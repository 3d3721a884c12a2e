"""Hosts as network namespaces behind a bridge, their links held to a rate in both directions. Linux, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

# A token bucket smaller than this cuts large packets into many, which costs the two cores more than the work itself.
BURST, LATENCY = "256kb", "400ms"
NETWORK = "10.79.0"
_NIC = "eth0"


class NoLab(Exception):
    """Why there can be no hosts here."""


def _ip(*arguments: str) -> None:
    completed = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    if completed.returncode:
        raise NoLab(f"ip {' '.join(arguments)}: {completed.stderr.strip()}")


def _in(namespace: str, *command: str) -> None:
    _ip("netns", "exec", namespace, *command)


def _shape(namespace: str, device: str, mbit_s: float) -> None:
    add = ("tc", "qdisc", "add", "dev", device)
    _in(
        namespace,
        *add,
        "root",
        "handle",
        "1:",
        "tbf",
        "rate",
        f"{mbit_s:g}mbit",
        "burst",
        BURST,
        "latency",
        LATENCY,
    )
    if device == _NIC:  # what Linux gives a device by itself; a switch is first in, first out
        _in(namespace, *add, "parent", "1:1", "pfifo_fast")


@dataclass(frozen=True)
class Host:
    """One of the lab's hosts."""

    name: str
    address: str

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
        """Run a command there, in a session of its own. It sees no other host's processes and shares no memory."""
        alone = ["unshare", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *alone, *command],
            env={**os.environ, **environ},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )


@contextmanager
def hosts(count: int, *, mbit_s: float) -> Iterator[list[Host]]:
    """So many hosts, each with a link of `mbit_s` megabits a second each way to a switch that has no limit.

    Raises:
        NoLab: not Linux, not root, or the kernel lacks a part.
    """
    if (
        sys.platform != "linux"
        or os.geteuid()
        or not (all(shutil.which(name) for name in ("ip", "tc", "unshare")))
    ):
        raise NoLab(
            "hosts are network namespaces, which need Linux, root and the commands ip, tc and unshare"
        )
    tag = uuid.uuid4().hex[:6]
    switch, made = (
        f"lab{tag}s",
        [Host(f"lab{tag}h{i}", f"{NETWORK}.{i}") for i in range(1, count + 1)],
    )
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, host in enumerate(made):
            port = f"p{number}"
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip(
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                _NIC,
                "netns",
                host.name,
            )
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", _NIC)
            _ip("-n", host.name, "link", "set", _NIC, "up")
            # As Linux comes, whatever this machine is set to.
            _ip(
                "-n",
                host.name,
                "route",
                "replace",
                f"{NETWORK}.0/24",
                "dev",
                _NIC,
                "congctl",
                "cubic",
            )
            _shape(host.name, _NIC, mbit_s)  # what it sends
            _shape(switch, port, mbit_s)  # what it receives
        yield made
    finally:
        for name in (*(host.name for host in made), switch):
            subprocess.run(
                ["ip", "netns", "del", name], capture_output=True, check=False, timeout=30
            )
