"""Try Paceline on the GPUs of this machine and write what came of it into one file.

    scripts/gpu-check [--minutes 55] [--only PART...] [--output gpu-check.json]

docs/gpu.md says what each part shows. Each command has a process of its own; one that fails stops no other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

from benchmarks.gpu import command, page
from benchmarks.gpu.failures import failures
from benchmarks.gpu.machine import machine, seen
from benchmarks.gpu.matrix import CELLS, matrix
from benchmarks.gpu.memory import PLANS, memory
from benchmarks.gpu.proof import proof
from benchmarks.gpu.recovery import recovery
from benchmarks.gpu.speed import MODELS, PRECISIONS, ROUNDS, speed

PARTS = ("machine", "matrix", "proof", "failures", "recovery", "memory", "speed")
CORES_A_COMMAND = 4  # most have two ranks and a process that starts them


def check(
    parts: Sequence[str],
    minutes: float,
    output: Path,
    *,
    python: Sequence[str] = command.PYTHON,
    cells: Sequence[tuple[str, str]] = CELLS,
    models: Any = MODELS,
    plans: Sequence[str] = PLANS,
    rounds: int = ROUNDS,
    precisions: Sequence[str] = PRECISIONS,
    jobs: int = 1,
) -> dict[str, Any]:
    """The whole document, which is written after every row.

    Args:
        minutes: After which nothing new is begun.
        python: What runs Python.
        plans: Whose memory is compared with what was predicted.
        rounds: In turns, of contenders for speed, in each of the precisions.
        jobs: How many commands run at a time, but for those whose speed is measured.

    Raises:
        RuntimeError: there is no GPU that torch can use.
    """
    environment = seen(python)
    if not environment["gpus"]:
        raise RuntimeError("torch can use no GPU here: `paceline doctor` says why")
    ends_s = time.monotonic() + 60 * minutes
    document: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **environment,
    }
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-check-") as name:
        arguments = (
            len(environment["gpus"]),
            Path(name),
            python,
            lambda: time.monotonic() > ends_s,
        )
        made = {
            "matrix": lambda: map(asdict, matrix(*arguments, cells=cells, jobs=jobs)),
            "proof": partial(proof, *arguments, jobs=jobs),
            "failures": partial(failures, *arguments, jobs=jobs),
            "recovery": partial(recovery, *arguments, jobs=jobs),
            "memory": partial(memory, *arguments, models=models, plans=plans, jobs=jobs),
            "speed": partial(
                speed, *arguments, models=models, rounds=rounds, precisions=precisions
            ),
        }
        for part in parts:
            print(f"{part}:", file=sys.stderr)
            if part == "machine":
                document[part] = machine(python)
            else:
                document[part] = []
                for row in made[part]():
                    document[part].append(row)
                    _tell(row)
                    _write(document, output)
            _write(document, output)
    return document


def _tell(row: Mapping[str, Any]) -> None:
    """A line for people who wait; of a command that failed, also what it said."""
    name = ", ".join(
        row[key]
        for key in ("job", "failure", "model", "precision", "contender", "plan")
        if key in row
    )
    print(f"  {name}: {row.get('verdict', '')} {row.get('reason', '')}".rstrip(), file=sys.stderr)
    if row.get("stderr_tail") and row.get("verdict", "failed") in ("failed", "differs"):
        print(indent(row["stderr_tail"], "    "), file=sys.stderr)


def _write(document: Mapping[str, Any], output: Path) -> None:
    """In one move: a check may be killed at any time."""
    unfinished = output.with_name(f"{output.name}.part")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(output)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=55.0, help="after which nothing new is begun (55)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument(
        "--output", type=Path, default=Path("gpu-check.json"), help="the file (gpu-check.json)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, (os.cpu_count() or 1) // CORES_A_COMMAND),
        metavar="N",
        help="commands at a time, but for those whose speed is measured (a quarter of the cores)",
    )
    given = parser.parse_args()
    try:
        document = check(given.only, given.minutes, given.output.resolve(), jobs=given.jobs)
    except RuntimeError as error:
        print(f"scripts/gpu-check: {error}", file=sys.stderr)
        return 2
    print(page.page(document))
    print(f"written to {given.output}", file=sys.stderr)
    return 1 if page.wrong(document) else 0


if __name__ == "__main__":
    raise SystemExit(main())
