"""Every kind of plan on GPUs beside one GPU, and one GPU beside the CPU, in float64.

Where there are fewer GPUs than a plan has ranks, they share the first one and talk over gloo, by
`tests/devices/shared_gpu.py`.
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
from paceline.strategies.plan import Plan
from tests.devices.pretended_cuda.plans import (
    ALIKE,
    EXACT,
    FEATURES,
    MORE_ALIKE,
    MORE_EXACT,
    MORE_FEATURES,
    PLACEMENT,
)

TOLERANCE = 1e-9  # relative to a tensor's largest number; float64 rounds to 1e-16, and sums have some thousand terms
TOLERANCES = {
    "padded llama": 1e-7,  # Transformers normalises and rotates in float32 in a float64 model, too
    "statistics": 1e-8,
}  # a bias before BatchNorm has no gradient but rounding, which AdamW divides by 1e-8
# Of compress=int8: its scales are float32, which a GPU divides by a number by multiplying with the reciprocal.
INT8_TOLERANCE = 1e-7
# BatchNorm sees a micro-batch: its job is compared where the batch is not cut. A step that draws gets other numbers of
# CUDA than of a CPU: its job is compared with one GPU alone.
CELLS: tuple[tuple[str, str], ...] = (
    *(("blocks", plan) for plan in (*EXACT, *MORE_EXACT, *ALIKE, *MORE_ALIKE)),
    *dict.fromkeys(
        (job, plan)
        for job, plan in (*FEATURES, *MORE_FEATURES)
        if job != "statistics" and (job, plan) != ("gan", "single")
    ),
    ("statistics", "single"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A job under a plan.

    verdict: "equal", "differs", "failed", or "not run". off_by: the furthest loss or weight from the reference's,
    relative to the largest of its tensor. reason: why it failed or did not run. stderr_tail: the end of what it wrote
    then.
    """

    job: str
    plan: str
    devices: str
    verdict: str
    off_by: float | None = None
    reason: str = ""
    stderr_tail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Run:
    job: str
    plan: str
    devices: str


@dataclass(frozen=True, slots=True)
class _Trained:
    losses: list[float]
    weights: dict[str, Tensor]
    seconds: float


def matrix(
    gpus: int,
    folder: Path,
    python: Sequence[str],
    out_of_time: Callable[[], bool],
    cells: Sequence[tuple[str, str]] = CELLS,
    jobs: int = 1,
) -> Iterator[Cell]:
    """Each cell in order: `single` on the first GPU beside the CPU, other plans beside that, and relaxed ones, which
    are no device's, beside themselves on CPUs.

    Args:
        jobs: How many runs there are at a time.
    """
    numbers = count()
    placement = folder / "placement.toml"
    placement.write_text(PLACEMENT)

    def trained(run: _Run) -> _Trained | command.Ended | None:
        if out_of_time():
            return None
        run_dir = folder / f"matrix-{next(numbers)}"
        ended = command.run(
            command.train(
                python,
                "job",
                run.plan.replace("FILE", str(placement)),
                run.devices,
                run_dir,
                "--set",
                f"name={run.job}",
                "--check",
                "no",
                "--restarts",
                "0",
            )
        )
        return _read(run_dir, ended.seconds) if ended.exit_code == 0 else ended

    runs = list(
        dict.fromkeys(
            run for job, plan in cells for run in (_reference(job, plan), _on_gpus(job, plan, gpus))
        )
    )
    known: dict[_Run, _Trained | command.Ended | None] = {}
    for run, result in zip(runs, command.beside(jobs, trained, runs), strict=True):
        known[run] = result
        while cells and (_reference(*cells[0]) in known) and (_on_gpus(*cells[0], gpus) in known):
            (job, plan), *cells = cells
            run = _on_gpus(job, plan, gpus)
            yield _compared(run, known[run], known[_reference(job, plan)])


def _reference(job: str, plan: str) -> _Run:
    read = Plan.parse(plan)
    if read.relaxed is not None:
        return _Run(job, plan, f"cpu:0-{read.world_size - 1}")
    return _Run(job, "single", "cpu:0" if plan == "single" else "cuda:0")


def _on_gpus(job: str, plan: str, gpus: int) -> _Run:
    return _Run(job, plan, command.devices(plan, gpus))


def _read(run_dir: Path, seconds: float) -> _Trained:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return _Trained(
        [row["loss"] for row in rows if "loss" in row],
        load_file(run_dir / "model.safetensors"),
        seconds,
    )


def _compared(
    run: _Run, actual: _Trained | command.Ended | None, expected: _Trained | command.Ended | None
) -> Cell:
    if actual is None or expected is None:
        return Cell(run.job, run.plan, run.devices, "not run", reason="the time was up")
    if isinstance(actual, command.Ended):
        return Cell(
            run.job,
            run.plan,
            run.devices,
            "failed",
            reason=actual.reason,
            stderr_tail=actual.stderr_tail,
            seconds=actual.seconds,
        )
    if isinstance(expected, command.Ended):
        return Cell(
            run.job,
            run.plan,
            run.devices,
            "failed",
            stderr_tail=expected.stderr_tail,
            seconds=actual.seconds,
            reason=f"what it is compared with failed: {expected.reason}",
        )
    if actual.weights.keys() != expected.weights.keys() or len(actual.losses) != len(
        expected.losses
    ):
        return Cell(
            run.job,
            run.plan,
            run.devices,
            "differs",
            reason="other weights or steps",
            seconds=actual.seconds,
        )
    distances = [
        abs(a - b) / abs(b or 1.0) for a, b in zip(actual.losses, expected.losses, strict=True)
    ]
    distances += [
        ((actual.weights[name] - value).abs().max() / (value.abs().max() or 1.0)).item()
        for name, value in expected.weights.items()
        if value.numel()
    ]
    off_by = math.inf if any(map(math.isnan, distances)) else max(distances)
    is_int8 = Plan.parse(run.plan).modifiers.compress == "int8"
    tolerance = INT8_TOLERANCE if is_int8 else TOLERANCES.get(run.job, TOLERANCE)
    verdict = "equal" if off_by <= tolerance else "differs"
    return Cell(run.job, run.plan, run.devices, verdict, off_by, seconds=actual.seconds)
