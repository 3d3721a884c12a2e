"""Rehearse faults that cut hosts off: each rank is on a host of its own, which is a network
namespace of this machine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.api.hosts import train_on_hosts
from paceline.base.errors import PacelineError, UsageError
from paceline.base.fork import die_with, prepare_to_fork
from paceline.launch.hosts.host_process import Host
from paceline.launch.hosts.leader_log import LeaderState
from paceline.launch.hosts.namespaces import NetworkHost, network_hosts
from paceline.launch.process.faults import Fault
from paceline.planner.resized import resized
from paceline.strategies.plan import Plan

PORT = 29500  # of the meeting place, in a separate network


@dataclass(frozen=True)
class HostsRehearsal:
    """A run under this plan on as many hosts as it has ranks."""

    plan: Plan
    # called in each rank with its plan and the faults that strike it
    train: Callable[[Plan, Sequence[Fault]], Any]
    run_dir: Path
    faults: tuple[Fault, ...]
    patience_s: float
    restarts: int | None

    @property
    def lost(self) -> set[int]:
        """The hosts that are cut off for good."""
        return {
            fault.rank for fault in self.faults if fault.kind == "cut" and fault.heals_s is None
        }

    def launch(self) -> tuple[int, str]:
        """Train until all hosts that are not cut off have ended. Return the worst exit code and its
        message.

        Raises:
            NoNamespaces: this machine can't create hosts.
            UsageError, PlanError: without these hosts the run can't go on.
        """
        self._refuse()
        prepare_to_fork()
        with network_hosts(self.plan.world_size) as hosts:
            launched = [
                self._start(index, host, hosts[0].address) for index, host in enumerate(hosts)
            ]
            ended = [
                ending_of(*each) for index, each in enumerate(launched) if index not in self.lost
            ]
            for process, _ in launched:
                process.kill()
                process.join()
        return max(ended, key=lambda end: end[0])

    def _refuse(self) -> None:
        """Refuse faults after which the remaining hosts are no majority; hosts are lost one after
        another.

        Raises:
            UsageError: a fault leaves no majority.
        """
        standing = LeaderState(members=frozenset(range(self.plan.world_size)), has_ended=False)
        for fault in sorted(self.faults, key=lambda fault: fault.step):
            if fault.kind == "cut" and fault.heals_s is None and fault.rank in standing.members:
                remaining = standing.members - {fault.rank}
                if not standing.is_enough(remaining):
                    raise UsageError(
                        f"'{fault}' leaves {len(remaining)} of {len(standing.members)} hosts, which is no "
                        "majority, and they may not go on",
                        hint=f"{fault}+SECONDS, after which it is back, or a plan of more ranks",
                    )
                keeper = standing.keeper if standing.keeper in remaining else min(remaining)
                standing = replace(standing, members=remaining, keeper=keeper)
        resized(self.plan, self.plan.world_size - len(self.lost))

    def _start(self, index: int, host: NetworkHost, address: str) -> tuple[Any, Connection]:
        parent_end, child_end = multiprocessing.Pipe(duplex=False)
        process: Any = multiprocessing.get_context("fork").Process(
            target=self._be_host, args=(index, host, address, child_end, os.getpid())
        )
        process.start()
        child_end.close()
        return process, parent_end

    def _be_host(
        self, index: int, host: NetworkHost, address: str, answer: Connection, parent_pid: int
    ) -> None:
        """Train in the host's process, and send what the training ended with."""
        die_with(parent_pid)
        count = self.plan.world_size
        code, message = 0, "it ended"
        try:
            host.enter()
            place = Host("the rehearsal", index, count, 1, address, PORT, count - len(self.lost))
            train_on_hosts(
                place,
                self.plan,
                lambda plan: self.train(plan, self._faults_of(index)),
                run=self.run_dir,
                procs=None,
                patience_s=self.patience_s,
                restarts=self.restarts,
            )
        except PacelineError as error:
            code, message = error.exit_code, " ".join(str(error).splitlines()[:2])
        answer.send_bytes(json.dumps(message).encode())
        os._exit(code)

    def _faults_of(self, index: int) -> list[Fault]:
        """Return the faults with the current number of the rank that each one strikes; runs in a
        rank.

        This host's rank may have another number by now than the fault says.
        """
        rank = int(os.environ["RANK"])
        return [
            fault
            if fault.kind != "cut"
            else replace(fault, rank=rank if fault.rank == index else -1)
            for fault in self.faults
        ]


def ending_of(process: Any, answer: Connection) -> tuple[int, str]:
    """Return a process's exit code, and what it ended with."""
    try:
        message: str = json.loads(answer.recv_bytes())
    except EOFError:
        message = ""
    process.join()
    return process.exitcode, message or f"it was ended by signal {-process.exitcode}"
