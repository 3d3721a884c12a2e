"""What a rank has from the process of its host, where that is one of several and started it as a fork."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.launch.hosts.host_copies import HostCopies
from paceline.launch.process.failure import Failure
from paceline.launch.process.heartbeats import HeartbeatTable


@dataclass(frozen=True)
class HostContext:
    """slot: its number on the host. board: where it leaves signs of life for the host. report: tells the host why the
    rank ends. copies: of the run's state, that hosts keep; None without restarts."""

    slot: int
    board: HeartbeatTable
    report: Callable[[Failure], None]
    copies: HostCopies | None


_this_rank: HostContext | None = None


def this_rank() -> HostContext | None:
    """None in a process that something else started."""
    return _this_rank


def begin(rank: HostContext) -> None:
    """Say in a fork that it is this rank."""
    global _this_rank
    _this_rank = rank
