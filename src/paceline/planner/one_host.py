"""The ways in which a run outlives failures on one host, whose process replaces lost ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from paceline.base.errors import PlanError
from paceline.launch.process.memory_store import TIME_SHARE
from paceline.planner.resized import resized
from paceline.planner.survival import FailingRun, NoSurvival, Survival, SurvivalName, fitting_step_s
from paceline.simulate.failures import Failures
from paceline.simulate.outages import Outages

# Seconds until the replaced ranks of one host compute again: forks of a warm process, a process
# group, a small model. Median of the slowest plan, python -m benchmarks.recovery on two cores.
REPLACED_S = 0.7


def ways(run: FailingRun) -> Iterator[tuple[SurvivalName, Callable[[], Survival]]]:
    """Yield the ways that exist on one host; building one may still raise `NoSurvival`."""
    yield "copies", partial(_copies, run)
    yield "checkpoint", partial(_checkpoint, run)
    if run.cluster.devices[0].kind == "cuda":
        yield "spare", partial(_spare, run)


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


def _spare(run: FailingRun) -> Survival:
    """Price a GPU that waits. A GPU that it replaced is repaired when the run has ended."""
    plan, num_gpus = (
        run.plan,
        len(run.cluster.nodes[0].devices if run.cluster.nodes else run.cluster.devices),
    )
    if num_gpus == 1:
        raise NoSurvival("the host has one GPU")
    if plan.world_size == num_gpus:
        try:
            plan = resized(plan, num_gpus - 1)
        except PlanError as error:
            raise NoSurvival(str(error).partition("\n")[0]) from error
    step_s = run.step_s if plan == run.plan else fitting_step_s(run, plan)
    failures = Failures(
        run.mtbf_s * run.plan.world_size / plan.world_size, run.copied_s, REPLACED_S + run.copied_s
    )
    outages = Outages(
        plan.world_size, 1, run.rates.repair_s, resumed_s=run.resumed_s, are_repaired_beside=False
    )
    return Survival.of(
        "spare",
        f"a GPU waits for the place of one that fails (--spares 1), under {plan}; the next failure ends the "
        "run",
        failures,
        max(run.copied_s / TIME_SHARE, step_s),
        outages=outages,
        used=min(1.0, run.step_s / step_s),
        options={"options": "--spares 1", "plans": [str(plan)], "repair_s": run.rates.repair_s},
    )
