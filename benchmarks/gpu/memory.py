"""The predicted memory of a rank beside the peak of torch's allocator on its GPU, for each kind of plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import command
from benchmarks.gpu.speed import MODELS, settings_of

PLANS = (
    "single",
    "single recompute=full",
    "single microbatches=2",
    "data=2",
    "shard=2",
    "shard=2 zero=1",
    "tensor=2",
    "pipeline=2",
    "place=2",
    "servers=1 workers=2",
    "data=2 local=2",
)
STEPS = 6


def memory(
    gpus: int,
    folder: Path,
    python: Sequence[str],
    out_of_time: Callable[[], bool],
    *,
    models: Mapping[str, Mapping[str, Any]] = MODELS,
    plans: Sequence[str] = PLANS,
    jobs: int = 1,
) -> Iterator[dict[str, Any]]:
    """A row a plan, of the first model: bytes of the rank that needs most. So many at a time."""
    name = next(iter(models))

    def row_of(numbered: tuple[int, str]) -> dict[str, Any]:
        number, plan = numbered
        devices = command.devices(plan, gpus)
        row: dict[str, Any] = {"model": name, "plan": plan, "devices": devices}
        if out_of_time():
            return {**row, "reason": "the time was up"}
        ended = command.run(
            command.train(
                python,
                "gpt",
                plan,
                devices,
                folder / f"memory-{number}",
                "--steps",
                str(STEPS),
                "--check",
                "no",
                *settings_of(models[name]),
            )
        )
        return {**row, **_figures(ended)}

    return command.beside(jobs, row_of, enumerate(plans))


def _figures(ended: command.Ended) -> dict[str, Any]:
    if ended.exit_code != 0:
        return {"reason": ended.reason, "stderr_tail": ended.stderr_tail}
    summary = json.loads(ended.stdout)
    peak, predicted = summary["peak_memory_bytes"], summary["predicted"]["peak_memory_bytes"]
    return {
        "peak_memory_bytes": peak,
        "predicted_bytes": predicted,
        "of_predicted": None if predicted is None else peak / predicted,
    }
