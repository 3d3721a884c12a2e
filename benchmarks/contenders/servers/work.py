"""The work of every parameter server: a perceptron of 25 MB in float32 under SGD, 32 samples for each gradient.

Data and initial weights are numpy's, so that each library computes the same and needs no other one.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

WIDTHS = (1024, 2048, 2048, 10)  # 6,316,042 parameters
BATCH = 32  # of a worker
LR = 0.02
SAMPLES = 4096
WARM_UP_UPDATES = 10  # Paceline's own samples_per_s leaves out as many
LOSSES = 20  # the last losses are averaged, so that equal work shows as an equal figure

Array = NDArray[np.float32]


def data() -> tuple[Array, NDArray[np.int64]]:
    """Samples, and a class for each that a linear function of it decides."""
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, WIDTHS[0]), dtype=np.float32)
    return x, (x @ random.standard_normal((WIDTHS[0], WIDTHS[-1]), dtype=np.float32)).argmax(1)


def initial_weights() -> list[tuple[Array, Array]]:
    """Each layer's weight (inputs, outputs) and bias."""
    random = np.random.default_rng(1)
    return [
        (
            random.standard_normal((inputs, outputs), dtype=np.float32)
            * np.float32((2 / inputs) ** 0.5),
            np.zeros(outputs, np.float32),
        )
        for inputs, outputs in pairwise(WIDTHS)
    ]


class Meter:
    """Times updates after the warm-up, where they are made."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.losses: list[float] = []

    def updated(self, loss: float) -> None:
        self.times_s.append(time.perf_counter())
        self.losses.append(loss)

    def report(self, samples: int) -> None:
        """Print the result as one line of JSON. samples: of an update."""
        warm = self.times_s[WARM_UP_UPDATES - 1 :]
        report(samples * (len(warm) - 1) / (warm[-1] - warm[0]), self.losses)


def report(samples_per_s: float, losses: Sequence[float]) -> None:
    print(
        json.dumps(
            {"samples_per_s": samples_per_s, "final_loss": statistics.fmean(losses[-LOSSES:])}
        ),
        flush=True,
    )
