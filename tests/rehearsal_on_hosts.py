"""Rehearsals in which hosts are cut off: each rank is on a host of its own, a network namespace of this machine (Linux,
as root)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.api.hosts import train_on_hosts
from paceline.api.rehearsal import Rehearsal, endings, rehearsed, told_ending
from paceline.api.train import TrainRequest
from paceline.base.errors import UsageError
from paceline.launch.hosts.host_process import Host
from paceline.launch.process.faults import Fault
from paceline.launch.process.messages import Line
from paceline.launch.process.supervisor import Supervisor
from paceline.planner.resized import resized
from paceline.runs import folder
from tests.namespaces import NetworkHost, network_hosts

PORT = 29500  # of the meeting place, in a separate network
_LOOK_S = 0.02


@dataclass(frozen=True)
class Cut(Fault):
    """A host's network is cut once a step is recorded, for good or for so many seconds. No rank is struck by it."""

    host: int = 0
    heals_s: float | None = None

    @classmethod
    def of(cls, host: int, step: int, heals_s: float | None = None) -> Cut:
        return cls("stop", -1, step, host=host, heals_s=heals_s)

    def __str__(self) -> str:
        return f"cut {self.host}@{self.step}{'' if self.heals_s is None else f'+{self.heals_s:g}'}"


def rehearse_on_hosts(
    job: pl.Job,
    plan: str,
    faults: Sequence[Fault],
    *,
    run: Path,
    save_every: int,
    timeout_s: float,
) -> Rehearsal:
    """Train undisturbed, then under faults, as `pl.rehearse` does, with a host for each rank.

    Raises:
        NoNamespaces: this machine can't have such hosts.
        UsageError: the first host is cut off for good, without which the others can't go on.
    """

    def ask(other: Any) -> TrainRequest:
        return TrainRequest.of(job, None, other)

    options = {"timeout_s": timeout_s, "restarts": None, "check": False, "save_every": save_every}
    on_hosts = OnHosts(pl.Plan.parse(plan), ask, timeout_s)
    return rehearsed(on_hosts.plan, on_hosts.launch, ask, run, faults, options)


@dataclass(frozen=True)
class OnHosts:
    """A run under this plan on as many hosts as it has ranks."""

    plan: pl.Plan
    ask: Callable[[Any], TrainRequest]
    patience_s: float

    def launch(self, run_dir: Path, options: dict[str, Any]) -> tuple[int, str]:
        """Train until all hosts that are not cut off for good have ended. Returns the worst exit code and its
        message."""
        faults, count = options.get("faults", ()), self.plan.world_size
        cuts = {number: fault for number, fault in enumerate(faults) if isinstance(fault, Cut)}
        lost = {cut.host for cut in cuts.values() if cut.heals_s is None}
        if 0 in lost:
            raise UsageError("the first host is cut off for good, and the others can't go on")
        resized(self.plan, count - len(lost))
        with network_hosts(count) as hosts:
            least = count - len(lost)
            places = [
                Host("the rehearsal", index, count, 1, hosts[0].address, PORT, least)
                for index in range(count)
            ]

            def be_host(index: int, line: Line) -> None:
                # The ranks of one host have loopback there.
                os.environ.pop("GLOO_SOCKET_IFNAME", None)
                hosts[index].enter()
                told_ending(partial(self._train, places[index], run_dir, dict(options)), line)

            with closing(Supervisor(be_host)) as processes:
                for index in range(count):
                    processes.start(index)
                over = threading.Event()
                cutter = threading.Thread(target=_cut, args=(cuts, hosts, run_dir, over))
                cutter.start()
                ended = endings(processes, [index for index in range(count) if index not in lost])
                over.set()
                cutter.join()
        return max(ended, key=lambda end: end[0])

    def _train(self, place: Host, run_dir: Path, options: dict[str, Any]) -> None:
        restarts = options.pop("restarts")
        train_on_hosts(
            place,
            self.plan,
            lambda plan: self.ask(plan).train(run_dir, **options),
            run=run_dir,
            procs=None,
            timeout_s=self.patience_s,
            restarts=restarts,
        )


def _cut(
    cuts: dict[int, Cut], hosts: Sequence[NetworkHost], run_dir: Path, over: threading.Event
) -> None:
    """Cut hosts off as their steps come, and note it where ranks note the faults that strike them."""
    notes = run_dir / "faults"
    waiting = {number: cut for number, cut in cuts.items() if not _note(notes, number).exists()}
    healing: dict[int, float] = {}
    while not over.wait(_LOOK_S):
        step = _recorded(run_dir)
        for number, cut in list(waiting.items()):
            if step >= cut.step:
                del waiting[number]
                hosts[cut.host].cut()
                notes.mkdir(exist_ok=True)
                text = json.dumps({"step": cut.step, "phase": "input", "time": time.time()})
                _note(notes, number).write_text(text)
                if cut.heals_s is not None:
                    healing[cut.host] = time.monotonic() + cut.heals_s
        for index, at_s in list(healing.items()):
            if time.monotonic() >= at_s:
                del healing[index]
                hosts[index].heal()


def _note(notes: Path, number: int) -> Path:
    return notes / f"{number}.json"


def _recorded(run_dir: Path) -> int:
    """The newest step in the run's figures."""
    lines: list[str] = []
    with suppress(FileNotFoundError):
        lines = (run_dir / folder.METRICS).read_text().splitlines()
    steps = [0]
    for line in lines:
        with suppress(ValueError):  # half a line
            steps.append(json.loads(line).get("step", 0))
    return max(steps)
