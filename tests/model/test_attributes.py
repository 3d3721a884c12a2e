"""Plain attributes of modules are seen changing, and put back as they were."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from paceline.model.forward_state import ForwardState


class Stateful(nn.Module):
    """Keeps state in a number, a tensor, a list, a deque and a dict; `flat` repeats its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.count, self.center, self.seen = 0, torch.zeros(2), [1.0]
        self.recent: Any = deque([1], maxlen=2)
        self.options = {"scale": float("nan"), "mean": torch.ones(2)}
        self.flat = list(self.layer.parameters())

    def change(self) -> None:
        self.count += 1
        self.center = self.center + 1
        self.seen.append(2.0)
        self.recent.append(2)
        self.options["mean"].mul_(3)
        self.late = 1


def test_changes_are_named() -> None:
    """Each attribute that is new or other than before, in place or not; nothing of torch's own and no parameter."""
    model = nn.Sequential(Stateful())
    before = ForwardState(model).now().attributes
    assert before.changed() == []
    with torch.no_grad():
        model[0].layer.weight += 1

    model[0].change()

    assert before.changed() == ["0.count", "0.center", "0.seen", "0.recent", "0.options", "0.late"]


def test_restoring_keeps_objects() -> None:
    """What others refer to is the same object with its former contents; what is new is gone."""
    model = Stateful()
    seen, center, mean = model.seen, model.center, model.options["mean"]
    before = ForwardState(model).now().attributes
    model.change()

    before.restore()

    assert before.changed() == [] and not hasattr(model, "late")
    assert model.seen is seen and seen == [1.0] and model.center is center
    assert (
        model.recent == deque([1])
        and model.recent.maxlen == 2
        and torch.equal(model.options["mean"], torch.ones(2))
    )
    assert model.options["mean"] is mean


def test_two_snapshots_of_one_model_are_independent() -> None:
    """A later snapshot restores the later contents."""
    model = Stateful()
    first = ForwardState(model).now().attributes
    model.change()
    second = ForwardState(model).now().attributes
    model.change()

    second.restore()
    assert model.count == 1 and model.seen == [1.0, 2.0]
    first.restore()
    assert model.count == 0 and model.seen == [1.0] and not hasattr(model, "late")
