"""Accuracy by source: time, order, memory and intervals, beside a predictor that knows one number of each source."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from benchmarks.models import Program, program, program_names
from benchmarks.published.predict import Prediction, predict
from benchmarks.published.rows import Case, read
from paceline.base.errors import PlanError

# What a program's figures were fitted in; what it does (its kernels, its formats, what it overlaps) is known of it.
FITTED = (
    "product_rate",
    "attention_rate",
    "convolution_rate",
    "small_convolution_rate",
    "memory_rate",
    "operator_s",
    "collective_s",
    "kernel_s",
    "microbatch_s",
    "step_s",
    "hook_s",
    "slowdown",
    "update_passes",
    "link_rate",
    "network_rate",
    "device_bytes_per_s",
    "node_bytes_per_s",
)
FEW = 20  # rows below which a source's median says little


@dataclass(frozen=True)
class Errors:
    """Of steps' times, each as a part of the measured one."""

    parts: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.parts)

    @property
    def median(self) -> float:
        return statistics.median(self.parts)

    @property
    def ninetieth(self) -> float:
        return sorted(self.parts)[min(len(self.parts) - 1, math.ceil(0.9 * len(self.parts)) - 1)]


def errors(done: Sequence[Prediction]) -> Errors | None:
    relative_errors = tuple(abs(p.ratio - 1) for p in done if p.ratio is not None)
    return Errors(relative_errors) if relative_errors else None


def constant(done: Sequence[Prediction]) -> Errors | None:
    """One number for all of a source: FLOP/s that a device reaches, the median of its rows."""
    timed = [
        (p.case.flops / len(p.case.cluster.devices), p.case.step_s) for p in done if p.case.step_s
    ]
    if not timed:
        return None
    rate = statistics.median(flops / step_s for flops, step_s in timed)
    return Errors(tuple(abs(flops / rate / step_s - 1) for flops, step_s in timed))


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman's, with equal ranks for ties.

    >>> rank_correlation([1, 2, 3], [10, 30, 20])
    0.5
    """
    a, b = _ranks(predicted), _ranks(measured)
    mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
    above = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    below = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    return above / below if below else math.nan


def _ranks(figures: Sequence[float]) -> list[float]:
    return [
        sum(other < figure for other in figures)
        + (sum(other == figure for other in figures) - 1) / 2
        for figure in figures
    ]


@dataclass(frozen=True)
class Choice:
    """A group of at least three different plans for equal model, devices and batch. A plan that was measured more than
    once counts by its median. regret: measured time of the plan that is predicted to be the fastest over the fastest's.
    """

    plans: int
    correlation: float
    regret: float


def choices(done: Iterable[Prediction]) -> list[Choice]:
    groups: dict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for p in done:
        if p.case.step_s is not None:
            groups[p.case.group].append(p)
    planner_choices = []
    for members in groups.values():
        by_plan: dict[str, list[Prediction]] = defaultdict(list)
        for p in members:
            by_plan[str(p.case.plans)].append(p)
        measured = [
            statistics.median(p.case.step_s or 0.0 for p in alike) for alike in by_plan.values()
        ]
        if len(by_plan) < 3 or len(set(measured)) < 2:
            continue
        predicted = [
            statistics.median(p.estimate.step_s for p in alike) for alike in by_plan.values()
        ]
        first = min(range(len(predicted)), key=predicted.__getitem__)
        planner_choices.append(
            Choice(
                len(by_plan), rank_correlation(predicted, measured), measured[first] / min(measured)
            )
        )
    return planner_choices


def left_out(case: Case) -> Program:
    """The case's program as it is known without its source: what was fitted on it is the other programs' median."""
    own = case.software
    if case.source not in own.fitted_on:
        return own
    others = [
        other
        for other in map(program, program_names())
        if other.name != own.name and other.fitted_on and case.source not in other.fitted_on
    ]
    return replace(
        own,
        **{name: statistics.median(getattr(other, name) for other in others) for name in FITTED},
    )


def memory_errors(done: Iterable[Prediction]) -> list[float]:
    return [p.memory_bytes / p.case.memory_bytes - 1 for p in done if p.case.memory_bytes]


def out_of_memory(done: Iterable[Prediction]) -> Counter[str]:
    """Rows by what was said and what happened."""
    return Counter(
        f"{'fits' if p.estimate.fits else 'does not fit'}, {'fitted' if p.case.fits else 'ran out'}"
        for p in done
    )


def covered(done: Iterable[Prediction]) -> list[bool]:
    return [p.estimate.low_s <= p.case.step_s <= p.estimate.high_s for p in done if p.case.step_s]


def main(path: Path) -> int:
    skipped: dict[str, Counter[str]] = defaultdict(Counter)
    done: dict[str, list[Prediction]] = defaultdict(list)
    without: dict[str, list[Prediction]] = defaultdict(list)
    for row in read(path):
        if not isinstance(row, Case):
            skipped[row[0]][row[2]] += 1
            continue
        try:
            done[row.source].append(predict(row))
            without[row.source].append(predict(row, left_out(row)))
        except PlanError as error:
            skipped[row.source][f"refused: {str(error).splitlines()[0]}"[:80]] += 1
    print(
        "Error of a step's time as a part of the measured one. constant: one FLOP/s fitted to the source."
    )
    print(
        "left out: with the medians of other programs' fitted figures. order: Spearman; regret: mean, worst.\n"
    )
    print(
        f"{'source':<14}{'rows':>5}{'mean':>7}{'median':>8}{'p90':>7}{'const.':>8}{'left out':>10}"
        f"{'groups':>8}{'order':>7}{'regret':>14}{'in 80 %':>9}"
    )
    for source, listed in sorted(done.items(), key=lambda item: -len(item[1])):
        print(_line(source, listed, without[source]))
    everything = [p for listed in done.values() for p in listed]
    others = [p for source, listed in done.items() if source != "vtrain" for p in listed]
    apart = [p for listed in without.values() for p in listed]
    print(_line("all", everything, apart))
    if others and len(others) < len(everything):
        print(
            _line(
                "all but vtrain",
                others,
                [p for s, listed in without.items() if s != "vtrain" for p in listed],
            )
        )
    _summary(done, without, everything)
    _memory(done)
    print("\nRows skipped, and why:")
    for source, reasons in sorted(skipped.items()):
        for reason, count in reasons.most_common():
            print(f"  {source:<14}{count:>5}  {reason}")
    return 0


def _line(source: str, done: Sequence[Prediction], without: Sequence[Prediction]) -> str:
    planner_errors, plain, apart = errors(done), constant(done), errors(without)
    if planner_errors is None or plain is None or apart is None:
        return f"{source:<14}{len(done):>5}  no times"
    groups = choices(done)
    line = (
        f"{source:<14}{len(planner_errors.parts):>5}{planner_errors.mean:>7.1%}{planner_errors.median:>8.1%}"
        f"{planner_errors.ninetieth:>7.1%}"
        f"{plain.median:>8.1%}{apart.median:>10.1%}"
    )
    if groups:
        regrets = [group.regret for group in groups]
        order = statistics.median(
            group.correlation for group in groups if not math.isnan(group.correlation)
        )
        line += (
            f"{len(groups):>8}{order:>7.2f}{statistics.fmean(regrets):>7.3f}{max(regrets):>7.3f}"
        )
    else:
        line += f"{'':>29}"
    return f"{line}{statistics.fmean(covered(done)):>9.0%}"


def _summary(
    done: dict[str, list[Prediction]],
    without: dict[str, list[Prediction]],
    everything: Sequence[Prediction],
) -> None:
    medians = [
        source_errors.median for listed in done.values() if (source_errors := errors(listed))
    ]
    apart = [
        source_errors.median for listed in without.values() if (source_errors := errors(listed))
    ]
    large = {
        source: (planner_errors.median, plain.median)
        for source, listed in done.items()
        if (planner_errors := errors(listed))
        and (plain := constant(listed))
        and len(planner_errors.parts) >= FEW
    }
    beaten = [source for source, (planner, plain) in large.items() if planner < plain]
    widths = [
        math.log(p.estimate.high_s / p.estimate.low_s) / 2 for p in everything if p.case.step_s
    ]
    print(
        f"\nMean of the sources' medians: {statistics.fmean(medians):.1%}; left out: {statistics.fmean(apart):.1%}.\n"
        f"Below the constant on {len(beaten)} of {len(large)} sources with {FEW} rows or more."
    )
    wide = statistics.median(widths)
    print(
        f"80 % intervals hold {statistics.fmean(covered(everything)):.1%} of the measured times;\nin the median they "
        f"reach {1 - math.exp(-wide):.0%} below and {math.exp(wide) - 1:.0%} above the prediction."
    )


def _memory(done: dict[str, list[Prediction]]) -> None:
    print("\nMemory, as a part of the measured: rows, median of the error, median of its size")
    for source, listed in done.items():
        if relative_errors := memory_errors(listed):
            print(
                f"  {source:<14}{len(relative_errors):>5}{statistics.median(relative_errors):>+8.1%}"
                f"{statistics.median(map(abs, relative_errors)):>8.1%}"
            )
    counted: Counter[str] = sum((out_of_memory(listed) for listed in done.values()), Counter())
    print("Predicted, measured: rows")
    for outcome, count in sorted(counted.items()):
        print(f"  {outcome:<26}{count:>5}")


assert set(FITTED) <= {field.name for field in fields(Program)}
