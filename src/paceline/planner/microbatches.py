"""`microbatches=auto`: find the fewest micro-batches with which a plan fits its devices, or say why
none fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.base.errors import PlanError
from paceline.cluster.cluster import Cluster
from paceline.model.cost.profile import Profile
from paceline.planner.rank_kinds import MemoryNeed, RankKind, play_ranks, rank_kinds
from paceline.simulate.device import DeviceRates
from paceline.strategies.plan import Plan

# Arbitrary rates, for estimates of which only the memory is used.
ANY_RATES = DeviceRates(1e9, 1e9, 1e9, 1e9, 0.0)


def fewest_microbatches(profile: Profile, plan: Plan, cluster: Cluster, *, batch: int) -> int:
    """Return the fewest micro-batches per update with which every rank stays within its device's
    memory.

    Raises:
        PlanError: even one sample per micro-batch is too much for some device. The message says by
            how much, for what, and which plan on the same devices would fit.
    """

    def kinds(tried: Plan) -> Sequence[RankKind]:
        return rank_kinds(profile, tried, cluster, batch=batch, rates=ANY_RATES)

    def worst(tried: Plan, count: int) -> MemoryNeed:
        """Return the memory of the rank that exceeds its device's memory the most, or has the least
        left.
        """
        tried = tried.with_(microbatches=count)
        played = play_ranks(kinds(tried), tried, cluster, snapshot=True)
        return max((rank.need for rank in played), key=lambda need: need.missing_bytes)

    def most_samples(tried: Plan) -> int:
        """Return the largest number of samples that a rank gets of a batch."""
        return int(max(sum(kind.cost.samples) for kind in kinds(tried.with_(microbatches=1))))

    most = most_samples(plan)
    # A single micro-batch needs no second gradient beside the first. From two on, more
    # micro-batches always need less, so bisection finds the number.
    at_once, at_most = worst(plan, 1), worst(plan, most)
    if at_once.missing_bytes <= 0:
        return 1
    if at_most.missing_bytes > 0:
        others = (
            smaller
            for smaller in _smaller(plan)
            for count in (1, most_samples(smaller))
            if worst(smaller, count).missing_bytes <= 0
        )
        least = min(at_once, at_most, key=lambda need: need.missing_bytes)
        raise _too_large(plan, least, next(others, None))
    fewest = 2
    while fewest < most:
        middle = (fewest + most) // 2
        fits = worst(plan, middle).missing_bytes <= 0
        fewest, most = (fewest, middle) if fits else (middle + 1, most)
    return fewest


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Yield the plans on the same devices that hold less, from the smallest change to the largest."""
    smaller = [plan.with_(recompute="full")]
    if plan.world_size > 1:
        smaller += [
            Plan.of(shard=plan.world_size),
            Plan.of(shard=plan.world_size, recompute="full"),
        ]
    for tried in smaller:
        if tried.with_(microbatches=1) != plan.with_(microbatches=1):
            yield tried


def _too_large(plan: Plan, need: MemoryNeed, other: Plan | None) -> PlanError:
    by_size = sorted(need.ledger.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {_gib(num_bytes)}" for name, num_bytes in by_size if num_bytes)
    taken = f"; {need.device.taken}" if need.device.taken else ""
    return PlanError(
        f"plan '{plan}' needs {_gib(need.total_bytes)} on a rank however small its micro-batches are, and "
        f"a {need.device.kind} device has {_gib(need.device.memory_bytes)}: {_gib(need.missing_bytes)} "
        f"({need.missing_bytes} bytes) too little ({parts}){taken}",
        hint=f"on these devices '{other.with_(microbatches='auto')}' fits"
        if other is not None
        else "more devices to shard over, devices with more memory, or a smaller model",
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
