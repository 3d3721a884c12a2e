"""A forward that is run again in backward leaves no second trace: state changes once, and is read as it was."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs.stateful import (
    Attributes,
    Codebook,
    MomentumTarget,
    assert_alike,
    assert_same,
    in_turn,
    stateful_job,
    trained,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import paceline
from paceline.launch.process.failure import RankFailed
from paceline.model.copy_on_write import TensorSnapshot
from paceline.model.forward_state import ForwardState
from paceline.torch_private.storage import address


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8),
        *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2)),
        nn.Linear(8, 4),
    )


def spectral_norm() -> nn.Module:
    normalised = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(
        normalised(nn.Linear(8, 8)),
        nn.Sequential(nn.Tanh(), normalised(nn.Linear(8, 8))),
        nn.Linear(8, 4),
    )


class Draws(nn.Module):
    """Random numbers of Python's, NumPy's and a generator of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + float(np.random.rand()) + float(np.random.standard_normal())
        return torch.tanh(self.linear(x) * scale) * torch.rand(
            8, generator=self.generator, dtype=x.dtype
        )


class Listing(nn.Module):
    """Whose only state is in containers that are empty at first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.means = nn.Linear(8, 8), [], {}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.append(1)
            self.means[len(self.means)] = 0.1
        return torch.tanh(self.linear(x)) * min(1.0, len(self.calls) / 16) + sum(
            self.means.values()
        )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "codebook": Codebook,
    "batch_norm": batch_norm,
    "spectral_norm": spectral_norm,
    "attributes": lambda: nn.Sequential(Attributes(), Attributes(), nn.Linear(8, 4)),
    "empty_containers": lambda: nn.Sequential(Listing(), Listing(), nn.Linear(8, 4)),
    "draws": lambda: nn.Sequential(Draws(), Draws(), nn.Linear(8, 4)),
    "momentum_target": lambda: nn.Sequential(MomentumTarget(), nn.Linear(8, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["single recompute=full"])
@pytest.mark.parametrize("name", MODELS)
@in_turn(lambda name, plan: stateful_job(MODELS[name]))
def test_state_changes_once():
    """Weights and buffers are one device's."""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("plan", ["single recompute=full microbatches=2"])
@pytest.mark.parametrize("name", MODELS)
@in_turn(lambda name, plan: stateful_job(MODELS[name]), reference="single microbatches=2")
def test_state_changes_once_in_each_micro_batch():
    """Weights and buffers are one device's, which computes them one after the other."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["codebook", "batch_norm", "attributes"])
def test_blocks_that_are_sharded_too(name: str, tmp_path: Path):
    """FSDP2 gathers a block for the second forward, and the state is still as it was in the first."""
    actual, expected = (
        trained(stateful_job(MODELS[name]), plan, tmp_path)
        for plan in ("shard=2 recompute=full", "shard=2")
    )
    assert_same(actual, expected, "shard=2 recompute=full")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "reference"),
    [
        ("place=2", "single"),
        ("pipeline=2 microbatches=1", "single"),
        ("pipeline=2 microbatches=4 schedule=gpipe", "single microbatches=4"),
    ],
)
@pytest.mark.parametrize("name", ["codebook", "batch_norm"])
def test_captured_pieces(name: str, plan: str, reference: str, tmp_path: Path):
    """Buffers of a captured piece are no arguments that backward must find untouched, also with forwards of several
    micro-batches before the first backward."""
    assert_alike(
        stateful_job(MODELS[name]), f"{plan} recompute=full", tmp_path, reference=reference
    )


def test_a_forward_sees_its_own_state_again():
    """With several forwards before the first backward, each second forward computes what its first one did."""
    torch.manual_seed(0)
    model = Attributes().double()
    state, inputs = ForwardState(model), [torch.randn(3, 8, dtype=torch.float64) for _ in range(3)]
    moments, outputs = [], []
    for x in inputs:
        moments.append(state.now())
        outputs.append(model(x))
    after = dict(vars(model))
    for number in (2, 0, 1, 1):
        with moments[number].again():
            assert torch.equal(model(inputs[number]), outputs[number])
        assert vars(model) == after


def test_looking_at_a_tensor_takes_no_memory():
    """Until the first write the value is kept where it is; afterwards it is what it was."""
    tensor = torch.ones(5)
    seen = TensorSnapshot(tensor)
    assert not seen.is_written()
    tensor.data.add_(1)
    assert seen.is_changed()
    assert seen.value.tolist() == [1.0] * 5
    assert not TensorSnapshot(torch.frombuffer(bytearray(16), dtype=torch.float32)).is_changed()


def test_of_a_distributed_tensor_its_part_is_looked_at(run_ranks: Callable[..., list[Any]]):
    """Without a copy of it and without a collective: the ranks look one after the other."""

    def body(context: Any) -> list[bool]:
        p = nn.Parameter(
            distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
        )
        if context.rank:
            return []
        seen = TensorSnapshot(p)
        assert not seen.is_written() and address(seen.value.to_local()) == address(p.to_local())
        with torch.no_grad():
            p.to_local().mul_(2)
        assert seen.is_changed() and not seen.is_same()
        return [
            seen.value.placements == p.placements,
            seen.value.to_local().eq(1).all().item(),
            p.to_local().eq(2).all().item(),
        ]

    assert run_ranks(body, 2, timeout_s=60) == [[True, True, True], []]


class Ticks:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


def in_array() -> Callable[[], int]:
    calls = np.zeros(1)

    def tick() -> int:
        calls[0] += 1
        return int(calls[0])

    return tick


class Warming(nn.Module):
    """Lets more through the more often it was called, which it counts where no attribute shows it."""

    def __init__(self, tick: Callable[[], int]) -> None:
        super().__init__()
        self.linear, self.tick = nn.Linear(8, 8), tick

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * min(1.0, (self.tick() + 1) / 8)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("make", [Ticks, in_array, lambda: itertools.count().__next__])
def test_a_state_that_no_attribute_shows_is_refused(
    make: Callable[[], Callable[[], int]], tmp_path: Path
):
    """Recomputing would change it twice; at the model's own level nothing is recomputed."""

    def blocks() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Warming(make()), nn.Linear(8, 4))

    with pytest.raises(RankFailed, match="'1' gives another output each time") as refused:
        paceline.train(
            stateful_job(blocks), "single recompute=full", devices="cpu:0", run=tmp_path / "refused"
        )
    assert (refused.value.failure.kind, refused.value.failure.step) == ("PlanRefused", 0)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.warming, self.layers = (
                Warming(make()),
                nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(self.warming(x))

    assert_alike(stateful_job(Root), "single recompute=full", tmp_path)


def test_a_large_model_that_was_not_tried_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("paceline.model.graph_check.MAX_BYTES", 100)
    model = lambda: nn.Sequential(nn.Linear(8, 8), Warming(Ticks()), nn.Linear(8, 4))  # noqa: E731
    paceline.train(
        stateful_job(model), "single recompute=full", devices="cpu:0", run=tmp_path, check=False
    )
    assert "was not tried for state that none of its attributes shows" in capfd.readouterr().err
