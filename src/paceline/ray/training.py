"""`train --on ray`: run the ranks on the nodes of a Ray cluster, and start them again if nodes or
ranks are lost.

Each node runs `ray/node_ranks.py`, which starts `ray/node_rank.py` once per rank with torchrun's
variables. Only text is sent: the path of the job's file, its settings, and the options of `train`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.api.plan_choice import is_auto
from paceline.api.result import Result
from paceline.base import signals
from paceline.base.errors import (
    ClusterError,
    PacelineError,
    PeerLost,
    PlanError,
    Preempted,
    UsageError,
)
from paceline.base.fork import value_of
from paceline.job import Job
from paceline.job.file import JobFile
from paceline.launch.hosts import host_process
from paceline.launch.hosts.environment import refuse_tls
from paceline.launch.hosts.nodes import NodeTransport, answers_to_greetings
from paceline.launch.hosts.shared_files import marked
from paceline.launch.process.failure import Failure, cause_of, ended_by
from paceline.launch.process.fault_policy import RESTARTS, RestartPolicy
from paceline.launch.process.messages import Message
from paceline.planner.resolve import default_plan
from paceline.ray.node_ranks import TrainingGreeting
from paceline.ray.nodes import (
    Node,
    Place,
    RayTransport,
    connected,
    find_nodes,
    layouts,
    nodes_now,
    placed,
)
from paceline.runs import folder
from paceline.strategies.plan import Plan

_START_S = 90.0  # seconds for nodes to give CPUs or GPUs and to start Paceline
_END_S = 20.0  # seconds for the other ranks to notice a failed rank and end
# Seconds for the last ranks of a lost node to end: NFS releases a dead host's locks after 90 s.
_LOCK_S = 120.0
_POLL_S = 0.5


@dataclass(frozen=True)
class RayRun:
    """A training whose ranks Ray places."""

    address: str
    source: JobFile
    plan: Plan
    run_dir: Path
    # options of `train`, including the plan, which each rank is given
    options: Mapping[str, Any]
    timeout_s: float  # how long nodes may be missing

    @classmethod
    def of(
        cls,
        on: str,
        source: JobFile | None,
        job: Job,
        plan: str | Plan | None,
        *,
        run: str | Path | None,
        timeout_s: float,
        options: Mapping[str, Any],
    ) -> RayRun:
        """Check a request, and settle its plan and run folder.

        Raises:
            UsageError: the request makes no sense.
            PlanError: the plan and `procs` contradict each other.
            ClusterError: no cluster answers, or it has too few devices.
        """
        address = _address(on)
        refuse_tls()
        if source is None:
            raise UsageError(
                f"on='{on}' needs the job's file, which the nodes load; a job can't be sent to them",
                hint='train("job.py", ...)',
            )
        if options.get("devices") is not None:
            raise UsageError(
                f"devices '{options['devices']}' are of this machine; on Ray's nodes a rank runs on what "
                "Ray gives it",
                hint="leave --devices out: Ray gives each rank a GPU, or a CPU",
            )
        if "RANK" in os.environ or host_process.host() is not None:
            raise UsageError(
                "this process is one of several that a launcher started, and Ray starts ranks itself",
                hint=f"run the command once, or leave --on {on} out",
            )
        if plan is not None and is_auto(plan):
            raise UsageError(
                f"plan 'auto' on {on}: plans are tried before ranks start, on their devices",
                hint="paceline plan FILE --cluster says which plan is the fastest; name it",
            )
        nodes = find_nodes(address)
        procs = options.get("procs")
        settled = (
            Plan.read(plan)
            if plan is not None
            else default_plan(job, procs or sum(n.count for n in nodes))
        )
        if procs not in (None, settled.world_size):
            raise PlanError(
                f"plan '{settled}' needs {settled.world_size} ranks and --procs says {procs}",
                hint="leave --procs out",
            )
        _check_room(settled, nodes)
        run_dir = (
            Path(run).resolve()
            if run is not None
            else folder.fresh_name(source.path.stem).resolve()
        )
        return cls(
            address,
            source,
            settled,
            run_dir,
            {**options, "plan": str(settled), "run": str(run_dir)},
            timeout_s,
        )

    def train(self, job: Job, *, restarts: int | None) -> Result:
        """Run the ranks until the run is over, and start them again if some were lost.

        Raises:
            RankFailed: a rank failed.
            PeerLost: ranks were lost once too often, or too few nodes are left.
        """
        is_new = not self.run_dir.exists()
        folder.check_free(self.run_dir, resume=bool(self.options.get("resume")))
        folder.writable(self.run_dir)
        attempts = _Attempts(self, RestartPolicy(RESTARTS if restarts is None else restarts))
        try:
            with (
                connected(self.address),
                signals.handled(signals.STOPPING, attempts.interrupted.append),
            ):
                while not attempts.run_once():
                    pass
        except UsageError as error:
            if is_new:
                folder.remove_if_never_began(self.run_dir, error)
            raise
        return Result(folder.read_summary(self.run_dir), self.run_dir, job)


def _address(on: str) -> str:
    """Return the address of the cluster's head, from "ray" or "ray:HOST:PORT".

    Raises:
        UsageError: the text is something else.
    """
    kind, _, address = on.partition(":")
    if kind != "ray":
        raise UsageError(
            f"--on {on}: there is no such cluster",
            hint="--on ray, or --on ray:HOST:PORT of its head",
        )
    return address or "auto"


def _check_room(plan: Plan, nodes: list[Node]) -> None:
    """Check that the cluster has enough devices for a plan.

    Raises:
        ClusterError: no nodes have so many devices.
    """
    if not layouts(plan.world_size, nodes):
        raise ClusterError(
            f"plan '{plan}' needs {_needed(plan, nodes)}, and the cluster has {_listed(nodes)}",
            hint="a plan of fewer ranks; each node has equally many of them",
        )


def _needed(plan: Plan, nodes: list[Node]) -> str:
    return f"{plan.world_size} {'GPUs' if nodes[0].kind == 'cuda' else 'CPUs'}, equally many on each node"


def _listed(nodes: list[Node]) -> str:
    return ", ".join(f"{node.name} ({node.count})" for node in nodes)


@dataclass
class _Attempts:
    """The consecutive starts of the ranks of a run."""

    run: RayRun
    restarts: RestartPolicy
    interrupted: list[int] = field(default_factory=list)  # signals that asked to stop
    num_starts: int = 0

    def run_once(self) -> bool:
        """Run the ranks once. Return whether the run is over."""
        run = self.run
        self.num_starts += 1
        if self.num_starts > 1:
            folder.wait_until_unclaimed(run.run_dir, timeout_s=_LOCK_S)
        nodes = self._nodes()
        with placed(run.plan.world_size, nodes, timeout_s=_START_S) as places:
            if places is None:
                raise ClusterError(
                    f"Ray gave no {_needed(run.plan, nodes)} within {_START_S:.0f} s: other work holds "
                    f"them; the cluster has {_listed(nodes)}",
                    hint="`ray status` says what is free",
                )
            with closing(RayTransport(places, ["-m", "paceline.ray.node_ranks"])) as wire:
                ends = self._start(wire, places)
                lost = (
                    ends.hear_out(self.interrupted)
                    if ends is not None
                    else "a node was lost while it started"
                )
        if lost is not None:
            self._note_restart(lost)
        return lost is None

    def _nodes(self) -> list[Node]:
        """Return the nodes that are there; wait until they have enough devices, because they had
        before.

        Raises:
            PeerLost: there are too few devices until the timeout.
            Preempted: the run was asked to stop meanwhile.
        """
        deadline_s, is_told = time.monotonic() + self.run.timeout_s, False
        while not layouts(self.run.plan.world_size, nodes := nodes_now(self.run.address)):
            if self.interrupted:
                raise _stop(self.interrupted[0])
            if time.monotonic() > deadline_s:
                raise PeerLost(
                    f"plan '{self.run.plan}' needs {_needed(self.run.plan, nodes)}, and the nodes that are "
                    f"left, {_listed(nodes)}, have too few for {self.run.timeout_s:g} s",
                    hint="the same command with --resume goes on when nodes are back, or with a smaller "
                    "plan now; --timeout SECONDS waits longer",
                )
            if not is_told:
                is_told = True
                _tell(
                    f"the nodes that are left, {_listed(nodes)}, have too few devices: waiting {self.run.timeout_s:g}"
                    " s for others"
                )
            time.sleep(_POLL_S)
        return nodes

    def _start(self, wire: NodeTransport, places: list[Place]) -> _Ends | None:
        """Start the ranks; return None if a node is lost meanwhile."""
        run, each = self.run, self.run.plan.world_size // len(places)
        with marked(run.source, run.run_dir) as shared:
            greeting = asdict(TrainingGreeting(shared, str(Path.cwd())))
            for node in range(len(places)):
                wire.tell(node, json.dumps(greeting))
            answers = answers_to_greetings(wire, _START_S, expected="port")
        first = answers[0]
        if first is None or None in answers.values():
            return None
        options = {**run.options, "resume": run.options.get("resume") or self.num_starts > 1}
        words = [
            "-m",
            "paceline.ray.node_rank",
            json.dumps({"job": run.source.to_dict(), "options": options}),
        ]
        for rank in range(run.plan.world_size):
            node, local_rank = divmod(rank, each)
            wire.tell(
                node,
                Message(
                    0,
                    "start",
                    rank,
                    {
                        "words": words,
                        "environment": _variables(
                            rank,
                            run.plan.world_size,
                            local_rank,
                            each,
                            places[0].address,
                            first["port"],
                        ),
                    },
                ).encode(),
            )
        _tell(
            f"Ray: {each} of {run.plan.world_size} ranks on each of {', '.join(place.name for place in places)}"
        )
        return _Ends(wire, [rank // each for rank in range(run.plan.world_size)])

    def _note_restart(self, why: str) -> None:
        """Count a restart.

        Raises:
            PeerLost: ranks were lost too often, or came no further.
            Preempted: the run was asked to stop.
        """
        if self.interrupted:
            raise _stop(self.interrupted[0])
        step = _steps(self.run.run_dir)
        if hint := self.restarts.why_not(step):
            raise PeerLost(why, hint=hint)
        _tell(f"{why}; all ranks start again {self.restarts.count(step)}")


@dataclass
class _Ends:
    """The ends of the ranks of one start."""

    wire: NodeTransport
    homes: list[int]  # the node of each rank
    codes: dict[int, int] = field(default_factory=dict)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    @cached_property
    def _deadline_s(self) -> float:
        """The time by which the others must end, once a rank has failed or was lost."""
        return time.monotonic() + _END_S

    def hear_out(self, interrupted: list[int]) -> str | None:
        """Pass on what ranks print, and requests to stop, until all ranks have ended or one was
        lost.

        Returns:
            The rank or node whose loss ended the ranks, in words; None if the run is over.

        Raises:
            PacelineError: the error of a rank.
        """
        passed_on = 0
        while len(self.codes) + len(self.lost) < len(self.homes):
            for node, line in self.wire.hear(_POLL_S):
                self._hear(node, line)
            if len(interrupted) > passed_on:
                passed_on = len(interrupted)
                if passed_on > 1:
                    raise _stop(interrupted[0])
                for node in set(self.homes):
                    self.wire.tell(node, Message(0, "order", 0, int(signal.SIGTERM)).encode())
            if (self.lost or any(self.codes.values())) and time.monotonic() > self._deadline_s:
                break
        return self._outcome(interrupted)

    def _hear(self, node: int, line: str | None) -> None:
        if line is None:
            self.wire.drop(node)
            self.lost |= {
                rank: f"node {self.wire.names[node]} is lost"
                for rank, home in enumerate(self.homes)
                if home == node and rank not in self.codes
            }
            return
        message = Message.decode(line)
        if message.kind == "report":
            print(message.value, file=sys.stderr, flush=True)
            return
        self.codes[message.rank] = message.value["code"]
        if answer := message.value["answer"]:
            self.answers[message.rank] = json.loads(answer)

    def _outcome(self, interrupted: list[int]) -> str | None:
        failures = [(rank, answer) for rank, answer in sorted(self.answers.items()) if answer]
        reports = {
            rank: Failure.from_json(answer["failure"])
            for rank, answer in failures
            if "failure" in answer
        }
        for rank, answer in failures:
            if rank not in reports and self.codes[rank] != PeerLost.exit_code:
                value_of(json.dumps(answer).encode(), self.codes[rank])  # which raises it
        cause = cause_of(list(reports.values())) if reports else None
        if cause is not None and cause.exit_code != PeerLost.exit_code:
            log = next(answer["log"] for rank, answer in failures if reports.get(rank) is cause)
            raise ended_by(cause, log, interrupted)
        if self.lost:
            return " and ".join(dict.fromkeys(self.lost.values()))
        killed = [rank for rank, code in self.codes.items() if code < 0]
        if killed:
            return f"rank {killed[0]} was killed by {signal.Signals(-self.codes[killed[0]]).name}"
        if cause is not None:
            return f"rank {cause.rank}: {cause.message.partition(chr(10))[0]}"
        missing = [rank for rank in range(len(self.homes)) if rank not in self.codes]
        if missing:
            return f"rank {missing[0]} did not end after the others had failed"
        failed = [rank for rank, code in sorted(self.codes.items()) if code]
        if not failed:
            return None
        if self.codes[failed[0]] == PeerLost.exit_code:
            return f"rank {failed[0]} lost the others"
        raise PacelineError(
            f"rank {failed[0]} ended with exit code {self.codes[failed[0]]}",
            hint="what it printed is above",
        )


def _variables(
    rank: int, world_size: int, local_rank: int, local_world_size: int, address: str, port: int
) -> dict[str, str]:
    """Return torchrun's variables for a rank, and the number of threads if the user sets it
    here.
    """
    names = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "PACELINE_LAUNCHER": "Ray",
    }
    threads = os.environ.get("OMP_NUM_THREADS")
    return {name: str(value) for name, value in names.items()} | (
        {"OMP_NUM_THREADS": threads} if threads else {}
    )


def _steps(run_dir: Path) -> int:
    """Return the step that the run has reached, by its last whole line of metrics; 0 without
    any.
    """
    metrics = run_dir / folder.METRICS
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, LookupError, TypeError):
            continue
    return 0


def _stop(number: int) -> PacelineError:
    error = Preempted(
        f"stopped by {signal.Signals(number).name} while ranks were started",
        hint="--resume goes on from the last checkpoint, if there is one",
    )
    if number == signal.SIGINT:
        error.exit_code = 128 + number
    return error


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
