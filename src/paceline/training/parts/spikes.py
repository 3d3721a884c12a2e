"""Spikes: losses or gradient norms far above those of the steps before, and whether a run stops or skips.

All ranks know the loss of the whole batch before they update with its gradients. So they decide alike, without a
message.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, get_args

from paceline.base.errors import JobError, PlanRefused, TrainingError, UsageError
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.plan import Plan

SpikeAction = Literal["stop", "skip"]

# What counts as a spike: so many standard deviations above the mean of the latest steps, once half as many are known.
# Source: Ai2's OLMo-core, `SkipStepOptimizer`, which trained OLMo 2 with it.
LATEST_STEPS, SIGMAS = 128, 6.0
# The standard deviation is taken for at least this part of the mean: losses of a run at rest hardly differ.
LEAST_SPREAD = 0.01
MOST_IN_A_ROW = 10  # spikes without an update between them: a run that only skips does not train


class Spike(TrainingError):
    """A step whose loss or gradients no update is to be made from. Raised by all ranks of a step alike.

    It is heard if another rank's samples are at fault, because that rank's report comes first.
    """


def read_action(text: str | None) -> SpikeAction | None:
    """
    Raises:
        UsageError: there is no such action.
    """
    if text is not None and text not in get_args(SpikeAction):
        raise UsageError(f"on_spike={text!r}: unknown", hint="on_spike is stop or skip")
    return text  # type: ignore[return-value]


def refuse_unwatched(action: SpikeAction | None, plan: Plan) -> None:
    """Refuse to watch for spikes where ranks can't decide about a step together.

    Raises:
        PlanRefused: replicas of the plan take steps of their own.
    """
    if action is None:
        return
    for strategy in ActivePlan(plan).strategies:
        if why := strategy.refuses.get("spikes"):
            raise PlanRefused(
                f"--on-spike {action} with {strategy.name}: {why}",
                hint="data=N and shard=N, also beside tensor=N and pipeline=N, decide about each step "
                "together",
            )


def refuse_backwards(action: SpikeAction, number: int, verb: str = "ctx.backward") -> None:
    """Refuse to watch a step that updates before all its losses are known.

    Args:
        number: Of backwards in the step.
        verb: What makes them.

    Raises:
        JobError: there are several.
    """
    if number > 1:
        raise JobError(
            f"--on-spike {action}: a step calls {verb} {number} times, and only one with a single backward can be "
            "left out, because its loss is known before its update",
            hint="leave --on-spike out: a loss that is not finite ends the run anyway",
        )


class Spikes:
    """Judges each step by those before it; the same on all ranks.

    losses, norms: of the latest steps that were no spikes. in_a_row: spikes since the last update. num_spikes: of the
        run.
    """

    def __init__(self, action: SpikeAction) -> None:
        self.action = action
        self.losses: deque[float] = deque(maxlen=LATEST_STEPS)
        self.norms: deque[float] = deque(maxlen=LATEST_STEPS)
        self.in_a_row = self.num_spikes = 0

    def judge(self, loss: float, norm: float | None) -> str:
        """Why a step is a spike, in words; "" if it is none, and then it counts among those before later ones.

        Args:
            loss: Of the whole batch.
            norm: Of the gradients before clipping; None if the job doesn't clip.
        """
        why = _why("the loss", loss, self.losses)
        if not why and norm is not None:
            why = _why("the norm of the gradients", norm, self.norms)
        if why:
            self.in_a_row, self.num_spikes = self.in_a_row + 1, self.num_spikes + 1
            return why
        self.in_a_row = 0
        self.losses.append(loss)
        if norm is not None:
            self.norms.append(norm)
        return ""

    def refuse_more(self, why: str, step: int) -> None:
        """
        Args:
            step: Its number, from 1.

        Raises:
            Spike: the run is to stop here, or so many steps in a row were spikes that it does not train any more.
        """
        if self.action == "stop":
            raise Spike(
                f"step {step} is a spike: {why}; the weights of the step before are kept",
                hint="--on-spike skip leaves such steps out",
            )
        if self.in_a_row >= MOST_IN_A_ROW:
            raise Spike(
                f"steps {step - self.in_a_row + 1} to {step} are spikes, all in a row; the last one: {why}",
                hint="a lower learning rate, clip=1.0, or a look at the samples in the run folder",
            )

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "in_a_row": self.in_a_row,
            "num_spikes": self.num_spikes,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from `to_dict`."""
        self.losses = deque(map(float, saved["losses"]), maxlen=LATEST_STEPS)
        self.norms = deque(map(float, saved["norms"]), maxlen=LATEST_STEPS)
        self.in_a_row, self.num_spikes = int(saved["in_a_row"]), int(saved["num_spikes"])


def _why(quantity: str, value: float, before: deque[float]) -> str:
    if not math.isfinite(value):
        return f"{quantity} is {'infinite' if math.isinf(value) else 'not a number (NaN)'}"
    if 2 * len(before) < LATEST_STEPS:
        return ""
    mean = statistics.fmean(before)
    spread = max(statistics.stdev(before, mean), LEAST_SPREAD * abs(mean))
    if value <= mean + SIGMAS * spread:
        return ""
    return f"{quantity} is {value:.4g}, and the mean of the {len(before)} steps before is {mean:.4g} +- {spread:.2g}"
