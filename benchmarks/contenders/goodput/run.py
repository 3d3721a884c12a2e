"""One run that survives in one way, and a note of the steps after which its state is in memory.

python -m benchmarks.contenders.goodput.run WAY FILE PLAN STEPS RUN SAVE_EVERY
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.base.errors import PacelineError
from paceline.launch.local import ranks
from paceline.training.parts.memory_checkpoint import Copier

IN_MEMORY = "in_memory.txt"  # in the run folder: a line for each copy that rank 0 makes


@contextmanager
def no_copies(*_: Any) -> Iterator[None]:
    yield None


def main(way: str, file: str, plan: str, steps: str, run: str, save_every: str) -> None:
    copy = Copier.copy

    def copied(copier: Copier, step: int, *args: Any, **options: Any) -> None:
        copy(copier, step, *args, **options)
        if copier.context.rank == 0:
            with (Path(run) / IN_MEMORY).open("a") as file:
                file.write(f"{step}\n")

    Copier.copy = copied  # type: ignore[method-assign]
    if way != "copies":
        ranks._copies = no_copies
    try:
        pl.train(
            pl.load(file),
            plan,
            steps=int(steps),
            run=run,
            check=False,
            table=False,
            save_every=int(save_every),
            resume=Path(run).exists(),
            **({"restarts": 0} if way == "resume" else {}),
        )
    except PacelineError as error:
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
