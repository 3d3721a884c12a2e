"""The page of the ported scripts: lines that change, plans under which they are equal, bugs that a proof finds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from .bugs import BUGS, IMPOSSIBLE, Bug
from .ported import EQUAL, PLANS, REFUSED, SCRIPTS, WRONG, Comparison, Port

REMARKS = {
    REFUSED: "",
    WRONG: " (wrong)",
    None: " (not run)",
}  # on plans under which a port is not equal
FORM_NAMES = {"attach": "`pl.attach`", "compute": "`compute=`", "step": "`training_step=`"}

_INTRODUCTION = """\
# Ported scripts

<!-- Written by `python -m tests.scripts --write docs/ported-scripts.md`. Do not edit. -->

{scripts} training scripts of the kinds that people publish, written anew, each beside its ports to Paceline. They are
in `tests/scripts/`: `original/` has the scripts, `attach/` those that keep their loop, `compute/` and `step/` those
that became a job.

- **Changed lines** are added and edited lines of the port, without blank lines and comments.
- Each port ran in float64 under {plans},
  with the initial weights, the order of samples and the noise of its original. Samples do not fill their last batch,
  and batches do not divide by 2 or 3.
- The loss of every step and all final weights and buffers are those of the original on one device, to 1e-9 of the
  largest number of a tensor, except under the plans of the last column, which are refused before the first update.
"""
_BUGS = """\
## Bugs that a proof finds in a loop

`paceline verify script.py --plan data=2` compares a script's losses, gradients and weights on one device and on ranks
at each update. Each row is a bug that `tests/scripts/bugs.py` plants into `tests/scripts/loops/sound.py`.

| bug | found |
|---|---|
"""
_IMPOSSIBLE = "\n`pl.attach` makes these impossible:\n\n"


def page(comparisons: Sequence[Comparison], found: Mapping[str, bool]) -> str:
    """Return the page in Markdown. found: whether the proof finds a bug, by the bug's name."""
    parts = [
        _INTRODUCTION.format(scripts=len(SCRIPTS), plans=", ".join(f"`{plan}`" for plan in PLANS)),
        *_table(comparisons),
        *_refusals(comparisons),
        _BUGS
        + "".join(_bug_row(bug, found[bug.name]) for bug in BUGS if bug.name in found)
        + _IMPOSSIBLE,
    ]
    return "\n".join(parts) + "".join(f"- {bug}: {why}\n" for bug, why in IMPOSSIBLE.items())


def _table(comparisons: Sequence[Comparison]) -> list[str]:
    verdicts = {(each.port, each.plan): each.verdict for each in comparisons}
    lines = ["| script | form | changed lines | not under |", "|---|---|---|---|"]
    for script in SCRIPTS:
        for port in script.ports:
            others = [
                f"`{plan}`{REMARKS[verdict]}"
                for plan in PLANS
                if (verdict := verdicts.get((port, plan))) != EQUAL
            ]
            lines.append(f"| {row_of(port)} | {', '.join(others)} |")
    return [*lines, ""]


def row_of(port: Port) -> str:
    """Return what a port's row says without running it."""
    script = port.script
    return (
        f"[{script.name}]({script.source}): {script.title} | {FORM_NAMES[port.form]} | "
        f"{len(port.changed)}"
    )


def _refusals(comparisons: Sequence[Comparison]) -> list[str]:
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for each in comparisons:
        if each.verdict != EQUAL:
            where = f"{each.port.script.name} ({each.port.form}"
            groups[_in_a_cell(each.reason)][where].append(each.plan)
    if not groups:
        return []
    rows = []
    for reason, ports in groups.items():
        places = (f"{where}: {', '.join(plans)})" for where, plans in ports.items())
        rows.append(f"| {reason} | {'; '.join(places)} |")
    return ["## What is refused, and why\n", "| reason | where |", "|---|---|", *rows, ""]


def _in_a_cell(reason: str) -> str:
    """Return the first sentence of a reason, which doesn't name the plan."""
    sentence = re.sub(r"(plan )?'(\w+=\w+ ?)+'", "the plan", reason.partition(". ")[0])
    return sentence.replace("|", "/").replace("<", "&lt;")


def _bug_row(bug: Bug, is_found: bool) -> str:
    return f"| {bug.says} | {'yes' if is_found else 'no'} |\n"


def comparisons_of_page(text: str) -> list[Comparison]:
    """Return what a page says of the ports that are still there."""
    reasons = {
        (where, plan): reason
        for reason, all_where in re.findall(r"^\| (.+) \| (\w+ \(.+\)) \|$", text, re.MULTILINE)
        for where, plans in re.findall(r"(\w+ \(\w+): ([^)]+)\)", all_where)
        for plan in plans.split(", ")
    }
    comparisons = []
    for port in (port for script in SCRIPTS for port in script.ports):
        begins = rf"^\| {re.escape(row_of(port).rpartition(' | ')[0])} \| \d+ \| (.*) \|$"
        if (row := re.search(begins, text, re.MULTILINE)) is None:
            continue
        others = row[1].split(", ")
        for plan in PLANS:
            verdict = next(
                (v for v, remark in REMARKS.items() if f"`{plan}`{remark}" in others), EQUAL
            )
            if verdict is not None:
                reason = reasons.get((f"{port.script.name} ({port.form}", plan), "")
                comparisons.append(Comparison(port, plan, verdict, reason))
    return comparisons


def found_of_page(text: str) -> dict[str, bool]:
    """Return whether a page says that the proof finds each bug, by name."""
    return {
        bug.name: is_found
        for bug in BUGS
        for is_found in (True, False)
        if _bug_row(bug, is_found) in text
    }
