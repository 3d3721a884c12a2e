"""What a server knows of its weights' past."""

from __future__ import annotations

import random

import pytest

from paceline.servers.history import History


def test_every_update_once_in_any_order():
    """It says which updates are there while some are missing, and forgets single ones when none is."""
    history, updates = History(3), list(range(3, 40))
    random.Random(0).shuffle(updates)
    for update in updates:
        assert not history.is_exactly(40)
        history.add(update)
        with pytest.raises(ValueError, match=f"update {update} was applied already"):
            history.add(update)
    assert history.is_exactly(40) and not history.later


def test_what_is_missing_is_said():
    history = History(0)
    for update in (0, 1, 4):
        history.add(update)
    assert str(history) == "the updates before 2 and 4" and not history.is_exactly(3)
    with pytest.raises(ValueError, match="update 0 was applied already"):
        history.add(0)
