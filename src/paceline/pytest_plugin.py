"""Fixtures for the tests of anyone's job: `paceline_verify(job, "data=2")` fails with what differs from one device, and
`paceline_rehearse(job, "data=2", "kill 1@5")` with what a fault lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from paceline.api.rehearsal import Rehearsal
    from paceline.api.verify import Certificate


@pytest.fixture
def paceline_verify() -> Callable[..., list[Certificate]]:
    """Check that plans compute what one device computes.

    >>> def test_my_job(paceline_verify):
    ...     paceline_verify(job(), "data=2", "shard=2", steps=4)

    Returns the certificates; an assertion fails with the first tensor and rank that differ.
    """

    def check(job: Any, *plans: str, steps: int = 4) -> list[Certificate]:
        from paceline.api.verify import verify

        certificates = verify(job, plans, steps=steps)
        failed = [certificate.describe() for certificate in certificates if not certificate.passed]
        assert not failed, "\n".join(failed)
        return certificates

    return check


@pytest.fixture
def paceline_rehearse(tmp_path: Path) -> Callable[..., Rehearsal]:
    """Train a job under faults and check that nothing is lost, repeated or changed.

    >>> def test_my_job_survives(paceline_rehearse):
    ...     paceline_rehearse(job(), "data=2", "kill 1@5", "stop 0@8:backward", steps=12)

    Returns what came of each fault; an assertion fails with all of it. Options are those of `paceline.rehearse`.
    """

    def check(job: Any, plan: str, *faults: str, **options: Any) -> Rehearsal:
        from paceline.api.rehearsal import rehearse

        outcome = rehearse(job, plan, faults, run=tmp_path / "rehearsal", **options)
        assert outcome.passed, outcome.describe()
        return outcome

    return check
