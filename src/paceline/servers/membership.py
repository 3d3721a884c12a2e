"""Which ranks a run lost and which came back, kept where it outlives the coordinator."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.runs.documents import rows
from paceline.training.run import RunPart

STARTED = "started"


class MembershipLog(RunPart):
    """Workers and servers that left and came back since the user started the run.

    Args:
        path: `events.jsonl`, a line an event; None keeps them in memory alone.
        goes_on: Whether this coordinator takes over from one that is gone.
    """

    def __init__(self, path: Path | None, *, goes_on: bool) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []
        if goes_on and path is not None and path.exists():
            for event in _whole_lines(path):
                self.events = [] if event["event"] == STARTED else [*self.events, event]
        if not goes_on:
            self.note(STARTED)
            self.events.clear()

    def note(self, event: str, **figures: Any) -> None:
        self.events.append({"event": event, **figures})
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(json.dumps({"event": event, **figures, "time": time.time()}) + "\n")

    def note_deaths(self, kind: str, number: int, deaths: int) -> None:
        """A worker or server has died so often: those that nobody could tell of are noted now."""
        for _ in range(deaths - self._count(f"{kind}_lost", kind, number)):
            self.note(f"{kind}_lost", **{kind: number})

    def note_restart(self, server_deaths: Sequence[int], *, step: int, updates: int) -> None:
        """All ranks started again, as one of them died, from a step. updates: that were recorded after it."""
        for server, deaths in enumerate(server_deaths):
            self.note_deaths("server", server, deaths)
        self.note("rolled_back", step=step, updates=updates)

    def note_rejoined(self, worker: int, step: int) -> bool:
        """A worker is there. Returns whether it had been lost before."""
        missing = self._count("worker_lost", "worker", worker) - self._count(
            "worker_rejoined", "worker", worker
        )
        for _ in range(missing):
            self.note("worker_rejoined", worker=worker, step=step)
        return missing > 0

    def _count(self, event: str, kind: str, number: int) -> int:
        return sum(entry["event"] == event and entry[kind] == number for entry in self.events)

    def summary(self) -> dict[str, Any]:
        """The figures of summary.json: numbers of workers and servers as they went and came, and updates."""

        def named(event: str, key: str) -> list[int]:
            return [entry[key] for entry in self.events if entry["event"] == event]

        return {
            "workers_lost": named("worker_lost", "worker"),
            "workers_rejoined": named("worker_rejoined", "worker"),
            "servers_lost": named("server_lost", "server"),
            "updates_lost": sum(named("rolled_back", "updates")),
        }


def _whole_lines(path: Path, offset: int = 0) -> Iterator[dict[str, Any]]:
    """The lines of a file from an offset on."""
    return rows(path.read_bytes()[offset:], path, after=offset)


def staleness_of(metrics: Path) -> list[int]:
    """The staleness of every update that a run recorded with one."""
    return (
        [line["staleness"] for line in _whole_lines(metrics) if "staleness" in line]
        if metrics.exists()
        else []
    )


def updates_after(metrics: Path, step: int, *, offset: int = 0) -> int:
    """How many updates a run recorded after a step, in what is written from an offset in bytes on."""
    if not metrics.exists():
        return 0
    lines: Iterator[Mapping[str, Any]] = _whole_lines(metrics, offset)
    return sum(("loss" in line or "staleness" in line) and line["step"] > step for line in lines)
