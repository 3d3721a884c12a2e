"""The planner's prediction for a case: the same `estimate` as for any job."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.published.rows import Case
from paceline.base.errors import PlanError
from paceline.cluster.software import Software
from paceline.planner.estimate import Estimate, estimate


@dataclass(frozen=True)
class Prediction:
    """Of one case."""

    case: Case
    estimate: Estimate

    @property
    def ratio(self) -> float | None:
        """Predicted over measured seconds; None where none were measured."""
        return self.estimate.step_s / self.case.step_s if self.case.step_s else None

    @property
    def memory_bytes(self) -> float:
        """Of what the row's source means by memory, on the fullest rank."""
        if self.case.is_device_memory:
            return max(need.total_bytes for need in self.estimate.needs)
        return self.estimate.peak_memory_bytes


def predict(case: Case, program: Software | None = None) -> Prediction:
    """Of several plans the fastest that fits, or the one that is nearest to fitting.

    Raises:
        PlanError: none of them can be.
    """
    tried, problems = [], []
    for plan in case.plans:
        try:
            tried.append(
                estimate(
                    case.profile,
                    plan,
                    case.cluster,
                    batch=case.batch,
                    precision=case.precision,
                    software=program or case.software,
                )
            )
        except PlanError as error:
            problems.append(error)
    if not tried:
        raise problems[0]
    if fitting := [candidate for candidate in tried if candidate.fits]:
        return Prediction(case, min(fitting, key=lambda candidate: candidate.step_s))
    return Prediction(
        case, min(tried, key=lambda candidate: max(need.missing_bytes for need in candidate.needs))
    )
