"""Plays a step's program on a device and its links: how long it takes, and the most memory it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from paceline.cluster.links import Network
from paceline.job import Precision
from paceline.simulate.collectives import collective_s
from paceline.simulate.program import (
    COMPUTE,
    HOST,
    NETWORK,
    SENDING,
    Allocate,
    Collective,
    Compute,
    Event,
    Program,
    Receive,
    Repeat,
    Send,
)

_ANY = ""  # the name of all collectives together
ROUNDS = 2  # of a repetition that are played before the rest are counted: streams that wait for each other have settled


class Rates(Protocol):
    """How fast a device is."""

    @property
    def slowdown(self) -> float:
        """By how much computing is slower beside a collective, as a part."""

    @property
    def collective_s(self) -> float:
        """Of the host to launch a collective."""

    def seconds(self, event: Compute, precision: Precision) -> tuple[float, float]:
        """Of the device for some operators, and of the host that launches them; 0 where they are one."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What playing a program gave.

    breakdown: seconds of "compute", "optimizer", "communication" (what no computing hides) and, of a rank that waits
        until others have computed what it receives, "bubble"; they add up to step_s.
    ledger: bytes by what they are for, at the moment of the peak.
    highest: the most bytes of each at any moment.
    """

    step_s: float
    breakdown: dict[str, float]
    peak_memory_bytes: int
    ledger: dict[str, int]
    highest: dict[str, int]


def play_together(
    programs: Sequence[Program],
    rates: Sequence[Rates],
    network: Network,
    *,
    precision: Precision = "float32",
    rank_stride: int = 1,
) -> list[Timeline]:
    """The step of ranks that wait for each other's messages, in rank order. A rank's streams run at the same time, the
    events of one stream one after the other.

    rank_stride: how far apart neighbours among them are numbered on the network.

    Raises:
        ValueError: a rank waits for a message that nobody sends.
    """
    arrived: dict[tuple[int, int, str], _Message] = {}
    players = [
        Player(rates_of_rank, network, precision=precision, number=number, rank_stride=rank_stride)
        for number, rates_of_rank in enumerate(rates)
    ]
    pending = [_Pending(player, program) for player, program in zip(players, programs, strict=True)]
    while any(rank.go_on(arrived) for rank in pending):
        pass
    if waiting := [rank for rank in pending if rank.position < len(rank.program)]:
        raise ValueError(
            f"rank {waiting[0].player.number} waits for {waiting[0].program[waiting[0].position]}, "
            "which nobody sends"
        )
    return [player.timeline() for player in players]


class _Message(NamedTuple):
    """computed_s: when its sender has computed it. arrived_s: when it is there."""

    computed_s: float
    arrived_s: float


class _Pending:
    """A rank on its way through its program."""

    def __init__(self, player: Player, program: Program) -> None:
        self.player, self.program, self.position = player, program, 0

    def go_on(self, arrived: dict[tuple[int, int, str], _Message]) -> bool:
        """Play until a message is missing; whether any event was played. arrived: by (from, to, name)."""
        before, player = self.position, self.player
        while self.position < len(self.program):
            event = self.program[self.position]
            if isinstance(event, Receive):
                key = (event.source, player.number, event.name)
                if key not in arrived:
                    break
                player.receive(arrived.pop(key))
            elif isinstance(event, Send):
                arrived[player.number, event.to, event.name] = player.send(event)
            else:
                player.play(event)
            self.position += 1
        return self.position > before


class Player:
    """One rank's clocks, what it was busy with, and its memory."""

    def __init__(
        self,
        rates: Rates,
        network: Network,
        *,
        precision: Precision = "float32",
        number: int = 0,
        rank_stride: int = 1,
    ) -> None:
        self.number, self.rank_stride, self.rates, self.precision = (
            number,
            rank_stride,
            rates,
            precision,
        )
        self.network = network
        self.clock: dict[str, float] = {
            COMPUTE: 0.0,
            NETWORK: 0.0,
            SENDING: 0.0,
            HOST: 0.0,
        }  # when each is free
        self.ended: dict[str, float] = {}
        self.busy: dict[str, float] = {"compute": 0.0, "optimizer": 0.0}
        self.bubble_s = 0.0
        self.memory = MemoryLedger()
        self._slowdown = rates.slowdown

    def play(self, event: Event) -> None:
        """Any event but a message."""
        played = _PLAYED.get(type(event))
        if played is None:
            raise TypeError(f"{event} is played with other ranks")
        played(self, event)

    def _compute(self, event: Compute) -> None:
        clock = self.clock
        device_s, host_s = self.rates.seconds(event, self.precision)
        start_s = clock[COMPUTE]
        for name in event.after:
            start_s = max(start_s, self.ended.get(name, 0.0))
        if self._slowdown and clock[NETWORK] > start_s:
            device_s += self._slowdown * min(device_s, clock[NETWORK] - start_s)
        clock[HOST] += host_s
        clock[COMPUTE] = max(start_s + device_s, clock[HOST])
        self.busy[event.part] += clock[COMPUTE] - start_s

    def _collective(self, event: Collective) -> None:
        clock = self.clock
        clock[HOST] += event.times * self.rates.collective_s
        begins_s = max(clock.get(event.stream, 0.0), clock[COMPUTE], clock[HOST])
        computed_s = max(0.0, begins_s - self.ended.get(_ANY, 0.0))
        ends_s = begins_s + collective_s(event, self.network, computed_s)
        clock[event.stream] = self.ended[event.name] = self.ended[_ANY] = ends_s
        if event.servers and event.stream == COMPUTE:
            clock[HOST] = ends_s  # the host itself takes what servers send

    def receive(self, message: _Message) -> None:
        """Until the sender has computed the message, the rank is in a bubble; after that, it waits for the link."""
        self.bubble_s += max(0.0, message.computed_s - self.clock[COMPUTE])
        self.clock[COMPUTE] = max(self.clock[COMPUTE], message.arrived_s)

    def send(self, event: Send) -> _Message:
        """A rank's messages leave one after the other; computing goes on."""
        link = self.network.between(self.number * self.rank_stride, event.to * self.rank_stride)
        computed_s = self.clock[COMPUTE]
        self.clock[SENDING] = (
            max(self.clock[SENDING], computed_s) + event.num_bytes / link.bytes_per_s
        )
        return _Message(computed_s, self.clock[SENDING] + link.latency_s)

    def _repeat(self, event: Repeat) -> None:
        """All but a few rounds are counted: clocks advance as in the last one played, and memory by what is kept."""
        remaining = event.count
        before: tuple[dict[str, float], ...] = ()
        for _ in range(min(ROUNDS, event.count)):
            before = self._state()
            for repeated in event.events:
                self.play(repeated)
            remaining -= 1
        if remaining > 1:
            after = self._state()
            for figures, old, new in zip(
                (self.clock, self.ended, self.busy, self.memory.by_ledger),
                before,
                after,
                strict=True,
            ):
                for name, figure in new.items():
                    figures[name] = figure + (remaining - 1) * (figure - old.get(name, figure))
            self.memory.settle()
        if remaining > 0:
            for repeated in event.events:
                self.play(repeated)

    def _state(self) -> tuple[dict[str, float], ...]:
        return dict(self.clock), dict(self.ended), dict(self.busy), dict(self.memory.by_ledger)

    def timeline(self) -> Timeline:
        step_s, memory = max(self.clock.values()), self.memory
        bubble = {"bubble": self.bubble_s} if self.bubble_s else {}
        exposed_s = max(0.0, step_s - sum(self.busy.values()) - self.bubble_s)
        return Timeline(
            step_s,
            breakdown={**self.busy, "communication": exposed_s, **bubble},
            peak_memory_bytes=round(memory.peak),
            ledger={name: round(held_bytes) for name, held_bytes in memory.at_peak.items()},
            highest={name: round(held_bytes) for name, held_bytes in memory.highest.items()},
        )


_PLAYED: dict[type, Callable[[Player, Any], None]] = {
    Compute: Player._compute,
    Collective: Player._collective,
    Repeat: Player._repeat,
    Allocate: lambda player, event: player.memory.change(event),
}


class MemoryLedger:
    """A running ledger, and what it was at its highest."""

    def __init__(self) -> None:
        self.by_ledger: dict[str, float] = defaultdict(float)
        self.total, self.peak = 0.0, 0.0
        self.at_peak: dict[str, float] = {}
        self.highest: dict[str, float] = defaultdict(float)

    def change(self, event: Allocate) -> None:
        ledger, num_bytes = event.ledger, event.num_bytes
        held_bytes = self.by_ledger[ledger] = self.by_ledger[ledger] + num_bytes
        if held_bytes > self.highest[ledger]:
            self.highest[ledger] = held_bytes
        self.total += num_bytes
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.by_ledger)

    def settle(self) -> None:
        """After what is held was set from outside."""
        self.total = sum(self.by_ledger.values())
        for ledger, held_bytes in self.by_ledger.items():
            self.highest[ledger] = max(self.highest[ledger], held_bytes)
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.by_ledger)
