"""A node of a search: a process that keeps this node's warm ranks and follows the controller's lines of JSON.

    python -m paceline.study.node

The first line names the job and the number of ranks; the end of stdin ends everything. Whoever starts this process
carries the lines (`launch/on_ray.py`). It is a separate process because ranks are forks, and a fork needs a process
with one thread.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.cluster import Cluster
from paceline.errors import PacelineError, UsageError
from paceline.jobfile import JobFile
from paceline.launch.nodes import Lines, serve, write_line
from paceline.launch.pool import Pool

_MARK = "nodes.mark"  # in the run folder, while nodes start: who reads it sees the same folder


@dataclass(frozen=True)
class Greeting:
    """What a node is told first.

    digest: Of the job's file. mark: What the mark in the run folder says.
    kind: Of the node's devices, "cpu" or "cuda". procs: Ranks at a time. threads: Of each rank, if not as usual.
    """

    version: str
    job: Mapping[str, Any]
    digest: str
    run_dir: str
    mark: str
    kind: str
    procs: int
    threads: str | None
    memory: str | None
    timeout_s: float


def marked(run_dir: Path) -> str:
    """Mark the run folder, for nodes to know it by; what the mark says."""
    mark = os.urandom(8).hex()
    (run_dir / _MARK).write_text(mark)
    return mark


def unmark(run_dir: Path) -> None:
    (run_dir / _MARK).unlink(missing_ok=True)


def main() -> None:
    """Answer the greeting, then serve."""
    out = os.dup(1)
    os.dup2(2, 1)  # what the job prints must not come between the lines
    asked = Lines(0)
    greeted = _first(asked)
    if greeted is None:
        return
    try:
        pool = _open(greeted)
    except PacelineError as error:
        write_line(out, json.dumps({"error": error.args[0], "hint": error.hint}))
        return
    with pool:
        write_line(out, json.dumps({"devices": pool.names}))
        serve(pool, asked, out)


def _first(asked: Lines) -> Greeting | None:
    """The first line; nothing comes after it before it is answered."""
    while (lines := asked.read()) is not None:
        if lines:
            return Greeting(**json.loads(lines[0]))
    return None


def _open(greeted: Greeting) -> Pool:
    """The warm ranks.

    Raises:
        UsageError: this node has another Paceline, another job or another run folder; or the job can't be loaded.
    """
    from paceline.study.begin import body

    if greeted.version != paceline.__version__:
        raise UsageError(f"it has Paceline {paceline.__version__}, and the search is of {greeted.version}",
                         hint="install the same version on all nodes")
    source, run_dir = JobFile.from_dict(greeted.job), Path(greeted.run_dir)
    shared = "the job's file and the run folder must be on a filesystem that all nodes see under the same path"
    if not source.path.is_file() or digest(source.path) != greeted.digest:
        is_there = "is another file there" if source.path.is_file() else "is not there"
        raise UsageError(f"the job's file {source.path} {is_there}", hint=shared)
    mark = run_dir / _MARK
    if not mark.is_file() or mark.read_text() != greeted.mark or not os.access(run_dir, os.W_OK):
        raise UsageError(f"the run folder {run_dir} is not there, or can't be written", hint=f"{shared}: --run DIR")
    os.environ.pop("OMP_NUM_THREADS", None)  # of Ray's own making
    if greeted.threads is not None:
        os.environ["OMP_NUM_THREADS"] = greeted.threads
    cluster = Cluster.local(f"{greeted.kind}:0-{greeted.procs - 1}", memory=greeted.memory)
    return Pool(body(source.open()), cluster.devices, timeout_s=greeted.timeout_s)


def digest(path: Path) -> str:
    """By which a file is known to be the same on all nodes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
