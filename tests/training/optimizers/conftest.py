"""What the tests of optimizers share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def few_trial_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank tries an optimizer that is not known over few steps, as for a large model; test_probe.py is about what
    it finds in many."""
    if request.path.name != "test_probe.py":
        monkeypatch.setattr("paceline.training.optimizers.probe.MOST_STEPS", 4)
