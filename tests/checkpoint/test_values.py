"""Python values in checkpoints come back as they were."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch

from paceline.base.codec import unpack
from paceline.base.errors import JobError
from paceline.checkpoint.values import from_text_tensor, pack, text_tensor


def back(value: Any, like: Any = None) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = text_tensor(pack(value, "it", tensors))
    return unpack(from_text_tensor(text), lambda name, _: tensors[name].clone(), like)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -0.1,
        1e300,
        "text",
        b"\x00\xff",
        1 + 2j,
        [1, [2.5, None]],
        (1, (2, "a")),
        {1, 2},
        {"a": 1, 2: (3,)},
        deque([1, 2], maxlen=5),
        float("inf"),
        {"__kind__": "not ours"},
        [],
        {},
        (),
    ],
)
def test_values_come_back(value: Any) -> None:
    """Equal and of the same type."""
    assert back(value) == value and type(back(value)) is type(value)


def test_not_a_number_and_tensors_come_back() -> None:
    """NaN as NaN, tensors inside containers by name, a generator where it was."""
    generator = torch.Generator().manual_seed(1)
    torch.rand(3, generator=generator)
    tensors: dict[str, torch.Tensor] = {}

    packed = pack({"a": [torch.ones(2), math.nan], "g": generator}, "it", tensors)
    value = unpack(packed, lambda name, _: tensors[name])

    assert sorted(tensors) == ["it.a.0", "it.g"]
    assert torch.equal(value["a"][0], torch.ones(2)) and math.isnan(value["a"][1])
    assert torch.equal(torch.rand(2, generator=value["g"]), torch.rand(2, generator=generator))


def test_what_is_there_is_filled() -> None:
    """Others may refer to the container, or to the tensor in it."""
    there = OrderedDict(a=torch.zeros(2), b=[1])
    inner, listed = there["a"], there["b"]

    assert back({"a": torch.ones(2), "b": [1, 2]}, there) is there
    assert torch.equal(inner, torch.ones(2)) and listed == [1, 2] and there["b"] is listed


def test_objects_are_refused_by_name() -> None:
    """What only pickle could keep is an error that says where it is."""
    with pytest.raises(JobError, match=r"'it\.a' holds a object"):
        pack({"a": object()}, "it", {})
