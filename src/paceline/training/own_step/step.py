"""A step that a job brings: backwards and updates of its own number and order, on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch

from paceline.base.errors import TrainingError
from paceline.model.forward_effects import limited_by_norm
from paceline.strategies.step_sync import StepFigures
from paceline.training.refusals import check_loss
from paceline.training.step import SUMS, Backward, TrainingStep


class OwnStep(TrainingStep):
    """A step with any number of backwards and updates.

    If it has one backward, ranks agree as in the usual step, before the first update. The figures of
    several backwards are sent at once, and read at the end of the step, or as soon as later work
    depends on them.
    """

    is_decided = False  # whether ranks agreed about the whole step before its first update

    @cached_property
    def may_edit(self) -> bool:
        """Whether a forward may change a parameter. On GPUs, this is looked for in a process's first
        step, and later only if some were found.
        """
        state = self.state
        return state.merges_edits and (
            self.is_first
            or state.device.type == "cpu"
            or bool(state.edits.names or limited_by_norm(state.model))
        )

    def go_on(self) -> None:
        """Let the step's end ask again for what may change after an update."""
        self.figures = None

    def decide(self, backward: Backward) -> None:
        """Agree about the step's only backward and whether to make its updates, before the first of them.
        Collective; the host waits for the device.
        """
        state, optimizers = self.state, self.state.optimizer
        if state.spikes is not None:
            clips = [
                optimizers.clips[name]
                for name, updated in optimizers.names.items()
                if not set(updated).isdisjoint(backward.trainable)
            ]
            self.clip = max(clips) if clips and None not in clips else None
        self.is_decided = True
        backward.agreed = torch.tensor([self.agree(backward), 1.0], dtype=torch.float64)

    def agree_later(self, backward: Backward) -> None:
        """Agree about a backward, and leave the gradients of its update. Collective.

        The host waits for the device only if another rank may have used a parameter that this one
        has not used, or changed one.
        """
        state, parameters = self.state, backward.parameters
        backward.agreed = agreed = state.step_sync.all_reduce_figures(self._message(backward))
        frozen = parameters.keys() & state.freezing.at(self.number, self.window.epoch)
        used = backward.used if self.samples or not state.step_sync.has_own_steps else set[str]()
        unused = parameters.keys() - used - frozen
        figures = None
        if self.may_edit or (unused and state.step_sync.world_size > 1):
            (figures,) = self.read([backward])
            unused &= backward.unused(figures)
        backward.drop(unused | frozen)
        if state.step_sync.world_size > 1 or not all(tally.is_mean for tally in backward.tallies):
            factor = torch.where(agreed[SUMS] > 0, backward.expected_count / agreed[1], 1.0)
            state.scale_gradients(factor, parameters)
        if figures is not None and figures.edited:
            self._merge_edits(figures)

    def read(self, backwards: Sequence[Backward], *more: torch.Tensor) -> list[StepFigures]:
        """Read what ranks agreed on about backwards, and more figures. The host waits for the device.

        Raises:
            TrainingError: a loss is not finite or counts nothing. Updates were made.
        """
        state = self.state
        sent = [*(each.agreed for each in backwards if each.agreed is not None), *more]
        values = iter(torch.cat(sent).tolist())
        figures = [StepFigures.read([next(values) for _ in range(len(each))]) for each in sent]
        for backward, each in zip(backwards, figures, strict=False):
            backward.is_read = True
            self._take(each)
            overflows = state.scaling is not None and not math.isfinite(each.loss)
            self.has_overflowed |= overflows
            if not each.count and state.step_sync.has_own_steps:
                continue  # this replica has no samples
            loss = 0.0 if overflows else each.loss
            check_loss(loss, each.count, backward.tallies, self.number, is_updated=True)
            if each.edited and not self.may_edit:
                raise TrainingError(
                    "a forward changes a parameter in place, and none did so in the first step",
                    hint="change it in the first step, too, or use a plan that doesn't cut the batch: "
                    "single, tensor=N or pipeline=N",
                )
            self.loss += each.loss / each.count
            for name, count in zip(backward.trainable, each.users, strict=True):
                self.users[name] += count
        return figures

    def end(self) -> StepFigures:
        """Return the figures of the whole step, on which ranks agree. Collective, unless ranks have agreed
        and nothing came after the update."""
        state = self.state
        if self.figures is None:
            message = state.step_sync.all_reduce_figures(self._message(None, is_last=True))
            self._tell_launched()
            unread = [each for each in self.backwards if not each.is_read]
            *_, last = self.read(unread, message)
            self._take(last)
            if state.scaling is not None and not self.is_decided:
                state.scaling.update(
                    is_skipped=self.has_overflowed, count=0.0, loss=self.loss, step=self.number
                )
            self.is_skipped = self.has_overflowed or bool(self.spike)
            self.figures = last
            last.loss, last.count = self.loss, 1.0
            if not state.step_sync.has_own_steps:
                self._check_used()
        if state.step_sync.has_own_steps:  # replicas weigh the loss by their samples
            self.figures.count = float(self.samples)
            self.figures.loss = self.loss * self.figures.count
        return super().end()
