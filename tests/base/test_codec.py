"""Values with tensors travel between processes of a host as they are, without pickle."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch

from paceline.base.codec import decode, encode, receive, send
from paceline.strategies.plan import Plan

VALUE = {
    "a": (torch.arange(6).reshape(2, 3).T, [torch.tensor(1.5, dtype=torch.bfloat16), None]),
    "text": "b",
    3: [1, 2.5, True],
    "nothing": {},
    "no elements": torch.empty(0, 3),
    "array": np.arange(3.0),
    "plan": Plan.parse("data=2"),
}


def is_alike(told: Any, value: Any) -> bool:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        return torch.equal(told, value) and told.dtype == value.dtype
    if isinstance(value, dict):
        return [*told] == [*value] and all(is_alike(told[key], value[key]) for key in value)
    if isinstance(value, tuple | list):
        return (
            type(told) is type(value)
            and len(told) == len(value)
            and all(map(is_alike, told, value))
        )
    return bool(told == value and type(told) is type(value))


def test_as_bytes():
    told = decode(encode(VALUE))
    assert is_alike(told, VALUE)
    told["array"].add_(1)  # it can be written to


def test_through_a_pipe():
    """Several values, one after the other; small enough for the pipe to hold."""
    here, there = multiprocessing.Pipe()
    for value in (VALUE, [1], torch.ones(())):
        send(here, value)
    assert all(is_alike(receive(there), value) for value in (VALUE, [1], torch.ones(())))
    here.close()
    with pytest.raises(EOFError):
        receive(there)


def test_other_objects_are_refused():
    here, there = multiprocessing.Pipe()
    for tell in (encode, lambda value: send(here, value)):
        with pytest.raises(TypeError, match="a object can't be told to another process"):
            tell({"a": [object()]})
    assert not there.poll()
