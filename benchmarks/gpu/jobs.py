"""The jobs that are run on GPUs, as a file for the command line: `--set name=...`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from tests.devices.pretended_cuda.jobs import JOBS, numbers

NOTED_STEPS = 10
CYCLES = 10**13  # of a GPU's clock, of some 2e9 a second
EXAMPLE = Path(__file__).parents[2] / "examples" / "02_gpt_bytes.py"


class TooLarge(nn.Module):
    """A forward that wants more than a whole GPU has, which nothing shows before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        wanted = torch.cuda.mem_get_info()[1] if x.is_cuda else 0
        kept = torch.empty(wanted + 1, dtype=torch.uint8, device=x.device)
        return self.last(x) + 0.0 * kept[-1]


def job(name: str = "blocks") -> paceline.Job:
    """A small job of the device tests, in float64."""
    return JOBS[name]()


def killed(failed: str) -> paceline.Job:
    """The second rank is killed in its third step.

    Args:
        failed: The file in which it notes the time before.
    """
    return _failing(failed, lambda: os.kill(os.getpid(), signal.SIGKILL))


def endless(failed: str) -> paceline.Job:
    """The second rank launches a kernel in its third step that runs for more than an hour.

    Args:
        failed: The file in which it notes the time before.
    """
    return _failing(failed, lambda: torch.cuda._sleep(CYCLES))


def _failing(failed: str, fail: Callable[[], None]) -> paceline.Job:
    steps = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == 3 and dist.get_rank() == 1:
            Path(failed).write_text(str(time.time()))
            fail()
        return F.mse_loss(output, target)

    return replace(job(), loss=loss, steps=1000)


def too_large() -> paceline.Job:
    return paceline.Job(
        model=TooLarge,
        data=numbers(48),
        loss=F.mse_loss,
        batch=12,
        steps=4,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-2),
    )


def gpt(
    width: int = 1024,
    layers: int = 12,
    sequence: int = 512,
    batch: int = 16,
    precision: str = "float32",
    noted: str = "",
) -> paceline.Job:
    """The byte GPT of the examples at a size for GPUs: 152 million parameters by default.

    Args:
        noted: A file in which the first rank notes the host's seconds that it has used when each loss is computed.
    """
    example = paceline.load(
        str(EXAMPLE), {"width": width, "layers": layers, "sequence": sequence, "batch": batch}
    )
    loss = _noting(example.loss, Path(noted)) if noted else example.loss
    return replace(example, precision=precision, validation=None, loss=loss)


def perceptron(width: int = 8192, layers: int = 4, batch: int = 512) -> paceline.Job:
    """268 million parameters by default, under plain SGD."""

    def model() -> nn.Module:
        hidden = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(width, 16))

    source = torch.Generator().manual_seed(0)
    pairs = TensorDataset(
        torch.randn(2048, width, generator=source), torch.randn(2048, 16, generator=source)
    )
    return paceline.Job(
        model=model,
        data=pairs,
        loss=F.mse_loss,
        batch=batch,
        steps=40,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )


class Residual(nn.Module):
    """Two convolutions of 3x3 beside a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = (
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.second, self.second_norm = (
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.skip(x))


def resnet(
    size: int = 128, batch: int = 128, width: int = 64, precision: str = "float32"
) -> paceline.Job:
    """ResNet-18 (He et al. 2016) on images of random numbers."""

    def model() -> nn.Module:
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = [
            block
            for number in range(4)
            for block in (
                Residual(widths[number], widths[number + 1], 2 if number else 1),
                Residual(widths[number + 1], widths[number + 1], 1),
            )
        ]
        return nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * width, 100),
        )

    source = torch.Generator().manual_seed(0)
    images = TensorDataset(
        torch.randn(1024, 3, size, size, generator=source),
        torch.randint(100, (1024,), generator=source),
    )
    return paceline.Job(
        model=model,
        data=images,
        loss=F.cross_entropy,
        batch=batch,
        steps=40,
        precision=precision,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3, momentum=0.9),
    )


def _noting(loss: Any, file: Path) -> Any:
    """The loss, which writes so seldom that it costs no step much."""
    used_s: list[float] = []

    def noted(output: Tensor, target: Tensor) -> Any:
        if not (dist.is_initialized() and dist.get_rank()):
            used_s.append(time.process_time())
            if len(used_s) % NOTED_STEPS == 0:
                file.write_text(json.dumps(used_s))
        return loss(output, target)

    return noted
