"""Write the answer of `plan` for people: the chosen plan first, then a table as wide as the
terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.base.document import strict
from paceline.base.tables import aligned, in_mib, in_ms, three_digits, wrapped
from paceline.job import Precision
from paceline.planner.estimate import Estimate
from paceline.planner.goodput import Goodput
from paceline.planner.remedies import Remedy
from paceline.planner.search import Candidate, RankedPlans, best_of_each_kind, compiling, reason
from paceline.strategies.plan import Plan

SHOWN = 16  # plans in the table


MILLION = 1_000_000


def lines(answer: Answer) -> Iterator[str]:
    plans, chosen = answer.ranking, answer.ranking.chosen
    if chosen is None:
        nearest = plans.too_large[0]
        yield wrapped(
            f"nothing fits on {answer.cluster}; nearest is '{nearest.plan}': {reason(nearest, nearest)}"
        )
        if answer.remedies:
            yield "what would fit, the least change first:"
            yield from (wrapped(f"  {remedy}") for remedy in answer.remedies)
        else:
            yield "no change that was tried makes a plan fit"
    else:
        yield f"chosen: {chosen.plan}"
        yield from (wrapped(f"  {text}") for text in _chosen(answer, chosen))
    yield from (wrapped(f"  with {name}: {candidate.plan}") for name, candidate in answer.flips)
    if text := compiling(plans):
        yield wrapped(f"  {text}")
    yield ""
    yield aligned(
        ["plan", "ms/step", "cost/M" if answer.is_priced else "samples/s", "MiB", "why not"],
        [_row(candidate, chosen or candidate, answer) for candidate in _shown(plans)],
    )
    yield f"{plans.num_tried} plans were priced on {answer.cluster}"
    kinds_by_reason: dict[str, list[str]] = {}
    for kind, why in plans.refused.items():
        kinds_by_reason.setdefault(why, []).append(kind)
    yield from (
        wrapped(f"not priced: {', '.join(kinds)}: {why}") for why, kinds in kinds_by_reason.items()
    )
    yield from (wrapped(f"rough: {note}") for note in answer.notes)


def _chosen(answer: Answer, chosen: Candidate) -> Iterator[str]:
    """Yield the lines about the chosen plan."""
    cost = f", {_money(answer, chosen)} a million samples" if answer.is_priced else ""
    yield f"{_speed(chosen, answer.batch)}{cost}: {reason(chosen, chosen)}"
    if tied := answer.ranking.tied:
        yield (
            f"as {'cheap' if answer.is_priced else 'fast'}, for all that is known: "
            f"{'; '.join(str(candidate.plan) for candidate in tied[:4])}"
        )
    if answer.advice is not None:
        yield _advised(answer.advice, chosen)
    if answer.outlook is not None:
        yield from answer.outlook.lines()


def _shown(plans: RankedPlans) -> list[Candidate]:
    """Return the best plan of each kind, then the fastest of all, in order."""
    best_and_nearest = [*best_of_each_kind(plans.ranked), *plans.too_large]
    more = [candidate for candidate in plans.ranked if candidate not in best_and_nearest]
    listed = [*best_and_nearest, *more[: max(0, SHOWN - len(best_and_nearest))]]
    return sorted(listed, key=lambda candidate: (not candidate.estimate.fits, candidate.step_cost))


def _row(candidate: Candidate, chosen: Candidate, answer: Answer) -> list[str]:
    estimate = candidate.estimate
    why = "chosen" if candidate.plan == chosen.plan and estimate.fits else reason(candidate, chosen)
    speed = (
        _money(answer, candidate)
        if answer.is_priced
        else three_digits(answer.batch / estimate.step_s)
    )
    return [
        f"{'~' if candidate.plan.relaxed is not None else ''}{candidate.plan}",
        three_digits(1e3 * estimate.step_s),
        speed,
        in_mib(estimate.peak_memory_bytes).removesuffix(" MiB"),
        why,
    ]


def _speed(candidate: Candidate, batch: int) -> str:
    estimate = candidate.estimate
    interval = (
        f" (80 %: {three_digits(1e3 * estimate.low_s)} to {three_digits(1e3 * estimate.high_s)})"
        if estimate.low_s < estimate.high_s
        else ""
    )
    return (
        f"{in_ms(estimate.step_s)} a step{interval}, {three_digits(batch / estimate.step_s)} samples/s, "
        f"{in_mib(estimate.peak_memory_bytes)}"
    )


def _money(answer: Answer, candidate: Candidate) -> str:
    return f"{answer.million_samples_cost(candidate):,.4g}"


def _advised(advice: Advice, chosen: Candidate) -> str:
    """Say what another precision would bring."""
    estimate = advice.estimate
    if isinstance(estimate, str):
        return f"precision={advice.precision}: {estimate}"
    times = chosen.estimate.step_s / estimate.step_s
    speed = f"{times:.3g} times as fast" if times >= 1 else f"{1 / times:.3g} times as slow"
    fits = "" if estimate.fits else ", which does not fit"
    return (
        f"precision={advice.precision} instead: {speed}, {in_ms(estimate.step_s)} a step, "
        f"{in_mib(estimate.peak_memory_bytes)}{fits}"
    )


@dataclass(frozen=True)
class Advice:
    """The effect that another precision would have on the chosen plan."""

    precision: Precision
    estimate: Estimate | str  # the new estimate; a text says why there is none

    def to_dict(self) -> dict[str, Any]:
        """Return the advice for `--json`."""
        if isinstance(self.estimate, str):
            return {"precision": self.precision, "problem": self.estimate}
        return {
            "precision": self.precision,
            "step_s": self.estimate.step_s,
            "fits": self.estimate.fits,
            "memory_bytes": self.estimate.peak_memory_bytes,
        }


@dataclass(frozen=True)
class Answer:
    """The answer of `plan`."""

    cluster: str  # as it was asked for
    batch: int  # samples per step
    ranking: RankedPlans
    # changes of hardware, with the plan that is best after each
    flips: tuple[tuple[str, Candidate], ...]
    notes: tuple[str, ...]  # which figures are rough, and why
    is_priced: bool = False  # whether plans are ranked by what they cost
    # if nothing fits: changes under which something does, the least first
    remedies: tuple[Remedy, ...] = ()
    advice: Advice | None = None  # None for a precision that has no other
    outlook: Goodput | None = None  # None unless failures were asked for

    @property
    def chosen(self) -> Plan | None:
        """The best plan that fits; None if none does. It is exact unless relaxed plans were asked
        for.
        """
        return self.ranking.chosen.plan if self.ranking.chosen is not None else None

    def million_samples_cost(self, candidate: Candidate) -> float:
        """Return the cost of a million samples, in the unit of the price."""
        return candidate.step_cost / self.batch * MILLION

    def to_dict(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        chosen = self.ranking.chosen
        return {
            "cluster": self.cluster,
            "chosen": str(chosen.plan) if chosen is not None else None,
            "tried": self.ranking.num_tried,
            "notes": list(self.notes),
            "flips": [
                {"change": name, "plan": str(candidate.plan)} for name, candidate in self.flips
            ],
            "refused": dict(self.ranking.refused),
            **(
                {"remedies": [remedy.to_dict() for remedy in self.remedies]}
                if chosen is None
                else {}
            ),
            "precision": self.advice.to_dict() if self.advice is not None else None,
            "failures": self.outlook.to_dict() if self.outlook is not None else None,
            "compiling": compiling(self.ranking) or None,
            "plans": [
                self._row(candidate, chosen or candidate)
                for candidate in (*self.ranking.ranked, *self.ranking.too_large)
            ],
        }

    def _row(self, candidate: Candidate, chosen: Candidate) -> dict[str, Any]:
        estimate = candidate.estimate
        cost = (
            {"cost_per_million_samples": self.million_samples_cost(candidate)}
            if self.is_priced
            else {}
        )
        return {
            "plan": str(candidate.plan),
            "kind": candidate.kind,
            "fits": estimate.fits,
            "step_s": estimate.step_s,
            "step_s_low": estimate.low_s,
            "step_s_high": estimate.high_s,
            "samples_per_s": self.batch / estimate.step_s,
            **cost,
            "measured": estimate.is_measured,
            "memory_bytes": estimate.peak_memory_bytes,
            "missing_bytes": max(0, candidate.missing_bytes),
            "ledger": dict(estimate.ledger),
            "breakdown": dict(estimate.breakdown),
            "relaxed": candidate.plan.relaxed is not None,
            "reason": reason(candidate, chosen),
        }

    def describe(self) -> str:
        """Return the answer as text for people, as wide as the terminal."""
        return "\n".join(lines(self))

    def write_html(self, to: str | Path, *, command: str = "paceline train JOB") -> Path:
        """Write one HTML file that needs no network. Return its path.

        Args:
            command: The command that trains under a plan.

        Raises:
            UsageError: a package that draws is missing, or the file can't be written.
        """
        from paceline.reports.plans import write

        return write(strict(self.to_dict()), Path(to), command=command)
