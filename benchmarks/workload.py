"""The pieces of work that contenders do on two CPU ranks: the byte GPT of `examples/02_gpt_bytes.py`, and small steps.

Model, data, loss and optimizer come from the same `Job`, so contenders can differ only in how they train it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import paceline as pl

EXAMPLE = Path(__file__).parents[1] / "examples" / "02_gpt_bytes.py"
SMALL = Path(__file__).parent / "contenders" / "small_job.py"
# By name: a file, and settings of its job. Names of small steps say about how long a step of hand-written
# DistributedDataParallel takes.
JOBS: dict[str, tuple[Path, dict[str, int]]] = {
    "gpt": (EXAMPLE, {}),
    "wide": (SMALL, {"width": 9440, "batch": 32}),  # 268 million parameters
    "2ms": (SMALL, {"width": 128, "batch": 64}),
    "5ms": (SMALL, {"width": 256, "batch": 256}),
    "10ms": (SMALL, {"width": 384, "batch": 384}),
    "20ms": (SMALL, {"width": 512, "batch": 512}),
}
RANKS = 2
WARM_UP_STEPS = 10  # Paceline's own samples_per_s leaves out as many
LOSSES = 10  # the last losses are averaged, so that equal work shows as an equal figure


def load_job(name: str = "gpt") -> pl.Job:
    """The job, after setting the seed of the initial weights."""
    torch.manual_seed(0)
    file, settings = JOBS[name]
    return pl.load(str(file), settings)


def arguments() -> argparse.Namespace:
    """What the command of a contender says: measured steps, and the name of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--job", choices=JOBS, default="gpt")
    return parser.parse_args()


class Meter:
    """Times the steps after the warm-up, and keeps the losses."""

    def __init__(self, steps: int) -> None:
        self.total_steps = WARM_UP_STEPS + steps
        self.losses: list[float] = []
        self.started_s = self.ended_s = 0.0

    def step_done(self, loss: torch.Tensor) -> bool:
        """Read the loss, as every contender does after every step. Returns whether all steps are done."""
        self.losses.append(loss.item())
        self.ended_s = time.perf_counter()
        if len(self.losses) == WARM_UP_STEPS:
            self.started_s = self.ended_s
        return len(self.losses) == self.total_steps

    def report(self, rank: int) -> None:
        """Print the result as one line of JSON, on rank 0. Collective: the loss is the mean over ranks."""
        loss = torch.tensor(statistics.fmean(self.losses[-LOSSES:]))
        torch.distributed.all_reduce(loss)
        if rank == 0:
            steps_per_s = (self.total_steps - WARM_UP_STEPS) / (self.ended_s - self.started_s)
            print(
                json.dumps({"steps_per_s": steps_per_s, "final_loss": loss.item() / RANKS}),
                flush=True,
            )
