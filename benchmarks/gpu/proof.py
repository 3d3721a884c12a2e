"""`paceline verify` on GPUs, in the rounding of their own kernels, and runs that are to repeat to the bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import command

# In float32, where convolutions may use TF32 and attention is a fused kernel, and in bf16.
JOBS = ("float32", "images in float32", "attention in float32", "half")
REPEATED = ("single", "data=2", "shard=2", "tensor=2")


def proof(gpus: int, folder: Path, python: Sequence[str], out_of_time: Callable[[], bool],
          jobs: Sequence[str] = JOBS) -> list[dict[str, Any]]:
    """A row for each job and each plan that the GPUs are enough for: what `verify` says, or whether two runs with
    deterministic=yes have the same weights."""
    rows: list[dict[str, Any]] = []
    for job in jobs:
        work = [lambda job=job: _certificates(gpus, folder, python, job),
                *(lambda job=job, plan=plan: [_repeated(folder, python, job, plan)]
                  for plan in REPEATED if plan == "single" or gpus > 1)]
        for part in work:
            rows += part() if not out_of_time() else [
                {"job": job, "plan": "", "verdict": "not run", "reason": "the time was up"}]
    return rows


def _certificates(gpus: int, folder: Path, python: Sequence[str], job: str) -> list[dict[str, Any]]:
    run = folder / f"proof-{job.replace(' ', '-')}"
    ended = command.run([*python, "-m", "paceline", "verify", f"{Path(__file__).with_name('jobs.py')}:job", "--set",
                         f"name={job}", "--devices", f"cuda:0-{min(gpus, 4) - 1}", "--run", str(run), "--json"],
                        timeout_s=2 * command.TIMEOUT_S)
    if not (run / "certificate.json").exists():
        return [{"job": job, "plan": "", "verdict": "failed", "reason": ended.reason}]
    found = json.loads((run / "certificate.json").read_text())
    return [{"job": job, "plan": plan["plan"], "verdict": plan["verdict"],
             "reason": plan["reason"] or plan["refused"] or plan["note"] or "", "precisions": plan["precisions"],
             "device": found["device"], "yardstick": found["yardstick"]} for plan in found["plans"]]


def _repeated(folder: Path, python: Sequence[str], job: str, plan: str) -> dict[str, Any]:
    row = {"job": job, "plan": f"{plan} deterministic=yes"}
    digests = set()
    for number in range(2):
        run = folder / f"repeated-{job}-{plan}-{number}".replace(" ", "-")
        ended = command.run(command.train(python, "job", row["plan"], "cuda:0" if plan == "single" else "cuda:0-1", run,
                                          "--set", f"name={job}", "--check", "no"))
        if ended.exit_code != 0:
            return {**row, "verdict": "failed", "reason": ended.reason}
        digests.add(hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest())
    return {**row, "verdict": "repeats" if len(digests) == 1 else "differs", "reason": ""}
