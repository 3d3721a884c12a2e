"""What a job costs on one device, figure by figure, and how fast a device is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.model.cost.profile import Profile

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.model.cost.fakes import FakeModel

__all__ = ["Profile", "profile_job"]


def profile_job(
    job: Job,
    *,
    samples: int = 2,
    device: str = "cpu",
    like: Profile | None = None,
    built: FakeModel | None = None,
) -> Profile:
    """See `paceline.model.cost.trace.profile_job`; torch is loaded only here."""
    from paceline.model.cost import trace

    return trace.profile_job(job, samples=samples, device=device, like=like, built=built)
