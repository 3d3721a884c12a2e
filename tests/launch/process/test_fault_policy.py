"""Whether ranks that were lost are started again."""

from __future__ import annotations

from paceline.launch.process.fault_policy import RestartPolicy


def test_ranks_start_again_while_they_come_further():
    """Two restarts in a row may come no further; a step that was not taken before gives two new ones."""
    restarts = RestartPolicy(100)
    for step in (5, 5, 4, 6, 6, 6):
        assert restarts.why_not(step) == ""
        restarts.count(step)
    assert restarts.why_not(6) == "3 starts in a row came no further than step 6"
    assert restarts.why_not(7) == ""


def test_each_rank_comes_further_by_itself():
    """A rank that the others go on without may be behind them."""
    restarts = RestartPolicy(100)
    restarts.count(50, 1)
    for _ in range(3):
        assert restarts.why_not(3, 2) == ""
        restarts.count(3, 2)
    assert restarts.why_not(3, 2) and not restarts.why_not(50, 1)


def test_restarts_are_counted():
    restarts = RestartPolicy(2)
    assert restarts.count(1) == "(1 restart left)"
    assert restarts.count(2) == "(0 restarts left)"
    assert restarts.why_not(3) == "no restarts are left"
