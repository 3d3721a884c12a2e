"""Hosts as network namespaces of this machine, behind a bridge in another one. Linux, as root."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.base.errors import PacelineError

NIC = "eth0"
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_COMMAND_S = 30.0


class NoNamespaces(PacelineError):
    """Why there can be no hosts here."""


@dataclass(frozen=True)
class NetworkHost:
    """A host of its own as far as the network goes; files, processes and clocks are this machine's.

    switch, port: the namespace of the bridge, and the host's place there.
    """

    name: str
    address: str
    switch: str
    port: str

    def enter(self) -> None:
        """Put this process, which has one thread, on the host."""
        with open(f"/run/netns/{self.name}") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), self.name)

    def cut(self) -> None:
        """Cut the host off: nothing that is sent arrives, on either side."""
        ip("-n", self.switch, "link", "set", self.port, "down")

    def heal(self) -> None:
        """Take the host back."""
        ip("-n", self.switch, "link", "set", self.port, "up")


def ip(*arguments: str) -> None:
    """
    Raises:
        NoNamespaces: the command `ip` says no.
    """
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    if done.returncode:
        raise NoNamespaces(
            f"ip {' '.join(arguments)}: {done.stderr.strip()}",
            hint=(
                "the kernel must have network namespaces, bridges and veth; a container needs --privileged"
            ),
        )


@contextmanager
def network_hosts(count: int, *, network: str = "10.78.0") -> Iterator[list[NetworkHost]]:
    """So many hosts, with addresses from NETWORK.1 on.

    Raises:
        NoNamespaces: not Linux, not root, or the kernel lacks a part.
    """
    if sys.platform != "linux" or os.geteuid() or shutil.which("ip") is None:
        raise NoNamespaces(
            "hosts of their own are network namespaces, which need Linux, root and the command ip",
            hint="run as root on Linux, after apt install iproute2",
        )
    tag = uuid.uuid4().hex[:6]
    switch = f"pl{tag}s"
    hosts = [
        NetworkHost(f"pl{tag}h{i}", f"{network}.{i}", switch, f"p{i}") for i in range(1, count + 1)
    ]
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for host in hosts:
            ip("netns", "add", host.name)
            ip("-n", host.name, "link", "set", "lo", "up")
            ip(
                "-n",
                switch,
                "link",
                "add",
                host.port,
                "type",
                "veth",
                "peer",
                "name",
                NIC,
                "netns",
                host.name,
            )
            ip("-n", switch, "link", "set", host.port, "master", "br0", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", NIC)
            ip("-n", host.name, "link", "set", NIC, "up")
        yield hosts
    finally:
        for name in (*(host.name for host in hosts), switch):
            subprocess.run(
                ["ip", "netns", "del", name], capture_output=True, check=False, timeout=_COMMAND_S
            )
