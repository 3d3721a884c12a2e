"""The places where the trials of a search run: this machine, or nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.base.errors import PlanError, UsageError
from paceline.cluster.cluster import Cluster
from paceline.job.file import JobFile, JobFunction
from paceline.launch.hosts.nodes import NodesPool
from paceline.launch.hosts.shared_files import marked
from paceline.launch.local.pool import Pool
from paceline.launch.local.worker_pool import WorkerPool
from paceline.ray.nodes import Node, RayTransport, at_nodes, connected, find_nodes
from paceline.searches.node import Greeting
from paceline.strategies.plan import Plan

_START_S = 90.0  # seconds for nodes to give CPUs or GPUs and to start Paceline


@dataclass(frozen=True)
class ExecutionTarget:
    """A place where trials can run."""

    most: int  # the most ranks that a trial can have
    # starts the warm ranks of a run folder
    open: Callable[[Path], AbstractContextManager[WorkerPool]]
    hint: str

    def check(self, plan: Plan) -> None:
        """Refuse a plan with more ranks than a trial can have.

        Raises:
            PlanError: the plan has too many ranks.
        """
        if plan.world_size > self.most:
            raise PlanError(
                f"plan '{plan}' needs {plan.world_size} devices a trial and the search has {self.most}",
                hint=self.hint.format(plan.world_size),
            )


def here(
    function: JobFunction,
    *,
    devices: str | None,
    procs: int | None,
    memory: str | None,
    timeout_s: float,
) -> ExecutionTarget:
    """Run trials on this machine.

    Raises:
        ClusterError: a device doesn't exist.
    """
    from paceline.searches.begin import body

    cluster = Cluster.local(devices, num_ranks=procs, memory=memory)
    return ExecutionTarget(
        len(cluster.devices),
        lambda run_dir: Pool(body(function), cluster.devices, timeout_s=timeout_s),
        "--procs {}, or a smaller plan",
    )


def on_ray(
    address: str,
    source: JobFile | None,
    *,
    devices: str | None,
    procs: int | None,
    memory: str | None,
    timeout_s: float,
) -> ExecutionTarget:
    """Run trials on the nodes of a Ray cluster.

    Args:
        procs: Ranks at a time on each node; by default one per GPU, or one per CPU if no node has
            GPUs.

    Raises:
        UsageError: Ray is not installed, the address is not valid, or Ray can't serve the request.
        ClusterError: no cluster answers there.
    """
    if source is None:
        raise UsageError(
            "ray= needs the job's file, which the nodes load; a function can't be sent to them",
            hint='search("job.py", ...)',
        )
    if devices is not None:
        raise UsageError(
            f"devices '{devices}' are of this machine; on Ray's nodes a trial runs on what Ray gives it",
            hint="--procs N: ranks at a time of each node",
        )
    nodes = find_nodes(address)
    counts = [
        procs if procs is not None and (node.kind == "cpu" or procs <= node.count) else node.count
        for node in nodes
    ]

    @contextmanager
    def opened(run_dir: Path) -> Iterator[WorkerPool]:
        take = [min(count, node.count) for count, node in zip(counts, nodes, strict=True)]
        with (
            connected(address),
            closing(RayTransport(at_nodes(nodes, take), ["-m", "paceline.searches.node"])) as wire,
        ):
            with marked(source, run_dir) as shared:
                pool = NodesPool(
                    wire,
                    [
                        asdict(
                            Greeting(
                                shared, node.kind, count, _threads(node, count), memory, timeout_s
                            )
                        )
                        for node, count in zip(nodes, counts, strict=True)
                    ],
                    timeout_s=_START_S,
                )
            yield pool

    return ExecutionTarget(
        max(counts),
        opened,
        "a plan of fewer ranks: a trial runs within one node; or --procs {} ranks a node",
    )


def _threads(node: Node, count: int) -> str | None:
    """Return the threads of each rank: the user's setting here, else a CPU rank's share of what Ray
    gives; else None.
    """
    share = str(max(1, node.count // count)) if node.kind == "cpu" else None
    return os.environ.get("OMP_NUM_THREADS", share)
