"""Shows a search as a page: the best value over time, each parameter against it, the Pareto front."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.document import strict
from paceline.reports.html import Page, Section, Tile, place, plural, shown

if TYPE_CHECKING:
    from paceline.reports.charts import Chart

MOST_PARAMETERS = 12  # that are drawn against an objective
FEW_TRIALS = 20  # of fewer, importances are rough
JOURNAL = "journal.log"

Trial = Mapping[str, Any]


def of_study(study: Mapping[str, Any], path: Path) -> Page:
    """Return the page of study.json in the folder `path`."""
    trials, objectives = study["trials"], study["objectives"]
    picks = [max if each["direction"] == "maximize" else min for each in objectives]
    done = _ended(trials, "complete")
    columns = zip(*map(_values, done), strict=True)
    best = [done[column.index(pick(column))] for column, pick in zip(columns, picks, strict=False)]
    tiles = [Tile("trials with a result", f"{len(done)} of {len(trials)}")]
    tiles += [
        Tile(f"best {each['name']}", shown(_values(trial)[nth]), f"trial {trial['number']}")
        for nth, (each, trial) in enumerate(zip(objectives, best, strict=False))
    ]
    test = dict(study.get("test") or {})
    note = f"trial {test.pop('trial', '')}"
    tiles += [Tile(f"test {name}", shown(value), note) for name, value in test.items()]
    wanted = " and ".join(f"{each['direction']} {each['name']}" for each in objectives)
    return Page(
        f"{place(path)} · search",
        f"{plural(len(trials), 'trial')} · {wanted}",
        {**_verdict(study, len(done)), "explore": _dashboard(path)},
        tiles[:6],
        [*(_sections(study, done, picks) if done else ()), _table(study)],
        strict(study),
    )


def _values(trial: Trial) -> Sequence[Any]:
    return trial.get("values") or [trial.get("value")]


def _ended(trials: Sequence[Trial], state: str) -> list[Trial]:
    """Return the trials that ended so and have values, in the order of their ends."""
    kept = [trial for trial in trials if trial["state"] == state and None not in _values(trial)]
    return sorted(kept, key=_end_s)


def _end_s(trial: Trial) -> float:
    return trial.get("ended_s") or 0.0


def _verdict(study: Mapping[str, Any], num_done: int) -> dict[str, str]:
    best, name = study.get("best"), study["objectives"][0]["name"]
    if best is None:
        front = plural(len(study.get("pareto") or ()), "trial")
        text = (
            f"{front} of {num_done} on the Pareto front"
            if num_done
            else "no trial has a result yet"
        )
        return {"verdict": text}
    return {
        "verdict": f"trial {best['trial']} is the best: {name} {shown(best['value'])}",
        "with": _params(best["params"]),
        **({"train it": best["command"]} if best.get("command") else {}),
    }


def _params(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in params.items())


def _dashboard(path: Path) -> str:
    journal = path / JOURNAL
    where = shlex.quote(str(journal)) if journal.exists() else "URL (that of --storage)"
    return f"optuna-dashboard {where} opens this study in Optuna's own dashboard"


def _sections(
    study: Mapping[str, Any], done: Sequence[Trial], picks: Sequence[Any]
) -> Iterator[Section]:
    from paceline.reports import charts

    names = [each["name"] for each in study["objectives"]]
    pruned, importances = _ended(study["trials"], "pruned"), _importances(study)
    progress, shares, parameters = list[charts.Chart](), list[charts.Chart](), list[Section]()
    for nth, (name, pick) in enumerate(zip(names, picks, strict=True)):

        def line(trials: Sequence[Trial], nth: int = nth) -> charts.Line:
            return [*map(_end_s, trials)], [_values(trial)[nth] for trial in trials]

        ends, values = line(done)
        is_log, weights = charts.is_wide(values), importances.get(name) or {}
        progress.append(
            charts.points(
                {"a trial": (ends, values), **({"pruned": line(pruned)} if pruned else {})},
                title=f"{name} over time",
                x="seconds since the first trial began",
                line={"the best so far": (ends, [*accumulate(values, pick)])},
                log=(False, is_log),
            )
        )
        bars = {key: {"importance": 100 * weight} for key, weight in weights.items()}
        if bars:
            title = f"what {name} depends on, % of its spread (fANOVA)"
            shares.append(charts.stacked(bars, title=title, unit="%"))
        keys = sorted(_parameters(study), key=lambda key: -weights.get(key, 0.0))
        drawn = [_by_parameter(done, key, nth) for key in keys[:MOST_PARAMETERS]]
        if drawn:
            parameters.append(Section(f"{name} by each parameter", charts=drawn))
    few = f"The importances are rough: they come from {plural(len(done), 'trial')}."
    yield Section("Progress", few * bool(shares and len(done) < FEW_TRIALS), progress + shares)
    if len(names) > 1 and (front := study.get("pareto")):
        yield _front(names, done, sorted(front, key=lambda trial: tuple(_values(trial))))
    yield from parameters


def _by_parameter(done: Sequence[Trial], key: str, nth: int) -> Chart:
    """Draw the objective of this place against a parameter, for the trials that have it."""
    from paceline.reports import charts

    having = [trial for trial in done if key in trial["params"]]
    chosen, values = (
        [trial["params"][key] for trial in having],
        [_values(trial)[nth] for trial in having],
    )
    are_numbers = all(type(x) in (int, float) for x in chosen)
    return charts.points(
        {"a trial": (chosen if are_numbers else [*map(str, chosen)], values)},
        title=key,
        log=(are_numbers and charts.is_wide(chosen), charts.is_wide(values)),
    )


def _front(names: Sequence[str], done: Sequence[Trial], front: Sequence[Trial]) -> Section:
    """Return the trials that no other one surpasses, as a line over two objectives and as a table."""
    from paceline.reports import charts

    def line(trials: Sequence[Trial]) -> charts.Line:
        xs, ys, *_ = zip(*map(_values, trials), strict=True)
        return xs, ys

    drawn = charts.points(
        {"a trial": line(done), "the front": line(front)},
        title=f"{names[1]} by {names[0]}",
        x=names[0],
        line={"the front": line(front)},
        log=(charts.is_wide(line(done)[0]), charts.is_wide(line(done)[1])),
    )
    return Section(
        "The Pareto front",
        "No other trial is better in one objective without being worse in another one.",
        [drawn] if len(names) == 2 else (),
        ("trial", *names, "with"),
        [
            (str(trial["number"]), *map(shown, _values(trial)), _params(trial["params"]))
            for trial in front
        ],
    )


def _importances(study: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return importances by objective. A study of one objective stores them by parameter only."""
    importances = study.get("importances") or {}
    if all(isinstance(value, Mapping) for value in importances.values()):
        return importances
    return {study["objectives"][0]["name"]: importances}


def _parameters(study: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for trial in study["trials"] for name in trial["params"]))


def _table(study: Mapping[str, Any]) -> Section:
    objectives, names = study["objectives"], _parameters(study)
    return Section(
        "Trials",
        head=("trial", "state", *(each["name"] for each in objectives), *names, "plan"),
        rows=[
            (
                str(trial["number"]),
                trial["state"],
                *(shown(value) for _, value in zip_longest(objectives, _values(trial))),
                *(shown(trial["params"].get(name)) for name in names),
                str(trial.get("plan", "")),
            )
            for trial in study["trials"]
        ],
        folded=plural(len(study["trials"]), "trial"),
    )
