"""What a model returned keeps its class on its way to other ranks, and where micro-batches are joined."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from paceline.base.codec import head_of, value_of
from paceline.base.errors import PlanRefused, TrainingError
from paceline.training.own_step.stage_outputs import _made, _opened
from paceline.training.own_step.step_batch import joined


class Boxes(NamedTuple):
    corners: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True)
class Detections:
    boxes: Boxes
    name: str | None = None
    width: int = field(init=False, default=3)


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """As those of Transformers: a mapping of the fields that are set, which are attributes as well."""

    logits: torch.Tensor | None = None
    loss: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("logits", "loss"):
            if getattr(self, name) is not None:
                super().__setitem__(name, getattr(self, name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def sent(value: Any) -> Any:
    text, tensors = head_of(value, _opened)
    return value_of(text, lambda *_: tensors.pop(0), _made)


def test_an_output_arrives_with_its_class():
    boxes = Boxes(torch.ones(2, 4), torch.arange(2))
    value = sent(
        [Detections(boxes, "left"), (None, 0.5), {1: boxes.scores, "b": OrderedDict(c=True)}]
    )
    first, numbers, by_key = value
    assert isinstance(first, Detections) and isinstance(first.boxes, Boxes)
    assert (first.name, first.width, numbers) == ("left", 3, (None, 0.5))
    assert first.boxes.corners is boxes.corners and by_key[1] is boxes.scores
    assert type(by_key["b"]) is OrderedDict and by_key["b"]["c"] is True


def test_an_output_that_is_more_than_its_items_stays_so():
    first, second = (ModelOutput(logits=torch.full((rows, 3), float(rows))) for rows in (1, 2))
    for output in (sent(first), joined([first, second], [1, 2])):
        assert (
            isinstance(output, ModelOutput) and output.loss is None and list(output) == ["logits"]
        )
        assert output.logits is output["logits"]
    assert len(joined([first, second], [1, 2]).logits) == 3 and len(first.logits) == 1


def test_a_class_that_other_ranks_do_not_find_is_refused():
    @dataclass
    class Local:
        x: torch.Tensor

    with pytest.raises(PlanRefused, match="Local, which other ranks can't find"):
        sent(Local(torch.ones(1)))
    with pytest.raises(PlanRefused, match="a model returns a object"):
        sent({1: [object()]})


def test_outputs_with_other_parts_are_not_joined():
    """Rather than those of the first micro-batch alone."""
    for parts in ([{"a": 1}, {"a": 1, "b": 2}], [[1, 2, 3], [1, 2]]):
        with pytest.raises(TrainingError, match=r"each (dict|list) holds something else"):
            joined(parts, [4, 4])
