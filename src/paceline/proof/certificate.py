"""The certificate of a verification: a document for programs and a table for people, in one folder."""

from __future__ import annotations

import json
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.base.document import strict

DOCUMENT, TABLE = "certificate.json", "certificate.txt"
VERSION = 2
MARKS = {
    "passed": "passed",
    "failed": "FAILED",
    "coupled": "COUPLED",
    "inconclusive": "UNCLEAR",
    "refused": "no plan",
}
WIDTH = 99  # characters in a line of the table
_PLAN, _NAME = 27, 26  # characters in the column of a plan, and in that of a parameter


def document(
    subject: Mapping[str, Any],
    plans: Sequence[Mapping[str, Any]],
    *,
    job: Mapping[str, Any] | None,
    run: Mapping[str, Any],
    yardstick: Mapping[str, Any],
    coupling: Mapping[str, Any] | None,
    note: str | None,
) -> dict[str, Any]:
    """Return the content of certificate.json.

    Args:
        subject: The model, versions, device and randomness. If the user named devices, it also has
            their names (`ranks`) and the operators that have no deterministic form there
            (`nondeterministic`).
        plans: For each plan, what `verify --json` prints of it.
        job: The file, its function and its settings; None for a job that was made in Python.
        run: Batch, seed, steps, precision and the like.
        yardstick: By precision, then by "loss", "gradient" and "weight".
        coupling: Why no plan that cuts the batch can be exact; None if nothing was found.
        note: What the certificate does not cover.
    """
    judged = [plan for plan in plans if plan["refused"] is None or plan["asked_for"]]
    fields: dict[str, Any] = strict(
        {
            "certificate": "paceline verify",
            "version": VERSION,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "passed": bool(judged) and all(plan["passed"] for plan in judged),
            "job": job,
            **subject,
            "run": run,
            "yardstick": yardstick,
            "coupling": coupling,
            "note": note,
            "plans": list(plans),
        }
    )
    return fields


def write(folder: Path, document: Mapping[str, Any]) -> None:
    """Write both files, each in one move. The document is last, so its table exists when the
    document does.
    """
    from paceline.base.files import write_text

    write_text(folder / TABLE, table(document) + "\n")
    write_text(folder / DOCUMENT, json.dumps(document, indent=1, allow_nan=False) + "\n")


def table(document: Mapping[str, Any]) -> str:
    """Return the document as text for people; no line is longer than `WIDTH`."""
    plans = document["plans"]
    counts = Counter(verdict(plan) for plan in plans)
    others = "".join(
        f", {counts[kind]} {kind}" for kind in ("coupled", "inconclusive") if counts[kind]
    )
    result = (
        f"{counts['passed']} plans passed, {counts['failed']} failed{others}, {counts['refused']} are none for "
        "this model"
    )
    return "\n".join(
        [
            f"Paceline certificate, {document['written']}: {result}",
            "",
            *(line for label, text in facts(document) for line in _row(label, text)),
            "",
            *_yardstick(document["yardstick"]),
            "",
            *_verdicts(plans),
        ]
    )


def verdict(plan: Mapping[str, Any]) -> str:
    """Return the key in `MARKS` of a plan."""
    if "verdict" in plan:
        return str(plan["verdict"])
    return "refused" if plan["refused"] else "passed" if plan["passed"] else "failed"


def facts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what was compared: labels with texts."""
    job, model, run, device = (
        document["job"],
        document["model"],
        document["run"],
        document["device"],
    )
    if job:
        settings = " ".join(f"{name}={value}" for name, value in job["settings"].items())
        yield ("job", f"{job['path']}:{job['function']} {settings}".rstrip())
    yield (
        "model",
        f"{model['class']}, {model['parameters']:,} parameters, {model['trainable']:,} of them "
        "trained",
    )
    yield ("initial weights", f"sha256 {model['initial_weights_sha256']}")
    yield (
        "run",
        f"{run['steps']} steps of {run['batch']} samples, seed {run['seed']}, {run['precision']}, "
        f"{run['optimizer']}" + (f", clip {run['clip']:g}" if run["clip"] else ""),
    )
    yield from _device(device)
    yield (
        "versions",
        ", ".join(f"{name} {version}" for name, version in document["versions"].items()),
    )
    yield ("randomness", _random(document["randomness"]))
    coupling = document["coupling"]
    yield (
        "coupling",
        "no layer and no loss was seen to mix the samples of a batch"
        if coupling is None
        else f"{coupling['found']}. Instead: {coupling['instead']}",
    )
    if document["note"]:
        yield ("note", document["note"])


def _device(device: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield facts about where one device and the ranks computed; for GPUs also about what they
    round to TF32.
    """
    if device["kind"] == "cpu":
        yield ("device", f"cpu ({device['machine']}, {device['capability']})")
        return
    but = f" but for {', '.join(device['nondeterministic'])}" if device["nondeterministic"] else ""
    yield (
        "device",
        f"{device['kind']} ({device['name']}, {device['capability']}), one device with "
        f"deterministic algorithms{but}; ranks on {', '.join(device['ranks'])}",
    )
    on, off = (
        [name for name, is_on in device["tf32"].items() if is_on == wanted]
        for wanted in (True, False)
    )
    yield (
        "TF32",
        "; ".join(
            f"{word} for {' and '.join(names)}"
            for word, names in (("on", on), ("off", off))
            if names
        ),
    )


def _random(randomness: Mapping[str, Any]) -> str:
    off, left = randomness["switched_off"], randomness["left_on"]
    names = list(off)
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    sentence = (
        f"compared switched off, in {shown}: random operators gave the mean of what they draw"
        if off
        else "nothing that is random was called"
    )
    return f"{sentence}; left on: {', '.join(left)}" if left else sentence


def _yardstick(yardstick: Mapping[str, Any]) -> Iterator[str]:
    yield "How far rounding moves one device's own figures, and what a plan may be off by there:"
    for precision, kind, spread, tolerance, step, name in limits(yardstick):
        where = f" of {_cut(name, _NAME)}" if name else ""
        yield (
            f"  {precision:<8} {kind:<9} spread {spread:<8} "
            f"may be off by {tolerance:<8} step {step}{where}"
        )


def limits(yardstick: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a precision, a kind of figure, how far rounding moves it, by how much a plan may differ,
    and the step and parameter where that was measured.
    """
    for precision, kinds in yardstick.items():
        for kind, figures in kinds.items():
            spread, tolerance = _figure(figures["spread"]), _figure(figures["tolerance"])
            yield precision, kind, spread, tolerance, str(figures["step"]), figures["name"] or ""


def _verdicts(plans: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield two lines per plan, one for each precision, beside the plan's text; then why it failed
    or was refused.
    """
    yield f"{'':<8}{'plan':<{_PLAN}}  {'in':<8} {'loss':<8} {'gradient':<8} {'weight':<8} nearest to its limit"
    for plan in plans:
        mark = MARKS[verdict(plan)]
        words = textwrap.wrap(plan["plan"], _PLAN) or [""]
        figures = [_line(each) for each in plan["precisions"]]
        for number in range(max(len(words), len(figures))):
            left = f"{mark if number == 0 else '':<8}{words[number] if number < len(words) else '':<{_PLAN}}"
            yield f"{left}  {figures[number] if number < len(figures) else ''}".rstrip()
        for remark in remarks(plan):
            for line in remark.splitlines():
                yield from textwrap.wrap(
                    line, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8
                )


def remarks(plan: Mapping[str, Any]) -> list[str]:
    """Return why a plan failed or was refused, and what its comparison would have noticed."""
    given = plan["refused"], plan["reason"], plan.get("overflow"), _power(plan), _resumed(plan)
    return [remark for remark in given if remark]


def _power(plan: Mapping[str, Any]) -> str | None:
    """Return a text about which errors the comparison would have noticed."""
    power = plan.get("power")
    if power is None:
        return None
    dropped = {
        True: " and a missing part of a batch",
        False: ", not a missing part of a batch",
        None: "",
    }
    return (
        f"would have noticed an error of {power['planted']:.1%} in {power['caught']} of {power['gradients']} "
        f"gradients{dropped[power['dropped']]}"
    )


def _resumed(plan: Mapping[str, Any]) -> str | None:
    return (
        f"went on from a checkpoint of '{plan['resumed_from']}'"
        if plan.get("resumed_from")
        else None
    )


def _line(precision: Mapping[str, Any]) -> str:
    name, loss, gradient, weight, share, furthest = comparison(precision)
    return (
        f"{name:<8} {loss:<8} {gradient:<8} {weight:<8} {share} "
        f"{_cut(furthest, _NAME - len(share) - 1)}"
    )


def comparison(precision: Mapping[str, Any]) -> tuple[str, str, str, str, str, str]:
    """Return a precision's name, the largest difference of losses, gradients and weights, which part
    of its limit the nearest one uses up, and where that is."""
    worst = precision["worst"]
    kind = max(worst, key=lambda kind: _share(worst[kind]))
    share = _share(worst[kind])
    return (
        precision["precision"],
        _figure(precision["max_loss_diff"]),
        _figure(precision["max_gradient_diff"]),
        _figure(precision["max_param_diff"]),
        f"{100 * share:.0f} %" if share < 10 else f"{share:.0e}x" if share < 1e300 else "more",
        worst[kind]["name"] or "loss",
    )


def _share(furthest: Mapping[str, Any]) -> float:
    """Return which part of its limit a difference uses up."""
    off, allowed = furthest["diff"], furthest["tolerance"]
    if off is None:
        return float("inf")
    return off / allowed if allowed else (float("inf") if off else 0.0)


def _row(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{label:<17}", subsequent_indent=" " * 17
    ) or [label]


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.1e}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"...{text[3 - most :]}"
