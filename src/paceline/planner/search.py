"""Find the fastest plan of a space that fits, say why each other kind loses, and what would change
the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.base.errors import PlanError
from paceline.planner.estimate import Estimate, NotPriced
from paceline.planner.space import (
    compiled_variant,
    microbatch_counts,
    offered,
    splits,
    uncompiled_variant,
    variants,
)
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.limits import DeviceCounts, Limits
from paceline.strategies.plan import Plan

# Plans tie if their steps differ by a smaller part, because two measurements of one plan do.
TIE = 0.02
MOST_REFINED = 12
# The least predicted gain of compiled blocks that counts, as a part of the step: kernels that torch
# compiles are that much slower or faster than others. See docs/formulas.md.
GAIN_SPREAD = 0.03
Price = Callable[[Plan], Estimate]
# Returns the least bytes by which a plan exceeds its devices' memory; must be cheap. It may stop
# early once the bytes are above 0 and reach the second argument.
Least = Callable[[Plan, float], int]
Rent = Callable[[Plan], float]  # price of a plan's devices per second


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its price."""

    plan: Plan
    estimate: Estimate
    # what the plan's devices cost per second; 1 if prices do not matter, so that cost is time
    rent_per_s: float = 1.0
    # steps of the run, over which the plan's cost at the start is spread; None if not known
    steps: int | None = None

    @property
    def step_cost(self) -> float:
        """The figure by which plans are ranked: seconds per step, or the price of these seconds.

        It includes the step's part of the cost that the run has once.
        """
        start_s = self.estimate.start_s / self.steps if self.steps else 0.0
        return (self.estimate.step_s + start_s) * self.rent_per_s

    @property
    def kind(self) -> str:
        return kind_of(self.plan)

    @property
    def missing_bytes(self) -> int:
        """The bytes by which the fullest rank exceeds its device's memory; at most 0 if the plan
        fits.
        """
        return max(need.missing_bytes for need in self.estimate.needs)


@dataclass(slots=True)
class RankedPlans:
    """The result of a search."""

    # plans that fit, exact and relaxed ones, the fastest first
    ranked: list[Candidate] = field(default_factory=list)
    too_large: list[Candidate] = field(default_factory=list)  # the nearest plans that don't fit
    # why plans could not be priced, by their kind
    refused: dict[str, str] = field(default_factory=dict)
    num_tried: int = 0  # plans that were priced
    may_relax: bool = False  # whether a relaxed plan may be chosen
    # for every way to split: the first exact plan that fits
    ways: tuple[Plan, ...] = ()
    over: tuple[Plan, ...] = ()  # plans that don't fit or have no price
    failed: tuple[Plan, ...] = ()  # plans that failed when they were tried
    # the best plan of each kind with compiled blocks, whether that pays or not; none if not asked for
    compiled: tuple[Candidate, ...] = ()

    @property
    def rivals(self) -> list[Candidate]:
        """The plans that may be chosen."""
        return [
            candidate
            for candidate in self.ranked
            if self.may_relax or candidate.plan.relaxed is None
        ]

    @property
    def chosen(self) -> Candidate | None:
        """The best plan that may be chosen, or None. If any was tried, it is one that was tried.

        Among plans that tie with the first one, an exact plan with the fewest keys is chosen.
        """
        rivals = [rival for rival in self.rivals if rival.estimate.is_measured] or self.rivals
        tied = [candidate for candidate in rivals if ties(candidate, rivals[0])]
        return min(
            tied,
            default=None,
            key=lambda candidate: (
                candidate.plan.relaxed is not None,
                len(candidate.plan.values()),
                candidate.step_cost,
            ),
        )

    @property
    def tied(self) -> list[Candidate]:
        """The plans that are as good as the chosen one, as far as the estimates can tell."""
        chosen = self.chosen
        return (
            []
            if chosen is None
            else [rival for rival in self.rivals if rival != chosen and ties(rival, chosen)]
        )


def ties(candidate: Candidate, other: Candidate) -> bool:
    """Whether the estimates can't tell which plan is better.

    The costs differ by less than a tie, and the intervals overlap if they are known.
    """
    is_apart = any(
        first.estimate.low_s * first.rent_per_s > second.estimate.high_s * second.rent_per_s
        for first, second in ((candidate, other), (other, candidate))
    )
    return abs(candidate.step_cost / other.step_cost - 1) <= TIE and not is_apart


def _nothing_is_sure(plan: Plan, enough_bytes: float) -> int:
    return 0


def _time_is_money(plan: Plan) -> float:
    return 1.0


def search(
    price: Price,
    limits: Limits,
    shape: DeviceCounts,
    least: Least = _nothing_is_sure,
    *,
    rent: Rent = _time_is_money,
    may_relax: bool = False,
    most_refined: int = MOST_REFINED,
) -> RankedPlans:
    """Price the candidates for the fastest plan of every way to split, then every schedule of the
    best ones.

    A way to split is first priced with the least recomputation and the fewest micro-batches that
    fit. More of either never makes a step without a pipeline faster.

    Args:
        least: Returns the least bytes by which a plan is over. A plan that is over by more than
            another of its kind is not priced.
        most_refined: The number of cuts of the model for which all schedules and micro-batches are
            tried.
    """
    ranking = RankedPlans(may_relax=may_relax)
    prices = _PriceTable(price, ranking, least, rent)
    first = _first(prices, (*splits(limits, shape), *offered(limits, shape)), limits)
    cuts: dict[
        tuple[int, ...], Plan
    ] = {}  # the best way for each cut of the model; replicas only share its state
    for candidate in first:
        cuts.setdefault(candidate.plan.model_cut, candidate.plan)
    for plan in list(cuts.values())[:most_refined]:
        _refine(prices, plan, limits)
    ranking.ways = tuple(candidate.plan for candidate in first if candidate.plan.relaxed is None)
    ranking.compiled = tuple(_compile(prices, limits))
    ranking.over = tuple(prices.over)
    ranking.ranked = sorted(prices.fitting.values(), key=_cost)
    ranking.too_large = sorted(
        prices.too_large.values(), key=lambda candidate: candidate.missing_bytes
    )
    return ranking


def _first(prices: _PriceTable, plans: Iterable[Plan], limits: Limits) -> list[Candidate]:
    """Return the candidate for the fastest plan of each way to split, the fastest first."""
    candidates = (_least_that_fits(prices, plan, limits) for plan in plans)
    return sorted((candidate for candidate in candidates if candidate is not None), key=_cost)


def _cost(candidate: Candidate) -> tuple[float, str]:
    return candidate.step_cost, str(candidate.plan)


class _PriceTable:
    """The known prices.

    `too_large` holds, for each kind, the plan that exceeds the memory the least; it stays empty
    unless `wants_nearest`.
    """

    def __init__(
        self,
        price: Price,
        ranking: RankedPlans,
        least: Least,
        rent: Rent,
        *,
        wants_nearest: bool = True,
    ) -> None:
        self.price, self.ranking, self.least, self.rent, self.wants_nearest = (
            price,
            ranking,
            least,
            rent,
            wants_nearest,
        )
        self.fitting: dict[Plan, Candidate] = {}
        self.too_large: dict[str, Candidate] = {}
        self.over: set[Plan] = set()

    def __call__(self, plan: Plan) -> Candidate | None:
        """Return the plan with its price; None if it doesn't fit, or can't be priced."""
        if plan in self.fitting or plan in self.over:
            return self.fitting.get(plan)
        kind = kind_of(plan)
        nearest = self.too_large.get(kind)
        try:
            enough_bytes = (
                0
                if not self.wants_nearest
                else math.inf
                if nearest is None
                else nearest.missing_bytes
            )
            missing_bytes = self.least(plan, enough_bytes)
            is_over = missing_bytes > 0 and missing_bytes >= enough_bytes
            candidate = None if is_over else Candidate(plan, self.price(plan), self.rent(plan))
        except (PlanError, NotPriced) as error:
            self.ranking.refused.setdefault(kind, str(error).partition("\n")[0])
            self.over.add(plan)
            return None
        self.ranking.num_tried += 1
        if candidate is not None and candidate.estimate.fits:
            self.fitting[plan] = candidate
            return candidate
        self.over.add(plan)
        if candidate is not None and (
            nearest is None or candidate.missing_bytes < nearest.missing_bytes
        ):
            self.too_large[kind] = candidate
        return None


def _least_that_fits(prices: _PriceTable, plan: Plan, limits: Limits) -> Candidate | None:
    """Return the plan with the least recomputation, then the fewest micro-batches, that fits; None
    if none does.

    A pipeline has at least four micro-batches per rank, if there are enough samples.
    """
    counts = microbatch_counts(plan, limits)
    if plan.has_schedule:
        counts = [count for count in counts if count >= min(counts[-1], 4 * plan.num_stage_ranks)]
    for recompute in limits.recomputes:
        recomputed = plan.with_(recompute=recompute)
        for count in counts:
            if (candidate := prices(recomputed.with_(microbatches=count))) is not None:
                return candidate
    return None


def _refine(prices: _PriceTable, plan: Plan, limits: Limits) -> None:
    """Price every recomputation, every number of micro-batches and every schedule."""
    for recompute in limits.recomputes:
        for count in microbatch_counts(plan, limits):
            other = plan.with_(recompute=recompute, microbatches=count)
            if (
                prices(other) is None
                and recompute == limits.recomputes[-1]
                and not plan.has_schedule
            ):
                continue
            for variant in variants(other, limits):
                prices(variant)
            if not plan.has_schedule and other in prices.fitting:
                break  # more micro-batches take longer


def _compile(prices: _PriceTable, limits: Limits) -> Iterator[Candidate]:
    """Yield the best exact plan of each kind with compiled blocks, and add it to the prices if
    compiling pays.

    It pays if steps gain more than prices may be wrong by, and if the run is so long that they gain
    more than compiling takes.
    """
    if limits.compiled_steps is None:
        return
    exact = [candidate for candidate in prices.fitting.values() if candidate.plan.relaxed is None]
    for plain in best_of_each_kind(sorted(exact, key=_cost)):
        compiled = compiled_variant(plain.plan)
        if compiled is None or prices(compiled) is None:
            continue
        candidate = replace(prices.fitting.pop(compiled), steps=limits.compiled_steps)
        gains = candidate.estimate.step_s < (1 - GAIN_SPREAD) * plain.estimate.step_s
        if gains and candidate.step_cost < plain.step_cost:
            prices.fitting[compiled] = candidate
        yield candidate


def compiling(plans: RankedPlans) -> str:
    """Return a text about the gain of compiled blocks, of a plan that was tried if there is one;
    empty if not asked for.
    """
    known = {candidate.plan: candidate.estimate for candidate in plans.ranked}
    compiled = {candidate.plan: candidate.estimate for candidate in plans.compiled}
    compiled |= {plan: known[plan] for plan in compiled if plan in known}
    for plan, estimate in sorted(compiled.items(), key=lambda item: not item[1].is_measured):
        if (plain := known.get(uncompiled_variant(plan))) is not None:
            gain_s, start_s = plain.step_s - estimate.step_s, estimate.start_s
            least_s = 0.0 if estimate.is_measured else GAIN_SPREAD * plain.step_s
            pays = (
                f"pays from {start_s / gain_s:.0f} steps on"
                if gain_s > least_s
                else "does not pay here"
            )
            return (
                f"'{plan}' {pays}: it takes {start_s:.3g} s once and gains {1e3 * gain_s:.3g} ms a step, "
                f"{'as tried' if estimate.is_measured else 'as predicted'}"
            )
    return ""


def kind_of(plan: Plan) -> str:
    """Return the axes and options that a plan uses, without their sizes.

    >>> kind_of(Plan.parse("pipeline=4 data=2 microbatches=8")), kind_of(Plan.parse("data=2 compress=int8"))
    ('pipeline data', 'data compress=int8')
    """
    words = [axis for axis, size in plan.axes.sizes().items() if size > 1]
    words += [
        family for strategy in ActivePlan(plan).strategies if (family := strategy.family(plan))
    ]
    return " ".join(words) or "single"


def binding(estimate: Estimate) -> str:
    """Return the part that takes most of a step, and the next one if it takes a tenth or more."""
    first, *rest = sorted(estimate.breakdown.items(), key=lambda item: -item[1])
    parts = _share(first[0], estimate)
    if rest and rest[0][1] >= 0.1 * estimate.step_s:
        name, seconds = rest[0]
        parts += f", {_WORDS.get(name, name)} {100 * seconds / estimate.step_s:.0f} %"
    return parts


def _share(name: str, estimate: Estimate) -> str:
    percent = 100 * estimate.breakdown[name] / estimate.step_s
    verb = "are" if name in ("communication", "bubble") else "is"
    return f"{_WORDS.get(name, name)} {verb} {percent:.0f} % of the step"


def reason(candidate: Candidate, chosen: Candidate) -> str:
    """Say in a few words why a plan is not the chosen one.

    The text names the part on which the plan spends more seconds than the chosen one, with its
    share of the plan's own step. If plans are ranked by cost, the text says how much more the plan
    costs.
    """
    best, estimate = chosen.estimate, candidate.estimate
    if not estimate.fits:
        return f"{amount(candidate.missing_bytes)} too much for a {worst_device(candidate)}"
    slower = estimate.step_s / best.step_s - 1
    more = {
        name: seconds - best.breakdown.get(name, 0.0)
        for name, seconds in estimate.breakdown.items()
    }
    if candidate.plan == chosen.plan:
        return binding(best)
    if ties(candidate, chosen):
        return f"as {'fast' if chosen.rent_per_s == 1.0 else 'cheap'}, for all that is known"
    if candidate.rent_per_s != 1.0 and (dearer := candidate.step_cost / chosen.step_cost - 1) > 0:
        return f"costs {100 * dearer:.0f} % more, {100 * abs(slower):.0f} % {'slower' if slower > 0 else 'faster'}"
    name = max(more, key=lambda key: more[key])
    if slower < 0:
        untried = ", by its price: there was no time to try it"
        return (
            f"{-100 * slower:.0f} % faster{', and relaxed' if candidate.plan.relaxed else untried}"
        )
    return _share(name, estimate)


_WORDS = {
    "compute": "computing",
    "communication": "messages that nothing hides",
    "bubble": "idle pipeline ranks",
    "optimizer": "the optimizer",
    "input": "reading data",
    "unexplained": "time that no part explains",
}


def worst_device(candidate: Candidate) -> str:
    need = max(candidate.estimate.needs, key=lambda need: need.missing_bytes)
    free = "" if need.device.total_bytes is None else " that are free"
    return f"{need.device.name or need.device.kind} of {amount(need.device.memory_bytes)}{free}"


def amount(num_bytes: float) -> str:
    """Return bytes as text with a unit.

    >>> amount(85_899_345_920), amount(1.5 * 2**20)
    ('80 GiB', '1.5 MiB')
    """
    return f"{num_bytes / 2**30:.3g} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.3g} MiB"


def best_of_each_kind(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the first candidate of each kind, in their order."""
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        best.setdefault(candidate.kind, candidate)
    return list(best.values())


@dataclass(frozen=True, slots=True)
class Change:
    """A change of hardware."""

    name: str  # as a user would say it
    price: Price  # gives prices under the change
    least: Least = _nothing_is_sure  # see `search`; under the change
    has_same_memory: bool = False  # whether the same plans fit
    # whether plans that fit without the change also fit with it, and take as long
    has_same_speed: bool = False
    # the least seconds of a step under the change, from the estimate without it, if the same plans
    # fit
    least_s: Callable[[Estimate], float] = lambda estimate: 0.0


def flips(
    ranking: RankedPlans,
    changes: Sequence[Change],
    limits: Limits,
    shape: DeviceCounts,
    *,
    rent: Rent = _time_is_money,
) -> list[tuple[str, Candidate]]:
    """Return the changes of hardware that make another kind of exact plan best, each with that
    plan.

    The other plan must be faster by more than a tie. Every way to split is priced again, but not
    with all of its schedules; the best plan of each kind keeps the schedule that was found.
    """
    chosen = ranking.chosen
    if chosen is None:
        return []
    unchanged_prices = {candidate.plan: candidate for candidate in ranking.ranked}
    best_plans = [
        candidate.plan
        for candidate in best_of_each_kind(ranking.ranked)
        if candidate.plan.relaxed is None
    ]
    flipped: list[tuple[str, Candidate]] = []
    for change in changes:
        prices = _PriceTable(change.price, RankedPlans(), change.least, rent, wants_nearest=False)
        prices.over |= {*ranking.failed, *(ranking.over if change.has_same_memory else ())}
        if change.has_same_memory:  # these needed more memory than predicted
            prices.over |= {each.plan for each in ranking.too_large}
        prices.fitting |= unchanged_prices if change.has_same_speed else {}
        ways: Iterable[Plan] = ranking.ways
        if not change.has_same_memory:
            every_way = (*splits(limits, shape), *offered(limits, shape))
            exact_ways = (plan for plan in every_way if plan.relaxed is None)
            ways = [candidate.plan for candidate in _first(prices, exact_ways, limits)]
        unchanged = prices(chosen.plan)
        best = _fastest(
            prices, dict.fromkeys((*ways, *best_plans)), unchanged_prices, change, unchanged
        )
        if (
            best is not None
            and best.kind != chosen.kind
            and (unchanged is None or best.step_cost < (1 - TIE) * unchanged.step_cost)
        ):
            flipped.append((change.name, best))
    return flipped


def _fastest(
    prices: _PriceTable,
    plans: Iterable[Plan],
    unchanged_prices: Mapping[Plan, Candidate],
    change: Change,
    unchanged: Candidate | None,
) -> Candidate | None:
    """Return the best of some plans under a change.

    Plans that can't be better than `unchanged` or another priced plan are not priced.
    """

    def least_cost(plan: Plan) -> float:
        candidate = unchanged_prices.get(plan)
        return (
            0.0
            if candidate is None or not change.has_same_memory
            else (change.least_s(candidate.estimate) * prices.rent(plan))
        )

    best = unchanged
    for least, _, plan in sorted((least_cost(plan), str(plan), plan) for plan in plans):
        if best is not None and least > best.step_cost:
            break
        if (candidate := prices(plan)) is not None:
            best = candidate if best is None else min(best, candidate, key=_cost)
    return best
