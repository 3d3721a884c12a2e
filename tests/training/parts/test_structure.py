"""Whether a rank's state is still made of the same tensors, without going through all of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.checkpoint.files import bytes_of
from paceline.cluster.devices import Device
from paceline.launch.process.live_states import LiveStates
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.strategies.state_tensors import StateTensor
from paceline.training import state
from paceline.training.parts.live_state import LiveState
from paceline.training.parts.structure import Structure
from paceline.training.stepper import Stepper

CPU = Device("cpu", 0, 2**30)


class Meter:
    def __init__(self) -> None:
        self.count = 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale, self.history, self.table, self.meter = 1.0, [1, 2], torch.ones(3), Meter()
        self.shape = (1, (2, "x"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * self.scale


def stepped(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Stepper:
    """After a step, so that the optimizer has its state."""
    job = pl.Job(
        model=Net,
        data=[(torch.ones(4), torch.ones(4))] * 8,
        loss=nn.functional.mse_loss,
        batch=8,
        steps=1,
        optimizer=lambda named: optimizer(named, lr=0.1),
    )
    plan = Plan.parse("single")
    stepper = Stepper(job, plan, Mesh.of(plan, 0), torch.device("cpu"), devices=(CPU,), shares=(1,))
    update(stepper)
    return stepper


def update(stepper: Stepper) -> None:
    nn.functional.mse_loss(stepper.model(torch.randn(8, 4)), torch.ones(8, 4)).backward()
    stepper.optimizer.step()
    stepper.optimizer.zero_grad()


@pytest.fixture
def stepper() -> Iterator[Stepper]:
    yield stepped()


def weight(stepper: Stepper) -> nn.Parameter:
    return stepper.local_parameters["layer.weight"]


def moments(stepper: Stepper) -> dict[str, Any]:
    return stepper.optimizer.state[weight(stepper)]


def test_updates_change_values_alone(stepper: Stepper) -> None:
    """Pieces show what tensors hold now; so does what is made of them anew."""
    structure = Structure(stepper)
    for _ in range(3):
        update(stepper)
        assert structure.is_current()
    for piece, again in zip(structure.pieces, state.pieces(stepper, of_others=True), strict=True):
        assert piece.name == again.name and torch.equal(piece.tensor, again.tensor)
    changing = state.changing_document(stepper, step=3, samples=24)
    assert state.joined_document(structure.fixed_document, changing) == state.document(
        stepper, step=3, samples=24
    )


CHANGES: dict[str, Callable[[Stepper], Any]] = {
    "memory of a parameter": lambda s: setattr(weight(s), "data", weight(s).data.clone()),
    "memory of optimizer state": lambda s: setattr(
        moments(s)["exp_avg"], "data", torch.zeros(4, 4)
    ),
    "optimizer state": lambda s: moments(s).update(exp_avg=moments(s)["exp_avg"].clone()),
    "more optimizer state": lambda s: moments(s).update(more=torch.zeros(4, 4)),
    "less optimizer state": lambda s: moments(s).pop("exp_avg"),
    "an entry of optimizer state": lambda s: s.optimizer.state.update(
        {weight(s): dict(moments(s))}
    ),
    "all optimizer state": lambda s: s.optimizer.load_state_dict(
        copy.deepcopy(s.optimizer.state_dict())
    ),
    "a buffer": lambda s: setattr(s.model.norm, "running_mean", torch.zeros(4)),
    "memory of a buffer": lambda s: setattr(s.model.norm.running_mean, "data", torch.zeros(4)),
    "another buffer": lambda s: s.model.register_buffer("late", torch.zeros(2)),
    "a module": lambda s: s.model.add_module("late", nn.BatchNorm1d(2)),
    "a number": lambda s: setattr(s.model, "scale", 2.0),
    "a list": lambda s: s.model.history.append(3),
    "another list": lambda s: setattr(s.model, "history", [1, 2]),
    "a tensor in an attribute": lambda s: s.model.table.data.mul_(2),
    "a number of an object": lambda s: setattr(s.model.meter, "count", 1),
    "another number of an object": lambda s: setattr(s.model.meter, "sum", 1.5),
    "an attribute": lambda s: setattr(s.model, "late", 5),
    "no attribute": lambda s: delattr(s.model, "scale"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_seen(stepper: Stepper, change: str) -> None:
    structure = Structure(stepper)
    assert structure.is_current()
    CHANGES[change](stepper)
    assert not structure.is_current()


class Counting(torch.optim.SGD):
    """Keeps a list by parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("norms", []).append(1.0)
        return super().step(closure)


class Outside(torch.optim.SGD):
    """Keeps a number in an attribute."""

    num_updates = 0

    def step(self, closure: Any = None) -> Any:
        self.num_updates += 1
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [Counting, Outside])
def test_where_it_cannot_be_told(optimizer: Any) -> None:
    """Each note then goes through the state."""
    assert not Structure(stepped(optimizer)).is_current()


def test_state_of_a_plans_room(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rooms make theirs as they please."""
    monkeypatch.setattr(
        Stepper, "kept", lambda self: iter([StateTensor("outer/step", torch.zeros(1))])
    )
    assert not Structure(stepper).is_current()


class Anew(torch.optim.Optimizer):
    """Makes its state anew in each update."""

    def __init__(self, named: Any, lr: float) -> None:
        super().__init__(named, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["mean"] = (
                        0.9 * self.state[parameter].get("mean", 0.0) + parameter.grad
                    )
                    parameter -= group["lr"] * self.state[parameter]["mean"]


@pytest.fixture
def states() -> Iterator[LiveStates]:
    states = LiveStates(1)
    yield states
    states.close()


def test_what_is_made_anew_is_not_kept(states: LiveStates) -> None:
    """It would lie in memory twice."""
    stepper = stepped(Anew)
    live = LiveState(states, stepper, 0)
    for step in range(1, 5):
        update(stepper)
        live.note(step, state.changing_document(stepper, step=step, samples=8 * step), began_s=0.0)
        assert (live._structure is None) is (step > 1)


def test_what_changes_now_and_then_is_kept_again(states: LiveStates, stepper: Stepper) -> None:
    live = LiveState(states, stepper, 0)
    for step in range(1, 9):
        update(stepper)
        if step % 4 == 0:
            stepper.model.scale += 1
        live.note(step, state.changing_document(stepper, step=step, samples=8 * step), began_s=0.0)
        assert live._structure is not None
        live._is_proved = True
    assert states.step(0) == 8
    states.describe(0, 9, b"{}")  # notes until now are of another structure
    assert states.step(0) is None


def test_views_move_along(states: LiveStates, stepper: Stepper) -> None:
    """The parameter and the optimizer's state are known, and Python is asked for others."""
    view, whole = weight(stepper).data[1], moments(stepper)["exp_avg"].clone()
    live = LiveState(states, stepper, 0)
    live.move()
    assert torch.equal(moments(stepper)["exp_avg"], whole)
    view.fill_(5.0)
    assert (weight(stepper)[1] == 5.0).all() and (weight(stepper)[0] != 5.0).all()
    live.note(1, state.changing_document(stepper, step=1, samples=8), began_s=0.0)
    entries = json.loads(states.index(0) or b"")["tensors"]
    where, offset, *_ = entries["parameters/layer.weight"]["pieces"][0]
    assert where == "arena" and entries["optimizer/layer.bias/step"]["pieces"][0][0] == "arena"
    in_arena = bytearray(weight(stepper).nbytes)
    states.read_arena(0, offset, memoryview(in_arena))
    assert in_arena == bytes_of(weight(stepper))
