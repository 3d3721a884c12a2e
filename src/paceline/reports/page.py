"""Writes a run, a study or a proof as one HTML file that needs no network: `paceline report DIR`."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from paceline.base.document import strict
from paceline.base.errors import UsageError, with_extra
from paceline.proof.certificate import DOCUMENT as CERTIFICATE
from paceline.proof.certificate import table as certificate_table
from paceline.reports.diagnosis import (
    AVOIDABLE,
    COMPUTING,
    PREDICTED_PARTS,
    Diagnosis,
    diagnose,
    rank_seconds,
    step_parts,
)
from paceline.reports.record import RunRecord
from paceline.runs import documents, folder

REPORT = "report.html"
MIB = 2**20
MOST_BARS = 40  # bars of a chart; more would make a page's figures hard to find


@dataclass(frozen=True)
class Chart:
    svg: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    text: str = ""
    charts: Sequence[Chart] = ()
    # A table.
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    picture: str = ""  # an SVG that is not scaled, shown as an image, so that no script in it runs
    listing: str = ""  # text that is shown unchanged


@dataclass(frozen=True)
class Alternatives:
    """Plans that were priced for a run's job on its devices."""

    # Name, step time divided by that of the run's own plan (both as predicted, without a trial),
    # and memory in bytes.
    plans: Sequence[tuple[str, float, int]] = ()
    note: str = ""  # why there are no plans, or what they leave out

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest plan that is predicted to be at least 5 % faster."""
        faster = [(name, ratio) for name, ratio, _ in self.plans if ratio < 0.95]
        return min(faster, key=lambda pair: pair[1], default=None)


def write(path: Path, *, to: Path | None = None, alternatives: Alternatives | None = None) -> Path:
    """Write the page of a run's, a study's or a proof's folder, and return its path.

    Raises:
        UsageError: the folder is none of these, or a package that draws is missing.
    """
    target = to or path / REPORT
    prepare(target)
    text = page(path, alternatives or Alternatives())
    folder.writable(target.parent)
    from paceline.base.files import write_text

    write_text(target, text)
    return target


def page(path: Path, alternatives: Alternatives) -> str:
    """Return the page's text. Every value of the folder is escaped. Pictures are drawn here or by
    the run.
    """
    return rendered(*_content(path, alternatives))


def prepare(to: Path) -> None:
    """Check that a page can be written, before anything takes time for it.

    Raises:
        UsageError: a package that makes pages is missing, the folder can't be written to, or a file
            of another kind would be lost.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"a report needs a package that is not here: {error.name}", hint=with_extra("report")
        ) from error
    if to.exists() and (to.is_dir() or to.suffix not in (".html", ".htm")):
        raise UsageError(
            f"can't write the page {to}: there is something else of that name",
            hint="a name in .html",
        )
    above = next(parent for parent in to.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"can't write the page {to}: {above} can't be written")


def rendered(
    title: str,
    subtitle: str,
    verdict: Mapping[str, str],
    sections: Sequence[Section],
    data: Mapping[str, Any],
) -> str:
    """Return a page's text.

    data: the figures for programs.
    """
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("paceline.reports", "."), autoescape=True, trim_blocks=True
    )
    environment.filters["base64"] = lambda text: base64.b64encode(
        text.encode(errors="replace")
    ).decode()
    return environment.get_template("page.html.j2").render(
        title=title, subtitle=subtitle, verdict=verdict, sections=sections, data=data
    )


def _content(
    path: Path, alternatives: Alternatives
) -> tuple[str, str, Mapping[str, str], list[Section], Mapping[str, Any]]:
    """Return the arguments for `rendered`."""
    if (path / folder.PLAN).exists():
        record = RunRecord.read(path)
        return (
            f"{record.name}: {record.plan['plan']}",
            _subtitle(record),
            _with_alternative(diagnose(record), alternatives).lines(),
            list(_of_run(record, alternatives)),
            strict(record.summary),
        )
    if (path / folder.STUDY).exists():
        study = documents.read(path / folder.STUDY, documents.StudyDocument)
        return (
            f"search {study['study']}",
            f"{len(study['trials'])} trials",
            _of_best(study),
            list(_of_study(study)),
            strict(study),
        )
    if (path / CERTIFICATE).exists():
        proof = folder.read_document(path, CERTIFICATE)
        return (
            "certificate",
            str(proof.get("written", "")),
            {},
            [_certificate(proof)],
            strict(proof),
        )
    raise UsageError(
        f"{path} is not the folder of a run, a search or a proof: it has no {folder.PLAN}, {folder.STUDY} or "
        f"{CERTIFICATE}",
        hint="paceline train JOB --run DIR writes one",
    )


def _subtitle(record: RunRecord) -> str:
    devices = record.plan.get("devices", "")
    return f"{record.plan.get('world_size', 1)} ranks on {devices}; {record.path.resolve()}"


def _with_alternative(judged: Diagnosis, alternatives: Alternatives) -> Diagnosis:
    """Return the verdict. If a faster plan was priced, that plan is the next thing to try."""
    if not alternatives.plans or judged.limit is None or judged.limit in AVOIDABLE:
        return judged
    if alternatives.best is None:
        return replace(
            judged,
            next=f"{judged.next}; of the plans priced for these devices, none is predicted to be "
            "5 % faster",
        )
    name, ratio = alternatives.best
    return replace(
        judged,
        next=f"--plan '{name}': its step is predicted to take {ratio:.2f} of this plan's",
        gain=1 / ratio,
        outlook={"gain": f"{1 / ratio:.2f} times as fast, as predicted"},
    )


# --- The sections of a run --------------------------------------------------------------------------------------


def _of_run(record: RunRecord, alternatives: Alternatives) -> Iterator[Section]:
    yield _figures(record)
    if record.steps:
        yield _training(record)
        yield _speed(record)
    yield from _step_time(record)
    yield from _memory(record)
    if record.schedule:
        yield Section(
            "Schedule",
            "What each rank did in the traced steps. White is waiting.",
            picture=record.schedule,
        )
    yield from _ranks(record)
    if len(starts := record.starts()) > 1:
        yield Section(
            "Starts and recoveries",
            "A start that undid updates went on from an earlier checkpoint or copy.",
            head=("start", "time", "plan", "ranks", "after update", "updates undone"),
            rows=[
                (
                    str(start.launch.launch),
                    _when(start.launch.time),
                    start.launch.plan,
                    str(start.launch.world_size),
                    f"{start.launch.after:,}",
                    f"{start.undone:,}",
                )
                for start in starts
            ],
        )
    yield from _servers(record)
    if record.events:
        events = [
            {**row, "time": _when(row["time"])} if isinstance(row.get("time"), float) else row
            for row in record.events
        ]
        yield Section("Losses of ranks and recoveries", head=_head(events), rows=_rows(events))
    if alternatives.plans or alternatives.note:
        yield Section(
            "Other plans on these devices",
            alternatives.note,
            head=("plan", "its step", "memory a rank"),
            rows=[
                (name, f"{ratio:.2f} of this plan's, as predicted", f"{memory / MIB:,.0f} MiB")
                for name, ratio, memory in alternatives.plans
            ],
        )
    if (record.path / CERTIFICATE).exists():
        yield _certificate(folder.read_document(record.path, CERTIFICATE))
    yield Section(
        "Where it comes from",
        rows=[
            (name.replace("_", " "), _value(value))
            for name, value in {**record.origin, **record.job}.items()
            if name != "files"
        ],
    )


def _ranks(record: RunRecord) -> Iterator[Section]:
    """Yield a section that says which ranks wait for which, for a traced run."""
    seconds = rank_seconds(record)
    if len(seconds) < 2:
        return
    kinds = list(dict.fromkeys(kind for each in seconds.values() for kind in each))
    busiest = max(seconds, key=lambda rank: seconds[rank].get(COMPUTING, 0.0))
    others = median(each.get(COMPUTING, 0.0) for rank, each in seconds.items() if rank != busiest)
    longest = seconds[busiest].get(COMPUTING, 0.0)
    text = (
        "No rank computed for 10 % longer than the others."
        if longest <= 1.1 * others
        else (
            f"Rank {busiest} computed for {longest / others:.2f} times as long as the others."
            if others
            else f"Rank {busiest} alone computed."
        )
    )
    yield Section(
        "Stragglers",
        text,
        head=("in the traced steps", *kinds),
        rows=[
            (f"rank {rank}", *(_ms(1e3 * each.get(kind, 0.0)) for kind in kinds))
            for rank, each in seconds.items()
        ],
    )


def _servers(record: RunRecord) -> Iterator[Section]:
    """Yield sections on the staleness of gradients and on the waiting time of workers under
    parameter servers.
    """
    from paceline.reports import charts

    counts = {
        name: count for name, count in (record.summary.get("staleness") or {}).items() if count
    }
    if counts:
        shown = dict(sorted(counts.items(), key=lambda item: item[0].zfill(9))[:MOST_BARS])
        yield Section(
            "Staleness",
            "How many updates of others a gradient's weights missed.",
            [
                Chart(
                    charts.stacked(
                        {name: {"gradients": count} for name, count in shown.items()}, x="gradients"
                    ),
                    "gradients by updates missed",
                )
            ],
        )
    workers = record.summary.get("workers") or {}
    kinds = list(dict.fromkeys(kind for each in workers.values() for kind in each))
    if workers:
        yield Section(
            "Workers",
            head=("", *(kind.replace("_", " ") for kind in kinds)),
            rows=[
                (f"worker {name}", *(_value(each.get(kind)) for kind in kinds))
                for name, each in workers.items()
            ],
        )


def _figures(record: RunRecord) -> Section:
    flat = {**record.summary, **(record.summary.get("metrics") or {})}
    check = flat.get("check") or {}
    rows = [
        (name, _value(value))
        for name, value in flat.items()
        if value is not None and not isinstance(value, Mapping)
    ]
    if check:
        rows.append(
            (
                "first update against one device",
                f"{check['verdict']} {check.get('reason') or ''}".strip(),
            )
        )
    return Section(
        "Figures",
        "" if record.summary else "The run did not end, so there is no summary.",
        listing=record.failure.get("message", ""),
        rows=rows,
    )


def _training(record: RunRecord) -> Section:
    from paceline.reports import charts

    steps = [row["step"] for row in record.steps]
    losses = [row["loss"] for row in record.steps]
    series: dict[str, charts.Line] = {"training": (steps, losses)}
    evaluated = [row["step"] for row in record.evaluations]
    if evaluated:
        series["validation"] = (evaluated, [row["validation_loss"] for row in record.evaluations])
    known = [value for _, values in series.values() for value in values if value is not None]
    is_wide = bool(known) and min(known) > 0 and max(known) > 20 * min(known)
    drawn = [Chart(charts.lines(series, x="step", y="loss", log=is_wide), "loss")]
    for name in _metrics(record.steps) | _metrics(record.evaluations):
        measured = {"training": record.steps, "validation": record.evaluations}
        series = {
            kind: ([row["step"] for row in rows], [_metric(row, name) for row in rows])
            for kind, rows in measured.items()
            if name in _metrics(rows)
        }
        drawn.append(Chart(charts.lines(series, x="step", y=name), name))
    rates = [row.get("lr") for row in record.steps]
    if len(set(rates)) > 1:
        drawn.append(
            Chart(
                charts.lines({"lr": (steps, rates)}, x="step", y="learning rate"), "learning rate"
            )
        )
    return Section("Training", charts=drawn)


def _metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, None]:
    """Return the names of the metrics in these lines, in their order."""
    return {name: None for row in rows for name in row.get("metrics") or {}}


def _metric(row: Mapping[str, Any], name: str) -> float | None:
    value: float | None = (row.get("metrics") or {}).get(name)
    return value


def _speed(record: RunRecord) -> Section:
    from paceline.reports import charts

    steps, took = (
        [row["step"] for row in record.steps],
        [1e3 * row["step_s"] for row in record.steps],
    )
    samples = [row["samples"] for row in record.steps]
    done = [after - before for before, after in zip([0, *samples], samples, strict=False)]
    rates = [
        1e3 * count / ms if ms and count > 0 else None for count, ms in zip(done, took, strict=True)
    ]
    low, high = record.predicted.get("step_s_low"), record.predicted.get("step_s_high")
    marks = {"saved": [row["step"] for row in record.saves]} if record.saves else None
    return Section(
        "Speed",
        charts=[
            Chart(
                charts.lines(
                    {"measured": (steps, took)},
                    x="step",
                    y="step time, ms",
                    band=(1e3 * low, 1e3 * high) if low and high else None,
                    marks=marks,
                ),
                "time of a step; the band holds the predicted interval of 80 %",
            ),
            Chart(
                charts.lines({"measured": (steps, rates)}, x="step", y="samples a second"),
                "throughput",
            ),
        ],
    )


def _step_time(record: RunRecord) -> Iterator[Section]:
    from paceline.reports import charts

    breakdown, parts = record.predicted.get("breakdown") or {}, step_parts(record)
    bars = {
        "predicted": {
            PREDICTED_PARTS.get(name, name): 1e3 * seconds for name, seconds in breakdown.items()
        },
        "measured": {part.name: 1e3 * part.seconds for part in parts},
    }
    bars = {name: bar for name, bar in bars.items() if any(bar.values())}
    if not bars:
        return
    divided = [part.name for part in parts if not part.is_measured]
    text = (
        f"The run measured the whole step; {', '.join(divided)} are divided as the prediction divides them. "
        "--trace STEPS measures them."
        if divided
        else ""
    )
    yield Section(
        "Where a step's time goes",
        text,
        [Chart(charts.stacked(bars, x="ms of a step"), "predicted beside measured")],
        ("part", "predicted", "measured"),
        [
            (
                name,
                *(
                    _ms(bar.get(name))
                    for bar in (bars.get("predicted", {}), bars.get("measured", {}))
                ),
            )
            for name in dict.fromkeys(name for bar in bars.values() for name in bar)
        ],
    )


def _memory(record: RunRecord) -> Iterator[Section]:
    from paceline.reports import charts

    ranks = record.predicted.get("ranks") or []
    if not ranks:
        return
    bars = {
        f"{_named(each['rank'])}, predicted": {
            name: size / MIB for name, size in each["ledger"].items() if size
        }
        for each in ranks
    }
    peak = record.summary.get("peak_memory_bytes")
    if peak is not None:
        bars["fullest rank, measured"] = {"measured peak": peak / MIB}
    yield Section(
        "Memory",
        charts=[Chart(charts.stacked(bars, x="MiB"), "by what holds it")],
        head=("", "MiB"),
        rows=[(name, f"{sum(bar.values()):,.0f}") for name, bar in bars.items()],
    )


def _named(rank: Any) -> str:
    return rank if isinstance(rank, str) else f"rank {rank}"


# --- Studies and proofs -----------------------------------------------------------------------------------------


def _of_best(study: Mapping[str, Any]) -> dict[str, str]:
    best = study.get("best")
    if best is None:
        return {"verdict": "no trial has a result yet"}
    name = study["objectives"][0]["name"]
    return {
        "verdict": f"trial {best['trial']} is the best: {name} {_value(best['value'])}",
        "with": ", ".join(f"{key}={_value(value)}" for key, value in best["params"].items()),
        **({"train it": best["command"]} if best.get("command") else {}),
    }


def _of_study(study: Mapping[str, Any]) -> Iterator[Section]:
    from paceline.reports import charts

    done = [trial for trial in study["trials"] if trial.get("value") is not None]
    if done:
        objective = study["objectives"][0]
        pick = max if objective["direction"] == "maximize" else min
        values = [trial["value"] for trial in done]
        best = [pick(values[:count]) for count in range(1, len(values) + 1)]
        yield Section(
            "Progress",
            charts=[
                Chart(
                    charts.points(
                        [trial["number"] for trial in done],
                        values,
                        best,
                        x="trial",
                        y=objective["name"],
                    ),
                    objective["name"],
                )
            ],
        )
    for name, weights in _importances(study):
        yield Section(
            f"What {name} depends on",
            charts=[
                Chart(
                    charts.stacked(
                        {
                            parameter: {"importance": weight}
                            for parameter, weight in weights.items()
                        },
                        x="part of the spread",
                    ),
                    "importance of each parameter (fANOVA)",
                )
            ],
        )
    parameters = list(dict.fromkeys(name for trial in study["trials"] for name in trial["params"]))
    yield Section(
        "Trials",
        head=("trial", "state", "value", *parameters, "plan"),
        rows=[
            (
                str(trial["number"]),
                trial["state"],
                _value(trial.get("value", trial.get("values"))),
                *(_value(trial["params"].get(name)) for name in parameters),
                str(trial.get("plan", "")),
            )
            for trial in study["trials"]
        ],
    )


def _importances(study: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float]]]:
    """Return importances by objective. A study of one objective stores them by parameter only."""
    importances = study.get("importances") or {}
    if not importances:
        return []
    if all(isinstance(value, Mapping) for value in importances.values()):
        return [(name, weights) for name, weights in importances.items() if weights]
    return [(study["objectives"][0]["name"], importances)]


def _certificate(proof: Mapping[str, Any]) -> Section:
    try:
        return Section("Certificate", listing=certificate_table(proof))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the certificate is damaged: {error!r}", hint="paceline verify JOB writes a new one"
        ) from error


# --- Values -----------------------------------------------------------------------------------------------------


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return json.dumps(value) if isinstance(value, Mapping | list) else str(value)


def _when(time_s: float) -> str:
    return (
        datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        if 0 < time_s < 1e11
        else ""
    )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} ms"


def _head(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    head = _head(rows)
    return [[_value(row.get(name)) for name in head] for row in rows]
