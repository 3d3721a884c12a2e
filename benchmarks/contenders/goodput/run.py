"""One run that survives in one way, and a note of the steps that it copied.

    python -m benchmarks.contenders.goodput.run WAY FILE PLAN STEPS RUN SAVE_EVERY
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.errors import PacelineError
from paceline.launch import local
from paceline.runtime.copies import Copier

COPIED = "copied.txt"  # in the run folder: a line for each copy of rank 0, the step after which it was made


@contextmanager
def no_copies(*_: Any) -> Iterator[None]:
    yield None


def main(way: str, file: str, plan: str, steps: str, run: str, save_every: str) -> None:
    copy = Copier.copy

    def noted(copier: Copier, step: int, *args: Any, **options: Any) -> None:
        copy(copier, step, *args, **options)
        if copier.context.rank == 0:
            with (Path(run) / COPIED).open("a") as copied:
                copied.write(f"{step}\n")

    Copier.copy = noted  # type: ignore[method-assign]
    if way != "copies":
        local._copies = no_copies
    try:
        pl.train(pl.load(file), plan, steps=int(steps), run=run, check=False, table=False, save_every=int(save_every),
                 resume=Path(run).exists(), **({"restarts": 0} if way == "resume" else {}))
    except PacelineError as error:
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
