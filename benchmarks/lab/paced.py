"""A job whose layers sleep while an accelerator would compute, and release gradients of a real size meanwhile.

A worker's step of `step_s` seconds is one third forward and two thirds backward, in equal parts over the layers. As
with an accelerator the host runs ahead: a layer begins when the one before it is computed and its weights have arrived.
Batches are cut over replicas, so each layer sleeps in proportion to the samples that it gets: `step_s` is what one host
needs for `samples` samples. A host may be slower than the others, or be held up now and then: see `Pace`.

    paceline train benchmarks/lab/paced.py --plan "servers=8 workers=8 colocate=yes" --set step_s=1.0
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl


@dataclass(frozen=True, slots=True)
class Pace:
    """What is particular to a host; it gets it in its environment.

    slower: by how much each of its steps takes longer. pause_s: seconds that it stands still in step `first` and every
    `PERIOD` steps after it.
    """

    slower: float = 1.0
    pause_s: float = 0.0
    first: int = 0

    def mean_step_s(self, step_s: float) -> float:
        """What a step takes by itself, of `step_s` seconds where nothing is slower."""
        return step_s * self.slower + self.pause_s / PERIOD

    def environ(self) -> dict[str, str]:
        return {_PACE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Pace:
        return cls(**json.loads(os.environ.get(_PACE, "{}")))


PERIOD = 16
_PACE = "PACED"


class _Device:
    """An accelerator: the host puts layers into its queue and waits for a loss or a gradient alone.

    end_s: when it will be through with all that is in the queue. in_backward: whether that is of a backward, whose
    layers are all put in at once.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.end_s, self.steps = 0.0, 0
        self.in_backward = False

    def pause(self) -> None:
        """What is due in this step."""
        if self.pace.pause_s and self.steps % PERIOD == self.pace.first:
            time.sleep(self.pace.pause_s)
        self.steps += 1

    def put(self, spent_s: float, *, backward: bool) -> None:
        if not (backward and self.in_backward):
            self.end_s = max(self.end_s, time.perf_counter())
        self.end_s += spent_s * self.pace.slower
        self.in_backward = backward

    def wait(self) -> None:
        time.sleep(max(0.0, self.end_s - time.perf_counter()))


_DEVICE = _Device(Pace.from_environment())


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        _DEVICE.put(forward_s, backward=False)
        ctx.backward_s = backward_s
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        _DEVICE.put(ctx.backward_s, backward=True)
        _DEVICE.wait()
        (weight,) = ctx.saved_tensors
        return gradients[0], torch.full_like(weight, 1e-3), None, None


class PacedLayer(nn.Module):
    """A weight that a step reads and gives a gradient for, and the time that takes.

    sample_s: seconds a sample, forward and backward together.
    """

    def __init__(self, numel: int, sample_s: float) -> None:
        super().__init__()
        self.weight, self.sample_s = nn.Parameter(torch.zeros(numel)), sample_s

    def forward(self, x: Tensor) -> Tensor:
        total_s = self.sample_s * len(x)
        return _Paced.apply(x, self.weight, total_s / 3, total_s * 2 / 3)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    _DEVICE.wait()
    _DEVICE.pause()
    return (output[:, 0] * 0 + target).mean()


def job(
    step_s: float = 1.0,
    megabytes: float = 25.0,
    layers: int = 16,
    samples: int = 8,
    workers: int = 1,
    steps: int = 12,
) -> pl.Job:
    """`workers`: hosts that a batch is cut over, so that each computes `step_s` seconds a step."""
    numel = round(megabytes * 1e6 / 4 / layers)
    x = torch.zeros(samples * workers * steps, 1)
    return pl.Job(
        model=lambda: nn.Sequential(
            *(PacedLayer(numel, step_s / layers / samples) for _ in range(layers))
        ),
        data=TensorDataset(x, torch.ones(len(x))),
        loss=_loss,
        batch=samples * workers,
        steps=steps,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )
