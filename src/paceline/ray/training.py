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
from dataclasses import asdict, dataclass, field, replace
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
from paceline.launch.hosts.environment import Environment, refuse_tls
from paceline.launch.hosts.nodes import NodeTransport, answers_to_greetings
from paceline.launch.hosts.shared_files import marked
from paceline.launch.process.failure import Failure, RankFailed, cause_of, ended_by, killed
from paceline.launch.process.fault_policy import RESTARTS, RestartPolicy
from paceline.launch.process.heartbeats import Heartbeat
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
from paceline.runs.journal import last_step
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
        except PacelineError as error:
            failed = error if isinstance(error, RankFailed) else error.__cause__
            if isinstance(failed, RankFailed) and self.run_dir.exists():
                folder.write_failure(self.run_dir, str(self.plan), failed)
                failed.run_dir = self.run_dir
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
        try:
            self._run_at(nodes)
        except PacelineError as error:
            if error.exit_code != PeerLost.exit_code:
                raise
            self._note_restart(error)
            return False
        return True

    def _run_at(self, nodes: list[Node]) -> None:
        """Run the ranks to their end.

        Raises:
            PacelineError: what ended them.
        """
        run = self.run
        with placed(run.plan.world_size, nodes, timeout_s=_START_S) as places:
            if places is None:
                raise ClusterError(
                    f"Ray gave no {_needed(run.plan, nodes)} within {_START_S:.0f} s: other work holds "
                    f"them; the cluster has {_listed(nodes)}",
                    hint="`ray status` says what is free",
                )
            with closing(RayTransport(places, ["-m", "paceline.ray.node_ranks"])) as wire:
                self._start(wire, places).hear_out(self.interrupted)

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

    def _start(self, wire: NodeTransport, places: list[Place]) -> _Ends:
        """Start the ranks.

        Raises:
            PeerLost: a node is lost meanwhile.
        """
        run, each = self.run, self.run.plan.world_size // len(places)
        with marked(run.source, run.run_dir) as shared:
            greeting = asdict(TrainingGreeting(shared, str(Path.cwd())))
            for node in range(len(places)):
                wire.tell(node, json.dumps(greeting))
            answers = answers_to_greetings(wire, _START_S, expected="port")
        first = answers[0]
        if first is None or None in answers.values():
            raise PeerLost("a node was lost while it started")
        options = {**run.options, "resume": run.options.get("resume") or self.num_starts > 1}
        words = [
            "-m",
            "paceline.ray.node_rank",
            json.dumps({"job": run.source.to_dict(), "options": options}),
        ]
        threads = os.environ.get("OMP_NUM_THREADS")
        for rank in range(run.plan.world_size):
            node, local_rank = divmod(rank, each)
            started = Environment(
                "Ray",
                rank,
                run.plan.world_size,
                local_rank,
                each,
                places[0].address,
                first["port"],
            )
            wire.tell(
                node,
                Message(
                    0,
                    "start",
                    rank,
                    {
                        "words": words,
                        "environment": started.variables
                        | ({"OMP_NUM_THREADS": threads} if threads else {}),
                    },
                ).encode(),
            )
        _tell(
            f"Ray: {each} of {run.plan.world_size} ranks on each of {', '.join(place.name for place in places)}"
        )
        return _Ends(wire, [rank // each for rank in range(run.plan.world_size)], run.run_dir)

    def _note_restart(self, lost: PacelineError) -> None:
        """Count a restart.

        Raises:
            PacelineError: `lost`, if ranks were lost too often, or came no further.
            Preempted: the run was asked to stop.
        """
        if self.interrupted:
            raise _stop(self.interrupted[0])
        step = max(0, last_step(self.run.run_dir / folder.JOURNAL))
        if hint := self.restarts.why_not(step):
            _tell(hint)
            raise lost
        why = " ".join(str(lost.args[0]).splitlines()[:2])
        _tell(f"{why}; all ranks start again {self.restarts.count(step)}")


@dataclass
class _Ends:
    """The ends of the ranks of one start."""

    wire: NodeTransport
    homes: list[int]  # the node of each rank
    run_dir: Path
    codes: dict[int, int] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)  # what ranks said of their ends
    refusals: dict[int, Any] = field(default_factory=dict)  # errors that are not of a rank's work
    lost: set[int] = field(default_factory=set)  # ranks whose node is lost

    @cached_property
    def _deadline_s(self) -> float:
        """The time by which the others must end, once a rank has failed or was lost."""
        return time.monotonic() + _END_S

    def hear_out(self, interrupted: list[int]) -> None:
        """Pass on what ranks print, and requests to stop, until all ranks have ended or one was
        lost.

        Raises:
            PacelineError: what ended the ranks before the run was over.
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
        self._raise_cause(interrupted)

    def _hear(self, node: int, line: str | None) -> None:
        if line is None:
            self.wire.drop(node)
            self.lost |= {
                rank
                for rank, home in enumerate(self.homes)
                if home == node and rank not in self.codes
            }
            return
        message = Message.decode(line)
        if message.kind == "report":
            print(message.value, file=sys.stderr, flush=True)
        elif message.failure is not None:
            self.failures[message.rank] = message.failure
        elif message.kind == "end":
            self.refusals[message.rank] = message.value
        else:
            self.codes[message.rank] = message.value

    def _raise_cause(self, interrupted: list[int]) -> None:
        cause, failed = self._cause(), None
        if cause is not None:
            log = self.run_dir / "logs" / f"rank-{cause.rank}.log"
            failed = ended_by(cause, str(log), interrupted)
        # Ranks that are lost, or can't meet, may follow from what another one says.
        refusals = sorted(
            (refusal["kind"] == PeerLost.__name__, rank) for rank, refusal in self.refusals.items()
        )
        for is_lost, rank in refusals[:1]:
            if cause is None or (
                not is_lost and (cause.rank == rank or cause.exit_code == PeerLost.exit_code)
            ):
                try:
                    value_of(json.dumps(self.refusals[rank]).encode(), 1)  # which raises it
                except PacelineError as error:
                    raise error from failed
        if failed is not None:
            raise failed
        for rank, code in sorted(self.codes.items()):
            if code:
                raise PacelineError(
                    f"rank {rank} ended with exit code {code}", hint="what it printed is above"
                )

    def _cause(self) -> Failure | None:
        """Return the failure that ended the ranks; of one that is gone, as the others saw it."""
        failures = list(self.failures.values())
        gone = self.lost | {rank for rank, code in self.codes.items() if code < 0}
        cause = cause_of(failures) if failures else None
        if not gone or (cause is not None and not cause.heard):
            return cause
        rank, sign, host = min(gone), Heartbeat(0, "start", 0.0), ""
        for seen in failures:
            if seen.rank in gone:
                rank, sign, host = seen.rank, Heartbeat(seen.step, seen.phase, 0.0), seen.host
        home = self.wire.names[self.homes[rank]]
        failure = replace(killed(rank, self.codes.get(rank), sign), host=host or home)
        if rank in self.lost:
            hint = "--resume goes on from the last checkpoint"
            return replace(failure, message=f"node {home} is lost", hint=hint)
        return failure


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
