"""`paceline verify` on GPUs, in the rounding of their own kernels, and runs that are to repeat to the bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from benchmarks.gpu import command
from paceline.base.errors import PlanRefused

# In float32, where convolutions may use TF32 and attention is a fused kernel, and in bf16.
JOBS = ("float32", "images in float32", "attention in float32", "half")
REPEATED = ("single", "data=2", "shard=2", "tensor=2")


def proof(
    gpus: int,
    folder: Path,
    python: Sequence[str],
    out_of_time: Callable[[], bool],
    names: Sequence[str] = JOBS,
    jobs: int = 1,
) -> Iterator[dict[str, Any]]:
    """A row for each job and each plan: what `verify` says of those that the GPUs are enough for, and whether two runs
    with deterministic=yes have the same weights, or are refused as an operator has no deterministic form. In these, two
    ranks share the only GPU.

    Args:
        jobs: How many commands run at a time.
    """

    def rows_of(work: tuple[str, str]) -> list[dict[str, Any]]:
        job, plan = work
        if out_of_time():
            return [{"job": job, "plan": plan, "verdict": "not run", "reason": "the time was up"}]
        return (
            [_repeated(gpus, folder, python, job, plan)]
            if plan
            else _certificates(gpus, folder, python, job)
        )

    return chain.from_iterable(command.beside(jobs, rows_of, product(names, ("", *REPEATED))))


def _certificates(gpus: int, folder: Path, python: Sequence[str], job: str) -> list[dict[str, Any]]:
    run = folder / f"proof-{job.replace(' ', '-')}"
    ended = command.run(
        [
            *python,
            "-m",
            "paceline",
            "verify",
            f"{Path(__file__).with_name('jobs.py')}:job",
            "--set",
            f"name={job}",
            "--devices",
            f"cuda:0-{min(gpus, 4) - 1}",
            "--run",
            str(run),
            "--json",
        ],
        timeout_s=2 * command.TIMEOUT_S,
    )
    if not (run / "certificate.json").exists():
        return [
            {
                "job": job,
                "plan": "",
                "verdict": "failed",
                "reason": ended.reason,
                "stderr_tail": ended.stderr_tail,
            }
        ]
    certificate = json.loads((run / "certificate.json").read_text())
    return [
        {
            "job": job,
            "plan": plan["plan"],
            "verdict": plan["verdict"],
            "reason": plan["reason"] or plan["refused"] or plan["note"] or "",
            "precisions": plan["precisions"],
            "device": certificate["device"],
            "yardstick": certificate["yardstick"],
        }
        for plan in certificate["plans"]
    ]


def _repeated(
    gpus: int, folder: Path, python: Sequence[str], job: str, plan: str
) -> dict[str, Any]:
    row = {"job": job, "plan": f"{plan} deterministic=yes"}
    digests = set()
    for number in range(2):
        run = folder / f"repeated-{job}-{plan}-{number}".replace(" ", "-")
        ended = command.run(
            command.train(
                python,
                "job",
                row["plan"],
                command.devices(plan, gpus),
                run,
                "--set",
                f"name={job}",
                "--check",
                "no",
                "--restarts",
                "0",
            )
        )
        if ended.exit_code != 0:
            refusal = _refusal(ended)
            return {
                **row,
                "verdict": "refused" if refusal else "failed",
                "reason": refusal or ended.reason,
                "stderr_tail": ended.stderr_tail,
            }
        digests.add(hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest())
    return {**row, "verdict": "repeats" if len(digests) == 1 else "differs", "reason": ""}


def _refusal(ended: command.Ended) -> str:
    """The line of a refused run that names an operator without a deterministic form; "" if it did not end by that."""
    lines = ended.stderr.splitlines() if ended.exit_code == PlanRefused.exit_code else []
    return next((line for line in lines if "has no deterministic form" in line), "")
