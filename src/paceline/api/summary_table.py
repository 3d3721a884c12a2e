"""A run's figures as a table for people."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def summary_table(summary: Mapping[str, Any]) -> str:
    """Return a run's figures and its card."""
    predicted = summary.get("predicted") or {}
    ranks = summary["world_size"]
    return table(
        {
            "plan": f"{summary['plan']} ({ranks} rank{'s' if ranks > 1 else ''})",
            "steps": summary["steps"],
            "stopped": summary.get("stopped"),
            "samples": summary["samples"],
            "samples/s": summary["samples_per_s"],
            "final loss": summary["final_loss"],
            "validation loss": summary.get("validation_loss"),
            **(summary.get("metrics") or {}),
            "time": f"{_number(summary['wall_s'])} s",
            "first update": _checked(summary.get("check")),
            "peak memory": _memory(summary["peak_memory_bytes"]),
            "predicted step": f"{_number(predicted['step_s'])} s"
            if predicted.get("step_s")
            else None,
            "predicted memory": _memory(predicted.get("peak_memory_bytes")),
            "run": summary.get("run"),
            **_card(summary.get("run")),
        }
    )


def card(run: str | Path) -> str:
    """Return five lines about what limits a run, or what ended it, and what to do next.

    The text is empty if the run's folder is not here.
    """
    return table(_card(str(run)))


def _card(run: str | None) -> dict[str, str]:
    """Return the card's rows; none if the folder is not here, as on hosts that did not write it."""
    from paceline.reports.diagnosis import diagnose  # loads torch
    from paceline.reports.record import RunRecord
    from paceline.runs import folder

    if run is None or not (Path(run) / folder.PLAN).exists():
        return {}
    return {
        **diagnose(RunRecord.read(run)).lines(),
        "report": f"paceline report {shlex.quote(run)}",
    }


def _checked(check: Mapping[str, Any] | None) -> str | None:
    """Return the result of the check before the run, for people; None on one device."""
    if check is None:
        return None
    verdict = {
        "passed": "one device's",
        "coupled": "one device's that cuts the batch alike",
        "unchecked": "not checked",
    }[check["verdict"]]
    return f"{verdict} (checked in {check['seconds']:.2g} s)" if check["seconds"] else verdict


def table(rows: Mapping[str, Any]) -> str:
    """Return a table with one line per row. Rows without a value are left out, and nested rows are
    expanded.
    """
    flat: dict[str, Any] = {}
    for label, value in rows.items():
        inner = value if isinstance(value, Mapping) else {"": value}
        flat.update({f"{label} {name}".rstrip(): each for name, each in inner.items()})
    shown = {
        label.replace("_", " "): _number(value)
        for label, value in flat.items()
        if value is not None
    }
    width = max(map(len, shown), default=0)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in shown.items())


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _memory(num_bytes: float | None) -> str | None:
    return None if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB a rank"
