"""Plays a step's program on a device and its links: how long it takes, and the most memory it holds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from paceline.cluster import Link
from paceline.job import Precision
from paceline.profile.device import DeviceRates
from paceline.simulate.collectives import collective_s
from paceline.simulate.program import COMPUTE, Allocate, Collective, Compute, Program


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
    clock: dict[str, float] = defaultdict(float)  # when each stream is free
    ended: dict[str, float] = {}
    busy: dict[str, float] = {"compute": 0.0, "optimizer": 0.0}
    memory = _Memory()
    for event in program:
        if isinstance(event, Allocate):
            memory.change(event)
        elif isinstance(event, Collective):
            clock[event.stream] = max(clock[event.stream], clock[COMPUTE]) + collective_s(event, link)
            ended[event.name] = clock[event.stream]
        else:
            seconds = compute_s(event, rates, precision)
            clock[COMPUTE] = max([clock[COMPUTE], *(ended[name] for name in event.after)]) + seconds
            busy[event.part] += seconds
    step_s = max(clock.values(), default=0.0)
    return Timeline(
        step_s, breakdown={**busy, "communication": max(0.0, step_s - sum(busy.values()))},
        peak_memory_bytes=round(memory.peak), ledger={name: round(held) for name, held in memory.at_peak.items()},
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
