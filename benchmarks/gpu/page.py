"""The document for people: Markdown, as it goes into docs/gpu.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import shorten
from typing import Any


def wrong(document: Mapping[str, Any]) -> list[str]:
    """What is not as it should be."""
    return [
        *(
            f"{cell['job']} under {cell['plan']}: {cell['verdict']} {cell['reason']}".strip()
            for cell in document.get("matrix", ())
            if cell["verdict"] in ("differs", "failed")
        ),
        *(
            f"{row['job']} under {row['plan']}: {row['verdict']} {_first_line(row)}".strip()
            for row in document.get("proof", ())
            if row["verdict"] in ("failed", "differs")
        ),
        *(
            f"{row['failure']}: {row['verdict']}"
            for row in document.get("failures", ())
            if row["verdict"] == "differs"
        ),
        *(
            f"a kill under {row['plan']}: {row['verdict']} {row['reason']}".strip()
            for row in document.get("recovery", ())
            if row["verdict"] in ("failed", "differs")
        ),
        *(
            f"memory of {row['model']} under {row['plan']}: {row['reason']}"
            for row in document.get("memory", ())
            if "reason" in row and row["reason"] != "the time was up"
        ),
        *(
            f"{row['contender']}, {row['model']}, {row['precision']}: {row['reason']}"
            for row in document.get("speed", ())
            if "reason" in row and row["reason"] != "the time was up"
        ),
    ]


def page(document: Mapping[str, Any]) -> str:
    """All tables; a part that was not run is left out."""
    lines = [f"{', '.join(document['gpus'])}; {document['date']}", ""]
    if "matrix" in document:
        lines += _table(
            ("job", "plan", "devices", "verdict", "off by", "why"),
            (
                (
                    cell["job"],
                    f"`{cell['plan']}`",
                    cell["devices"],
                    cell["verdict"],
                    "" if cell["off_by"] is None else f"{cell['off_by']:.0e}",
                    cell["reason"],
                )
                for cell in document["matrix"]
            ),
        )
    if "proof" in document:
        lines += _table(
            ("job", "plan", "verdict", "why"),
            (
                (row["job"], f"`{row['plan']}`", row["verdict"], _first_line(row))
                for row in document["proof"]
            ),
        )
    if "failures" in document:
        lines += _table(
            (
                "what happens",
                "plan",
                "devices",
                "exit code",
                "expected",
                "seconds to the end",
                "verdict",
            ),
            (
                (
                    row["failure"],
                    f"`{row['plan']}`",
                    row["devices"],
                    row.get("exit_code", ""),
                    row["expected_exit_code"],
                    f"{row['seconds_to_end']:.1f}" if "seconds_to_end" in row else "",
                    f"{row['verdict']} {row.get('reason', '')}".strip(),
                )
                for row in document["failures"]
            ),
        )
    if "recovery" in document:
        lines += _table(
            (
                "a rank is killed under",
                "devices",
                "next step s",
                "steps again",
                "samples lost",
                "weights",
            ),
            map(_recovery, document["recovery"]),
        )
    if "memory" in document:
        lines += _table(
            ("model", "plan", "devices", "peak MiB", "predicted MiB", "by predicted"),
            map(_memory, document["memory"]),
        )
    if "speed" in document:
        lines += _table(
            (
                "model",
                "precision",
                "contender",
                "steps/s",
                "by the loop",
                "host ms a step",
                "by the loop",
                "peak GiB",
                "step by predicted",
                "memory by predicted",
            ),
            map(_speed, document["speed"]),
        )
    unexpected = wrong(document)
    return "\n".join(
        [*lines, f"Not as it should be: {len(unexpected)}", *(f"- {line}" for line in unexpected)]
    )


def _memory(row: Mapping[str, Any]) -> tuple[Any, ...]:
    first = row["model"], f"`{row['plan']}`", row["devices"]
    if "peak_memory_bytes" not in row:
        return *first, row["reason"], "", ""
    predicted, part = row["predicted_bytes"], row["of_predicted"]
    return (
        *first,
        f"{row['peak_memory_bytes'] / 2**20:.1f}",
        "" if predicted is None else f"{predicted / 2**20:.1f}",
        "" if part is None else f"{part:.2f}",
    )


def _recovery(row: Mapping[str, Any]) -> tuple[Any, ...]:
    first = f"`{row['plan']}`", row["devices"]
    if row.get("next_step_s") is None:
        return *first, f"{row['verdict']} {row['reason']}", "", "", ""
    return (
        *first,
        f"{row['next_step_s']:.2f}",
        row["recomputed_updates"],
        row["samples_lost"],
        row["weights"] if row["weights"] == "equal" else f"off by {row['difference']:.0e}",
    )


def _first_line(row: Mapping[str, Any]) -> str:
    return shorten(str(row["reason"]).partition("\n")[0], 120, placeholder=" ...")


def _speed(row: Mapping[str, Any]) -> tuple[Any, ...]:
    first = row["model"], row["precision"], row["contender"]
    if "steps_per_s" not in row:
        return *first, row["reason"], "", "", "", "", "", ""
    return (
        *first,
        f"{row['steps_per_s']:.2f}",
        "" if row["ratio"] is None else f"{row['ratio']:.2f}",
        f"{1e3 * row['host_s']:.2f}",
        "" if row["host ratio"] is None else f"{row['host ratio']:.2f}",
        f"{row['peak_memory_bytes'] / 2**30:.2f}",
        *(
            f"{row[name]:.2f}" if name in row else ""
            for name in ("step_s of predicted", "memory of predicted")
        ),
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows),
        "",
    ]
