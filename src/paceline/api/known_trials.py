"""The trials of a job's plans on this machine, kept for a day."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.model.cost import cache
from paceline.planner.corrections import Calibration
from paceline.planner.problem import PlanningProblem
from paceline.strategies.plan import Plan

CACHED = "trials"  # cache document; keys are the jobs' fingerprints
OLD_S = 24 * 3600.0
MOST_JOBS = 50


@dataclass(slots=True)
class KnownTrials:
    """What is known from trials of a job's plans. A plan that failed is tried again the next time.

    Equal jobs have the same work, batch and precision, and are tried on the same devices.
    """

    job: str = ""  # its fingerprint
    trials: list[tuple[Plan, Calibration]] = field(default_factory=list)
    spent_s: float = 0.0  # by all trials together
    num_read: int = 0  # trials that the cache had

    @classmethod
    def read(cls, problem: PlanningProblem, cluster: Cluster) -> KnownTrials:
        """Return the trials in the cache; none if they are old or make no sense."""
        job = fingerprint(problem, cluster)
        try:
            document = _jobs()[job]
            trials = [
                (Plan.parse(plan), Calibration(**figures)) for plan, figures in document["trials"]
            ]
            return cls(job, trials, float(document["spent_s"]), len(trials))
        except (KeyError, TypeError, ValueError, AttributeError):
            return cls(job)

    def write(self) -> None:
        """Keep the trials. Those of the oldest jobs are forgotten."""
        document = {
            "written_at": time.time(),
            "trials": [(str(plan), asdict(calibration)) for plan, calibration in self.trials],
            "spent_s": self.spent_s,
        }
        kept = [(job, other) for job, other in _jobs().items() if job != self.job]
        cache.write(CACHED, "cpu", dict([*kept[1 - MOST_JOBS :], (self.job, document)]))


def forget_trials(job: str) -> None:
    """Let the plans of a job be tried again, which is given by its fingerprint."""
    cache.write(CACHED, "cpu", {other: known for other, known in _jobs().items() if other != job})


def fingerprint(problem: PlanningProblem, cluster: Cluster) -> str:
    """Return a text that is equal for equal jobs on equal devices of this machine."""
    devices = [
        (device.kind, device.memory_bytes if device.is_limit else None)
        for device in cluster.devices
    ]
    figures = (
        problem.profile,
        problem.job.batch,
        problem.job.precision,
        devices,
        os.environ.get("OMP_NUM_THREADS"),
    )
    return sha256(repr(figures).encode()).hexdigest()[:16]


def _jobs() -> dict[str, Any]:
    """Return the documents of all jobs that are not old."""
    jobs = cache.read(CACHED, "cpu")
    if not isinstance(jobs, dict):
        return {}
    return {
        job: document
        for job, document in jobs.items()
        if isinstance(document, dict)
        and isinstance(written_at := document.get("written_at"), float)
        and 0 <= time.time() - written_at < OLD_S
    }
