"""The table of job and plan, and the page that says what works under what."""

from __future__ import annotations

from collections.abc import Sequence

from .registry import Entry
from .sweep import COUPLED, EXACT, REFUSED, WRONG, Cell

SYMBOLS = {EXACT: "=", COUPLED: "~", REFUSED: "-", WRONG: "X"}


def table(jobs: Sequence[Entry], cells: Sequence[Cell]) -> str:
    """A row for each job, a column for each plan; the plans are numbered above."""
    plans = list(dict.fromkeys(cell.plan for cell in cells))
    found = {(cell.job, cell.plan): SYMBOLS[cell.verdict] for cell in cells}
    lines = [f"{number:>3} {plan}" for number, plan in enumerate(plans, 1)]
    lines.append(" " * 28 + "".join(f"{number:>3}" for number in range(1, len(plans) + 1)))
    lines += [f"{entry.name:<28}" + "".join(f"{found.get((entry.name, plan), ' '):>3}" for plan in plans)
              for entry in jobs]
    return "\n".join(lines)


def page(jobs: Sequence[Entry], cells: Sequence[Cell]) -> str:
    """The page in Markdown."""
    return table(jobs, cells)
