"""Jobs whose body is a function of the model and of a batch, `compute=`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

from .registry import FEATURES, SAMPLES, Net, adamw, entry, integers, make_job, numbers

IGNORED, WORDS, LENGTH = -100, 12, 6


def computed(compute: Callable[[Any, Any], Any], model: Any = Net, **changes: Any) -> paceline.Job:
    """A job with a computation in place of a loss."""
    return make_job(model, **{"loss": None, "compute": compute, **changes})


@entry("a mean over the samples, from a batch that is a list")
def computed_mean() -> paceline.Job:
    def compute(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    data = TensorDataset(numbers(SAMPLES, FEATURES), integers(3, SAMPLES))
    return computed(compute, data=data, optimizer=adamw)


class Reader(nn.Module):
    """Attends to words that are no padding, and names each word."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, FEATURES)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(FEATURES, 2, 16, 0.0, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(FEATURES, WORDS)

    def forward(self, words: Tensor, *, padding: Tensor) -> Tensor:
        x = self.table(words)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        return self.head(x)


@entry("masked words as a sum and a count, from a mapping with lengths, by keyword arguments")
def computed_masked_words() -> paceline.Job:
    def compute(model: nn.Module, batch: Any) -> Any:
        words, lengths = batch["words"], batch["of"]["length"]
        padding = torch.arange(LENGTH, device=words.device) >= lengths[:, None]
        labels = batch["labels"].masked_fill(padding, IGNORED)
        output = model(words, padding=padding)
        total = F.cross_entropy(
            output.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total, (labels != IGNORED).sum()

    words, labels = integers(WORDS, SAMPLES, LENGTH), integers(WORDS, SAMPLES, LENGTH, seed=5)
    labels[integers(3, SAMPLES, LENGTH, seed=6) > 0] = IGNORED
    lengths = 1 + integers(LENGTH, SAMPLES, seed=7)
    data = [
        {"words": word, "labels": label, "of": {"length": int(length)}}
        for word, label, length in zip(words, labels, lengths, strict=True)
    ]
    return computed(compute, Reader, data=data, clip=0.5)


@entry("figures beside the loss, and another function for evaluations")
def computed_figures() -> paceline.Job:
    def compute(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        output = model(x)
        is_right = output.argmax(1) == y
        figures = {
            "accuracy": is_right.double().mean(),
            "of_some": (is_right[y > 0].sum(), (y > 0).sum()),
        }
        return F.cross_entropy(output, y), figures

    def validate(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        output = model(x)
        return {
            "loss": F.cross_entropy(output, y, reduction="none").square().mean(),
            "size": output.square().mean(),
        }

    data = TensorDataset(numbers(SAMPLES, FEATURES), integers(3, SAMPLES))
    return computed(compute, data=data, validation_step=validate, validation=data)


class Autoencoder(nn.Module):
    """Its parts can be called by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Net(outputs=8)
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, FEATURES))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, -1)
        return mean, spread

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x)
        drawn = mean + torch.randn_like(mean) * (spread / 2).exp()
        return self.decoder(drawn), mean, spread


def _two_terms(x: Tensor, made: Tensor, mean: Tensor, spread: Tensor) -> Any:
    error = F.mse_loss(made, x, reduction="none").sum(1).mean()
    divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1).mean()
    return error + 0.1 * divergence


@entry("a variational autoencoder: two terms and a draw in its forward", random_layers=True)
def computed_variational() -> paceline.Job:
    def compute(model: nn.Module, batch: Any) -> Any:
        (x,) = batch
        return _two_terms(x, *model(x))

    return computed(compute, Autoencoder, data=TensorDataset(numbers(SAMPLES, FEATURES)))


@entry("methods and parts of a model, never its forward, and a draw between", random_layers=True)
def computed_by_parts() -> paceline.Job:
    def compute(model: Any, batch: Any) -> Any:
        (x,) = batch
        mean, spread = model.encode(x)
        drawn = mean + torch.randn_like(mean) * (spread / 2).exp()
        return _two_terms(x, model.decoder(drawn), mean, spread)

    return computed(compute, Autoencoder, data=TensorDataset(numbers(SAMPLES, FEATURES)))


@entry("a model that is called twice, on two views of a sample")
def computed_twice() -> paceline.Job:
    def compute(model: nn.Module, batch: Any) -> Any:
        one, other, is_same = batch
        likeness = F.cosine_similarity(model(one), model(other))
        return F.binary_cross_entropy_with_logits(5 * likeness, is_same)

    views = numbers(2, SAMPLES, FEATURES)
    return computed(compute, data=TensorDataset(*views, integers(2, SAMPLES).double()))


@entry("labelled and unlabelled samples in one batch, agreeing with a call without gradients")
def computed_consistency() -> paceline.Job:
    def compute(model: nn.Module, batch: Any) -> Any:
        x, noisy, y = batch
        with torch.no_grad():
            soft = model(x).softmax(-1)
        is_sure = soft.amax(-1) > 0.4
        agreement = F.cross_entropy(model(noisy), soft, reduction="none") * is_sure
        labelled = F.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="none")
        return labelled.mean() + agreement.mean()

    x, y = numbers(SAMPLES, FEATURES), integers(3, SAMPLES)
    y[integers(2, SAMPLES, seed=6) > 0] = IGNORED
    return computed(compute, data=TensorDataset(x, x + 0.1 * numbers(SAMPLES, FEATURES, seed=4), y))


@entry("BatchNorm in a computation: coupled where a rank cuts its part")
def computed_batch_norm() -> paceline.Job:
    def compute(model: nn.Module, batch: Any) -> Any:
        return F.mse_loss(model(batch["x"]), batch["y"])

    def model() -> nn.Module:
        return Net(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)))

    x, y = numbers(SAMPLES, FEATURES), numbers(SAMPLES, 3, seed=3)
    return computed(compute, model, data=[{"x": a, "y": b} for a, b in zip(x, y, strict=True)])


@entry("a penalty on the model's parameters, and one of its parameters by itself")
def computed_with_parameters() -> paceline.Job:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(()))

    def compute(model: Any, batch: Any) -> Any:
        x, y = batch
        error = F.mse_loss(model(x) * model.scale.exp(), y)
        return error + 1e-2 * sum(p.square().sum() for p in model.parameters())

    return computed(compute, Scaled)


@entry("derivatives by the input, as an equation of physics has them")
def computed_derivatives() -> paceline.Job:
    def compute(model: nn.Module, batch: Any) -> Any:
        (x,) = batch
        with torch.enable_grad():  # also in an evaluation
            place = x.detach().requires_grad_()
            value = model(place)
            (slope,) = torch.autograd.grad(value.sum(), place, create_graph=True)
        return (slope.sum(1) + value.squeeze(1) - x[:, 0]).square().mean()

    return computed(compute, lambda: Net(outputs=1), data=TensorDataset(numbers(SAMPLES, FEATURES)))
