"""Values in Python that something outside of a forward sets while training goes on: a schedule, a loss, the data."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler

import paceline

from .registry import BATCH, FEATURES, SAMPLES, Net, entry, make_job, numbers

RATE = [1.0]  # that a schedule changes
SETTINGS = SimpleNamespace(scale=1.0, inner=SimpleNamespace(names=["a"]))


def _scheduled(
    build: Callable[[], nn.Module], change: Callable[[Any, int], None], **changes: Any
) -> paceline.Job:
    """A job whose schedule changes the model, or what it reads, before each step."""
    held: dict[str, nn.Module] = {}

    def model() -> nn.Module:
        held["model"] = build()
        change(held["model"], 0)
        return held["model"]

    def factor(step: int) -> float:
        if "model" in held:
            change(held["model"], step)
        return 1.0

    return make_job(
        model,
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        **changes,
    )


class Tempered(Net):
    """Outputs by a temperature, which is an attribute of its class at first; each block may have a weight."""

    tau = 1.0
    weights: Any = (1.0, 1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block, weight in zip(self.blocks, self.weights, strict=True):
            x = x + weight * block(x)
        return self.last(x) / self.tau


@entry("a temperature that a schedule sets on the model")
def temperature_of_a_schedule() -> paceline.Job:
    return _scheduled(Tempered, lambda model, step: setattr(model, "tau", 1 + 0.3 * step))


@entry("a tuple that a schedule sets on the model")
def tuple_of_a_schedule() -> paceline.Job:
    return _scheduled(
        Tempered, lambda model, step: setattr(model, "weights", (1.0, 0.1 * step, 0.5))
    )


@entry("a list of floats that a schedule changes in place")
def list_of_a_schedule() -> paceline.Job:
    def change(model: Any, step: int) -> None:
        if not isinstance(model.weights, list):
            model.weights = [1.0, 1.0, 1.0]
        model.weights[1] = 0.2 * step

    return _scheduled(Tempered, change)


class Mode(enum.Enum):
    """What a layer does."""

    PLAIN = 1
    DOUBLED = 2


@dataclass
class Config:
    """Of a model, one inside another."""

    scale: float = 1.0
    mode: Mode = Mode.PLAIN
    inner: Config | None = None
    table: dict[str, float] = field(default_factory=lambda: {"shift": 0.0})


class Configured(Net):
    """Reads what it does in a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(inner=Config())

    def forward(self, x: Tensor) -> Tensor:
        assert self.config.inner is not None
        scale = self.config.inner.scale * (2.0 if self.config.mode is Mode.DOUBLED else 1.0)
        return super().forward(x) * scale + self.config.table["shift"]


@entry("a configuration inside of another that a schedule changes")
def nested_config_of_a_schedule() -> paceline.Job:
    def change(model: Any, step: int) -> None:
        model.config.inner.scale = 1.0 + 0.2 * step
        model.config.mode = Mode.DOUBLED if step % 2 else Mode.PLAIN
        model.config.table["shift"] = 0.1 * step

    return _scheduled(Configured, change)


@entry("an attribute that is None at first, and becomes a text")
def text_of_a_schedule() -> paceline.Job:
    class Worded(Net):
        act: str | None = None

        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            return output if self.act is None else getattr(torch, self.act)(output)

    return _scheduled(
        Worded, lambda model, step: setattr(model, "act", "tanh" if step > 2 else None)
    )


@entry("a function that a schedule puts in the place of another one")
def function_of_a_schedule() -> paceline.Job:
    class Active(Net):
        act: Any = staticmethod(torch.tanh)

        def __init__(self) -> None:
            super().__init__()
            self.act = torch.tanh

        def forward(self, x: Tensor) -> Tensor:
            return self.act(super().forward(x))

    return _scheduled(
        Active, lambda model, step: setattr(model, "act", torch.tanh if step < 2 else F.softplus)
    )


@entry(
    "a global variable, an object's attribute and a variable of a closure that a schedule changes"
)
def globals_of_a_schedule() -> paceline.Job:
    depth = 0

    class Reading(Net):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x) * RATE[0] * SETTINGS.scale
            return output + 0.1 * depth + _shift()

    def change(model: Any, step: int) -> None:
        nonlocal depth
        RATE[0], SETTINGS.scale, depth = 1.0 + 0.1 * step, 1.0 - 0.05 * step, step
        SETTINGS.inner.names = ["a"] * (1 + step)

    return _scheduled(Reading, change)


def _shift() -> float:
    return 0.01 * len(SETTINGS.inner.names)


@entry("dropout that a schedule switches on")
def dropout_of_a_schedule() -> paceline.Job:
    class Dropping(Net):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.drop(x))

    # All or nothing: what is drawn is the same under each plan.
    return _scheduled(Dropping, lambda model, step: setattr(model.drop, "p", float(step % 3 == 1)))


class Normed(Net):
    """One block in the middle has statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@entry("the momentum of running statistics, which a schedule lowers: coupled")
def momentum_of_a_schedule() -> paceline.Job:
    return _scheduled(Normed, lambda model, step: setattr(model.norm, "momentum", 1 / (1 + step)))


@entry("a layer of statistics that a schedule puts into evaluation mode: coupled")
def evaluation_mode_of_a_part() -> paceline.Job:
    return _scheduled(Normed, lambda model, step: model.norm.train(step < 3))


@entry("a layer that a schedule freezes")
def frozen_by_a_schedule() -> paceline.Job:
    return _scheduled(
        Net,
        lambda model, step: [p.requires_grad_(step < 3) for p in model.first.parameters()] and None,
    )


@entry("a layer in the middle that a schedule freezes for a while")
def frozen_for_a_while() -> paceline.Job:
    return _scheduled(
        Net, lambda model, step: model.blocks[1].requires_grad_(step not in (1, 2)) and None
    )


@entry("a hook on a layer's output that a schedule adds and takes away")
def hook_of_a_schedule() -> paceline.Job:
    handles: list[Any] = []

    def change(model: Any, step: int) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
        if step % 2:
            handles.append(
                model.blocks[0].register_forward_hook(lambda module, inputs, output: output * 0.5)
            )

    return _scheduled(Net, change)


@entry("a weight that the data set writes on the model for each window", evaluates=False)
def attribute_of_the_data() -> paceline.Job:
    held: dict[str, Any] = {}

    class Data(Dataset[Any]):
        x, y = numbers(SAMPLES, FEATURES), numbers(SAMPLES, 3, seed=3)

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if "model" in held:
                held["model"].tau = 1.0 + 0.5 * (index // BATCH)
            return self.x[index], self.y[index]

    def model() -> nn.Module:
        held["model"] = Tempered()
        return held["model"]

    data = Data()
    return make_job(model, data=data, sampler=SequentialSampler(data))


def attribute_of_the_loss() -> paceline.Job:
    """A weight that the loss writes on the model, by how often it was called. No plain loop cuts such a job as ranks
    do, whose losses have a model each: it is no job of the page."""
    held: dict[str, Any] = {}

    def model() -> nn.Module:
        held["model"] = Tempered()
        return held["model"]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        held["model"].weights = (held["model"].weights[0] + 0.1, 1.0, 1.0)
        return F.mse_loss(output, target)

    return make_job(model, loss=loss, steps=4)  # of which no window is too short for each replica


@entry("a Python number that the collate function finds in its samples")
def numbers_of_collate() -> paceline.Job:
    def collate(samples: list[Any]) -> Any:
        x = torch.stack([x for x, _ in samples])
        return {"x": x, "tau": 1.5, "kept": 4}, torch.stack([y for _, y in samples])

    class Kept(Tempered):
        def forward(self, x: Tensor, tau: float, kept: int) -> Tensor:
            x = x.clone()
            x[:, kept:] = 0.0
            return super().forward(x) / tau

    return make_job(Kept, collate=collate)


LENGTHS = [2, 3, 2, 3, 3, 2, 3, 2, 2, 3, 3, 3] + [
    1 + 7 * k % 6 for k in range(SAMPLES - BATCH)
]  # longer ones later


class Sequences(Dataset[Any]):
    """Of features, each as long as its number says, with three numbers to be found."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return numbers(LENGTHS[index], FEATURES, seed=index), numbers(3, seed=100 + index)


def _padded(samples: list[Any]) -> Any:
    lengths = torch.tensor([len(x) for x, _ in samples])
    x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return (x, lengths), torch.stack([y for _, y in samples])


def of_sequences(
    model: Callable[[], nn.Module], collate: Callable[[list[Any]], Any] = _padded
) -> paceline.Job:
    """A job whose later batches have longer sequences; the model is given their lengths."""
    data = Sequences()
    return make_job(model, data=data, collate=collate, sampler=SequentialSampler(data))


class Masked(nn.Module):
    """A layer whose outputs past each length are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        for row, n in zip(mask, lengths, strict=True):
            if n.item() < len(row):
                row[n.item() :] = True
        return x.masked_fill(mask[:, :, None], 0.0)


@entry("masks by lengths in a module, after which the model reads a size; later batches are longer")
def masks_by_lengths() -> paceline.Job:
    class Averaging(Net):
        def __init__(self) -> None:
            super().__init__()
            self.masked = Masked()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            x = self.masked(x, lengths)
            return super().forward(x.mean(1) * x.size(1) / lengths[:, None])

    return of_sequences(Averaging)


@entry("packed sequences in a module; later batches are longer")
def packed_and_longer() -> paceline.Job:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(FEATURES, FEATURES, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]

    class Packed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return super().forward(self.encoder(x, lengths).sum(1) / lengths[:, None])

    return of_sequences(Packed)


@entry("a loop over lengths as a list in a module that pools")
def pooled_by_lengths() -> paceline.Job:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, FEATURES)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return torch.stack(
                [self.linear(row[:n]).mean(0) for row, n in zip(x, lengths.tolist(), strict=True)]
            )

    class Pooling(Net):
        def __init__(self) -> None:
            super().__init__()
            self.pool = Pool()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return super().forward(self.pool(torch.tanh(x), lengths))

    return of_sequences(Pooling)


@entry("a list of sequences, of which the model takes the longest's length", evaluates=False)
def listof_sequences() -> paceline.Job:
    class Listed(Net):
        def forward(self, sequences: list[Tensor]) -> Tensor:
            longest = max(map(len, sequences))
            rows = [
                F.pad(row, (0, 0, 0, longest - len(row))).sum(0) / len(row) for row in sequences
            ]
            return super().forward(torch.stack(rows))

    def collate(samples: list[Any]) -> Any:
        return {"sequences": [x for x, _ in samples]}, torch.stack([y for _, y in samples])

    return of_sequences(Listed, collate)


@entry("texts as the only input, which the forward looks up")
def texts_alone() -> paceline.Job:
    words = [f"w{number}" for number in range(20)]
    number_of = {word: number for number, word in enumerate(words)}

    class Texts(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[dict[str, str], Tensor]:
            return {"text": f"{words[index % 20]} {words[7 * index % 20]}"}, numbers(
                3, seed=100 + index
            )

    class Reader(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, FEATURES)

        def forward(self, text: list[str]) -> Tensor:
            rows = torch.tensor([[number_of[word] for word in each.split()] for each in text])
            return super().forward(self.table(rows).mean(1))

    return make_job(Reader, data=Texts())
