"""A node of a search: a process that keeps this node's warm ranks and follows the controller's
lines of JSON.

    python -m paceline.searches.node

The first line names the job and the number of ranks; the end of stdin ends everything. The program
that starts this process carries the lines (`ray/nodes.py`). It is a separate process because ranks
are forks, and a fork needs a process with one thread.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from paceline.base.errors import PacelineError
from paceline.cluster.cluster import Cluster
from paceline.launch.hosts.nodes import STARTED, Lines, serve, write_line
from paceline.launch.hosts.shared_files import SharedFiles
from paceline.launch.local.pool import Pool


@dataclass(frozen=True)
class Greeting:
    """The first message to a node."""

    shared: SharedFiles
    kind: str  # of the node's devices: "cpu" or "cuda"
    procs: int  # the number of ranks at a time
    threads: str | None  # of each rank; None for the usual number
    memory: str | None
    timeout_s: float


def main() -> None:
    """Answer the greeting, then serve requests."""
    out = os.dup(1)
    os.dup2(2, 1)  # what the job prints must not come between the lines
    requests = Lines(0)
    greeted = _first(requests)
    if greeted is None:
        return
    write_line(out, json.dumps(STARTED))
    try:
        pool = _open(greeted)
    except PacelineError as error:
        write_line(out, json.dumps({"error": error.args[0], "hint": error.hint}))
        return
    with pool:
        write_line(out, json.dumps({"devices": pool.names}))
        serve(pool, requests, out)


def _first(requests: Lines) -> Greeting | None:
    """Return the greeting from the first line; no other line comes before it is answered. None if
    stdin ends.
    """
    while (lines := requests.read()) is not None:
        if lines:
            document = json.loads(lines[0])
            return Greeting(**{**document, "shared": SharedFiles(**document["shared"])})
    return None


def _open(greeted: Greeting) -> Pool:
    """Start the warm ranks.

    Raises:
        UsageError: this node has another Paceline, another job or another run folder; or the job
            can't be loaded.
    """
    from paceline.searches.begin import body

    source = greeted.shared.check()
    os.environ.pop("OMP_NUM_THREADS", None)  # of Ray's own making
    if greeted.threads is not None:
        os.environ["OMP_NUM_THREADS"] = greeted.threads
    cluster = Cluster.local(f"{greeted.kind}:0-{greeted.procs - 1}", memory=greeted.memory)
    return Pool(body(source.open()), cluster.devices, timeout_s=greeted.timeout_s)


if __name__ == "__main__":
    main()
