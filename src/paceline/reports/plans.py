"""Writes the plans that `paceline plan` ranked as one HTML file that needs no network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.reports.diagnosis import PREDICTED_PARTS
from paceline.reports.html import (
    MIB,
    Page,
    Section,
    Tile,
    duration,
    interval,
    plural,
    prepare,
    size,
)
from paceline.runs import folder

MOST_DRAWN = 12  # plans of a chart; so many fit the height of a phone


def write(answer: Mapping[str, Any], to: Path, *, command: str) -> Path:
    """Write the page of a document of `paceline plan --json`, and return its path.

    command: the command that trains under a plan, without the plan.

    Raises:
        UsageError: see `prepare`.
    """
    prepare(to)
    text = Page(
        f"plans on {answer['cluster']}",
        f"{answer['tried']} plans were priced",
        _verdict(answer, command),
        _tiles(answer),
        list(_sections(answer)),
        answer,
    ).text()
    return folder.write_page(to, text)


def _verdict(answer: Mapping[str, Any], command: str) -> dict[str, str]:
    best = answer["plans"][0]
    if answer["chosen"] is None:
        changes = [f"{each['change']}: '{each['plan']}'" for each in answer["remedies"]]
        return {
            "verdict": f"nothing fits on {answer['cluster']}; '{best['plan']}' is nearest",
            "why": best["reason"],
            **({"next": changes[0]} if changes else {}),
        }
    chosen = next(row for row in answer["plans"] if row["plan"] == answer["chosen"])
    return {
        "verdict": f"{chosen['plan']}: {duration(chosen['step_s'])} a step, {chosen['samples_per_s']:,.4g} samples/s",
        "why": chosen["reason"],
        "next": f"{command} --plan '{chosen['plan']}'",
    }


def _tiles(answer: Mapping[str, Any]) -> list[Tile]:
    """Return the figures of the chosen plan, or of the one that is nearest to fit."""
    rows = {row["plan"]: row for row in answer["plans"]}
    row, single = rows[answer["chosen"] or answer["plans"][0]["plan"]], rows.get("single")
    ratio = f"{single['step_s'] / row['step_s']:.2f} times one device" if single else ""
    return [
        Tile(
            "step",
            duration(row["step_s"]),
            f"{interval(row['step_s_low'], row['step_s_high'])} in 80 % of cases",
        ),
        Tile("samples/s", f"{row['samples_per_s']:,.0f}", ratio),
        Tile(
            "memory of the fullest rank",
            size(row["memory_bytes"]),
            "" if row["fits"] else "too much",
        ),
        Tile(
            "plans priced",
            f"{answer['tried']:,}",
            f"{plural(len(answer['refused']), 'kind')} refused",
        ),
    ]


def _sections(answer: Mapping[str, Any]) -> Iterator[Section]:
    from paceline.reports import charts

    drawn = {f"{'~' * row['relaxed']}{row['plan']}": row for row in _drawn(answer)}
    intervals = {
        name: (1e3 * row["step_s_low"], 1e3 * row["step_s_high"]) for name, row in drawn.items()
    }
    grey = {name for name, row in drawn.items() if row["relaxed"]}
    times = {
        name: {
            PREDICTED_PARTS.get(part, part): 1e3 * seconds
            for part, seconds in row["breakdown"].items()
        }
        or {"step": 1e3 * row["step_s"]}
        for name, row in drawn.items()
    }
    memory = {
        name: {part: held / MIB for part, held in row["ledger"].items() if held}
        for name, row in drawn.items()
    }
    yield Section(
        "Predicted step and memory",
        "The chosen plan, one device, replicas on all devices, and the best plan of each other kind. "
        "Thin lines are intervals that hold 80 % of cases."
        + (
            " Grey plans (~) are relaxed: they don't compute exactly what one device computes."
            * bool(grey)
        ),
        charts=[
            charts.stacked(times, title="a step, ms", unit="ms", intervals=intervals, grey=grey),
            charts.stacked(memory, title="memory of the fullest rank, MiB", unit="MiB", grey=grey),
        ],
    )
    yield Section(
        "Plans",
        head=("plan", "step", "80 % of cases", "samples/s", "memory", "why not"),
        rows=[
            (
                f"{'~' if row['relaxed'] else ''}{row['plan']}",
                duration(row["step_s"]),
                interval(row["step_s_low"], row["step_s_high"]),
                f"{row['samples_per_s']:,.4g}",
                size(row["memory_bytes"]),
                "chosen" if row["plan"] == answer["chosen"] else row["reason"],
            )
            for row in answer["plans"]
        ],
        folded=f"{len(answer['plans'])} plans, with why each was not chosen",
    )
    if answer["flips"]:
        yield Section(
            "What would change the choice",
            rows=[(each["change"], each["plan"]) for each in answer["flips"]],
        )
    if answer["refused"]:
        yield Section("Not priced", rows=list(answer["refused"].items()))
    if answer["notes"]:
        yield Section(
            "What is rough",
            rows=[(str(number), note) for number, note in enumerate(answer["notes"], 1)],
        )


def _drawn(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the plans of the charts: the chosen one, `single`, as many replicas as possible, and
    the best of each kind, the exact ones first."""
    plans = [row for row in answer["plans"] if row["fits"]] or answer["plans"]
    replicas = {
        int(match[1]): row["plan"]
        for row in plans
        if (match := re.fullmatch(r"data=(\d+)", row["plan"]))
    }
    named = [answer["chosen"], "single", *[replicas[count] for count in sorted(replicas)[-1:]]]
    first = [row for name in named for row in plans if row["plan"] == name]
    kinds: dict[str, Mapping[str, Any]] = {}
    for row in sorted(plans, key=lambda row: row["relaxed"]):
        kinds.setdefault(row["kind"], row)
    rows = {row["plan"]: row for row in (*first, *kinds.values())}
    return list(rows.values())[:MOST_DRAWN]
