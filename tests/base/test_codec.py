"""Values with tensors travel between processes of a host as they are, without pickle."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
from collections import OrderedDict, UserDict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.codec import decode, encode, receive, send, value_of
from paceline.base.fork import in_a_fork
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.cluster.links import Link
from paceline.model.cost.profile import Affine, Parameter, Profile, Segment, Work
from paceline.strategies.plan import Plan

VALUE = {
    "a": (torch.arange(6).reshape(2, 3).T, [torch.tensor(1.5, dtype=torch.bfloat16), None]),
    "text": "b",
    3: [1, 2.5, True],
    1: torch.ones(1),
    "1": torch.zeros(2),  # of the same name as the one before
    "nothing": {},
    "no elements": torch.empty(0, 3),
    "array": np.arange(3.0),
    "number": np.float32(0.1),
    "plan": Plan.parse("data=2"),
    "others": [b"\x00", 1 + 2j, {1, "a"}, deque([1, 2, 3], maxlen=3), -math.inf],
}


def is_alike(told: Any, value: Any) -> bool:
    if type(told) is not type(value):
        return False
    if isinstance(value, torch.Tensor):
        return torch.equal(told, value) and told.dtype == value.dtype
    if isinstance(value, np.ndarray):
        return bool((told == value).all()) and told.dtype == value.dtype
    if isinstance(value, dict):
        return [*told] == [*value] and all(is_alike(told[key], value[key]) for key in value)
    if isinstance(value, tuple | list):
        return len(told) == len(value) and all(map(is_alike, told, value))
    return bool(told == value or (value != value and told != told))


def test_as_bytes():
    told = decode(encode(VALUE))
    assert is_alike(told, VALUE)
    told["a"][0].add_(1)  # it can be written to


def test_through_a_pipe():
    """Several values, one after the other; small enough for the pipe to hold."""
    here, there = multiprocessing.Pipe()
    for value in (VALUE, [1], torch.ones(())):
        send(here, value)
    assert all(is_alike(receive(there), value) for value in (VALUE, [1], torch.ones(())))
    here.close()
    with pytest.raises(EOFError):
        receive(there)


def test_from_a_fork():
    assert is_alike(in_a_fork(lambda: VALUE), VALUE)


class Pair(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (OrderedDict(a=1), {"a": 1}),
        (UserDict({"a": [1]}), {"a": [1]}),
        (Pair(1, 2), (1, 2)),
        (random.Random(1), random.Random(1).random()),
    ],
    ids=["OrderedDict", "UserDict", "Pair", "Random"],
)
def test_what_subclasses_of_containers_become(value: Any, plain: Any):
    told = decode(encode(value))
    told = told.random() if isinstance(value, random.Random) else told
    assert type(told) is type(plain) and told == plain


def test_other_objects_are_refused():
    here, there = multiprocessing.Pipe()
    for tell in (encode, lambda value: send(here, value)):
        for refused in (object(), lambda: 1, is_alike):
            with pytest.raises(TypeError, match="can't be told to another process"):
                tell({"a": [refused]})
    assert not there.poll()


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
def test_a_value_of_this_package_stays_itself(value: Any):
    assert decode(encode(value)) == value


def test_a_profile_stays_itself():
    """What it makes of its fields is made again."""
    profile = Profile(
        (Parameter("a.weight", "a", 8, 2), Parameter("bias", "", 4, 1)),
        (Segment("a", Work(Affine(1.0, 2.0)), gradients=("a.weight",)),),
        notes=("rough",),
    )
    restored = decode(encode(profile))
    assert (restored.parameters, restored.segments, restored.notes) == (
        profile.parameters,
        profile.segments,
        profile.notes,
    )
    assert restored.owned_by("a") == profile.owned_by("a") and restored.parameter_bytes == 12


_simple = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
_keys = st.text() | st.integers() | st.tuples(st.text(), st.integers())
_tensors = st.builds(
    lambda numbers, dtype: torch.tensor(numbers).to(dtype),
    st.lists(st.integers(0, 1), max_size=3),
    st.sampled_from([torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]),
)


@given(
    st.recursive(
        _simple
        | _tensors
        | _tensors.filter(lambda t: t.dtype is not torch.bfloat16).map(torch.Tensor.numpy),
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(_keys, inner),
    )
)
def test_any_nesting_stays_itself(value: Any):
    assert is_alike(decode(encode(value)), value)


@pytest.mark.parametrize("kind", [["os", "system"], ["paceline.base.codec", "encode"]])
def test_nothing_else_is_made(kind: list[str]):
    packed = {"__kind__": "object", "class": kind, "parts": {"__kind__": "dict", "items": []}}
    with pytest.raises(ValueError, match=r"is not of this package|is no dataclass"):
        value_of(json.dumps([packed, {}]).encode(), lambda tensor, is_cuda: tensor)
