"""Losses: sums and counts, ignored targets, those that look at the model, several at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

from .registry import FEATURES, SAMPLES, Net, adamw, entry, integers, make_job, numbers


def _classes(ignored: float = 0.0) -> TensorDataset:
    target = integers(3, SAMPLES)
    target[torch.rand(SAMPLES, generator=torch.Generator().manual_seed(4)) < ignored] = -100
    return TensorDataset(numbers(SAMPLES, FEATURES), target)


@entry("cross entropy, the mean over samples")
def cross_entropy() -> paceline.Job:
    return make_job(data=_classes(), loss=F.cross_entropy, optimizer=adamw)


@entry("ignored targets, as a sum and a count")
def ignored_targets() -> paceline.Job:
    return make_job(
        data=_classes(0.5),
        optimizer=adamw,
        loss=lambda output, target: (
            F.cross_entropy(output, target, reduction="sum"),
            (target >= 0).sum(),
        ),
    )


@entry("ignored targets as a mean, which weighs samples by their micro-batch: coupled")
def ignored_targets_as_mean() -> paceline.Job:
    return make_job(
        data=_classes(0.3),
        loss=lambda output, target: (
            F.cross_entropy(output, target, reduction="sum") / (target >= 0).sum().clamp(min=1)
        ),
    )


def _sum_or_zero(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    counted = target >= 0
    if not counted.any():
        return torch.zeros(()), 0
    return F.cross_entropy(output[counted], target[counted], reduction="sum"), int(counted.sum())


@entry("a sum and a count that are 0, without a graph, where nothing counts")
def zero_sum_and_count() -> paceline.Job:
    data = _classes()
    target = data.tensors[1].clone()
    target[torch.arange(SAMPLES) % 6 != 0] = -100
    return make_job(data=TensorDataset(data.tensors[0], target), loss=_sum_or_zero)


@entry("a sum weighed by sample")
def weighted_samples() -> paceline.Job:
    x = numbers(SAMPLES, FEATURES)
    return make_job(
        data=TensorDataset(x, numbers(SAMPLES, 4, seed=6)),
        loss=lambda output, target: (
            ((output - target[:, :3]).square().mean(1) * target[:, 3].exp()).sum(),
            target[:, 3].exp().sum(),
        ),
    )


@entry("label smoothing")
def smoothed_labels() -> paceline.Job:
    return make_job(
        data=_classes(),
        loss=lambda output, target: F.cross_entropy(output, target, label_smoothing=0.1),
    )


@entry("class weights, whose mean is by weight: as a sum and a count")
def class_weights() -> paceline.Job:
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    return make_job(
        data=_classes(),
        loss=lambda output, target: (
            F.cross_entropy(output, target, weights, reduction="sum"),
            weights[target].sum(),
        ),
    )


@entry("binary cross entropy on several labels a sample")
def binary() -> paceline.Job:
    return make_job(
        data=TensorDataset(numbers(SAMPLES, FEATURES), integers(2, SAMPLES, 3).float()),
        loss=F.binary_cross_entropy_with_logits,
    )


class Frames(nn.Module):
    """Ten frames of log-probabilities a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(outputs=10 * 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).view(-1, 10, 5).log_softmax(-1)


def _ctc(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    lengths = torch.full((len(output),), 10), torch.full((len(output),), target.shape[1])
    return F.ctc_loss(output.transpose(0, 1), target, *lengths, reduction="sum"), len(output)


@entry("connectionist temporal classification")
def ctc() -> paceline.Job:
    return make_job(
        Frames,
        data=TensorDataset(numbers(SAMPLES, FEATURES), integers(4, SAMPLES, 3) + 1),
        loss=_ctc,
    )


class Siamese(nn.Module):
    """One net for several inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, *views: Tensor) -> list[Tensor]:
        return [self.net(view) for view in views]


class Views(torch.utils.data.Dataset[Any]):
    """Items of several views."""

    def __init__(self, number: int) -> None:
        self.views = numbers(number, SAMPLES, FEATURES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, ...], int]:
        return tuple(self.views[:, index]), index % 2


@entry("a siamese net with a triplet loss")
def triplet() -> paceline.Job:
    return make_job(
        Siamese, data=Views(3), loss=lambda output, target: F.triplet_margin_loss(*output)
    )


@entry("a siamese net with a cosine loss")
def siamese() -> paceline.Job:
    return make_job(
        Siamese,
        data=Views(2),
        loss=lambda output, target: F.cosine_embedding_loss(*output, target * 2 - 1),
    )


class Contrast(nn.Module):
    """Encodes all that a sample holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=-1)


def _contrast(output: Tensor, target: Tensor) -> Tensor:
    similar = output @ output.transpose(1, 2) * 5
    return F.cross_entropy(similar.flatten(0, 1), target.flatten())


@entry("a contrastive loss among what one item holds")
def contrast_in_an_item() -> paceline.Job:
    data = TensorDataset(numbers(SAMPLES, 4, FEATURES), integers(4, SAMPLES, 4))
    return make_job(Contrast, data=data, loss=_contrast)


@entry("a contrastive loss among the samples of a batch: coupled")
def contrast_in_a_batch() -> paceline.Job:
    return make_job(
        Contrast,
        loss=lambda output, target: F.cross_entropy(
            output @ output.T * 5, torch.arange(len(output)).flip(0)
        ),
    )


@entry("a Kullback-Leibler divergence from soft targets")
def kl() -> paceline.Job:
    return make_job(
        data=TensorDataset(numbers(SAMPLES, FEATURES), numbers(SAMPLES, 3, seed=7).softmax(-1)),
        loss=lambda output, target: F.kl_div(output.log_softmax(-1), target, reduction="batchmean"),
    )


class Held(nn.Module):
    """A net that the loss can look at."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        _Seen.model = self

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net.first(x)
        self.aux = hidden.square().mean()
        for block in self.net.blocks:
            hidden = block(hidden)
        return self.net.last(hidden)


class _Seen:
    """The model that was built last, for losses that look at it."""

    model: Held


@entry("a loss that adds a penalty on all weights")
def weight_penalty() -> paceline.Job:
    return make_job(
        Held,
        loss=lambda output, target: (
            F.mse_loss(output, target)
            + 1e-1 * sum(p.square().sum() for p in _Seen.model.parameters())
        ),
    )


@entry("a loss that reads what a forward has left in the model")
def loss_reads_aux() -> paceline.Job:
    return make_job(Held, loss=lambda output, target: F.mse_loss(output, target) + _Seen.model.aux)


class PenaltyInside(nn.Module):
    """A net that gives its own weight penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        penalty = torch.stack([block.body.weight.square().sum() for block in self.net.blocks]).sum()
        return self.net(x), penalty


@entry("a weight penalty that the model returns beside its output")
def penalty_as_output() -> paceline.Job:
    return make_job(
        PenaltyInside, loss=lambda output, target: F.mse_loss(output[0], target) + 0.01 * output[1]
    )


class ForceField(nn.Module):
    """Energies and forces: a gradient in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(outputs=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.net(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, force


@entry("a force field, which differentiates in its forward")
def force_field() -> paceline.Job:
    return make_job(
        ForceField,
        data=TensorDataset(numbers(SAMPLES, FEATURES), numbers(SAMPLES, 1, seed=8)),
        loss=lambda output, target: F.mse_loss(output[0], target) + 0.1 * output[1].square().mean(),
    )


class Critic(nn.Module):
    """A discriminator on real and false samples, with the penalty on its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(outputs=1)

    def forward(self, real: Tensor, false: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        between = (0.5 * (real + false)).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)
        return self.net(real), self.net(false), (gradient.norm(dim=1) - 1).square()


@entry("a GAN's discriminator with a penalty on its gradient", evaluates=False)
def gan_critic() -> paceline.Job:
    return make_job(
        Critic,
        data=Views(2),
        loss=lambda output, target: (output[1] - output[0] + 10 * output[2][:, None]).mean(),
    )


@entry("a Huber loss")
def huber() -> paceline.Job:
    return make_job(loss=lambda output, target: F.huber_loss(output, target, delta=0.3))


@entry("a loss that is computed in float32", tolerance=1e-5)
def loss_in_float32() -> paceline.Job:
    return make_job(loss=lambda output, target: F.mse_loss(output.float(), target.float()))


class Warming(nn.Module):
    """A loss that weighs more with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
        return F.mse_loss(output, target) * (1 - 0.5**self.calls)


@entry("a loss that is a module and counts its calls", evaluates=False)
def counting_loss() -> paceline.Job:
    return make_job(loss=Warming())
