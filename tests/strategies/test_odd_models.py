"""Odd but legitimate models train under plans that split them as on one device, or are refused before step 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import odd_models as odd
import pytest
import torch
import torch.nn.functional as F
from jobs.perceptrons import ResidualBlock, ResidualNet
from jobs.stateful import in_turn
from torch import Tensor, nn

import paceline
from paceline.launch.process.failure import RankFailed

EXACT: dict[str, Callable[[], nn.Module]] = {
    "a straight-through sign": lambda: ResidualNet(odd.Binarised),
    "a gradient reversal": odd.Reversed,
    "functions of several outputs": lambda: ResidualNet(odd.SeveralOutputs),
    "hooks": odd.with_hooks,
    "hooks inside": lambda: ResidualNet(odd.HookInside),
    "reentrant checkpoints": odd.Checkpointed,
    "counters in blocks": lambda: ResidualNet(odd.Counting),
    "a tensor in an attribute": odd.Centred,
    "buffers put in place": lambda: ResidualNet(odd.Averaging),
    "a buffer of the root": odd.AveragingRoot,
    "running statistics": lambda: ResidualNet(odd.Normalised),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", odd.SPLITS)
@pytest.mark.parametrize("name", EXACT)
@in_turn(
    lambda name, plan: odd.job_of(EXACT[name], batch=12 if name == "running statistics" else 2)
)
def test_what_is_exact() -> None:
    """Parameters and buffers, with and without the model's own state."""


@pytest.mark.slow
@pytest.mark.parametrize("model", EXACT.values(), ids=EXACT)
def test_one_device_is_a_plain_loop(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    """A run on one device, that other plans are compared with elsewhere."""
    assert odd.difference(lambda: odd.job_of(model), "single", tmp_path) < 1e-10


@pytest.mark.parametrize("plan", ["place=2 recompute=full"])
@pytest.mark.parametrize(
    "model", [lambda: ResidualNet(odd.Normalised), lambda: ResidualNet(odd.Counting)]
)
@in_turn(lambda model, plan: odd.job_of(model))
def test_recomputed_parts_change_their_state_once() -> None:
    """Buffers and attributes, although blocks are computed twice."""


@pytest.mark.parametrize("plan", ["pipeline=2 microbatches=3 schedule=gpipe"])
@in_turn(
    lambda plan: odd.job_of(lambda: ResidualNet(odd.Averaging), batch=6),
    reference="single microbatches=3",
)
def test_several_forwards_before_a_backward() -> None:
    """A later micro-batch doesn't change what an earlier one has kept, as one device computes them one by one."""


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (lambda: ResidualNet(odd.ActivatedInPlace), "pipeline=2 microbatches=1"),
        *(
            pytest.param(model, plan, marks=pytest.mark.slow)
            for model, plan in (
                (lambda: ResidualNet(odd.ActivatedInPlace), "tensor=2"),
                (odd.EditedMask, "tensor=2"),
                (odd.EditedMask, "pipeline=2 microbatches=1"),
            )
        ),
    ],
)
@in_turn(lambda model, plan: odd.job_of(model, batch=2))
def test_values_edited_in_place() -> None:
    """An edit is not cut off from what it edits."""


@pytest.mark.parametrize(
    "model",
    [
        lambda: ResidualNet(odd.ActivatedInPlace),
        pytest.param(odd.EditedMask, marks=pytest.mark.slow),
    ],
)
def test_values_edited_in_place_in_parts(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    """They would be edited on one rank and read on another."""
    with pytest.raises(RankFailed, match="edits in place what") as refused:
        odd.trained(odd.job_of(model), "place=2", tmp_path / "parts")
    assert (refused.value.failure.kind, refused.value.failure.step) == ("PlanError", 0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["pipeline=2 shard=2 microbatches=1", "pipeline=2 microbatches=1"])
@in_turn(lambda plan: odd.job_of(odd.TiedThrice, batch=4))
def test_a_weight_of_three_modules() -> None:
    """Two of them on one rank, where it is whole, so that it is whole on the other too."""


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (odd.CountingRoot, "CountingRoot itself changes its attribute 'calls' each time"),
        (odd.Skipping, "Skipping itself draws from Python's or NumPy's random numbers"),
        (odd.ForceField, "the forward takes gradients with torch.autograd"),
    ],
)
def test_what_is_refused(model: Callable[[], nn.Module], words: str, tmp_path: Path) -> None:
    """What the model's own forward does that no graph holds, by name, with a plan that works."""
    message = odd.refusal(odd.job_of(model), "pipeline=2", tmp_path)
    assert words in message and "data=N" in message


def penalty() -> dict[str, Any]:
    net = ResidualNet()
    return {
        "model": lambda: net,
        "loss": lambda output, target: (
            F.mse_loss(output, target) + 0.1 * sum(p.square().sum() for p in net.parameters())
        ),
    }


def auxiliary() -> dict[str, Any]:
    made: list[Any] = []

    class Net(ResidualNet):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            self.aux = output.square().mean()
            return output

    def model() -> nn.Module:
        made.append(Net())
        return made[-1]

    return {
        "model": model,
        "loss": lambda output, target: F.mse_loss(output, target) + made[-1].aux,
    }


def inner() -> dict[str, Any]:
    net, seen = ResidualNet(), list[Tensor]()
    net.blocks[1].register_forward_hook(lambda module, given, output: seen.append(output))
    return {
        "model": lambda: net,
        "loss": lambda output, target: F.mse_loss(output, target) + seen[-1].square().mean(),
    }


class WithInput(ResidualNet):
    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_()
        return x, super().forward(x)


def by_input() -> dict[str, Any]:
    """A loss that differentiates the output by the input."""

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(output[1].sum(), output[0], create_graph=True)
        return F.mse_loss(output[1], target) + gradient.square().mean()

    return {"model": WithInput, "loss": loss}


class Flat(ResidualNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(len(x), -1)


def in_place() -> dict[str, Any]:
    """A loss that writes to the model's output, which is a view."""
    return {
        "model": Flat,
        "loss": lambda output, target: F.mse_loss(output.add_(0.1), target.flatten(1)),
    }


@pytest.mark.parametrize("plan", ["shard=2"])
@in_turn(lambda plan: odd.job_of(**in_place()))
def test_a_loss_that_writes_to_the_output() -> None:
    """FSDP2 must know of the gradient though the output is a view."""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", odd.SPLITS)
@pytest.mark.parametrize(
    ("job", "words"),
    [
        (in_place, "the loss writes to the model's output in place"),
        (by_input, "the loss goes back through the model"),
        (penalty, "the loss uses the parameter 'first.weight' of the model"),
        (auxiliary, "the loss uses the attribute 'aux' of the model"),
        (inner, "the loss uses a tensor that the forward made inside of the model"),
    ],
)
def test_losses_that_look_at_the_model(
    job: Callable[[], dict[str, Any]], words: str, plan: str, tmp_path: Path
) -> None:
    """They are refused at once, by name."""
    message = odd.refusal(odd.job_of(**job()), plan, tmp_path)
    assert words in message and "data=N" in message


def weighted() -> paceline.Job:
    torch.manual_seed(0)
    net = ResidualNet()
    net.register_buffer("weights", torch.rand(4))
    return odd.job_of(
        lambda: net,
        batch=2,
        loss=lambda output, target: ((output - target).square() * net.weights).mean(),
    )


@pytest.mark.parametrize("plan", ["pipeline=2 microbatches=1"])
@in_turn(lambda plan: weighted())
def test_a_loss_with_a_constant_of_the_model() -> None:
    """A buffer that no forward changes is whole on every rank."""


class Mapped(ResidualBlock):
    """Maps a function over the samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.vmap(lambda row: torch.tanh(self.linear(row)))(x)


class Chooses(nn.Module):
    """Reads a value of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * (2 if x[0, 0] > 0 else 3)


@pytest.mark.parametrize("plan", ["pipeline=2"])
def test_a_value_that_a_forward_reads_is_named_by_its_line(plan: str, tmp_path: Path) -> None:
    message = odd.refusal(odd.job_of(Chooses), plan, tmp_path / "refused")
    assert (
        "it reads values of a tensor in `return self.l(x) * (2 if x[0, 0] > 0 else 3)`" in message
    )
    assert (
        "test_odd_models.py:" in message and "data=N and shard=N plans run it as it is" in message
    )


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))  # type: ignore[no-any-return]


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("block", "plan", "words"),
    [
        (Mapped, "pipeline=2", "recording its forward failed"),
        (Mapped, "tensor=2", "recording its forward failed"),
        *(
            (scripted, plan, "'blocks.0' is a scripted module")
            for plan in ("pipeline=2", "shard=2", "single recompute=full")
        ),
    ],
)
def test_modules_that_torch_hides(
    block: Callable[[], nn.Module], plan: str, words: str, tmp_path: Path
) -> None:
    """Of torch.func and torch.jit: refused in words."""
    assert words in odd.refusal(odd.job_of(lambda: ResidualNet(block)), plan, tmp_path / "refused")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("plan", ["data=2"])
@pytest.mark.parametrize("block", [Mapped, scripted])
@in_turn(lambda block, plan: odd.job_of(lambda: ResidualNet(block)))
def test_modules_that_torch_hides_under_replicas() -> None:
    """Exact, as the model runs as it is."""
