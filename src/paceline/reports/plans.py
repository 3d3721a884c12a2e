"""Writes the plans that `paceline plan` ranked as one HTML file that needs no network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.reports.diagnosis import PREDICTED_PARTS
from paceline.reports.page import MIB, Chart, Section, prepare, rendered
from paceline.runs import folder

MOST_DRAWN = 12  # plans of a chart; so many fit the height of a phone


def write(answer: Mapping[str, Any], to: Path, *, command: str) -> Path:
    """Write the page of a document of `paceline plan --json`, and return its path.

    command: the command that trains under a plan, without the plan.

    Raises:
        UsageError: see `prepare`.
    """
    from paceline.base.files import write_text

    prepare(to)
    text = rendered(
        f"plans on {answer['cluster']}",
        f"{answer['tried']} plans were priced",
        _verdict(answer, command),
        list(_sections(answer)),
        answer,
    )
    folder.writable(to.parent)
    write_text(to, text)
    return to


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
        "verdict": f"{chosen['plan']}: {chosen['step_s']:.3g} s a step, {chosen['samples_per_s']:,.4g} samples/s",
        "why": chosen["reason"],
        "next": f"{command} --plan '{chosen['plan']}'",
    }


def _sections(answer: Mapping[str, Any]) -> Iterator[Section]:
    from paceline.reports import charts

    drawn = _drawn(answer)
    intervals = {row["plan"]: (1e3 * row["step_s_low"], 1e3 * row["step_s_high"]) for row in drawn}
    grey = {row["plan"] for row in drawn if row["relaxed"]}
    times = {
        row["plan"]: {
            PREDICTED_PARTS.get(name, name): 1e3 * seconds
            for name, seconds in row["breakdown"].items()
        }
        or {"step": 1e3 * row["step_s"]}
        for row in drawn
    }
    memory = {
        row["plan"]: {"memory of the fullest rank": row["memory_bytes"] / MIB} for row in drawn
    }
    yield Section(
        "Predicted step and memory",
        "The chosen plan, one device, replicas on all devices, and the best plan of each other kind."
        + (
            " Grey plans are relaxed: they don't compute exactly what one device computes."
            * bool(grey)
        ),
        charts=[
            Chart(
                charts.stacked(times, x="ms of a step", intervals=intervals, grey=grey),
                "where a step's time goes, with the interval of 80 % of cases",
            ),
            Chart(charts.stacked(memory, x="MiB", grey=grey), "memory of the fullest rank"),
        ],
    )
    yield Section(
        "Plans",
        head=("plan", "s/step", "80 % of cases", "samples/s", "MiB", "why not"),
        rows=[
            (
                f"{'~' if row['relaxed'] else ''}{row['plan']}",
                f"{row['step_s']:.3g}",
                f"{row['step_s_low']:.3g} to {row['step_s_high']:.3g}",
                f"{row['samples_per_s']:,.4g}",
                f"{row['memory_bytes'] / MIB:,.0f}",
                "chosen" if row["plan"] == answer["chosen"] else row["reason"],
            )
            for row in answer["plans"]
        ],
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
