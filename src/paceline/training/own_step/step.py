"""A step that a job or a script's loop brings: backwards and updates of its own number and order, on
one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from paceline.base.errors import TrainingError, nearest
from paceline.job.named_optimizers import NamedOptimizers
from paceline.model.forward_effects import limited_by_norm
from paceline.strategies.compose import end_evaluation
from paceline.strategies.layout import Whole
from paceline.strategies.step_sync import StepFigures
from paceline.training.feed import MicroBatch
from paceline.training.own_step.named_parts import ModelPart
from paceline.training.parts.spikes import refuse_backwards
from paceline.training.refusals import check_loss
from paceline.training.scaling import power_of_two
from paceline.training.step import SUMS, Backward, TrainingStep
from paceline.training.window import WindowWork


class OwnStep(TrainingStep):
    """A step with any number of backwards and updates.

    If it has one backward, ranks agree as in the usual step, before the first update. The figures of
    several backwards are sent at once, and read at the end of the step, or as soon as later work
    depends on them.

    Attributes:
        pieces: This rank's micro-batches, on the device.
        pending: The step's first backward, if ranks still have to agree on it.
        reached: Parameters of a backward that no update has used.
        observe: Looks at the step's gradients before clipping, summed over the updates.
    """

    is_decided = False  # whether ranks agreed about the whole step before its first update

    def __init__(self, *given: Any, **named: Any) -> None:
        """Begin a step; see `TrainingStep`."""
        super().__init__(*given, **named)
        state = self.state
        self.pieces = [batch.to(state.device, state.job.input_dtype) for batch in self.batches]
        self.pending: Backward | None = None
        self.reached = set[str]()
        self.observe: Callable[[], None] | None = None
        self._gradients = dict[str, torch.Tensor]()

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

    # --- Verbs ----------------------------------------------------------------------------------------------------

    def part(self, name: str) -> ModelPart:
        """Return a model by its name.

        Raises:
            TrainingError: there is none.
        """
        if name not in self.state.parts:
            raise TrainingError(f"no model '{name}': {nearest(name, self.state.parts)}")
        return self.state.parts[name]

    def check_backward(self, verb: str) -> None:
        """
        Raises:
            JobError: a backward is not the first, and the step is watched for spikes.
        """
        if self.state.spikes is not None:
            refuse_backwards(self.state.spikes.action, len(self.backwards) + 1, verb)

    @contextmanager
    def collecting(self, names: Collection[str]) -> Iterator[None]:
        """Let only these models get gradients inside the block. Other models run frozen."""
        others = [
            part
            for part in self.state.parts.values()
            if part.name not in names and isinstance(part.layout, Whole)
        ]
        frozen = [p for part in others for p in part.layout.module.parameters() if p.requires_grad]
        synchronisers: list[Any] = [each for part in others for each in part.synchronisers]
        for p in frozen:
            p.requires_grad_(False)
        for synchroniser in synchronisers:
            synchroniser.collect(on=False)
        try:
            yield
        finally:
            for p in frozen:
                p.requires_grad_(True)
            for synchroniser in synchronisers:
                synchroniser.collect(on=True)

    def add(self, parts: Sequence[ModelPart], work: WindowWork) -> Backward:
        """Add the gradients of a loss to those of earlier losses. Collective.

        Ranks agree about the loss, unless it may be the step's only one.
        """
        parameters, _ = self.state.trained_by(parts)
        earlier = {}  # the synchronisers have already summed them
        for name, p in parameters.items():
            if p.grad is not None and name in self.reached:
                earlier[name] = p.grad.clone()
            p.grad = None
        backward = self.pending = self.backward(parts, work)
        self.reached.update(backward.trainable)
        if not (self.state.has_one_backward and len(self.backwards) == 1):
            self.agree_on_pending()
        for name, gradient in earlier.items():
            p = parameters[name]
            p.grad = gradient if p.grad is None else p.grad + gradient
        return backward

    def agree_on_pending(self, *, decides: bool = False) -> bool:
        """Agree about the pending backward, if there is one. Collective.

        decides: whether ranks decide now about all updates of the step, which they always do if the
            step may be a spike.

        Returns:
            Whether they decided.
        """
        backward, self.pending = self.pending, None
        if backward is None:
            return False
        if decides or self.state.spikes is not None:
            self.decide(backward)
            return True
        self.agree_later(backward)
        return False

    def names_of(self, optimizer: str, verb: str, *, hint: str) -> Collection[str]:
        """Return the names of what an optimizer updates, on whichever rank.

        Args:
            optimizer: "" is a job's only one.
            hint: What to do before the verb.

        Raises:
            TrainingError: there is no such optimizer, or no gradient for it.
        """
        optimizers = self.state.optimizer
        names: Collection[str] = self.state.trainable
        if isinstance(optimizers, NamedOptimizers):
            if optimizer not in optimizers.members:
                raise TrainingError(
                    f"no optimizer '{optimizer}': {nearest(optimizer, optimizers.members)}"
                )
            names = optimizers.names[optimizer]
        if not self.reached.intersection(names):
            raise TrainingError(f"{verb} finds no gradient of what it updates", hint=hint)
        return names

    def update(self, optimizer: str, names: Collection[str]) -> None:
        """Clip the gradients of an optimizer, step it and its schedule, and drop the gradients.
        Collective.

        All ranks leave the update out if a gradient overflows on one under loss scaling, or if the
        step is a spike.

        names: of the parameters that the optimizer updates.
        """
        state = self.state
        # Under loss scaling, ranks decide about each update, which may be about a part.
        is_only = self.pending is not None and set(names).issuperset(self.pending.trainable)
        is_decided = self.agree_on_pending(decides=is_only or state.scaling is None)
        is_decided |= state.spikes is not None
        parameters = {name: state.parameters[name] for name in names if name in state.parameters}
        if not (self.is_skipped if is_decided else self._overflow(parameters)):
            if self.observe is not None:
                self._keep(parameters)
            self.beat("optimizer")
            state.named_update(optimizer, parameters, self.norm_on_device if is_only else None)
        for p in parameters.values():
            p.grad = None
        # Weights that were gathered for a forward are those before the update.
        for part in state.parts.values():
            if any(name.startswith(part.prefix) for name in names):
                end_evaluation(part.synchronisers)
        self.reached.difference_update(names)

    def _overflow(self, parameters: dict[str, torch.nn.Parameter]) -> bool:
        """Divide gradients by the loss scale, and return whether some are infinite or NaN on any
        rank.

        Without loss scaling this does nothing and returns False. Collective under loss scaling: the
        host waits for the device.
        """
        state = self.state
        if state.scaling is None:
            return False
        overflow = state.unscale(parameters).double().reshape(1)
        overflows = bool(state.step_sync.all_reduce_figures(overflow))
        self.has_overflowed |= overflows
        return overflows

    def _keep(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        for name, p in parameters.items():
            if p.grad is not None:
                earlier, gradient = self._gradients.get(name), p.grad.clone()
                self._gradients[name] = gradient if earlier is None else earlier + gradient

    def unused_gradients(self) -> list[str]:
        """Return the names of parameters with gradients that no update has used, after ranks have
        agreed about all backwards. Collective.
        """
        self.agree_on_pending()
        parameters = self.state.parameters
        return [
            name for name in self.reached & parameters.keys() if parameters[name].grad is not None
        ]

    # --- Agreement ------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Let the step's end ask again for what may change after an update."""
        self.figures = None

    def decide(self, backward: Backward) -> None:
        """Agree about the step's only backward and whether to make its updates, before the first of them.
        Collective; the host waits for the device.
        """
        optimizers = self.state.optimizer
        if self.state.spikes is not None and isinstance(optimizers, NamedOptimizers):
            clips: list[Any] = [
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
        state.has_one_backward &= len(self.backwards) == 1
        if self.observe is not None:
            for name, p in state.parameters.items():
                p.grad = self._gradients.get(name)
            self.observe()
            state.clear_gradients()
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


class BackwardWork(WindowWork):
    """The micro-batches of one backward."""

    def __init__(
        self, taken: OwnStep, parts: Sequence[ModelPart], batches: list[MicroBatch], *place: int
    ) -> None:
        """place: the backward's place in the step, which keys random streams."""
        state = taken.state
        super().__init__(state, taken.window, batches, taken.number, state.loss_number, taken.beat)
        self.place = place
        self.synchronisers = [each for part in parts for each in part.synchronisers]
        # Gradients of a loss that is a sum are about as large as those of a mean when they are scaled,
        # rounded or left out of a message.
        self.expected_count = power_of_two(taken.window.count)

    def before_forward(self, microbatch: int, stage: int) -> None:
        for synchroniser in self.synchronisers:
            synchroniser.hold()
        super().before_forward(microbatch, stage)
