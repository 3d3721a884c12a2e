"""A fixture for the tests of anyone's job: `paceline_verify(job, "data=2")` fails with what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from paceline.verbs.verify import Certificate


@pytest.fixture
def paceline_verify() -> Callable[..., list[Certificate]]:
    """Check that plans compute what one device computes.

    >>> def test_my_job(paceline_verify):
    ...     paceline_verify(job(), "data=2", "shard=2", steps=4)

    Returns the certificates; an assertion fails with the first tensor and rank that differ.
    """

    def check(job: Any, *plans: str, steps: int = 4) -> list[Certificate]:
        from paceline.verbs.verify import verify

        found = verify(job, plans, steps=steps)
        failed = [certificate.describe() for certificate in found if not certificate.passed]
        assert not failed, "\n".join(failed)
        return found

    return check
