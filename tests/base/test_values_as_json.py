"""Values go through JSON unchanged; nothing but this package's dataclasses is told."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.values import plain, value_of
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.cluster.links import Link
from paceline.model.cost.profile import Affine, Parameter, Profile, Segment, Work
from paceline.strategies.plan import Plan


def told(value: Any) -> Any:
    return value_of(json.loads(json.dumps(plain(value))))


@pytest.mark.parametrize(
    "value",
    [
        Plan.parse("data=2 shard=2 zero=2 microbatches=3 recompute=full"),
        Plan.parse("servers=2 workers=3 staleness=inf"),
        Plan.parse("data=2 local=3 outer=diloco compress=int8"),
        Device("cuda", 1, 5, holders=("process 7",)),
        Cluster((Device("cpu", 0, 3),), Link(1e9, 0.0), links=((2, Link(1.0, 2.0)),)),
        Cluster.parse("2x8xH100").nodes,
        {(1, "a"): [Affine(1.0, 2.0), None]},
    ],
    ids=str,
)
def test_a_value_stays_itself(value: Any):
    assert told(value) == value


def test_a_profile_stays_itself():
    """What it makes of its fields is made again."""
    profile = Profile(
        (Parameter("a.weight", "a", 8, 2), Parameter("bias", "", 4, 1)),
        (Segment("a", Work(Affine(1.0, 2.0)), gradients=("a.weight",)),),
        notes=("rough",),
    )
    restored = told(profile)
    assert (restored.parameters, restored.segments, restored.notes) == (
        profile.parameters,
        profile.segments,
        profile.notes,
    )
    assert restored.owned_by("a") == profile.owned_by("a") and restored.parameter_bytes == 12


_simple = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_keys = st.text() | st.integers() | st.tuples(st.text(), st.integers())


@given(
    st.recursive(
        _simple,
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(_keys, inner),
    )
)
def test_any_nesting_stays_itself(value: Any):
    assert told(value) == value


def test_numbers_that_are_none_stay_so():
    assert math.isnan(told((float("nan"),))[0]) and told(math.inf) == math.inf


@pytest.mark.parametrize("value", [object(), {"a": lambda: 1}, (b"x",), [set()]])
def test_what_is_no_value_is_refused(value: Any):
    with pytest.raises(TypeError, match="is not told to other processes"):
        plain(value)


@pytest.mark.parametrize("kind", [["os", "system"], ["paceline.base.values", "plain"]])
def test_nothing_else_is_made(kind: list[str]):
    with pytest.raises(ValueError, match=r"is not of this package|is no dataclass"):
        value_of({"kind": kind, "fields": {}})
