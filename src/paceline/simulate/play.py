"""Plays a step's program on a device and its links: how long it takes, and the most memory it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster import Link
from paceline.job import Precision
from paceline.profile.device import DeviceRates
from paceline.simulate.collectives import collective_s
from paceline.simulate.program import (
    COMPUTE,
    SENDING,
    Allocate,
    Collective,
    Compute,
    Event,
    Program,
    Receive,
    Send,
)


@dataclass(frozen=True, slots=True)
class Timeline:
    """What playing a program gave.

    breakdown: seconds of "compute", "optimizer" and "communication" (what no computing hides); they add up to
        step_s.
    ledger: bytes by what they are for, at the moment of the peak.
    highest: the most bytes of each at any moment.
    """

    step_s: float
    breakdown: dict[str, float]
    peak_memory_bytes: int
    ledger: dict[str, int]
    highest: dict[str, int]


def play(program: Program, rates: DeviceRates, link: Link, *, precision: Precision = "float32") -> Timeline:
    """One rank's step. The streams run at the same time, the events of one stream one after the other."""
    return play_together([program], [rates], link, precision=precision)[0]


def play_together(programs: Sequence[Program], rates: Sequence[DeviceRates], link: Link, *,
                  precision: Precision = "float32") -> list[Timeline]:
    """The step of ranks that wait for each other's messages, in rank order.

    Raises:
        ValueError: a rank waits for a message that nobody sends.
    """
    arrived: dict[tuple[int, int, str], float] = {}
    ranks = [_Rank(number, program, own, link, precision) for number, (program, own) in
             enumerate(zip(programs, rates, strict=True))]
    while any(rank.go_on(arrived) for rank in ranks):
        pass
    if waiting := [rank for rank in ranks if not rank.is_done]:
        raise ValueError(f"rank {waiting[0].number} waits for {waiting[0].waits_for}, which nobody sends")
    return [rank.timeline() for rank in ranks]


class _Rank:
    """A rank on its way through its program."""

    def __init__(self, number: int, program: Program, rates: DeviceRates, link: Link, precision: Precision) -> None:
        self.number, self.program, self.rates, self.link, self.precision = number, program, rates, link, precision
        self.at = 0
        self.clock: dict[str, float] = defaultdict(float)  # when each stream is free
        self.ended: dict[str, float] = {}
        self.busy: dict[str, float] = {"compute": 0.0, "optimizer": 0.0}
        self.memory = _Memory()

    @property
    def is_done(self) -> bool:
        return self.at == len(self.program)

    @property
    def waits_for(self) -> Event:
        return self.program[self.at]

    def go_on(self, arrived: dict[tuple[int, int, str], float]) -> bool:
        """Play until a message is missing; whether any event was played. arrived: when, by (from, to, name)."""
        before = self.at
        while not self.is_done:
            event = self.program[self.at]
            if isinstance(event, Receive):
                key = (event.source, self.number, event.name)
                if key not in arrived:
                    break
                self.clock[COMPUTE] = max(self.clock[COMPUTE], arrived.pop(key))
            elif isinstance(event, Send):
                self.clock[SENDING] = (max(self.clock[SENDING], self.clock[COMPUTE])
                                       + event.num_bytes / self.link.bytes_per_s)
                arrived[self.number, event.to, event.name] = self.clock[SENDING] + self.link.latency_s
            else:
                self._play(event)
            self.at += 1
        return self.at > before

    def _play(self, event: Compute | Collective | Allocate) -> None:
        clock = self.clock
        if isinstance(event, Allocate):
            self.memory.change(event)
        elif isinstance(event, Collective):
            clock[event.stream] = max(clock[event.stream], clock[COMPUTE]) + collective_s(event, self.link)
            self.ended[event.name] = clock[event.stream]
        else:
            seconds = compute_s(event, self.rates, self.precision)
            clock[COMPUTE] = max([clock[COMPUTE], *(self.ended[name] for name in event.after)]) + seconds
            self.busy[event.part] += seconds

    def timeline(self) -> Timeline:
        step_s, memory = max(self.clock.values(), default=0.0), self.memory
        return Timeline(
            step_s, breakdown={**self.busy, "communication": max(0.0, step_s - sum(self.busy.values()))},
            peak_memory_bytes=round(memory.peak),
            ledger={name: round(held) for name, held in memory.at_peak.items()},
            highest={name: round(held) for name, held in memory.highest.items()},
        )


def compute_s(event: Compute, rates: DeviceRates, precision: Precision) -> float:
    """Seconds of some operators: each waits for the arithmetic, for memory or for its launch, one after another."""
    return (event.flops / rates.matrix_flops_per_s(precision) + event.moved_bytes / rates.memory_bytes_per_s
            + event.function_bytes / rates.function_bytes_per_s + event.operators * rates.operator_s + event.fixed_s)


class _Memory:
    """A running ledger, and what it was at its highest."""

    def __init__(self) -> None:
        self.held: dict[str, float] = defaultdict(float)
        self.total, self.peak = 0.0, 0.0
        self.at_peak: dict[str, float] = {}
        self.highest: dict[str, float] = defaultdict(float)

    def change(self, event: Allocate) -> None:
        self.held[event.ledger] += event.num_bytes
        self.highest[event.ledger] = max(self.highest[event.ledger], self.held[event.ledger])
        self.total += event.num_bytes
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.held)
