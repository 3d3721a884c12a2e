"""State that a forward changes: buffers, counters, plain tensors, frozen targets, codebooks."""

from __future__ import annotations

import copy
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

from .registry import FEATURES, Net, adamw, entry, make_job, numbers


class Codebook(nn.Module):
    """Vector quantisation whose codes are moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.d = nn.Linear(FEATURES, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.e(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        q = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 6).to(z)
                self.counts.mul_(0.9).add_(0.1 * hot.sum(0))
                self.sums.mul_(0.9).add_(0.1 * hot.t() @ z)
                self.codes.copy_(self.sums / self.counts.clamp(min=0.1)[:, None])
        return self.d(z + (q - z).detach())


@entry("a codebook of moving averages: coupled")
def codebook() -> paceline.Job:
    return make_job(Codebook, data=TensorDataset(numbers(50, FEATURES), numbers(50, 4, seed=3)))


@entry("a codebook that is trained by its loss")
def codebook_by_loss() -> paceline.Job:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.codes, self.d = nn.Linear(FEATURES, 4), nn.Embedding(6, 4), Net()
            self.up = nn.Linear(4, FEATURES)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.e(x)
            q = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
            commitment = (z - q.detach()).square().mean(1) + (q - z.detach()).square().mean(1)
            return self.d(self.up(z + (q - z).detach())), commitment

    return make_job(
        Quantised, loss=lambda output, target: F.mse_loss(output[0], target) + output[1].mean()
    )


@entry("a warm-up by a counter in Python: coupled")
def counter_warm_up() -> paceline.Job:
    class Warm(Net):
        def __init__(self) -> None:
            super().__init__()
            self.t = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.t += 1
            return super().forward(x) * min(1.0, self.t / 8)

    return make_job(Warm)


@entry("a warm-up by a counter in a buffer: coupled")
def counter_in_a_buffer() -> paceline.Job:
    class Warm(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("t", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.t += 1
            return super().forward(x) * (self.t / 8).clamp(max=1.0)

    return make_job(Warm)


@entry("a centre of outputs in a plain tensor attribute, as DINO: coupled")
def dino_centre() -> paceline.Job:
    class Centred(Net):
        def __init__(self) -> None:
            super().__init__()
            self.center = torch.zeros(3, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if self.training:
                self.center = self.center * 0.9 + 0.1 * output.detach().mean(0)
            return output - self.center

    return make_job(Centred)


@entry("a buffer that changes from the third step on: coupled")
def late_buffer() -> paceline.Job:
    class Late(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros((), dtype=torch.long))
            self.register_buffer("ema", torch.zeros(FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.n += 1
                if int(self.n) > 2:
                    self.ema.mul_(0.9).add_(0.1 * x.mean(0))
            return super().forward(x)

    return make_job(Late)


@entry("a buffer that is replaced and not changed in place: coupled")
def replaced_buffer() -> paceline.Job:
    class Replaced(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x - self.mean)

    return make_job(Replaced)


@entry("a buffer that each forward brings to the device and dtype that it has")
def buffer_brought_again() -> paceline.Job:
    class Brought(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.arange(1.0, FEATURES + 1))

        def forward(self, x: Tensor) -> Tensor:
            self.scale = self.scale.to(x.device).detach().to(x)
            return super().forward(x * self.scale)

    return make_job(Brought)


@entry("running statistics that are kept and never used: exact weights, coupled buffers")
def watched_inputs() -> paceline.Job:
    class Watched(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("greatest", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.greatest.copy_(0.5 * self.greatest + 0.5 * x.abs().max())
            return super().forward(x)

    return make_job(Watched)


class ActNorm(nn.Module):
    """A scale and a bias that the first batch sets, as in Glow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = (
            nn.Parameter(torch.ones(FEATURES)),
            nn.Parameter(torch.zeros(FEATURES)),
        )
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.is_set:
            self.bias.data.copy_(-x.mean(0))
            self.scale.data.copy_(1 / (x.std(0, correction=0) + 1e-3))
            self.is_set = True
        return (x + self.bias) * self.scale


@entry("weights that the first batch sets")
def act_norm() -> paceline.Job:
    return make_job(lambda: Net(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), ActNorm())))


class MomentumTarget(nn.Module):
    """An online net and a frozen one that follows it, as BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Net()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            with torch.no_grad():
                for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                    q.lerp_(p, 0.1)
        return self.predictor(self.online(x)), self.target(x)


@entry("a frozen target that follows by momentum in the forward, as BYOL: coupled")
def byol_target() -> paceline.Job:
    return make_job(
        MomentumTarget,
        loss=lambda output, target: F.mse_loss(*output) + F.mse_loss(output[0], target),
    )


@entry("a frozen backbone with a trained head")
def frozen_backbone() -> paceline.Job:
    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = (
                Net(outputs=FEATURES).requires_grad_(False),
                nn.Linear(FEATURES, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.backbone(x))

    return make_job(Tuned, optimizer=adamw)


@entry("a frozen block in the middle")
def frozen_middle() -> paceline.Job:
    class Middle(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].requires_grad_(False)

    return make_job(Middle, optimizer=adamw)


@entry("a layer that is frozen while training goes on")
def frozen_later() -> paceline.Job:
    class Later(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            if int(self.n) > 3:
                self.first.requires_grad_(False)
            return super().forward(x)

    return make_job(Later)


@entry("layers that are skipped at random by Python's generator")
def layers_skipped() -> paceline.Job:
    class Skipping(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for number, block in enumerate(self.blocks):
                if number == 0 or not self.training or random.random() > 0.0:
                    x = block(x)
            return self.last(x)

    return make_job(Skipping)


@entry("a cache of activations that lives for one forward")
def cache_of_a_forward() -> paceline.Job:
    class Caching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.cache.clear()
            x = self.first(x)
            for number, block in enumerate(self.blocks):
                x = block(x)
                self.cache[f"block {number}"] = x
            return self.last(x + self.cache["block 0"])

    return make_job(Caching)


@entry("a behaviour that differs between training and evaluation")
def other_in_evaluation() -> paceline.Job:
    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            return output if self.training else output.clamp(-0.5, 0.5)

    return make_job(
        Other, validation=TensorDataset(numbers(17, FEATURES, seed=9), numbers(17, 3, seed=10))
    )


@entry("an average of the weights in buffers, by the model's own forward: coupled")
def average_in_buffers() -> paceline.Job:
    class Averaging(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", self.last.weight.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.average.lerp_(self.last.weight, 0.2)
            return super().forward(x)

    return make_job(Averaging)


@entry(
    "a buffer of bools that notes which features were ever active, and silences the others' bias"
)
def buffer_of_bools() -> paceline.Job:
    class Active(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, FEATURES)
            self.register_buffer("active", torch.zeros(FEATURES, dtype=torch.bool))

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            if self.training:
                self.active |= (x > 0.8).any(0)
            return x * torch.where(self.active, 1.0, 0.9)

    return make_job(lambda: Net(Active))
