"""What `plan` says to people: the chosen plan first, then a table of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.planner.rank import Candidate, RankedPlans, best_of_each_kind, reason
from paceline.verbs.planning import Advice, Answer

SHOWN = 16  # plans of the table


def lines(answer: Answer) -> Iterator[str]:
    found, chosen = answer.ranking, answer.ranking.chosen
    if chosen is None:
        nearest = found.too_large[0]
        yield from _wrapped(f"nothing fits on {answer.cluster}; nearest is '{nearest.plan}': "
                            f"{reason(nearest, nearest)}")
    else:
        yield f"chosen: {chosen.plan}"
        cost = f", {_money(answer, chosen)} a million samples" if answer.is_priced else ""
        yield from _wrapped(f"  {_speed(chosen, answer.batch)}{cost}: {reason(chosen, chosen)}")
        if found.tied:
            tied = "; ".join(str(one.plan) for one in found.tied[:4])
            yield from _wrapped(f"  as {'cheap' if answer.is_priced else 'fast'}, for all that is known: {tied}")
        if answer.advice is not None:
            yield from _wrapped(f"  {_advised(answer.advice, chosen)}")
        if answer.outlook is not None:
            yield from _wrapped(f"  {answer.outlook.describe()}")
    for name, one in answer.flips:
        yield from _wrapped(f"  with {name}: {one.plan}")
    yield ""
    second = "cost/M" if answer.is_priced else "samples/s"
    yield f"{'plan':<44} {'s/step':>8} {second:>10} {'MiB':>8}  why not"
    for one in _shown(found):
        yield from _row(one, chosen or one, answer)
    yield f"{found.num_tried} plans were priced on {answer.cluster}"
    for kind, why in found.refused.items():
        yield from _wrapped(f"not priced: {kind}: {why}")
    for note in answer.notes:
        yield from _wrapped(f"rough: {note}")


def _shown(found: RankedPlans) -> list[Candidate]:
    """The best of each kind, then the fastest of all, in order."""
    kept = [*best_of_each_kind(found.ranked), *found.too_large]
    more = [one for one in found.ranked if one not in kept]
    listed = [*kept, *more[:max(0, SHOWN - len(kept))]]
    return sorted(listed, key=lambda one: (not one.estimate.fits, one.step_cost))


def _row(one: Candidate, chosen: Candidate, answer: Answer) -> Iterator[str]:
    found = one.estimate
    why = "chosen" if one.plan == chosen.plan and found.fits else reason(one, chosen)
    mark = "~" if one.plan.relaxed is not None else ""
    name, rest = _cut(f"{mark}{one.plan}", 44)
    said, more = _cut(why, 25)
    speed = _money(answer, one) if answer.is_priced else f"{answer.batch / found.step_s:.4g}"
    yield (f"{name:<44} {found.step_s:>8.3g} {speed:>10} "
           f"{found.peak_memory_bytes / 2**20:>8.0f}  {said}")
    while rest or more:
        name, rest = _cut(rest, 42)
        said, more = _cut(more, 25)
        yield f"  {name:<42} {'':>8} {'':>10} {'':>8}  {said}".rstrip()


def _cut(text: str, width: int) -> tuple[str, str]:
    """What fits a column, at a space, and what is left."""
    if len(text) <= width:
        return text, ""
    at = text.rfind(" ", 0, width + 1)
    return (text[:at], text[at + 1:]) if at > 0 else (text[:width], text[width:])


def _wrapped(text: str) -> Iterator[str]:
    while text:
        line, text = _cut(text, 98)
        yield line
        text = text and f"  {text}"


def _speed(one: Candidate, batch: int) -> str:
    found = one.estimate
    interval = f" (80 %: {found.low_s:.3g} to {found.high_s:.3g})" if found.low_s < found.high_s else ""
    return (f"{found.step_s:.3g} s a step{interval}, {batch / found.step_s:.4g} samples/s, "
            f"{found.peak_memory_bytes / 2**20:,.0f} MiB")


def _money(answer: Answer, one: Candidate) -> str:
    return f"{answer.million_samples_cost(one):,.4g}"


def _advised(advice: Advice, chosen: Candidate) -> str:
    """One line."""
    other = advice.estimate
    if isinstance(other, str):
        return f"precision={advice.precision}: {other}"
    times = chosen.estimate.step_s / other.step_s
    said = f"{times:.3g} times as fast" if times >= 1 else f"{1 / times:.3g} times as slow"
    fits = "" if other.fits else ", which does not fit"
    return (f"precision={advice.precision} instead: {said}, {other.step_s:.3g} s a step, "
            f"{other.peak_memory_bytes / 2**20:,.0f} MiB{fits}")
