"""`python -m tests.corpus`: run plans over jobs and print what works under what."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

if (
    __name__ == "__main__"
):  # tests import this module: their processes keep the devices that they have
    os.environ.setdefault("KERAS_BACKEND", "torch")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def write_cells(path: Path, cells: list[Any]) -> None:
    """Every cell with its reason, as JSON."""
    path.write_text(json.dumps([cell.to_dict() for cell in cells], indent=1) + "\n")


def known_cells(path: Path) -> list[Any]:
    """The cells of an earlier sweep, from its --json or its page, but for those of jobs that are no longer there."""
    from .page import cells_of_page
    from .registry import entries
    from .sweep import Cell

    text = path.read_text()
    cells = (
        [Cell(**cell) for cell in json.loads(text)]
        if path.suffix == ".json"
        else cells_of_page(text)
    )
    names = {entry.name for entry in entries()}
    return [cell for cell in cells if cell.job in names]


def main() -> int:
    """Run the sweep, print its table, and return 1 if a cell is wrong."""
    import torch

    from .certified import CERTIFIED_PLANS, certify
    from .page import SYMBOLS, page, table
    from .registry import entries
    from .resumed import resume_check
    from .sweep import PLANS, REFUSED, WRONG, Cell, Sweep

    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__)
    parser.add_argument("--jobs", default="*", help="names or themes, with * and commas")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), metavar="PLAN")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="a rank that is silent for so long hangs"
    )
    parser.add_argument("--json", type=Path, help="every cell with its reason")
    parser.add_argument("--write", type=Path, help="the page that says what works under what")
    parser.add_argument(
        "--retry",
        type=Path,
        metavar="FILE",
        help="run what FILE, a --json or a page (.md), calls wrong or refused or lacks; keep its rest",
    )
    parser.add_argument(
        "--resume-check", action="store_true", help="stop under one plan and go on under another"
    )
    parser.add_argument(
        "--certify", action="store_true", help="let paceline verify judge, and count what it fails"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    jobs = entries(given.jobs)
    if not jobs:
        parser.error(f"no job matches {given.jobs!r}")
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="paceline-corpus-", dir=shared if shared.is_dir() else None
    ) as folder:
        sweep = Sweep(Path(folder), given.seconds)
        cells: list[Cell] = resume_check(sweep) if given.resume_check else []
        if given.certify:
            plans = given.plans if given.plans != list(PLANS) else CERTIFIED_PLANS
            cells = certify(jobs, plans, sweep.say, timeout_s=given.seconds)
        known = known_cells(given.retry) if given.retry else []
        kept = 0
        for plan in () if given.resume_check or given.certify else given.plans:
            of_plan = {cell.job: cell for cell in known if cell.plan == plan}
            settled = {
                cell.job for cell in of_plan.values() if cell.verdict not in (WRONG, REFUSED)
            }
            again = [entry for entry in jobs if entry.name not in settled]
            kept += len(settled)
            of_plan |= {cell.job: cell for cell in (sweep.run(again, [plan]) if again else ())}
            cells += of_plan.values()
            if given.json:  # after each plan, for a sweep that is ended before its time
                write_cells(given.json, cells)
    if given.json:
        write_cells(given.json, cells)
    if given.write:
        given.write.write_text(page(jobs, cells, kept=kept))
    print(table(jobs, cells))
    print(
        ", ".join(
            f"{number} {verdict} ({SYMBOLS[verdict]})"
            for verdict, number in Counter(cell.verdict for cell in cells).most_common()
        )
    )
    for cell in cells:
        if cell.verdict == WRONG:
            print(f"wrong: {cell.job} under {cell.plan}: {cell.reason}")
    return int(any(cell.verdict == WRONG for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
