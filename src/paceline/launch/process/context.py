"""What a rank knows about itself and its peers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.base import signals
from paceline.base.waiting import waiting

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from paceline.launch.hosts.host_copies import HostCopies
    from paceline.launch.process.faults import FaultInjector
    from paceline.launch.process.heartbeats import Heartbeat, HeartbeatTable
    from paceline.launch.process.memory_store import StateCopies
    from paceline.launch.process.messages import Line
    from paceline.launch.process.outside_watch import OutsideWatch


_FIRST_LOOK_S, _LAST_LOOK_S = (
    0.001,
    0.05,
)  # between looks for another rank's word; doubled after each


@dataclass
class RankContext:
    """This process among the ranks of a run.

    device: where its tensors live.
    store: key-value store shared by all ranks; None for a single rank.
    board, slot: where it leaves its signs of life.
    attempt: names this launch; the same on all ranks, another at every start.
    secret: known to the ranks of this launch and to nobody else.
    host: the address of this host at which the other ranks reach it.
    timeout_s: how long a rank may give no sign of life.
    num_trained: trainings that this launch has begun; tells apart what they leave in the store.
    num_starts: how often all ranks were started in this run, this time included.
    deaths: how often each rank had died in this run when this one was started.
    restarts: how often ranks that die may still be started again.
    lost: ranks that are known to have died, the first one first; grows while they run. unreachable: those of them whose
        host gives no answer.
    hosts: of each rank, for people; empty where all are on this one.
    line: to the process that controls the run, if it is another one and listens.
    faults: that strike this rank, in a run that is rehearsed.
    copies: memory for copies of the run's state, for ranks that are started again, by slot; None without restarts.
    host_copies: the same memory, where each of several hosts has its own and reads what the others have.
    was_stoppable: whether a block of `stoppable` has ended, as training did then.
    is_watched: whether the process that started it looks for hangs, and ends it when it is asked to stop again.
    watch: looks for hangs of this host's ranks, where no process outside of them does.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    store: Store | None
    board: HeartbeatTable
    slot: int
    attempt: str
    step: int = 0
    stop_signal: int | None = field(default=None)
    secret: bytes = field(default=b"", repr=False)
    host: str = "127.0.0.1"
    timeout_s: float = 300.0
    num_trained: int = 0
    num_starts: int = 1
    deaths: tuple[int, ...] = ()
    restarts: int = 0
    lost: list[int] = field(default_factory=list)
    unreachable: list[int] = field(default_factory=list)
    hosts: tuple[str, ...] = ()
    line: Line | None = None
    faults: FaultInjector | None = None
    copies: StateCopies | None = None
    host_copies: HostCopies | None = None
    was_stoppable: bool = False
    is_watched: bool = False
    watch: OutsideWatch | None = None

    def beat(self, phase: str) -> None:
        """A sign of life."""
        self.board.write(self.slot, self.step, phase)
        if self.faults is not None:
            self.faults.strike(self.step, phase)

    def hear(self, key: str, phase: str) -> bytes:
        """What another rank leaves under a key of the store, however long that takes.

        This rank gives signs of life meanwhile. The other rank gives its own: the watch finds it if it hangs.
        """
        store, pause_s = self.store, _FIRST_LOOK_S
        assert store is not None
        with waiting:
            while not store.check([key]):
                self.beat(phase)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_LOOK_S)
        return bytes(store.get(key))

    @property
    def sign(self) -> Heartbeat:
        return self.board.read(self.slot)

    def sign_of(self, rank: int) -> Heartbeat:
        """A rank's last sign of life; this rank's own where the other's is not on this board."""
        if self.slot == self.rank and rank in range(self.board.num_ranks):
            sign = self.board.read(rank)
            return sign if sign.time_s else self.sign
        return self.sign

    @property
    def dead(self) -> list[int]:
        """Ranks that are known to have died: from their parent, if all ranks have one, or else from connections."""
        return self.board.dead if self.is_watched else self.lost

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Turn SIGTERM, SIGINT and the schedulers' SIGUSR1 and SIGUSR2 into a request to stop after the step.

        A second request takes the default course at once; where the process that started this one watches it, that
        process decides what is a second one.
        """
        requested: set[int] = set()

        def request(number: int) -> None:
            if number in requested and not self.is_watched:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            requested.add(number)
            self.stop_signal = (
                self.stop_signal or number
            )  # Ctrl-C reaches a rank twice: itself and by its parent

        with signals.handled(signals.STOPPING, request):
            try:
                yield
            finally:
                self.was_stoppable = True
