"""`accumulate=auto`: find the fewest micro-batches with which a plan fits its devices, or say why
none fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.base.errors import PlanError
from paceline.cluster.cluster import Cluster
from paceline.job import Precision
from paceline.model.cost.profile import Profile
from paceline.planner.rank_kinds import MemoryNeed, rank_kinds
from paceline.simulate.device import DeviceRates
from paceline.strategies.plan import Plan

# Arbitrary rates, for estimates of which only the memory is used.
ANY_RATES = DeviceRates(1e9, 1e9, 1e9, 1e9, 0.0)


def fewest_microbatches(
    profile: Profile, plan: Plan, cluster: Cluster, *, batch: int, precision: Precision = "float32"
) -> int:
    """Return the fewest micro-batches per update with which every rank stays within its device's
    memory.

    Raises:
        PlanError: even one sample per micro-batch is too much for some device. The message says by
            how much, for what, and which plan on the same devices would fit.
    """

    def worst(count: int) -> MemoryNeed:
        return _worst(
            profile, plan.with_(accumulate=count), cluster, batch=batch, precision=precision
        )

    most = _most_samples(plan, cluster, batch)
    # A single micro-batch needs no second gradient beside the first. From two on, more
    # micro-batches always need less, so bisection finds the number.
    at_once, at_most = worst(1), worst(most)
    if at_once.missing_bytes <= 0:
        return 1
    if at_most.missing_bytes > 0:
        raise _too_large(
            plan,
            min(at_once, at_most, key=lambda need: need.missing_bytes),
            list(_plans_that_fit(profile, plan, cluster, batch=batch, precision=precision)),
        )
    fewest = 2
    while fewest < most:
        middle = (fewest + most) // 2
        fewest, most = (fewest, middle) if worst(middle).missing_bytes <= 0 else (middle + 1, most)
    return fewest


def _worst(
    profile: Profile, plan: Plan, cluster: Cluster, *, batch: int, precision: Precision
) -> MemoryNeed:
    """Return the memory of the rank that exceeds its device's memory the most, or has the least
    left.
    """
    kinds = rank_kinds(plan, cluster, batch=batch, rates=ANY_RATES)
    needs = (
        kind.play(profile, plan, precision=precision, snapshot=True).need(plan) for kind in kinds
    )
    return max(needs, key=lambda need: need.missing_bytes)


def _most_samples(plan: Plan, cluster: Cluster, batch: int) -> int:
    """Return the largest number of samples that a rank gets of a batch."""
    kinds = rank_kinds(plan.with_(accumulate=1), cluster, batch=batch, rates=ANY_RATES)
    return int(max(sum(kind.microbatches) for kind in kinds))


def _plans_that_fit(
    profile: Profile, plan: Plan, cluster: Cluster, *, batch: int, precision: Precision
) -> Iterator[Plan]:
    """Yield the plans on the same devices that hold less and fit, from the smallest change to the
    largest.
    """
    smaller = [plan.with_(recompute="full")]
    if plan.world_size > 1:
        smaller += [
            Plan.of(shard=plan.world_size),
            Plan.of(shard=plan.world_size, recompute="full"),
        ]
    for tried in smaller:
        counts = (1, _most_samples(tried, cluster, batch))
        if tried.with_(accumulate=1) != plan.with_(accumulate=1) and any(
            _worst(
                profile, tried.with_(accumulate=count), cluster, batch=batch, precision=precision
            ).missing_bytes
            <= 0
            for count in counts
        ):
            yield tried.with_(accumulate="auto")


def _too_large(plan: Plan, need: MemoryNeed, others: Sequence[Plan]) -> PlanError:
    by_size = sorted(need.ledger.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {_gib(num_bytes)}" for name, num_bytes in by_size if num_bytes)
    taken = f"; {need.device.taken}" if need.device.taken else ""
    return PlanError(
        f"plan '{plan}' needs {_gib(need.total_bytes)} on a rank however small its micro-batches are, and "
        f"a {need.device.kind} device has {_gib(need.device.memory_bytes)}: {_gib(need.missing_bytes)} "
        f"({need.missing_bytes} bytes) too little ({parts}){taken}",
        hint=f"on these devices '{others[0]}' fits"
        if others
        else "more devices to shard over, devices with more memory, or a smaller model",
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
