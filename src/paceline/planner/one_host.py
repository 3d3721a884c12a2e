"""The ways in which a run outlives failures on one host, whose process replaces lost ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from paceline.launch.process.memory_store import TIME_SHARE
from paceline.planner.survival import FailingRun, Survival, SurvivalName
from paceline.simulate.failures import Failures

# Seconds until the replaced ranks of one host compute again: forks of a warm process, a process
# group, a small model. Median of the slowest plan, python -m benchmarks.recovery on two cores.
REPLACED_S = 0.7


def ways(run: FailingRun) -> Iterator[tuple[SurvivalName, Callable[[], Survival]]]:
    """Yield the ways that exist on one host."""
    yield "copies", partial(_copies, run)
    yield "checkpoint", partial(_checkpoint, run)


def _copies(run: FailingRun) -> Survival:
    words = "ranks are replaced on their host and go on from what they left in memory"
    return Survival.of(
        "copies",
        words,
        Failures(run.mtbf_s, run.copied_s, REPLACED_S + run.copied_s),
        max(run.copied_s / TIME_SHARE, run.step_s),
    )


def _checkpoint(run: FailingRun) -> Survival:
    return Survival.of(
        "checkpoint",
        "ranks are replaced on their host and go on from the newest checkpoint",
        *run.saving(REPLACED_S),
    )
