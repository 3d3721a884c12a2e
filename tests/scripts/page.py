"""The page of the ported scripts: lines that change, plans under which they are equal, bugs that a proof finds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from .bugs import BUGS, IMPOSSIBLE, Bug
from .ported import EQUAL, PLANS, REFUSED, SCRIPTS, WRONG, Comparison, Port

SIGNS = {EQUAL: "=", REFUSED: "-", WRONG: "X"}
FORM_NAMES = {"attach": "`pl.attach`", "compute": "`compute=`", "step": "`step=`"}

_INTRODUCTION = """\
# Ported scripts

<!-- Written by `python -m tests.scripts --write docs/ported-scripts.md`. Do not edit. -->

{scripts} training scripts of the kinds that people publish, each beside its ports to Paceline. The scripts are small
and written anew, with the loops, optimizers and schedules of the public ones; they run in seconds on CPUs. They are in
`tests/scripts/`: `original/` has the scripts, `attach/` those that keep their loop, `compute/` and `step/` those that
became a job.

- **Changed lines** are the lines of the port that the original does not have at their place: added and edited ones,
  without blank lines and comments. Lines that are only left out don't count.
- Each port runs in float64 under each plan. `=`: the loss of every step and all final weights and buffers are those of
  the original on one device; 1e-9 is allowed, relative to the largest number of a tensor. `-`: the plan is refused
  before the first update, with the reason below. `X`: anything else.
- Samples do not fill their last batch, and batches do not divide by 2 or 3. Under `data=3` some ranks have no row of
  the last batch.
- Both scripts run with the same initial weights, read the samples in the same order, and draw the same noise: a
  function of the sample takes its place.
"""
_BUGS = """\
## Bugs that a proof finds in a loop

`paceline verify script.py --plan data=2` runs the script on one device and on ranks, and compares losses, gradients and
weights at each update. Each row is a bug of such loops, planted into `tests/scripts/loops/sound.py`. The loop without a
bug passes.

| bug | in the script | found |
|---|---|---|
"""
_IMPOSSIBLE = "\n`pl.attach` makes these impossible:\n\n"


def page(comparisons: Sequence[Comparison], found: Mapping[str, bool]) -> str:
    """Return the page in Markdown. found: whether the proof finds a bug, by the bug's name."""
    parts = [
        _INTRODUCTION.format(scripts=len(SCRIPTS)),
        *_table(comparisons),
        *_refusals(comparisons),
        _BUGS
        + "".join(_bug_row(bug, found[bug.name]) for bug in BUGS if bug.name in found)
        + _IMPOSSIBLE,
    ]
    return "\n".join(parts) + "".join(f"- {bug}: {why}\n" for bug, why in IMPOSSIBLE.items())


def _table(comparisons: Sequence[Comparison]) -> list[str]:
    verdicts = {(each.port, each.plan): SIGNS[each.verdict] for each in comparisons}
    lines = [
        f"| script | original | form | changed lines | {' | '.join(f'`{plan}`' for plan in PLANS)} |",
        "|---|---|---|---|" + "---|" * len(PLANS),
    ]
    for script in SCRIPTS:
        for port in script.ports:
            signs = " | ".join(verdicts.get((port, plan), " ") for plan in PLANS)
            lines.append(f"| {row_of(port)} | {signs} |")
    return [*lines, ""]


def row_of(port: Port) -> str:
    """Return what a port's row says without running it."""
    script = port.script
    return (
        f"{script.name}: {script.title} | [original]({script.source}) | {FORM_NAMES[port.form]} | "
        f"{len(port.changed)}"
    )


def _refusals(comparisons: Sequence[Comparison]) -> list[str]:
    groups: dict[str, list[str]] = defaultdict(list)
    for each in comparisons:
        if each.verdict != EQUAL:
            groups[_in_a_cell(each.reason)].append(
                f"{each.port.script.name} ({each.port.form}, {each.plan})"
            )
    if not groups:
        return []
    rows = (f"| {reason} | {'; '.join(where)} |" for reason, where in groups.items())
    return ["## What is refused, and why\n", "| reason | where |", "|---|---|", *rows, ""]


def _in_a_cell(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;")


def _bug_row(bug: Bug, is_found: bool) -> str:
    line = " ".join(bug.new.split()).replace("|", "/")
    return f"| {bug.says} | `{line}` | {'yes' if is_found else 'no'} |\n"


def comparisons_of_page(text: str) -> list[Comparison]:
    """Return what a page says of the ports that are still there."""
    ports = {f"{port.script.name} ({port.form}": port for s in SCRIPTS for port in s.ports}
    reasons = {}
    for reason, where in re.findall(r"^\| (.+) \| (\w+ \(.+\)) \|$", text, re.MULTILINE):
        reasons |= dict.fromkeys(where.split("; "), reason)
    verdicts = {sign: verdict for verdict, sign in SIGNS.items()}
    comparisons = []
    for where, port in ports.items():
        begins = rf"^\| {re.escape(row_of(port).rpartition(' | ')[0])} \| \d+ \| (.+) \|$"
        row = re.search(begins, text, re.MULTILINE)
        for plan, sign in zip(PLANS, row[1].split(" | ") if row else (), strict=False):
            if sign in verdicts:
                reason = reasons.get(f"{where}, {plan})", "")
                comparisons.append(Comparison(port, plan, verdicts[sign], reason))
    return comparisons


def found_of_page(text: str) -> dict[str, bool]:
    """Return whether a page says that the proof finds each bug, by name."""
    return {
        bug.name: is_found
        for bug in BUGS
        for is_found in (True, False)
        if _bug_row(bug, is_found) in text
    }
