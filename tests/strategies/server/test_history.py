"""What a server knows of its weights' past."""

from __future__ import annotations

import random

import pytest

from paceline.strategies.server.history import History


def test_every_step_once_in_any_order():
    """It says which steps are there while some are missing, and forgets single ones when none is."""
    history, steps = History(3), list(range(3, 40))
    random.Random(0).shuffle(steps)
    for step in steps:
        assert not history.is_exactly(40)
        history.add(step)
        with pytest.raises(ValueError, match=f"step {step} was applied already"):
            history.add(step)
    assert history.is_exactly(40) and not history.later


def test_what_is_missing_is_said():
    history = History(0)
    for step in (0, 1, 4):
        history.add(step)
    assert str(history) == "the steps before 2 and 4" and not history.is_exactly(3)
    with pytest.raises(ValueError, match="step 0 was applied already"):
        history.add(0)
