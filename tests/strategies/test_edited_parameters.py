"""Parameters that a forward edits in place: replicas stay equal to each other and to one device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.stateful import MomentumTarget, by_one_device, in_turn, stateful_job, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.launch.process.failure import RankFailed
from paceline.model.forward_effects import followers, may_write, written_by
from paceline.model.units import find_units


class Bag(nn.Module):
    """The mean of three words, whose vectors may be no longer than a limit."""

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self.words = nn.Embedding(33, 8, max_norm=max_norm)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.words(x).mean(1))


class LateTarget(MomentumTarget):
    """A target that follows from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if self.steps < 3:
            return torch.tanh(self.online(x) + self.target(x))
        with torch.no_grad():
            for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                q.lerp_(p, 0.1)
        return torch.tanh(self.online(x) + self.target(x))


class FollowsSamples(nn.Module):
    """A frozen parameter that becomes what the samples say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(8, 4), nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x - self.mean)


def bag(max_norm: float) -> paceline.Job:
    generator = torch.Generator().manual_seed(2)
    words, y = (
        torch.randint(0, 33, (36, 3), generator=generator),
        torch.randn(36, 4, generator=generator),
    )
    return stateful_job(lambda: Bag(max_norm), data=TensorDataset(words, y))


def target(kind: type[nn.Module] = MomentumTarget) -> paceline.Job:
    return stateful_job(lambda: nn.Sequential(kind(), nn.Linear(8, 4)))


JOBS = {
    "limit": lambda: bag(1.0),
    "limit that is reached late": lambda: bag(4.0),
    "target": target,
    "late target": lambda: target(LateTarget),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", pytest.param("data=3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", JOBS)
@in_turn(lambda name, plan: JOBS[name]())
def test_replicas_put_their_edits_together():
    """An element that some replicas edit takes that edit, and one that all edit takes it once."""


@pytest.mark.parametrize("plan", ["data=2 microbatches=2"])
@in_turn(lambda plan: bag(1.0))
def test_edits_of_several_micro_batches():
    """The limit of a norm is kept in each micro-batch."""


def test_edits_that_contradict_each_other_are_refused(tmp_path: Path):
    """What depends on a replica's samples can't be put together; the parameter is named before the first update."""
    with pytest.raises(
        RankFailed, match="a forward changes the parameter 'mean' in place"
    ) as refusal:
        trained(stateful_job(FollowsSamples), "data=2", tmp_path)
    assert "register it as a buffer" in str(refusal.value)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "plan", ["shard=2", "shard=2 zero=1", "shard=2 recompute=full", "data=2 shard=2"]
)
@pytest.mark.parametrize("name", ["limit", "target"])
@in_turn(lambda name, plan: JOBS[name]())
def test_edited_parameters_are_kept_whole():
    """FSDP2 would drop what a forward writes to the weights that it has gathered."""


def test_an_edit_that_no_look_at_the_model_showed_is_refused(tmp_path: Path):
    """A target that begins to follow later is sharded; the change is seen in the step that makes it."""
    with pytest.raises(
        RankFailed,
        match=r"changes the parameter '0.target.weight' in place, and shard=N would lose",
    ):
        trained(target(LateTarget), "shard=2", tmp_path)


class CopiedTarget(MomentumTarget):
    """The first forward writes to the target what it holds already."""

    def __init__(self) -> None:
        super().__init__()
        self.target.load_state_dict(self.online.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                q.lerp_(p, 0.1)
        return torch.tanh(self.online(x) + self.target(x))


@pytest.mark.parametrize("plan", ["shard=2"])
@in_turn(lambda plan: target(CopiedTarget))
def test_a_write_that_changes_nothing_at_first_is_seen():
    """The target begins as a copy of what it follows."""


@pytest.mark.slow
def test_servers_see_a_write_that_changes_nothing_at_first(tmp_path: Path):
    with pytest.raises(
        RankFailed, match=r"a forward changes the parameter '0\.target\.bias' in place, and servers"
    ):
        trained(target(CopiedTarget), "servers=1 workers=2", tmp_path)


class Centred(nn.Module):
    """Keeps a running centre in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.centre = nn.Linear(8, 4), torch.zeros(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.centre = 0.9 * self.centre + 0.1 * y.detach().mean(0)
        return y - self.centre


@pytest.mark.slow
def test_servers_refuse_tensors_in_attributes_that_change(tmp_path: Path):
    """Each worker would go on with its own."""
    with pytest.raises(
        RankFailed, match="training changes 'centre', and servers keep trained parameters alone"
    ):
        trained(stateful_job(Centred), "servers=1 workers=2", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["limit", "target"])
def test_servers_refuse_edited_parameters(name: str, tmp_path: Path):
    """They keep the parameters and would not learn of it."""
    with pytest.raises(
        RankFailed, match="and servers, which keep the parameters, would not learn of it"
    ):
        trained(JOBS[name](), "servers=1 workers=2", tmp_path)


def test_a_model_that_edits_nothing_is_not_run_beforehand():
    """The code of its classes is looked through first."""
    assert not may_write(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.TransformerEncoderLayer(4, 2))
    )
    assert may_write(MomentumTarget())


class TwoNets(nn.Module):
    """BYOL's way with nets of several layers, so that the target is used in other stages than where it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(
            nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
        )
        self.target = nn.Sequential(
            nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
        )
        self.target.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(x.mean(0), 0.5)
                for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                    q.lerp_(p, 0.1)
        return self.online(x) * self.target(x)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 microbatches=4",
        "pipeline=2 microbatches=4 schedule=interleaved",
        "pipeline=2 microbatches=4 schedule=zero-bubble",
        "tensor=2 microbatches=4",
    ],
)
@in_turn(lambda plan: stateful_job(TwoNets, batch=8), reference="single microbatches=4")
def test_other_stages_use_what_was_written_for_their_micro_batch():
    """The next micro-batch's forward may have written again by then."""


class Seeing(nn.Module):
    """Keeps a running mean of its samples in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(x.mean(0), 0.5)
        return self.layers(x)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Seeing, pytest.param(TwoNets, marks=pytest.mark.slow)])
def test_stand_ins_leave_no_trace_in_buffers(model: type[nn.Module], tmp_path: Path):
    """A window of one sample: three micro-batches of each replica, and all of the second one's, are stand-ins."""
    job = stateful_job(model, samples=25, steps=3)
    expected = by_one_device(job, "data=2 microbatches=4")
    state = trained(job, "pipeline=2 shard=2 microbatches=4", tmp_path)
    torch.testing.assert_close(state["seen"], expected["seen"])


class ThroughData(TwoNets):
    """MoCo's way of writing it."""

    def forward(self, x: Tensor) -> Tensor:
        for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
            q.data = q.data if not self.training else q.data.mul_(0.9).add_(p.data, alpha=0.1)
        return self.online(x) * self.target(x)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "plan", ["shard=2", "shard=2 zero=1", "data=2 shard=2", "shard=2 recompute=full"]
)
@pytest.mark.parametrize("kind", [TwoNets, ThroughData])
@in_turn(lambda kind, plan: stateful_job(kind))
def test_shards_follow_shards():
    """Outside of their blocks both nets are in parts, and are written to in parts."""


def test_shards_do_not_follow_in_several_micro_batches(tmp_path: Path):
    """Some of them may have no samples, and must leave no trace."""
    with pytest.raises(
        RankFailed, match="uses a parameter of one of its blocks without calling the block"
    ):
        trained(stateful_job(TwoNets), "shard=2 microbatches=2", tmp_path)


class BySamples(TwoNets):
    """A momentum that the samples set."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                q.lerp_(p, float(x.abs().mean()))
        return self.online(x) * self.target(x)


class InBlocks(TwoNets):
    """Writes in the block itself, what it holds already."""

    def __init__(self) -> None:
        super().__init__()
        self.target[0].register_forward_pre_hook(
            lambda block, _: (block.weight.data.copy_(torch.eye(8)), None)[1]
        )
        self.target[0].weight.data.copy_(torch.eye(8))


class Once(TwoNets):
    """Sets a weight in its block, in the first forward alone, as an ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.target[0].register_forward_pre_hook(self.set_once)
        self.is_set = False

    def set_once(self, block: nn.Module, inputs: Any) -> None:
        if not self.is_set:
            block.weight.data.copy_(torch.eye(8))
            self.is_set = True

    def forward(self, x: Tensor) -> Tensor:
        return self.online(x) * self.target(x)


def test_what_a_block_writes_once_does_not_follow():
    """It was written to before: a look at two forwards more sees nothing."""
    model = Once()
    names = written_by(lambda: model(torch.ones(2, 8)), model)
    assert names == {"target.0.weight"}
    assert (
        followers(names, model, find_units(model), (partial(model, torch.zeros(2, 8)),) * 2)
        == set()
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            TwoNets,
            {
                "target.0.weight",
                "target.0.bias",
                "target.2.weight",
                "target.2.bias",
                "target.4.weight",
                "target.4.bias",
            },
        ),
        (BySamples, set()),
        (
            InBlocks,
            {
                "target.0.bias",
                "target.2.weight",
                "target.2.bias",
                "target.4.weight",
                "target.4.bias",
            },
        ),
    ],
)
def test_followers_are_written_to_from_outside_alike_for_all_samples(
    kind: type[nn.Module], expected: set[str]
):
    model = kind()
    names = [name for name, _ in model.target.named_parameters(prefix="target")]

    assert (
        followers(
            names,
            model,
            find_units(model),
            tuple(partial(model, torch.full((2, 8), value)) for value in (0.1, 0.2)),
        )
        == expected
    )


class LateNets(TwoNets):
    """Begins to follow in the third step, where no look beforehand sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards > 5:
            return super().forward(x)
        return self.online(x) * self.target(x)


def test_what_would_be_lost_of_gathered_blocks_is_refused(tmp_path: Path):
    """Below ZeRO's third stage blocks stay gathered between micro-batches; what is written to them there is dropped."""
    with pytest.raises(
        RankFailed,
        match=r"changes the parameter 'target\.\d\.\w+' in place, and shard=N would lose",
    ):
        trained(stateful_job(LateNets), "shard=2 zero=2 microbatches=2", tmp_path)
