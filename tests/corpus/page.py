"""The table of jobs and plans, and the page that says what works under what."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from .registry import Entry
from .sweep import COUPLED, EXACT, REFUSED, WRONG, Cell

SYMBOLS = {EXACT: "=", COUPLED: "~", REFUSED: "-", WRONG: "X", "inconclusive": "?"}
COMMONEST = 10
ROOT = Path(__file__).parents[2]

_INTRODUCTION = """\
# What works under what

<!-- Written by `python -m tests.corpus --write docs/what-works.md`. Do not edit. -->

This page shows which kinds of jobs are exact under which plans. Use it to see whether a plan suits a model like yours;
`paceline verify` then proves it for your own job.

    paceline verify job.py --plan "data=2 shard=2"

{jobs} small jobs, each with one idea, trained under {plans} plans on CPU ranks. The test compares each run with a plain
loop on one device: the final weights and buffers, the loss of every step, and the validation loss if there is one. The
plain loop shares only the job's fields and the order of data with Paceline. The jobs are in `tests/corpus/`.

- `=` exact: equal to one device up to rounding. In float64 the limit is 1e-9, relative to the largest number of a
  tensor. The limit is larger if a job computes in float32 or a shorter format.
- `~` coupled: the job's samples depend on each other (BatchNorm, batch statistics, state that changes with each
  forward) and the plan cuts the batch. The run equals one device that cuts each batch in the same way.
- `-` refused: Paceline refuses the plan before the first update, with a reason.
- `X` wrong: different numbers, a hang, or an error that is not a refusal.

The page does not cover GPUs, several hosts, speed, or relaxed plans, which are not meant to equal one device.
"""
_KEPT = """\
{kept} of the {cells} cells are from earlier runs. The last run took what was refused, wrong or not on the page.
"""
_EVERY_CELL = "## Every job under every plan\n"


def table(jobs: Sequence[Entry], cells: Sequence[Cell]) -> str:
    """A row for each job, a column for each plan; the plans are numbered above."""
    plans = list(dict.fromkeys(cell.plan for cell in cells))
    signs = _signs(cells)
    tried = {cell.job for cell in cells}
    lines = [f"{number:>3} {plan}" for number, plan in enumerate(plans, 1)]
    lines.append(" " * 28 + "".join(f"{number:>3}" for number in range(1, len(plans) + 1)))
    lines += [
        f"{entry.name:<28}" + "".join(f"{signs.get((entry.name, plan), ' '):>3}" for plan in plans)
        for entry in jobs
        if entry.name in tried
    ]
    return "\n".join(lines)


def page(jobs: Sequence[Entry], cells: Sequence[Cell], *, kept: int = 0) -> str:
    """The page in Markdown: shares by plan, the commonest refusals, every cell.

    kept: how many of the cells are from earlier runs.
    """
    plans = list(dict.fromkeys(cell.plan for cell in cells))
    parts = [
        _INTRODUCTION.format(jobs=len(jobs), plans=len(plans)),
        _shares(plans, cells),
        _refusals(cells),
        _every_cell(jobs, plans, cells),
    ]
    if kept:
        parts.insert(1, _KEPT.format(kept=kept, cells=len(cells)))
    return "\n".join(parts)


def cells_of_page(text: str) -> list[Cell]:
    """The cells that a page shows, without reasons and figures, because a page has a sign for each."""
    plans = re.findall(r"^\d+\. `(.+)`$", text, re.MULTILINE)
    verdicts = {sign: verdict for verdict, sign in SYMBOLS.items()}
    cells = []
    for line in text.partition(_EVERY_CELL)[2].splitlines():
        job, *columns = line.removeprefix("| ").removesuffix(" |").split(" | ")
        cells += [
            Cell(job, plan, verdicts[sign])
            for plan, sign in zip(plans, columns[-len(plans) :], strict=False)
            if sign in verdicts
        ]
    return cells


def _signs(cells: Sequence[Cell]) -> dict[tuple[str, str], str]:
    return {(cell.job, cell.plan): SYMBOLS[cell.verdict] for cell in cells}


def _shares(plans: Sequence[str], cells: Sequence[Cell]) -> str:
    lines = [
        "## By plan\n",
        "| plan | exact | coupled | refused | wrong |",
        "|---|---|---|---|---|",
    ]
    for title, of_plan in [
        *((f"`{plan}`", [c for c in cells if c.plan == plan]) for plan in plans),
        ("all", list(cells)),
    ]:
        count = Counter(cell.verdict for cell in of_plan)
        shares = (
            f"{100 * count[verdict] / len(of_plan):.1f} %" if count[verdict] else "0"
            for verdict in (EXACT, COUPLED, REFUSED, WRONG)
        )
        lines.append(f"| {title} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


def _refusals(cells: Sequence[Cell]) -> str:
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.verdict == REFUSED:
            groups[kind_of(cell.reason)].append(cell)
    ordered = sorted(groups.values(), key=len, reverse=True)
    lines = [
        "## The most common refusals\n",
        f"{sum(map(len, ordered))} of {len(cells)} cells are refused, for "
        f"{len(ordered)} kinds of reasons. Each row is one kind, with one example and its hint:\n",
        "| cells | example | reason | what to do |",
        "|---|---|---|---|",
    ]
    for group in ordered[:COMMONEST]:
        example = group[0]
        hint = example.trace.partition("\n\nhint: ")[2].splitlines()
        lines.append(
            f"| {len(group)} | {example.job} under `{example.plan}` | {_in_a_cell(example.reason)} "
            f"| {_in_a_cell(hint[0] if hint else '')} |"
        )
    return "\n".join(lines) + "\n"


def kind_of(reason: str) -> str:
    """A reason without what names and counts things in it."""
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'|\b[A-Z]\w+\b", "...", reason))


def _in_a_cell(text: str) -> str:
    return text.replace(f"{ROOT}/", "").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _every_cell(jobs: Sequence[Entry], plans: Sequence[str], cells: Sequence[Cell]) -> str:
    signs = _signs(cells)
    lines = [_EVERY_CELL, *(f"{number}. `{plan}`" for number, plan in enumerate(plans, 1))]
    for theme in dict.fromkeys(entry.theme for entry in jobs):
        lines += [
            f"\n### {theme}\n",
            f"| job | idea | {' | '.join(map(str, range(1, len(plans) + 1)))} |",
            "|---|---|" + "---|" * len(plans),
        ]
        lines += [
            f"| {entry.name} | {_in_a_cell(entry.idea)} | "
            f"{' | '.join(signs.get((entry.name, plan), ' ') for plan in plans)} |"
            for entry in jobs
            if entry.theme == theme
        ]
    return "\n".join(lines) + "\n"
