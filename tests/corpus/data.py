"""Data sets: short, odd, random, streamed, and items of every kind."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import paceline

from .registry import BATCH, FEATURES, SAMPLES, Net, adamw, entry, integers, make_job, numbers


def _tensors(samples: int) -> TensorDataset:
    x = numbers(samples, FEATURES)
    return TensorDataset(x, torch.tanh(x @ numbers(FEATURES, 3, seed=3)))


class NextToken(nn.Module):
    """Says its own loss, as the models of Transformers do: the mean over the labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, FEATURES)
        self.layer = nn.TransformerEncoderLayer(FEATURES, 2, 2 * FEATURES, 0.0, batch_first=True)
        self.head = nn.Linear(FEATURES, 16)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        logits = self.head(self.layer(self.embed(input_ids), ahead, attention_mask == 0))
        return {
            "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
            "logits": logits,
        }


def _padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tokens with zeros behind them, and labels that are ignored there."""
    tokens = [sample["input_ids"] for sample in samples]
    whole = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True)
    return {
        "input_ids": whole,
        "attention_mask": mask,
        "labels": whole.masked_fill(mask == 0, -100),
    }


@entry("mappings of tokens of other lengths, padded by collate, and the model's own loss")
def padded_tokens() -> paceline.Job:
    lengths = integers(9, SAMPLES, seed=4)
    return make_job(
        NextToken,
        loss=None,
        optimizer=adamw,
        collate=_padded,
        data=[
            {"input_ids": integers(16, 3 + int(length), seed=number)}
            for number, length in enumerate(lengths)
        ],
    )


@entry("samples that are their own targets")
def own_target() -> paceline.Job:
    return make_job(
        lambda: nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, FEATURES)),
        loss=F.mse_loss,
        data=TensorDataset(numbers(SAMPLES, FEATURES)),
        optimizer=adamw,
    )


@entry("a sampler that draws some samples more often, and fewer an epoch")
def weighted_sampler() -> paceline.Job:
    weights = torch.arange(1.0, SAMPLES + 1)
    return make_job(sampler=WeightedRandomSampler(weights, 2 * BATCH + 3), optimizer=adamw)


@dataclass
class Record:
    """A sample with names."""

    x: Tensor
    scale: float
    y: Tensor


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor, scale: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) * scale.to(x.dtype).unsqueeze(1) - y


@entry("records whose fields are the model's arguments")
def records() -> paceline.Job:
    x, y = _tensors(SAMPLES).tensors
    return make_job(
        Scaled,
        loss=lambda output, given: output.square().mean(),
        optimizer=adamw,
        data=[Record(x[k], 1.0 + k % 3, y[k]) for k in range(SAMPLES)],
    )


class InFile(Dataset[Any]):
    """Reads each sample from a file that was opened once."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.y, self.bytes = y, x[0].nbytes
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the job
        self.file.write(x.numpy().tobytes())
        self.file.flush()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.file.seek(index * self.bytes)
        return torch.frombuffer(bytearray(self.file.read(self.bytes)), dtype=self.y.dtype), self.y[
            index
        ]


@entry("samples in a file that was opened once")
def one_open_file() -> paceline.Job:
    return make_job(data=InFile(*_tensors(SAMPLES).tensors))


class Cached(InFile):
    """Keeps each sample as its first reader changed it."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y)
        self.read: dict[int, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index not in self.read:
            x, y = super().__getitem__(index)
            self.read[index] = x + torch.randn(FEATURES), y
        return self.read[index]


@entry("a cache of samples with random changes in them")
def cached_changes() -> paceline.Job:
    return make_job(data=Cached(*_tensors(SAMPLES).tensors))


@entry("fewer samples than a batch")
def short_data() -> paceline.Job:
    return make_job(data=_tensors(7), optimizer=adamw)


@entry("an epoch that ends with a single sample")
def last_window_of_one() -> paceline.Job:
    return make_job(data=_tensors(2 * BATCH + 1), optimizer=adamw)


@entry("an epoch that ends with five samples")
def last_window_of_five() -> paceline.Job:
    return make_job(data=_tensors(BATCH + 5), optimizer=adamw)


@entry("the short last window is left out")
def drop_last() -> paceline.Job:
    return make_job(drop_last=True, data=_tensors(2 * BATCH + 5))


@entry("a length in epochs")
def in_epochs() -> paceline.Job:
    return make_job(steps=None, epochs=2, data=_tensors(2 * BATCH + 3))


@entry("another seed")
def another_seed() -> paceline.Job:
    return make_job(seed=12345)


@entry("a validation set that no batch divides, each epoch")
def validation() -> paceline.Job:
    return make_job(validation=_tensors(29), data=_tensors(30))


class Noisy(Dataset[Any]):
    """Samples with noise from torch, random and numpy."""

    def __init__(self) -> None:
        self.x, self.y = _tensors(SAMPLES).tensors

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(FEATURES) * 0.1 + random.random() + np.random.rand()
        return self.x[index] + noise, self.y[index]


@entry("augmentation that draws from torch, random and numpy")
def augmentation() -> paceline.Job:
    return make_job(data=Noisy())


class Stream(IterableDataset[Any]):
    """Samples one after the other."""

    def __init__(self, samples: int = SAMPLES, *, noise: float = 0.0) -> None:
        self.samples, self.noise, self.epoch = samples, noise, 0
        self.x, self.y = _tensors(samples).tensors

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.samples):
            place = (index * 7 + self.epoch) % self.samples
            yield self.x[place] + self.noise * random.random(), self.y[place]


@entry("iterable data")
def stream() -> paceline.Job:
    return make_job(data=Stream())


@entry("iterable data that draws and knows its epoch")
def stream_with_noise() -> paceline.Job:
    return make_job(data=Stream(BATCH + 5, noise=0.5))


@entry("a subset of two concatenated data sets")
def subset_of_concatenation() -> paceline.Job:
    return make_job(data=Subset(ConcatDataset([_tensors(20), _tensors(20)]), list(range(0, 40, 2))))


@entry("a list of numpy arrays and Python numbers as data")
def numpy_items() -> paceline.Job:
    x = numbers(30, FEATURES).double().numpy()
    return make_job(
        data=[(row, float(row.sum())) for row in x],
        model=lambda: Net(outputs=1),
        loss=lambda output, target: F.mse_loss(output[:, 0], target),
    )


class Fields(Dataset[Any]):
    """Items that are made by a function."""

    def __init__(self, item: Any) -> None:
        self.item = item
        self.x, self.y = _tensors(SAMPLES).tensors

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.item(self.x[index], self.y[index], index)


class TwoInputs(nn.Module):
    """A net of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.gate = Net(), nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.net(x) * torch.sigmoid(self.gate(scale))


@entry("a mapping as input")
def dict_input() -> paceline.Job:
    return make_job(TwoInputs, data=Fields(lambda x, y, i: ({"x": x, "scale": x.flip(0)}, y)))


@entry("a tuple as input")
def tuple_input() -> paceline.Job:
    return make_job(TwoInputs, data=Fields(lambda x, y, i: ((x, x.flip(0)), y)))


class Nested(nn.Module):
    """A net of nested inputs in which strings lie, with nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = Net(), nn.Linear(FEATURES, 3)

    def forward(self, views: dict[str, Any], name: list[str]) -> dict[str, Any]:
        assert all(isinstance(each, str) for each in name)
        first, (second, third) = views["one"], views["others"]
        return {
            "mean": self.net(first),
            "parts": [self.scale(second), (self.scale(third), len(name))],
        }


def _nested_loss(output: dict[str, Any], target: Tensor) -> Tensor:
    first, (second, _) = output["parts"]
    return F.mse_loss(output["mean"] + first * second, target)


@entry("nested inputs in which strings lie, and nested outputs")
def nested_with_strings() -> paceline.Job:
    return make_job(
        Nested,
        loss=_nested_loss,
        data=Fields(
            lambda x, y, i: (
                {"views": {"one": x, "others": (x.flip(0), x * 2)}, "name": f"sample {i}"},
                y,
            )
        ),
    )


class Answer(NamedTuple):
    """Two heads' outputs."""

    mean: Tensor
    spread: Tensor


class TwoHeads(nn.Module):
    """A net that answers with a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(outputs=FEATURES)
        self.mean, self.spread = nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Answer:
        x = self.net(x)
        return Answer(self.mean(x), F.softplus(self.spread(x)))


@entry("a named tuple as output, with a Gaussian likelihood")
def named_tuple_output() -> paceline.Job:
    return make_job(
        TwoHeads,
        loss=lambda output, target: (
            output.spread.log() + 0.5 * ((target - output.mean) / (output.spread + 0.1)).square()
        ).mean(),
    )


@dataclass
class Result:
    """An output that is no container of torch's."""

    mean: Tensor
    name: str = "result"


class DataclassNet(nn.Module):
    """A net that answers with a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Result:
        return Result(self.net(x))


@entry("a dataclass as output")
def dataclass_output() -> paceline.Job:
    return make_job(DataclassNet, loss=lambda output, target: F.mse_loss(output.mean, target))


class ListOfOutputs(nn.Module):
    """A net that gives every block's output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.net.first(x)
        outputs = []
        for block in self.net.blocks:
            x = block(x)
            outputs.append(self.net.last(x))
        return outputs


@entry("a list of outputs, one of each depth, all of which count")
def deep_supervision() -> paceline.Job:
    return make_job(
        ListOfOutputs,
        loss=lambda outputs, target: sum(F.mse_loss(each, target) for each in outputs),
    )


@entry("whole numbers of one byte as input")
def byte_input() -> paceline.Job:
    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.to(self.net.last.weight.dtype) / 255)

    return make_job(Bytes, data=Fields(lambda x, y, i: ((x * 100).to(torch.uint8), y)))


@entry("targets in a mapping, of several kinds")
def dict_target() -> paceline.Job:
    return make_job(
        TwoHeads,
        data=Fields(lambda x, y, i: (x, {"values": y, "kind": int(i % 3)})),
        loss=lambda output, target: (
            F.mse_loss(output.mean, target["values"])
            + F.cross_entropy(output.spread, target["kind"])
        ),
    )
