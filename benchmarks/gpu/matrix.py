"""Every kind of plan on GPUs beside one GPU, and one GPU beside the CPU, in float64.

Where there are fewer GPUs than a plan has ranks, they share the first one and talk over gloo.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gpu import command
from paceline.plans import Plan
from tests.devices.pretended_cuda.plans import ALIKE, EXACT, FEATURES, MORE_ALIKE, MORE_EXACT, MORE_FEATURES

TOLERANCE = 1e-9  # relative to a tensor's largest number; float64 rounds to 1e-16, and sums have some thousand terms
# BatchNorm sees a micro-batch: its job is compared where the batch is not cut.
CELLS: tuple[tuple[str, str], ...] = (
    *(("blocks", plan) for plan in (*EXACT, *MORE_EXACT, *ALIKE, *MORE_ALIKE)),
    *dict.fromkeys((job, plan) for job, plan in (*FEATURES, *MORE_FEATURES) if job != "statistics"),
    ("statistics", "single"))


@dataclass(frozen=True, slots=True)
class Cell:
    """A job under a plan.

    verdict: "equal", "differs", "failed", or "not run". off_by: the furthest loss or weight from the reference's,
    relative to the largest of its tensor. reason: why it failed or did not run.
    """

    job: str
    plan: str
    devices: str
    verdict: str
    off_by: float | None = None
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Trained:
    losses: list[float]
    weights: dict[str, Tensor]


def matrix(gpus: int, folder: Path, python: Sequence[str], out_of_time: Callable[[], bool],
           cells: Sequence[tuple[str, str]] = CELLS) -> Iterator[Cell]:
    """Each cell as soon as it is known: `single` on the first GPU beside the CPU, other plans beside that, and relaxed
    ones, which are no device's, beside themselves on CPUs."""
    known: dict[tuple[str, str], _Trained | str] = {}
    numbers = count()

    def trained(job: str, plan: str, devices: str) -> tuple[_Trained | str, float]:
        run_dir = folder / f"matrix-{next(numbers)}"
        ended = command.run(command.train(python, "job", plan, devices, run_dir, "--set", f"name={job}",
                                          "--check", "no"))
        return (_read(run_dir) if ended.exit_code == 0 else ended.reason), ended.seconds

    def reference(job: str, plan: str) -> _Trained | str:
        read = Plan.parse(plan)
        if read.relaxed is not None:
            return trained(job, plan, f"cpu:0-{read.world_size - 1}")[0]
        devices = "cpu:0" if plan == "single" else "cuda:0"
        if (job, devices) not in known:
            known[job, devices] = trained(job, "single", devices)[0]
        return known[job, devices]

    for job, plan in cells:
        devices = command.devices(plan, gpus)
        if out_of_time():
            yield Cell(job, plan, devices, "not run", reason="the time was up")
        else:
            expected = reference(job, plan)
            found, seconds = (known[job, "cuda:0"], 0.0) if plan == "single" and (job, "cuda:0") in known \
                else trained(job, plan, devices)
            if plan == "single":
                known[job, "cuda:0"] = found
            yield _compared(job, plan, devices, found, expected, seconds)


def _read(run_dir: Path) -> _Trained:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return _Trained([row["loss"] for row in rows if "loss" in row], load_file(run_dir / "model.safetensors"))


def _compared(job: str, plan: str, devices: str, found: _Trained | str, expected: _Trained | str,
              seconds: float) -> Cell:
    if isinstance(found, str) or isinstance(expected, str):
        reason = found if isinstance(found, str) else f"what it is compared with failed: {expected}"
        return Cell(job, plan, devices, "failed", reason=reason, seconds=seconds)
    if found.weights.keys() != expected.weights.keys() or len(found.losses) != len(expected.losses):
        return Cell(job, plan, devices, "differs", reason="other weights or steps", seconds=seconds)
    distances = [abs(a - b) / abs(b or 1.0) for a, b in zip(found.losses, expected.losses, strict=True)]
    distances += [((found.weights[name] - value).abs().max() / (value.abs().max() or 1.0)).item()
                  for name, value in expected.weights.items() if value.numel()]
    off_by = math.inf if any(map(math.isnan, distances)) else max(distances)
    return Cell(job, plan, devices, "equal" if off_by <= TOLERANCE else "differs", off_by, seconds=seconds)
