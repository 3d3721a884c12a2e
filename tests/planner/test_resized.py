"""The plan of a run that goes on with another number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.errors import PlanError
from paceline.planner.resized import resized
from paceline.strategies.plan import Plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "world_size", "expected"),
    [
        ("data=3", 2, "data=2"),
        ("data=2", 3, "data=3"),
        ("data=3", 1, "single"),
        ("shard=3", 2, "shard=2"),
        ("data=3 microbatches=2 recompute=full", 2, "data=2 microbatches=2 recompute=full"),
        ("data=3 tensor=2", 4, "data=2 tensor=2"),  # what cuts the model stays
        ("data=4 pipeline=2", 6, "pipeline=2 data=3"),
        ("data=2 shard=3", 4, "data=2 shard=2"),  # as few counts as possible
        ("data=8 shard=8 tensor=2", 120, "shard=60 tensor=2"),  # then as little memory
        ("pipeline=2 data=2", 3, "pipeline=3"),
        ("pipeline=3", 2, "pipeline=2"),
        ("pipeline=2 microbatches=4", 1, "single microbatches=4"),
        ("tensor=4", 2, "tensor=2"),
        ("place=3", 2, "place=2"),
        ("data=3 shares=2:1:1", 2, "data=2"),
        ("data=3 local=4", 2, "data=2 local=4"),
        ("servers=1 workers=3", 3, "servers=1 workers=2"),
        ("servers=2 workers=2 colocate=yes", 1, "servers=1 workers=1 colocate=yes"),
    ],
)
def test_the_plan_for_other_ranks(plan: str, world_size: int, expected: str):
    assert resized(Plan.parse(plan), world_size) == Plan.parse(expected)


@pytest.mark.parametrize("plan", ["shard=3 zero=2", "place=2"])
def test_a_plan_that_has_none_is_refused(plan: str):
    with pytest.raises(
        PlanError, match=r"can't be changed so that it is for 1(.|\n)*hint: a plan with data="
    ):
        resized(Plan.parse(plan), 1)


SIZES = st.integers(1, 6)


@given(data=SIZES, shard=SIZES, tensor=st.integers(1, 2), world_size=st.integers(1, 40))
def test_counts_alone_change(data: int, shard: int, tensor: int, world_size: int):
    plan = Plan.of(data=data, shard=shard, tensor=tensor, microbatches=3)
    try:
        other = resized(plan, world_size)
    except PlanError:
        assert plan.world_size == 1
        return
    assert other.world_size == world_size and other.modifiers == plan.modifiers
    assert other.model_cut == plan.model_cut or world_size % tensor or not (data > 1 or shard > 1)
