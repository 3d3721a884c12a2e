"""Writes a run, a study or a proof as one HTML file that needs no network: `paceline report DIR`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.base.document import strict
from paceline.base.errors import UsageError
from paceline.base.tables import three_digits
from paceline.proof.certificate import DOCUMENT as CERTIFICATE
from paceline.reports.diagnosis import (
    AVOIDABLE,
    COMPUTING,
    PREDICTED_PARTS,
    Diagnosis,
    diagnose,
    rank_seconds,
    step_parts,
)
from paceline.reports.html import (
    MIB,
    Page,
    Section,
    Tile,
    day,
    duration,
    figure,
    interval,
    place,
    plural,
    prepare,
    shown,
    size,
)
from paceline.reports.proof import of_proof
from paceline.reports.record import RunRecord
from paceline.reports.study import of_study
from paceline.runs import documents, folder

if TYPE_CHECKING:
    from paceline.reports.charts import Chart

REPORT = "report.html"
MOST_PLANS = 8  # plans that the page lists
MOST_BARS = 40  # bars of a chart; more would make a page's figures hard to find


def write(path: Path, *, to: Path | None = None) -> Path:
    """Write the page of a run's, a study's or a proof's folder, and return its path.

    Raises:
        UsageError: the folder is none of these, or a package that draws is missing.
    """
    target = to or path / REPORT
    prepare(target)
    return folder.write_page(target, page(path))


def page(path: Path) -> str:
    """Return the page's text. Every value of the folder is escaped. Pictures are drawn here or by
    the run.
    """
    return _content(path).text()


def _content(path: Path) -> Page:
    if (path / folder.PLAN).exists():
        record = RunRecord.read(path)
        return Page(
            f"{place(path)} · {record.plan['plan']}",
            _subtitle(record),
            _with_faster_plan(diagnose(record), record).lines(),
            _tiles(record),
            list(_of_run(record)),
            strict(record.summary),
        )
    if (path / folder.STUDY).exists():
        study = documents.read(path / folder.STUDY, documents.StudyDocument)
        return of_study(study, path)
    if (path / CERTIFICATE).exists():
        return of_proof(folder.read_document(path, CERTIFICATE))
    raise UsageError(
        f"{path} is not the folder of a run, a search or a proof: it has no {folder.PLAN}, {folder.STUDY} or "
        f"{CERTIFICATE}",
        hint="paceline train JOB --run DIR writes one",
    )


def _considered(record: RunRecord) -> list[tuple[str, float, int]]:
    """Return the plans that were considered when the run's plan was chosen: each with its step in
    steps of the run's plan, as predicted, and its memory in bytes.
    """
    step_s = record.predicted.get("step_s")
    return [
        (each["plan"], each["step_s"] / step_s, each["peak_memory_bytes"])
        for each in (record.predicted.get("considered") or ())[:MOST_PLANS]
        if step_s
    ]


def _with_faster_plan(judged: Diagnosis, record: RunRecord) -> Diagnosis:
    """Return the verdict. If a plan that was considered is predicted to be at least 5 % faster, that
    plan is the next thing to try.
    """
    plans = _considered(record)
    if not plans or judged.limit is None or judged.limit in AVOIDABLE:
        return judged
    name, ratio, _ = min(plans, key=lambda plan: plan[1])
    if ratio >= 0.95:
        return judged
    return replace(
        judged,
        next=f"--plan '{name}': its step is predicted to take {ratio:.2f} of this plan's",
        gain=1 / ratio,
        outlook={"gain": f"{1 / ratio:.2f} times as fast, as predicted"},
    )


# --- The sections of a run --------------------------------------------------------------------------------------


def _subtitle(record: RunRecord) -> str:
    kind = "CPU" if str(record.plan.get("devices", "")).startswith("cpu") else "GPU"
    facts = (
        plural(record.plan.get("world_size", 1), f"{kind} rank"),
        plural(_num_steps(record), "step"),
        day(record.origin.get("began", "")),
        "finished" if record.summary else "did not end",
    )
    return " · ".join(filter(None, facts))


def _num_steps(record: RunRecord) -> int:
    return int(record.summary.get("steps") or max((row["step"] for row in record.steps), default=0))


def _tiles(record: RunRecord) -> list[Tile]:
    """Return the figures that most readers look for; of a run that did not end, its last ones."""
    last, evaluation = ({}, *record.steps)[-1], ({}, *record.evaluations)[-1]
    figures = {
        **evaluation,
        "final_loss": last.get("loss"),
        "step_s": median([row["step_s"] for row in record.steps] or [0.0]) or None,
        **record.summary,
        "steps": _num_steps(record),
    }
    metrics = figures.get("metrics") or {}
    figures |= metrics
    low, high, memory = (
        record.predicted.get(name) for name in ("step_s_low", "step_s_high", "peak_memory_bytes")
    )
    notes = {
        "validation_loss": f"training {shown(figures['final_loss'])}",
        **dict.fromkeys(list(metrics)[:1], "validation"),
        "samples_per_s": f"{shown(figures.get('samples'))} samples",
        "step_s": f"predicted {interval(low, high)}" if low and high else "",
        "peak_memory_bytes": f"predicted {size(memory)}" if memory else "",
        "wall_s": plural(figures["steps"], "step"),
        "final_loss": "training",
        "steps": "",
    }
    known = {name: note for name, note in notes.items() if figures.get(name) is not None}
    return [Tile(*figure(name, figures[name]), note) for name, note in known.items()][:6]


def _of_run(record: RunRecord) -> Iterator[Section]:
    if message := record.failure.get("message", ""):
        yield Section("What it said", listing=message)
    if record.steps:
        low, high = record.predicted.get("step_s_low"), record.predicted.get("step_s_high")
        yield Section(
            "Training",
            "Thin lines are single steps, thick ones their running median."
            + " The band is the predicted interval of 80 % of cases." * bool(low and high),
            [
                *_training(record),
                *_speed(record, (1e3 * low, 1e3 * high) if low and high else None),
            ],
        )
    yield from _step_time(record)
    yield from _memory(record)
    if record.schedule:
        yield Section(
            "Schedule",
            "What each rank did in the traced steps. Numbers are micro-batches; where nothing is "
            "drawn, a rank waits.",
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
    yield from _other_plans(record)
    if (record.path / CERTIFICATE).exists():
        yield from of_proof(folder.read_document(record.path, CERTIFICATE)).sections
    rows = _figures(record.summary)
    yield Section(
        "All figures",
        "" if record.summary else "The run did not end, so there is no summary.",
        rows=rows,
        folded=f"{len(rows)} figures of summary.json",
    )
    yield _source(record)


def _other_plans(record: RunRecord) -> Iterator[Section]:
    from paceline.reports import charts

    if plans := _considered(record):
        bars = {name: {"step": ratio} for name, ratio, _ in plans}
        yield Section(
            "Other plans on these devices",
            "The best plan of each kind, by the prices from which this run's plan was chosen.",
            [charts.stacked(bars, title="step, in steps of this plan, as predicted", unit="×")],
            ("plan", "its step", "memory a rank"),
            [(name, f"{ratio:.2f} ×", size(num_bytes)) for name, ratio, num_bytes in plans],
        )


def _source(record: RunRecord) -> Section:
    """Return where the run comes from in one line, and the details."""
    job, git, settings = (
        record.job,
        record.origin.get("git") or {},
        record.job.get("settings") or {},
    )
    words = [
        f"{place(job['path'])}:{job['function']}" if job else "a job made in Python",
        *(f"--set {name}={value}" for name, value in settings.items()),
    ]
    if git.get("commit"):
        changed = git.get("modified")
        words.append(
            f"at {git['commit'][:7]} ({f'{changed} files changed' if changed else 'clean'})"
        )
    rows = [
        (f"{name} {inner}".strip().replace("_", " "), shown(value))
        for name, group in {**record.origin, **record.job}.items()
        if name != "files"
        for inner, value in (group if isinstance(group, Mapping) else {"": group}).items()
    ]
    return Section(
        "Where it comes from", " ".join(words), rows=rows, folded="versions, command and commit"
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
            (f"rank {rank}", *(duration(each.get(kind, 0.0)) for kind in kinds))
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
    workers = record.summary.get("workers") or {}
    if counts:
        ordered = dict(sorted(counts.items(), key=lambda item: item[0].zfill(9))[:MOST_BARS])
        bars = {plural(int(name), "update"): {"": count} for name, count in ordered.items()}
        many, total = len(workers), sum(counts.values())
        yield Section(
            "Staleness",
            "How many updates of others were made after a gradient's weights were fetched."
            + (
                f" {many} workers make a step of {many} updates. The plan's staleness bounds how many parts "
                "a worker is ahead of the slowest one, which is not a bound on these updates."
                if many
                else ""
            ),
            [charts.stacked(bars, title="gradients by updates that they missed")],
            ("missed", "gradients", "part of all"),
            [
                (name, f"{bar['']:,}", f"{100 * bar[''] / total:.1f} %")
                for name, bar in bars.items()
            ],
        )
    kinds = list(dict.fromkeys(kind for each in workers.values() for kind in each))
    if workers:
        yield Section(
            "Workers",
            head=("worker", *(figure(kind, 0.0)[0] for kind in kinds)),
            rows=[
                (str(name), *(figure(kind, each.get(kind))[1] for kind in kinds))
                for name, each in workers.items()
            ],
        )


def _figures(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all figures as rows, with their units."""
    flat = {**summary, **(summary.get("metrics") or {})}
    check = flat.get("check") or {}
    rows = [
        figure(name, value)
        for name, value in flat.items()
        if value is not None and not isinstance(value, Mapping)
    ]
    if check:
        words = ": ".join(filter(None, (check["verdict"], check.get("reason"))))
        rows.append(("first update against one device", words))
    return rows


def _training(record: RunRecord) -> list[Chart]:
    from paceline.reports import charts

    steps = [row["step"] for row in record.steps]
    losses = [row["loss"] for row in record.steps]
    series: dict[str, charts.Line] = {"training": (steps, losses)}
    evaluated = [row["step"] for row in record.evaluations]
    if evaluated:
        series["validation"] = (evaluated, [row["validation_loss"] for row in record.evaluations])
    known = [value for _, values in series.values() for value in values if value is not None]
    drawn = [charts.lines(series, title="loss", log=charts.is_wide(known))]
    for name in _metrics(record.steps) | _metrics(record.evaluations):
        measured = {"training": record.steps, "validation": record.evaluations}
        series = {
            kind: ([row["step"] for row in rows], [_metric(row, name) for row in rows])
            for kind, rows in measured.items()
            if name in _metrics(rows)
        }
        drawn.append(charts.lines(series, title=name))
    rates = [row.get("lr") for row in record.steps]
    if len(set(rates)) > 1:
        drawn.append(charts.lines({"lr": (steps, rates)}, title="learning rate"))
    return drawn


def _metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, None]:
    """Return the names of the metrics in these lines, in their order."""
    return {name: None for row in rows for name in row.get("metrics") or {}}


def _metric(row: Mapping[str, Any], name: str) -> float | None:
    value: float | None = (row.get("metrics") or {}).get(name)
    return value


def _speed(record: RunRecord, predicted: tuple[float, float] | None) -> list[Chart]:
    """Return charts of each step's time, in ms and with the predicted one, and of the throughput."""
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
    return [
        charts.lines(
            {"measured": (steps, took)},
            title="time of a step, ms",
            clipped=True,
            band=predicted,
            marks={"saved": [row["step"] for row in record.saves]} if record.saves else None,
        ),
        charts.lines({"measured": (steps, rates)}, title="samples a second", clipped=True),
    ]


def _step_time(record: RunRecord) -> Iterator[Section]:
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
    yield _parted("Where a step's time goes", bars, "ms", text=text, total="a step")


def _parted(
    title: str, bars: Mapping[str, Mapping[str, float]], unit: str, *, total: str, text: str = ""
) -> Section:
    """Return a chart of parts, and beside it a table of the same figures, which is its legend."""
    from paceline.reports import charts

    drawn = charts.stacked(bars, title=f"{total}, {unit}", unit=unit)
    rows = [
        (part, *(three_digits(bar[part]) if part in bar else "" for bar in bars.values()))
        for part in dict.fromkeys(part for bar in bars.values() for part in bar)
    ]
    return Section(title, text, [replace(drawn, keys={})], (unit, *bars), rows)


def _memory(record: RunRecord) -> Iterator[Section]:
    ranks = record.predicted.get("ranks") or []
    if not ranks:
        return
    bars = {
        f"{_named(each['rank'])}, predicted": {
            name: held / MIB for name, held in each["ledger"].items() if held
        }
        for each in ranks
    }
    peak = record.summary.get("peak_memory_bytes")
    if peak is not None:
        bars["fullest rank, measured"] = {"measured peak": peak / MIB}
    yield _parted("Memory", bars, "MiB", total="memory of a rank")


def _named(rank: Any) -> str:
    return rank if isinstance(rank, str) else f"rank {rank}"


# --- Values -----------------------------------------------------------------------------------------------------


def _when(time_s: float) -> str:
    return (
        datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        if 0 < time_s < 1e11
        else ""
    )


def _head(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    head = _head(rows)
    return [[shown(row.get(name)) for name in head] for row in rows]
