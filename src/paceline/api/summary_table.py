"""A run's figures as a table for people."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.base.tables import in_mib, in_ms, number, three_digits, wrapped


def summary_table(summary: Mapping[str, Any]) -> str:
    """Return a run's figures, an empty line and its card."""
    predicted = summary.get("predicted") or {}
    ranks = summary["world_size"]
    figures = table(
        {
            "plan": f"{summary['plan']} ({ranks} rank{'s' if ranks > 1 else ''})",
            "steps": summary["steps"],
            "stopped": summary.get("stopped"),
            "samples": summary["samples"],
            "samples/s": three_digits(summary["samples_per_s"]),
            "final loss": summary["final_loss"],
            "validation loss": summary.get("validation_loss"),
            **(summary.get("metrics") or {}),
            "time": f"{number(summary['wall_s'])} s",
            "predicted step": in_ms(predicted["step_s"]) if predicted.get("step_s") else None,
            "peak memory": _memory(summary["peak_memory_bytes"]),
            "predicted memory": _memory(predicted.get("peak_memory_bytes")),
            "first update": _checked(summary.get("check")),
            "run": summary.get("run"),
        }
    )
    return "\n\n".join(filter(None, [figures, card(summary.get("run"))]))


def card(run: str | Path | None) -> str:
    """Return lines about what limits a run, or what ended it, and what to do next.

    The text is empty if the run's folder is not here, as on hosts that did not write it.
    """
    from paceline.reports.diagnosis import diagnose  # loads torch
    from paceline.reports.record import RunRecord
    from paceline.runs import folder

    if run is None or not (Path(run) / folder.PLAN).exists():
        return ""
    lines = diagnose(RunRecord.read(run)).lines()
    rows = {**lines, "report": f"paceline report {shlex.quote(str(run))}"}
    *sentences, command = table(rows).splitlines()
    return "\n".join([*(wrapped(line, len("verdict  ")) for line in sentences), command])


def _checked(check: Mapping[str, Any] | None) -> str | None:
    """Return the result of the check before the run, for people; None on one device."""
    if check is None:
        return None
    verdict = {
        "passed": "equals one device's",
        "coupled": "equals one device's that cuts the batch alike",
        "unchecked": f"not checked: {str(check.get('reason')).partition(' (')[0]}",
    }[check["verdict"]]
    return f"{verdict} (checked in {check['seconds']:.2g} s)" if check["seconds"] else verdict


def table(rows: Mapping[str, Any]) -> str:
    """Return a table with one line per row. Rows without a value are left out, and nested
    rows have their own labels, with that of the outer row if another row has the same.
    """
    flat: dict[str, Any] = {}
    for label, value in rows.items():
        inner = value if isinstance(value, Mapping) else {"": value}
        flat.update(
            {
                f"{name} {label}" if name in rows else name or label: each
                for name, each in inner.items()
            }
        )
    shown = {
        label.replace("_", " "): number(value) for label, value in flat.items() if value is not None
    }
    width = max(map(len, shown), default=0)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in shown.items())


def _memory(num_bytes: float | None) -> str | None:
    return None if num_bytes is None else f"{in_mib(num_bytes)} a rank"
