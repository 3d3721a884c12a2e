"""A job whose layers take the time that an accelerator would, asleep, and release gradients of a real size as they go.

A worker's step of `step_s` seconds is a third forward and two thirds backward, in equal parts over the layers. As with
an accelerator the host runs ahead: a layer begins when the one before it is computed and its weights have come.
Batches are cut over replicas, so each layer sleeps in proportion to the samples it is given: `step_s` is what one host
needs for `samples` samples.

    paceline train benchmarks/lab/paced.py --plan "server=8 workers=8 colocate=yes" --set step_s=1.0
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl


class _Device:
    """An accelerator: the host puts layers into its queue and waits for a loss or a gradient alone.

    end_s: when it will be through with all that is in the queue. in_backward: whether that is of a backward, whose
    layers are all put in at once.
    """

    def __init__(self) -> None:
        self.end_s = 0.0
        self.in_backward = False

    def put(self, spent_s: float, *, backward: bool) -> None:
        if not (backward and self.in_backward):
            self.end_s = max(self.end_s, time.perf_counter())
        self.end_s += spent_s
        self.in_backward = backward

    def wait(self) -> None:
        time.sleep(max(0.0, self.end_s - time.perf_counter()))


_DEVICE = _Device()


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
        weight, = ctx.saved_tensors
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
    return (output[:, 0] * 0 + target).mean()


def job(step_s: float = 1.0, megabytes: float = 25.0, layers: int = 16, samples: int = 8, workers: int = 1,
        steps: int = 12) -> pl.Job:
    """`workers`: hosts that a batch is cut over, so that each computes `step_s` seconds a step."""
    numel = round(megabytes * 1e6 / 4 / layers)
    x = torch.zeros(samples * workers * steps, 1)
    return pl.Job(
        model=lambda: nn.Sequential(*(PacedLayer(numel, step_s / layers / samples) for _ in range(layers))),
        data=TensorDataset(x, torch.ones(len(x))), loss=_loss, batch=samples * workers, steps=steps,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3))
