"""Plans whose choices don't compose are refused with the reason, and others are not."""

from __future__ import annotations

import pytest

from paceline.base.errors import PlanError
from paceline.strategies.conflicts import check, stated
from paceline.strategies.plan import Plan


@pytest.mark.parametrize(
    ("text", "why", "instead"),
    [
        (
            "pipeline=2 shard=2 schedule=zero-bubble",
            "gradients come out wrong without an error",
            "data=N",
        ),
        ("pipeline=2 shard=2 zero=1 schedule=zero-bubble", "passes them by", "1f1b"),
        ("pipeline=2 schedule=zero-bubble recompute=full", "compute the forward again", "1f1b"),
        ("data=2 shard=2 local=4", "would have to meet in it", "data=N"),
        ("data=2 local=4 compress=topk", "an outer step later", "int8"),
        ("data=2 tensor=2 compress=powersgd", "ranks hold parts", "int8"),
        ("servers=1 workers=2 compress=int8", "too coarse for weights", "bf16"),
        ("tensor=2 compile=blocks", "those are not compiled yet", "without it"),
        ("pipeline=2 schedule=zero-bubble compile=blocks", "is one operator", "1f1b"),
    ],
)
def test_what_does_not_compose_is_refused(text: str, why: str, instead: str):
    """With the plan, what goes wrong, and what to choose."""
    with pytest.raises(PlanError) as refused:
        check(Plan.parse(text))
    assert f"plan '{text.split()[0]}" in str(refused.value)
    assert why in str(refused.value) and instead in str(refused.value.hint)


def test_every_conflict_is_met_by_a_plan():
    """No row of the table is dead."""
    plans = [
        Plan.parse(text)
        for text in (
            "pipeline=2 shard=2 schedule=zero-bubble",
            "pipeline=2 schedule=zero-bubble recompute=full",
            "data=2 shard=2 local=4",
            "data=2 local=4 compress=topk",
            "data=2 tensor=2 compress=powersgd",
            "servers=1 workers=2 compress=topk",
            "single compile=blocks recompute=selective",
            "tensor=2 compile=blocks",
            "pipeline=2 schedule=zero-bubble compile=blocks",
            "servers=1 workers=2 staleness=1 deterministic=yes",
            "data=2 shares=speed deterministic=yes",
        )
    ]
    assert all(any(conflict.is_met(plan) for plan in plans) for conflict in stated())


@pytest.mark.parametrize(
    "text",
    [
        "pipeline=2 data=2 schedule=zero-bubble",
        "pipeline=2 shard=2 schedule=interleaved",
        "data=2 tensor=2",
        "shard=2 tensor=2",
        "pipeline=2 data=2 tensor=2",
        "place=2 data=2",
        "pipeline=2 recompute=full",
        "single recompute=selective",
    ],
)
def test_what_composes_is_not_refused(text: str):
    """tests/verify shows that these equal one device."""
    check(Plan.parse(text))
