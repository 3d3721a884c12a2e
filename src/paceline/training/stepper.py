"""Takes one optimizer step on one rank. The code is the same for every plan; plans differ in their
synchronisers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.errors import TrainingError
from paceline.job.order import Window
from paceline.strategies.compose import (
    end_evaluation,
)
from paceline.strategies.layout import Whole
from paceline.strategies.step_sync import SyncedFigures
from paceline.training.feed import MicroBatch
from paceline.training.logged import means
from paceline.training.loss import LossSum
from paceline.training.optimizers.closure import update_with_closure
from paceline.training.own_step.followers import follow
from paceline.training.own_step.step import OwnStep
from paceline.training.own_step.verbs import Verbs
from paceline.training.rank_state import RankState
from paceline.training.replicas.inplace_parameters import EditsDifferError
from paceline.training.replicas.set_once import set_once
from paceline.training.step import TrainingStep
from paceline.training.upload import uploaded
from paceline.training.window import WindowWork, go_back


@dataclass(frozen=True, slots=True)
class StepResult:
    """The values on which all ranks agree after a step."""

    # The losses of every step since ranks last synchronised, this one's last. Each is the sum over
    # a window divided by its global count. Empty if ranks don't synchronise after this step.
    losses: tuple[float, ...]
    stop: int  # how many ranks were asked to stop
    # Before clipping; None if the job doesn't clip, and for a skipped step. If replicas take their
    # own steps, it is the replica's own norm.
    gradient_norm: float | None
    is_settled: bool  # whether the run may be saved and evaluated here
    # Whether nothing was updated, because gradients overflowed under loss scaling or the step is a
    # spike.
    is_skipped: bool = False
    spike: str = ""  # why the step is a spike, in words; "" if it is none
    # Of the samples that all replicas used in the steps of `losses`; see `order.digest`.
    digest: int = 0
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # what the job logged


class Stepper(RankState):
    """The state of one rank, which takes steps together with the other ranks."""

    def step(
        self,
        window: Window,
        batches: list[MicroBatch],
        *,
        step: int,
        stop: Callable[[], bool] = lambda: False,
        beat: Callable[[str], None] = lambda phase: None,
        on_launched: Callable[[], None] = lambda: None,
        observe: Callable[[], None] | None = None,
    ) -> StepResult:
        """Take the step of the job: its own, or one backward and one update.

        Collectives: those of the plan's strategies, and one small all-reduce of the loss over all
        ranks when they synchronise.

        Args:
            step: Number of the step, from 0; keys the random streams.
            stop: Whether this rank was asked to stop. It is called after the backward; every rank
                learns of it in the result.
            beat: Is told which phase begins.
            on_launched: Called when all but the update was launched, before the host waits for the
                device.
            observe: Called when gradients are complete, before clipping.

        Raises:
            TrainingError: a loss that is not finite, can't be trained on, or uses no parameter. No
                weight was changed, except by the updates of a job's own step. Those weights must
                not be saved.
        """
        kind = TrainingStep if self.job.own_step is None else OwnStep
        taken = kind(self, window, batches, step, stop=stop, beat=beat, on_launched=on_launched)
        self.before_forwards()
        if isinstance(taken, OwnStep):
            self._take_own(taken, observe)
        else:
            self._take_usual(taken, observe)
        return self.end_step(taken)

    def end_step(self, taken: TrainingStep) -> StepResult:
        """Return what ranks agree on after a step. Collective when they synchronise."""
        step = taken.number
        synced = self.step_sync.end_step(step + 1, taken.end(), taken.beat)
        if synced is None:
            return StepResult((), 0, taken.norm, is_settled=False)
        self.metrics = means(taken.logged.sums)
        result = self._step_result(
            synced,
            sample_share=synced.weight if self.step_sync.has_own_steps else taken.sample_share,
            step=step,
            gradient_norm=taken.norm,
            is_skipped=taken.is_skipped,
            spike=taken.spike,
            metrics=self.metrics,
        )
        if isinstance(taken, OwnStep) and not self.step_sync.has_own_steps and not taken.spike:
            self._follow(step)
        return result

    def _take_usual(self, step: TrainingStep, observe: Callable[[], None] | None) -> None:
        """Take the step of a job with one model and one loss: one backward, one update."""

        def evaluate(*, is_again: bool = False) -> float:
            self.clear_gradients()  # also of parameters that the optimizer leaves out
            work = WindowWork(
                self, step.window, step.batches, step.number, self.loss_number, step.beat
            )
            if not is_again:  # a step has the figures of its first evaluation
                step.logged = work.logged
            backward = step.backward(list(self.parts.values()), work)
            return step.agree(backward, is_again=is_again)

        try:
            loss = evaluate()
        except EditsDifferError:
            if not isinstance(self.layout, Whole):
                raise
            self._set_once()
            self.before_forwards()
            loss = evaluate()
        if observe:
            observe()
        step.beat("optimizer")
        norm = self.gradient_norm = step.norm
        if self.needs_closure:
            update_with_closure(self, step, loss, evaluate)
            step.norm = norm
        elif not step.is_skipped:
            self.step_optimizer("", self.parameters, step.norm_on_device)

    def _take_own(self, step: OwnStep, observe: Callable[[], None] | None) -> None:
        """Take the step that the job brings."""
        step.observe = observe
        Verbs(step).take()
        if (
            self.step_sync.has_own_steps and self.job.followers
        ):  # they are synchronised as buffers are
            self._follow(step.number)
            step.go_on()

    def _set_once(self) -> None:
        """Go back to the state before the first step, and set parameters by the samples of all
        replicas.

        In the first step each replica has set them by its own samples.
        """
        self.edits.put_back()
        self.buffers.put_back()
        set_once(self)
        self.buffers.look()

    def _follow(self, step: int) -> None:
        """Move followers after a step, numbered from 0."""
        if not self.job.followers:
            return
        follow(
            self.job.followers, self.local_parameters, dict(self.model.named_buffers()), step + 1
        )
        for name in self.job.followers:
            end_evaluation(self.parts[name].synchronisers)

    @contextmanager
    def evaluating(self, sample_share: float, *, step: int) -> Iterator[None]:
        """Synchronise, after the model is evaluated inside the block, the state that its forwards
        change, as after a step.

        Collective over the replicas.

        Args:
            sample_share: This replica's share of the samples on which the model is evaluated.
        """
        meets = len(self.mesh.replicas) > 1 and not self.step_sync.has_own_steps
        if meets:
            self.before_forwards()
        yield
        end_evaluation(self.synchronisers)
        if not meets:
            return
        flags = torch.tensor([self.has_unsynced_buffers, *self.edits.end()])
        changes, group = uploaded(flags.float(), self.device), self.mesh.group("replicas")
        dist.all_reduce(changes, dist.ReduceOp.MAX, group=group)
        changed, edited, unknown = map(bool, changes.tolist())
        if edited:
            self.edits.merge(group, has_unknown=unknown, step=step)
        self.buffers.meet(sample_share, group, has_unsynced=changed)

    def settle(self, step: int) -> StepResult | None:
        """End the run after `step` steps: on return all replicas hold the same. Returns None if
        they already did.

        Collective if ranks have not synchronised after the last step.
        """
        synced = self.step_sync.finalize(step)
        if synced is None:
            return None
        return self._step_result(synced, sample_share=synced.weight, step=step - 1)

    def _step_result(
        self,
        synced: SyncedFigures,
        *,
        sample_share: float,
        step: int,
        gradient_norm: float | None = None,
        **more: Any,
    ) -> StepResult:
        """Return the step's result from the figures on which ranks agreed, and more of its fields.

        sample_share: this replica's share of the samples that the figures are about.
        """
        flags, first = synced.flags, step + 2 - len(synced.losses)
        for number, (_, count) in enumerate(synced.losses):
            if not count:
                raise TrainingError(
                    f"the loss counts nothing in step {first + number}: its count is {count:g}",
                    hint="every target of the window is ignored; a larger batch makes this unlikely",
                )
        # The steps of replicas may differ. Which models a step of the job's own trains is not known here.
        if first == 1 and self.step_sync.has_own_steps and self.job.own_step is None:
            self.check_used(dict(zip(self.trainable, flags.users, strict=True)), step)
        if len(self.mesh.replicas) > 1:
            self.buffers.meet(
                sample_share, self.mesh.group("replicas"), has_unsynced=bool(flags.changed)
            )
        return StepResult(
            tuple(loss / count for loss, count in synced.losses),
            int(flags.stops),
            gradient_norm,
            is_settled=True,
            digest=int(flags.digest),
            **more,
        )

    def backward(
        self,
        window: Window,
        batches: list[MicroBatch],
        *,
        step: int,
        part: int,
        beat: Callable[[str], None] = lambda phase: None,
        tell: Callable[[list[LossSum]], None] = lambda tallies: None,
    ) -> set[str]:
        """Compute the gradients of a window, as far as the plan's synchronisers reduce them.
        Collective as they are.

        Args:
            part: Which part of the window this rank computes; keys the random streams.
            tell: Called with the losses of a rank that computes whole replicas, before the last of
                its backwards begins.

        Returns:
            The names of parameters that this rank used.
        """
        self.clear_gradients()
        work = WindowWork(self, window, batches, step, part, beat, tell)
        return go_back(self, list(self.parts.values()), work)
