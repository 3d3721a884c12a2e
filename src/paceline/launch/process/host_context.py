"""What a rank has from the process of its host, where that started it and tells of its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.launch.hosts.host_copies import HostCopies
from paceline.launch.process.failure import Failure
from paceline.launch.process.heartbeats import HeartbeatTable


@dataclass(frozen=True)
class HostContext:
    """report: tells the host why the rank ends. board: where it leaves signs of life for the host, if that looks for
    them. slot: its number on the host. copies: of the run's state, that hosts keep; None without restarts."""

    report: Callable[[Failure], None]
    board: HeartbeatTable | None = None
    slot: int = 0
    copies: HostCopies | None = None


_this_rank: HostContext | None = None


def this_rank() -> HostContext | None:
    """None in a process that something else started."""
    return _this_rank


def begin(rank: HostContext) -> None:
    """Say that this process is this rank."""
    global _this_rank
    _this_rank = rank
