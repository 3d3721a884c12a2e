"""Recurrent nets and scans."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

import paceline

from .registry import FEATURES, SAMPLES, adamw, entry, integers, make_job, numbers

LENGTH = 5


def _sequences() -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, LENGTH, FEATURES), numbers(SAMPLES, 3, seed=3))


class Recurrent(nn.Module):
    """A recurrent layer of torch's and a head."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.layer, self.last = (
            nn.Linear(FEATURES, FEATURES),
            layer,
            nn.Linear(width, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x))[0][:, -1])


@entry("two layers of LSTM")
def lstm() -> paceline.Job:
    return make_job(
        lambda: Recurrent(nn.LSTM(FEATURES, 6, 2, batch_first=True), 6),
        data=_sequences(),
        optimizer=adamw,
    )


@entry("a GRU in both directions, time first")
def gru_both_ways() -> paceline.Job:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, FEATURES)
            self.layer, self.last = nn.GRU(FEATURES, 4, bidirectional=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layer(self.first(x.transpose(0, 1)))[0][-1])

    return make_job(TimeFirst, data=_sequences())


@entry("a plain recurrent layer with dropout between layers", random_layers=True)
def rnn_with_dropout() -> paceline.Job:
    return make_job(
        lambda: Recurrent(nn.RNN(FEATURES, 6, 2, batch_first=True, dropout=0.2), 6),
        data=_sequences(),
    )


@entry("packed sequences of unequal lengths")
def packed_sequences() -> paceline.Job:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.LSTM(FEATURES, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            output, _ = pad_packed_sequence(
                self.layer(packed)[0], batch_first=True, total_length=LENGTH
            )
            return self.last(output.sum(1))

    x, y = _sequences().tensors
    lengths = integers(LENGTH, SAMPLES) + 1
    return make_job(Packed, data=[((a, n), b) for a, n, b in zip(x, lengths, y, strict=True)])


@entry("an LSTM cell in a loop of the user's")
def lstm_cell() -> paceline.Job:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.last = nn.LSTMCell(FEATURES, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = c = x.new_zeros(len(x), 6)
            for t in range(x.shape[1]):
                h, c = self.cell(x[:, t], (h, c))
            return self.last(h)

    return make_job(Loop, data=_sequences())


class Scan(nn.Module):
    """A selective state-space layer, as Mamba's, as a loop over time."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(FEATURES, 1))
        self.select, self.skip = (
            nn.Linear(FEATURES, 2 * states + 1),
            nn.Parameter(torch.ones(FEATURES)),
        )
        self.mix = nn.Conv1d(FEATURES, FEATURES, 3, padding=2, groups=FEATURES)
        self.out = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        u = F.silu(self.mix(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        into, out, step = self.select(u).split([4, 4, 1], -1)
        decay = torch.exp(-F.softplus(step)[..., None] * self.rates.exp())
        state, outputs = u.new_zeros(len(x), FEATURES, 4), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + u[:, t, :, None] * into[:, t, None]
            outputs.append((state * out[:, t, None]).sum(-1))
        return x + self.out(torch.stack(outputs, 1) + u * self.skip)


@entry("a selective scan, as Mamba's")
def selective_scan() -> paceline.Job:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = (
                nn.ModuleList([Scan() for _ in range(3)]),
                nn.Linear(FEATURES, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.last(x[:, -1])

    return make_job(Model, data=_sequences(), optimizer=adamw)


@entry("a linear recurrence by cumulative sums")
def cumulative_recurrence() -> paceline.Job:
    class Decay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.value = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            gates = F.logsigmoid(self.gate(x)).cumsum(1)
            return x + ((self.value(x) * (-gates).exp()).cumsum(1) * gates.exp()).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = (
                nn.ModuleList([Decay() for _ in range(3)]),
                nn.Linear(FEATURES, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.last(x.mean(1))

    return make_job(Model, data=_sequences())
