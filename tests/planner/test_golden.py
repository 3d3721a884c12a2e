"""Prices are those of the committed table: `python -m tests.planner.golden` says what a change changes."""

from __future__ import annotations

import pytest

from tests.planner import golden

ADVICE = (
    "python -m tests.planner.golden --write writes the new table; say in the commit why it is right"
)


def _differences(names):
    return golden.differences(list(golden.rows(names)), golden.committed())


def test_prices_of_few_jobs():
    assert _differences(golden.FEW) == [], ADVICE


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in golden.JOBS if name not in golden.FEW])
def test_prices(name):
    assert _differences([name]) == [], ADVICE


def test_a_changed_price_is_named():
    row = dict.fromkeys(golden.COLUMNS, "") | {
        "job": "a",
        "cluster": "b",
        "plan": "single",
        "ms": "2",
    }
    known = {("a", "b", "single"): row | {"ms": "1"}}

    assert golden.differences([row], known) == ["a, b, single: ms 1 -> 2"]
