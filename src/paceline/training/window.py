"""The work around the micro-batches of a window on one rank: random streams, the loss and its
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.errors import PlanRefused
from paceline.base.streams import seed_streams
from paceline.job.compute import computed_figures
from paceline.job.order import Window
from paceline.model.casts import autocast
from paceline.strategies.mesh import is_about_parts
from paceline.training.blame import blaming, note_sample, sample_names
from paceline.training.feed import MicroBatch
from paceline.training.logged import LoggedFigures
from paceline.training.loss import LossSum, read_tally, with_gradient, without_total

if TYPE_CHECKING:
    from paceline.training.own_step.named_parts import ModelPart
    from paceline.training.rank_state import RankState


class WindowWork:
    """The work around the micro-batches of one step.

    Attributes:
        criterion: Computes the loss from (output, target).
        synchronisers: Those of the parameters that the loss trains.
        place: Keys the random streams, in addition to the step, the part and the micro-batch.
        logged: What the job's `compute` gave beside the loss.
    """

    def __init__(
        self,
        state: RankState,
        window: Window,
        batches: Sequence[MicroBatch],
        step: int,
        part: int,
        beat: Callable[[str], None],
        tell: Callable[[list[LossSum]], None] = lambda tallies: None,
    ) -> None:
        self.state, self.window, self.step, self.part, self.beat = (
            state,
            window,
            step,
            part,
            beat,
        )
        self.tell, self.criterion, self.synchronisers = (
            tell,
            state.job.criterion,
            state.synchronisers,
        )
        self.place: tuple[int, ...] = ()
        self.batches = [batch.to(state.device, state.job.input_dtype) for batch in batches]
        self.tallies: list[LossSum] = []
        self.logged = LoggedFigures(state)
        self.set_aside: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        own_samples = sum(batch.samples for batch in batches)
        self.samples = max(own_samples, 1) if state.step_sync.has_own_steps else window.count
        scaling = state.scaling
        self.scale = 1.0 if scaling is None else scaling.scale
        self.latest = 0  # the micro-batch whose forward began last
        # A loss that is a sum is divided by it before backward.
        self.expected_count = 1.0 if scaling is None else scaling.expected_count(window.count)

    def before_forward(self, microbatch: int, stage: int) -> None:
        self.latest = microbatch
        place = (self.part, microbatch, stage) if stage else (self.part, microbatch)
        seed_streams(self.state.job.seed, "step", self.step, *place, *self.place)
        self.beat("forward")

    def loss(self, microbatch: int, output: Any) -> torch.Tensor:
        batch, job = self.batches[microbatch], self.state.job
        with autocast(job, self.state.device):
            tally = read_tally(self._explained_loss(output, microbatch), samples=batch.samples or 1)
            tally = with_gradient(tally, output, backward_goes_on=self.state.all_go_back)
        self.tallies.append(
            tally if batch.samples else LossSum(torch.zeros_like(tally.value), 0.0, tally.is_mean)
        )
        if job.compute is not None:
            for name, figure in computed_figures(output).items():
                source, whole = f"figure {name!r} of compute", self.window.count
                self.logged.add(name, figure, source=source, samples=batch.samples, whole=whole)
        # The weight of a mean over samples is known before backward. (sum, count) is divided when
        # the count of all samples is known: the window's, or this replica's own if replicas take
        # their own steps. A padding batch has weight 0.
        weight = (
            batch.samples / self.samples * self.scale
            if tally.is_mean
            else float(batch.samples > 0) * self.scale / self.expected_count
        )
        value = (
            tally.value.float() if tally.value.dtype == torch.float16 else tally.value
        )  # a scale may not fit into float16
        return value * weight

    def _explained_loss(self, output: Any, microbatch: int) -> Any:
        """Return the job's loss, and refuse it if it is made of shards."""
        try:
            value = self.criterion(output, self.batches[microbatch].target)
        except Exception as error:
            if isinstance(error, RuntimeError) and is_about_parts(
                error
            ):  # NotImplementedError is a RuntimeError
                raise _reads_shards(str(error).splitlines()[0]) from error
            if self.state.job.own_step is None:
                note_sample(
                    error,
                    self.criterion,
                    output,
                    self.batches[microbatch].target,
                    sample_names(self.state.job, self.state.part, self.window, microbatch),
                )
            raise
        for part in value if isinstance(value, tuple | list) else [value]:
            if hasattr(part, "device_mesh"):
                raise _reads_shards("it became a DTensor")
        samples = self.batches[microbatch].samples or 1
        return without_total(value, samples=samples, whole=self.window.count)

    def record(self, kind: str, label: str, start_s: float, end_s: float) -> None:
        if self.state.trace is not None:
            self.state.trace.add(kind, label, start_s, end_s)

    def before_backward(self, microbatch: int) -> None:
        is_last = microbatch == len(self.batches) - 1
        self.drop_rows_of_stand_in()
        if not self.batches[microbatch].samples:
            self.set_aside = {p: p.grad for p in self.state.sparsely_trained}
            for p in self.set_aside:
                p.grad = None
        for synchroniser in self.synchronisers:
            synchroniser.begin(last=is_last)
        if is_last:
            self.tell(self.tallies)
        self.beat("backward")

    def drop_rows_of_stand_in(self) -> None:
        """Drop the rows that a padding batch adds to sparse gradients. They are zeros, but an
        optimizer would update such rows.
        """
        for p, gradient in self.set_aside.items():
            p.grad = gradient
        self.set_aside = {}


def _reads_shards(evidence: str) -> PlanRefused:
    return PlanRefused(
        "the loss uses parameters of the model, and under this plan a rank holds parts of them where "
        f"it is computed ({evidence})",
        hint="use a data=N plan, or shard=N zero=2, which keeps parameters whole between forward and "
        "backward: let a loss that compute= returns use them after its call of the model",
    )


def go_back(state: RankState, parts: Sequence[ModelPart], work: WindowWork) -> set[str]:
    """Compute the gradients of a loss, as far as the plan's synchronisers reduce them. Collective as
    they are.

    parts: the models that it trains, of which the first one runs.

    Returns:
        The names of parameters that this rank used.
    """
    with blaming(state.job, state.part, work.window, work.batches, lambda: work.latest):
        parts[0].layout.run(work.batches, work)
    state.freezing.refuse_thawed(state.local_parameters, state.parameters, work.step)
    work.drop_rows_of_stand_in()
    unused = set().union(*(each.unused() for part in parts for each in part.synchronisers))
    parameters, _ = state.trained_by(parts)
    used = {name for name, p in parameters.items() if p.grad is not None and name not in unused}
    work.beat("reduce")
    for part in reversed(parts):
        for synchroniser in reversed(part.synchronisers):
            synchroniser.finish()
        part.layout.finish()
    return used
