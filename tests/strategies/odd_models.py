"""Small odd but legitimate models, and a comparison of what a plan trains with what one device trains."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jobs.data import regression
from jobs.perceptrons import ResidualBlock, ResidualNet
from jobs.stateful import by_one_device
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline
from paceline.launch.process.failure import RankFailed

BATCH, SAMPLES = 12, 50
SPLITS = ("tensor=2", "pipeline=2 microbatches=1", "place=2")


def job_of(model: Callable[[], nn.Module], **changes: Any) -> paceline.Job:
    """A regression in float64 with plain SGD."""
    fields = {
        "model": model,
        "data": regression(SAMPLES, seed=3),
        "loss": F.mse_loss,
        "batch": BATCH,
        "steps": 4,
        "precision": "float64",
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "drop_last": True,
    }
    return paceline.Job(**{**fields, **changes})


def trained(job: paceline.Job, plan: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    """Everything in the model that a plan trains, by name."""
    world_size = paceline.Plan.parse(plan).world_size
    paceline.train(
        job,
        plan,
        devices=f"cpu:0-{world_size - 1}" if world_size > 1 else "cpu:0",
        run=folder,
        timeout_s=60,
        **options,
    )
    return load_file(folder / "model.safetensors")


def difference(
    job: Callable[[], paceline.Job], plan: str, folder: Path, *, single: str = "single"
) -> float:
    """The greatest of any parameter and buffer between a plan and one device.

    single: a plan that cuts batches as one device is to do.
    """
    expected, actual = by_one_device(job(), single), trained(job(), plan, folder)
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name].double() - tensor.double()).abs().max())
        for name, tensor in expected.items()
    )


def refusal(job: paceline.Job, plan: str, folder: Path) -> str:
    """What is said of a plan that is refused before the first step."""
    try:
        trained(job, plan, folder)
    except RankFailed as failed:
        assert failed.failure.kind == "PlanRefused", failed
        assert failed.failure.step == 0, failed
        return str(failed)
    raise AssertionError(f"{plan} was not refused")


# --- Models -------------------------------------------------------------------------------------------------------


class SignFunction(torch.autograd.Function):
    """A sign with the gradient of a clipped identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Reversal(torch.autograd.Function):
    """Passes its input on, and gradients reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class SinOfProduct(torch.autograd.Function):
    """Two outputs and None, from a tensor, a number and a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, weight: Tensor) -> tuple[Tensor, None, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x * factor, None, (x @ weight.t()).sin()

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, _: None, of_sin: Tensor
    ) -> tuple[Tensor, None, Tensor]:
        x, weight = ctx.saved_tensors
        inner = 0.5 * of_sin * (x @ weight.t()).cos()
        return gradient * ctx.factor + inner @ weight, None, inner.t() @ x


sign = SignFunction.apply  # bound before anything is captured, as users do


class Binarised(ResidualBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x + sign(self.linear(x))


class Reversed(ResidualNet):
    """A function in the model's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(Reversal.apply(x, 0.5))


class SeveralOutputs(ResidualBlock):
    """One of whose functions runs without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        scaled, nothing, waves = SinOfProduct.apply(self.linear(x), 0.5, self.linear.weight)
        assert nothing is None
        with torch.no_grad():
            signs = sign(x)
        return scaled + 0.1 * waves + 0.01 * signs


class Counting(ResidualBlock):
    """A warm-up by a counter, and outputs that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 8)


class CountingRoot(ResidualNet):
    """The same in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 8)


class Centred(ResidualNet):
    """Keeps a running mean in a plain attribute of the model (DINO)."""

    def __init__(self) -> None:
        super().__init__()
        self.center = torch.zeros(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        centred = output - self.center
        if self.training:
            self.center = self.center * 0.9 + 0.1 * output.detach().mean(0)
        return centred


class Averaging(ResidualBlock):
    """Puts another tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x) - self.mean
        if self.training:
            self.mean = self.mean * 0.9 + 0.1 * x.detach().mean(0)
        return output


class AveragingRoot(ResidualNet):
    """The same at the model's begin, which no other rank than the first may see."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.mean
        if self.training:
            self.mean = self.mean * 0.9 + 0.1 * x.detach().mean(0)
        return super().forward(x)


class Normalised(nn.Module):
    """Running statistics of a batch and of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.batch = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.instance = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.instance(torch.relu(self.batch(self.l(x))).unflatten(1, (2, 4))).flatten(1)


class ActivatedInPlace(ResidualBlock):
    """Edits its own input, as residual nets that activate first."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(nn.functional.leaky_relu(x, 0.3, inplace=True)))


class EditedMask(ResidualNet):
    """A value without a gradient of which each block edits a part."""

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).to(x)
        x = self.first(x)
        for block in self.blocks:
            mask[:, :4] *= 0.5
            x = block(x) * (1 + 0.1 * mask)
        return self.last(x + 0.1 * mask)


class HookInside(ResidualBlock):
    """Clips the gradient of a value by a hook that its forward registers."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
        return x + torch.tanh(y)


class Checkpointed(ResidualNet):
    """Reentrant checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        return self.last(x)


class Skipping(ResidualNet):
    """Leaves out layers by Python's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if not self.training or random.random() < 0.5:
                x = block(x)
        return self.last(x)


class TiedThrice(nn.Module):
    """A weight that three modules share, two of them side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.o = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 4),
        )
        self.m = nn.Linear(8, 8)
        self.b.weight = self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.c(self.m(torch.tanh(self.b(torch.tanh(self.a(x)))))))


class ForceField(nn.Module):
    """A forward that takes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.out = (
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return self.out(force)


def with_hooks() -> nn.Module:
    """Every kind of hook that a user can wait for gradients with."""
    net, mask = ResidualNet(), torch.tensor([1.0, 0.0] * 4, dtype=torch.float64)

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    net.first.weight.register_hook(lambda gradient: gradient * mask)
    net.blocks[0].linear.weight.register_post_accumulate_grad_hook(halve)
    net.blocks[1].register_full_backward_hook(
        lambda module, given, came: tuple(g * 0.5 for g in given)
    )
    net.last.register_full_backward_pre_hook(lambda module, came: (came[0] * 2,))
    return net
