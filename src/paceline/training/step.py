"""One step on one rank: losses go back, ranks agree about them, and optimizers update.

The step of a job with one loss is one backward and one update; see `stepper.Stepper`. A step of the
job's own calls the same two as often as it wants; see `own_step.verbs.Verbs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.base.errors import RanksDisagree
from paceline.strategies.step_sync import StepFigures
from paceline.torch_private.autograd import version_of
from paceline.training.clipping import squared_norm
from paceline.training.logged import LoggedFigures
from paceline.training.loss import LossSum
from paceline.training.refusals import check_loss
from paceline.training.upload import uploaded
from paceline.training.window import WindowWork, go_back

if TYPE_CHECKING:
    from paceline.job.order import Window
    from paceline.training.feed import MicroBatch
    from paceline.training.own_step.named_parts import ModelPart
    from paceline.training.rank_state import RankState


# The places of two figures in a message.
SUMS, OVERFLOWS = (StepFigures.__slots__.index(name) for name in ("sums", "overflows"))


@dataclass
class Backward:
    """A loss that went back on this rank."""

    parameters: Mapping[str, torch.nn.Parameter]  # those here that it trains
    trainable: list[str]  # names of those on all ranks
    used: set[str]  # names of those that it used here
    tallies: list[LossSum]  # this rank's part of the loss
    expected_count: float  # by which a loss that is a sum was divided before it went back
    edited: bool  # whether its forwards changed a parameter here
    unknown: bool  # and one that is not known yet
    agreed: torch.Tensor | None = None  # `StepFigures` of all ranks, on the device
    is_read: bool = False

    def unused(self, figures: StepFigures) -> set[str]:
        """Return the parameters that no rank used."""
        users = zip(self.trainable, figures.users, strict=True)
        return {name for name, count in users if not count}

    def drop(self, names: Collection[str]) -> None:
        """Drop gradients of parameters."""
        for name in self.parameters.keys() & set(names):
            self.parameters[name].grad = None


class TrainingStep:
    """One step on one rank: a backward, an agreement of all ranks, an update.

    Ranks agree right before the update, in one small message that has all that the end of the step
    asks, too. The host reads it once, before anything is written to a weight.

    Attributes:
        loss: The mean loss, or the sum of those of all backwards that were read.
        users: How many ranks used each parameter in some backward.
        is_skipped: Whether nothing is updated, because gradients overflowed under loss scaling or the
            step is a spike.
        spike: Why the step is a spike, in words.
        logged: The figures of the step beside its loss.
        norm: Of the gradients before clipping; None if the job doesn't clip.
    """

    def __init__(
        self,
        state: RankState,
        window: Window,
        batches: Sequence[MicroBatch],
        number: int,
        *,
        stop: Callable[[], bool],
        beat: Callable[[str], None],
        on_launched: Callable[[], None],
    ) -> None:
        """Begin step `number`, counted from 0; see `Stepper.step`."""
        self.state, self.window, self.batches, self.number = state, window, batches, number
        self.stop, self.beat, self.on_launched = stop, beat, on_launched
        self.samples = sum(batch.samples for batch in batches)  # of this replica
        self.is_first = not state.has_begun
        self.backwards: list[Backward] = []
        self.figures: StepFigures | None = None  # of the whole step
        self.loss, self.users = 0.0, dict.fromkeys(state.trainable, 0.0)
        self.is_skipped, self.has_overflowed, self.spike = False, False, ""
        self.logged = LoggedFigures(state)
        self.norm: float | None = None
        self.norm_on_device: torch.Tensor | None = None
        self.clip = state.job.clip  # the norm is computed if there is one

    @property
    def sample_share(self) -> float:
        """This replica's share of the window's samples."""
        return self.samples / self.window.count

    def backward(self, parts: Sequence[ModelPart], work: WindowWork) -> Backward:
        """Compute and reduce the gradients of a loss. Collective as the plan's strategies are."""
        state = self.state
        parameters, trainable = state.trained_by(parts)
        versions = {n: version_of(p) for n, p in parameters.items()} if self.is_first else {}
        used = go_back(state, parts, work)
        state.written |= {
            n for n, version in versions.items() if version_of(parameters[n]) != version
        }
        edited, unknown = state.edits.end() if state.merges_edits else (False, False)
        backward = Backward(
            parameters,
            trainable,
            used,
            work.tallies,
            work.expected_count,
            edited,
            unknown,
        )
        self.backwards.append(backward)
        return backward

    def agree(self, backward: Backward, *, is_again: bool = False) -> float:
        """Agree about a backward before its update, and about all that the step's end asks. Leave the
        gradients of the update. Collective; the host waits for the device.

        Args:
            is_again: Whether this is a later evaluation of the step's loss. Then the optimizer has to
                handle a loss that is not finite.

        Returns:
            The mean loss; NaN if nothing counts.
        """
        state, parameters = self.state, backward.parameters
        figures, squares, norm = self._ask(backward)
        count, alone = figures.count, state.step_sync.has_own_steps
        if figures.edited and state.merges_edits:
            self._merge_edits(figures)
        factor = backward.expected_count / count if figures.sums and count else float(count != 0)
        norm = norm * factor if norm is not None else None
        self._judge(figures, norm)
        if not is_again:
            check_loss(
                0.0 if self.is_skipped else figures.loss,
                max(count, 1.0) if alone else count,  # only all replicas together know what counts
                backward.tallies,
                self.number,
            )
        self.users.update(zip(backward.trainable, figures.users, strict=True))
        backward.drop(backward.unused(figures))
        if not is_again and not alone:
            self._check_used()
        if state.scaling is not None:
            state.scaling.update(
                is_skipped=self.has_overflowed, count=count, loss=figures.loss, step=self.number
            )
        if self.is_skipped or not count:  # a replica without samples takes no step
            backward.drop(parameters)
        elif figures.sums:
            state.scale_gradients(factor, parameters)
        if norm is not None and not self.is_skipped:
            self.norm, self.norm_on_device = norm, squares.sqrt() * factor
        mean = figures.loss / count if count else math.nan
        if not is_again and count:
            self.loss = mean
        if self.figures is not None:  # a step has the loss of its first evaluation
            figures.loss, figures.count = self.figures.loss, self.figures.count
        self.figures = figures
        return mean

    def _ask(self, backward: Backward) -> tuple[StepFigures, torch.Tensor, float | None]:
        """Return the figures of all ranks, and the squared norm of the gradients on the device and its
        root on the host, before they are divided by the count of a loss that is a sum.

        The norm is None without `clip`. Collective; the host waits for the device.
        """
        state, parameters = self.state, backward.parameters
        state.freezing.let_go(parameters, self.number, self.window.epoch)
        overflow = None if state.scaling is None else state.unscale(parameters)
        squares = squared_norm(self.clip, parameters, state.layout.owned, state.mesh, state.device)
        message = self._message(backward, is_last=True)
        if overflow is not None:
            message[OVERFLOWS] = overflow
        message = torch.cat([state.step_sync.all_reduce_figures(message), squares.reshape(1)])
        self._tell_launched()
        *values, square = message.tolist()
        backward.is_read, figures = True, StepFigures.read(values)
        self._take(figures)
        return figures, squares, math.sqrt(square) if self.clip is not None else None

    def _judge(self, figures: StepFigures, norm: float | None) -> None:
        """Decide whether an update is to be made, as all ranks do."""
        state, loss, count = self.state, figures.loss, figures.count
        self.has_overflowed = state.scaling is not None and (
            bool(figures.overflows) or not math.isfinite(loss)
        )
        if state.spikes is not None and count and not self.has_overflowed:
            self.spike = state.spikes.judge(loss / count, norm)
        self.is_skipped = self.has_overflowed or bool(self.spike)

    def _merge_edits(self, figures: StepFigures) -> None:
        group, has_unknown = self.state.mesh.group("replicas"), bool(figures.unknown)
        self.state.edits.merge(group, has_unknown=has_unknown, step=self.number)

    def _take(self, figures: StepFigures) -> None:
        """Take what ranks logged from the end of a last message. Collective if there are new names.

        Raises:
            RanksDisagree: some ranks sent a last message, and others not: they called different verbs
                of the job's own step.
        """
        if figures.ends not in (0.0, self.state.step_sync.world_size):
            raise RanksDisagree(
                f"rank {self.state.mesh.rank} is in another place of the step than others",
                hint="all ranks must take the same path: a condition on samples holds on some ranks alone; give "
                "each sample a weight in the loss in its place",
                heard=True,
            )
        if figures.ends:
            self.logged.take(figures)

    def _check_used(self) -> None:
        """Look whether the step's losses use what they are to train."""
        users = {name: self.users[name] for each in self.backwards for name in each.trainable}
        self.state.check_used(users, self.number)

    def _tell_launched(self) -> None:
        """Say, once in a step, that the host is about to wait for the device."""
        tell, self.on_launched = self.on_launched, lambda: None
        tell()

    def _message(self, backward: Backward | None, *, is_last: bool = False) -> torch.Tensor:
        """Return this rank's figures of a backward, on the device, with those that are logged at the
        end of a last message.

        Ranks without the model's output have no tallies, and learn of the loss from others.

        is_last: whether they have what the step's end asks.
        """
        state, figures, tallies = self.state, StepFigures(), list[LossSum]()
        if backward is not None:
            if state.mesh.is_first_of_same_loss:
                tallies = backward.tallies
            figures.sums = float(sum(not tally.is_mean for tally in tallies))
            figures.edited, figures.unknown = float(backward.edited), float(backward.unknown)
            figures.users = tuple(float(name in backward.used) for name in backward.trainable)
        if is_last:
            figures.ends, figures.stops = 1.0, float(self.stop())
            figures.changed = float(state.has_unsynced_buffers)
            figures.digest = state.digest(self.batches)
            figures.unnamed = float(len(self.logged.new_names))
        message = _with_losses(figures, tallies, state.device)
        names = state.logged_names if is_last else ()
        return torch.cat([message, self.logged.message(names)]) if names else message

    def end(self) -> StepFigures:
        """Return the figures of the whole step, on which ranks agree."""
        assert self.figures is not None
        self.figures.users = tuple(self.users.values())
        return self.figures


def _with_losses(
    figures: StepFigures, tallies: Sequence[LossSum], device: torch.device
) -> torch.Tensor:
    """Return figures on the device, with the sums and counts of losses.

    The host does not wait for losses and counts that are on the device.
    """
    figures.loss, losses = _added([tally.total for tally in tallies])
    figures.count, counts = _added([tally.count for tally in tallies])
    message = uploaded(torch.tensor(figures.values, dtype=torch.float64), device)
    for place, there in enumerate((losses, counts)):
        if there:
            message[place] += torch.stack([figure.double() for figure in there]).sum()
    return message


def _added(figures: Sequence[torch.Tensor | float]) -> tuple[float, list[torch.Tensor]]:
    """Return the sum of the figures that the host has, and the others."""
    here, there = 0.0, list[torch.Tensor]()
    for figure in figures:
        if isinstance(figure, torch.Tensor) and figure.device.type != "cpu":
            there.append(figure)
        else:
            here += float(figure)
    return here, there
