"""Throughput beside a hand-written loop, and predicted time and memory beside the measured ones."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.gpu import command
from benchmarks.workload import WARM_UP_STEPS

# Settings of the byte GPT. A step of the small one takes less time on the GPU than its launches take on the host, so
# its ratio is that of host times.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "152 million parameters": {},
    "3 million parameters, bound by the host": {
        "width": 256,
        "layers": 4,
        "sequence": 16,
        "batch": 8,
    },
}
ROUNDS = 3
PRECISIONS = ("float32", "bf16", "fp16", "tf32", "fp8")
PEER = "benchmarks.contenders.on_gpus"


def speed(
    gpus: int,
    folder: Path,
    python: Sequence[str],
    out_of_time: Callable[[], bool],
    *,
    rounds: int = ROUNDS,
    steps: int = 50,
    models: Mapping[str, Mapping[str, Any]] = MODELS,
    precisions: Sequence[str] = PRECISIONS,
) -> Iterator[dict[str, Any]]:
    """Rows of one contender each: steps a second and its part of the plain loop's, medians over rounds in turns."""
    for number, (precision, name) in enumerate(product(precisions, models)):  # the usual ones first
        contenders = _contenders(
            gpus,
            folder / f"speed-{number}",
            python,
            settings_of({**models[name], "precision": precision}),
            steps,
        )
        yield from _beside(name, precision, contenders, rounds, out_of_time)


def settings_of(values: Mapping[str, Any]) -> list[str]:
    """As the command line takes them."""
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def _contenders(
    gpus: int, folder: Path, python: Sequence[str], settings: list[str], steps: int
) -> dict[str, Callable[[], dict[str, Any] | str]]:
    """The plain loop of each number of GPUs comes before those that are compared with it."""
    numbers = count()
    folder.mkdir(parents=True)

    def noting() -> tuple[Path, list[str]]:
        path = folder / f"host-{next(numbers)}"
        return path, settings_of({"noted": path})

    def run_paceline(plan: str, devices: str) -> dict[str, Any] | str:
        noted, note = noting()
        ended = command.run(
            command.train(
                python,
                "gpt",
                plan,
                devices,
                folder / f"{next(numbers)}",
                "--steps",
                str(WARM_UP_STEPS + steps),
                "--loader-workers",
                "1",
                "--check",
                "no",
                *settings,
                *note,
            )
        )
        if ended.exit_code != 0:
            return ended.reason
        summary = json.loads(ended.stdout)
        return {
            "steps_per_s": summary["samples_per_s"] * summary["steps"] / summary["samples"],
            "peak_memory_bytes": summary["peak_memory_bytes"],
            "step_s": summary["step_s"],
            "predicted": summary["predicted"],
            "host_s": _host_s(noted),
        }

    def run_peer(*start: str, compiled: bool = False) -> dict[str, Any] | str:
        noted, note = noting()
        ended = command.run(
            [
                *python,
                *start,
                *settings,
                *note,
                "--steps",
                str(steps),
                *(["--compile"] if compiled else []),
            ]
        )
        if ended.exit_code != 0:
            return ended.reason
        return {**json.loads(ended.stdout.strip().splitlines()[-1]), "host_s": _host_s(noted)}

    contenders: dict[str, Callable[[], dict[str, Any] | str]] = {
        "plain loop": lambda: run_peer("-m", PEER),
        "plain loop, torch.compile": lambda: run_peer("-m", PEER, compiled=True),
        "single": lambda: run_paceline("single", "cuda:0"),
        "single compile=blocks": lambda: run_paceline("single compile=blocks", "cuda:0"),
    }
    if gpus > 1:
        torchrun = (
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(gpus),
            "-m",
            PEER,
        )
        contenders["DistributedDataParallel"] = lambda: run_peer(*torchrun)
        for plan in (f"data={gpus}", f"shard={gpus}"):
            contenders[plan] = lambda plan=plan: run_paceline(plan, f"cuda:0-{gpus - 1}")  # type: ignore[misc]
    return contenders


def _host_s(noted: Path) -> float:
    """The median step's seconds of the first rank's process on the host, all threads together, after the warm-up."""
    ends_s = json.loads(noted.read_text())[WARM_UP_STEPS:]
    return statistics.median(after - before for before, after in pairwise(ends_s))


def _beside(
    model: str,
    precision: str,
    contenders: Mapping[str, Callable[[], dict[str, Any] | str]],
    rounds: int,
    out_of_time: Callable[[], bool],
) -> list[dict[str, Any]]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for name, run in contenders.items():
            if name in failed:
                continue
            if out_of_time():
                failed.setdefault(name, "the time was up")
                continue
            result = run()
            if isinstance(result, str):
                failed[name] = result
            else:
                runs[name].append(result)
    return [_row(model, precision, name, runs, failed.get(name, "")) for name in contenders]


def _row(
    model: str, precision: str, name: str, runs: Mapping[str, list[dict[str, Any]]], reason: str
) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "precision": precision, "contender": name}
    if reason:
        row["reason"] = reason
    if not runs[name]:
        return row
    peer = "plain loop" if name.startswith(("plain loop", "single")) else "DistributedDataParallel"
    pairs = _ratios(runs, name, peer, "steps_per_s")
    row |= {
        "steps_per_s": statistics.median(run["steps_per_s"] for run in runs[name]),
        "of": peer,
        "ratio": statistics.median(pairs) if pairs else None,
        "host_s": statistics.median(run["host_s"] for run in runs[name]),
        "host ratio": statistics.median(_ratios(runs, name, peer, "host_s")) if pairs else None,
        "peak_memory_bytes": max(run["peak_memory_bytes"] for run in runs[name]),
        "runs": runs[name],
    }
    predicted = runs[name][-1].get("predicted")
    if predicted:
        last = runs[name][-1]
        row["step_s of predicted"] = last["step_s"] / predicted["step_s"]
        row["memory of predicted"] = last["peak_memory_bytes"] / predicted["peak_memory_bytes"]
    return row


def _ratios(
    runs: Mapping[str, list[dict[str, Any]]], name: str, peer: str, figure: str
) -> list[float]:
    """Of runs in the same turn."""
    return [a[figure] / b[figure] for a, b in zip(runs[name], runs[peer], strict=False)]
