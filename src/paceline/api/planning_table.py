"""What `plan` says to people: the chosen plan first, then a table as wide as the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.api.planning import Advice, Answer
from paceline.base.tables import aligned, wrapped
from paceline.planner.search import Candidate, RankedPlans, best_of_each_kind, compiling, reason

SHOWN = 16  # plans of the table


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
        ["plan", "s/step", "cost/M" if answer.is_priced else "samples/s", "MiB", "why not"],
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
    """What there is to say of the chosen plan."""
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
    """The best of each kind, then the fastest of all, in order."""
    best_and_nearest = [*best_of_each_kind(plans.ranked), *plans.too_large]
    more = [candidate for candidate in plans.ranked if candidate not in best_and_nearest]
    listed = [*best_and_nearest, *more[: max(0, SHOWN - len(best_and_nearest))]]
    return sorted(listed, key=lambda candidate: (not candidate.estimate.fits, candidate.step_cost))


def _row(candidate: Candidate, chosen: Candidate, answer: Answer) -> list[str]:
    estimate = candidate.estimate
    why = "chosen" if candidate.plan == chosen.plan and estimate.fits else reason(candidate, chosen)
    speed = (
        _money(answer, candidate) if answer.is_priced else f"{answer.batch / estimate.step_s:.4g}"
    )
    return [
        f"{'~' if candidate.plan.relaxed is not None else ''}{candidate.plan}",
        f"{estimate.step_s:.3g}",
        speed,
        f"{estimate.peak_memory_bytes / 2**20:.0f}",
        why,
    ]


def _speed(candidate: Candidate, batch: int) -> str:
    estimate = candidate.estimate
    interval = (
        f" (80 %: {estimate.low_s:.3g} to {estimate.high_s:.3g})"
        if estimate.low_s < estimate.high_s
        else ""
    )
    return (
        f"{estimate.step_s:.3g} s a step{interval}, {batch / estimate.step_s:.4g} samples/s, "
        f"{estimate.peak_memory_bytes / 2**20:,.0f} MiB"
    )


def _money(answer: Answer, candidate: Candidate) -> str:
    return f"{answer.million_samples_cost(candidate):,.4g}"


def _advised(advice: Advice, chosen: Candidate) -> str:
    """What another precision would bring."""
    estimate = advice.estimate
    if isinstance(estimate, str):
        return f"precision={advice.precision}: {estimate}"
    times = chosen.estimate.step_s / estimate.step_s
    speed = f"{times:.3g} times as fast" if times >= 1 else f"{1 / times:.3g} times as slow"
    fits = "" if estimate.fits else ", which does not fit"
    return (
        f"precision={advice.precision} instead: {speed}, {estimate.step_s:.3g} s a step, "
        f"{estimate.peak_memory_bytes / 2**20:,.0f} MiB{fits}"
    )
