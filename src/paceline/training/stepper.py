"""Takes one optimizer step on one rank. The code is the same for every plan; plans differ in their
synchronisers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from paceline.base.errors import TrainingError
from paceline.job.order import Window
from paceline.strategies.compose import (
    end_evaluation,
)
from paceline.strategies.layout import Whole
from paceline.strategies.mesh import local_part
from paceline.strategies.step_sync import STEP_FIGURES, SyncedFigures
from paceline.torch_private.autograd import version_of
from paceline.torch_private.optimizers import mark_stepped
from paceline.training.blame import blaming
from paceline.training.clipping import clip, squared_norm
from paceline.training.feed import MicroBatch
from paceline.training.loss import LossSum
from paceline.training.optimizers.closure import Closure, step_gathered
from paceline.training.optimizers.schedule import step_schedule
from paceline.training.own_step.followers import follow
from paceline.training.own_step.verbs import Verbs
from paceline.training.rank_state import RankState
from paceline.training.refusals import check_loss, check_used
from paceline.training.replicas.inplace_parameters import EditsDifferError
from paceline.training.replicas.set_once import set_once
from paceline.training.upload import uploaded
from paceline.training.window import WindowWork

# The place in a step's figures that says whether forwards changed state that is not synchronised
# yet.
_CHANGED = STEP_FIGURES + 2
_OVERFLOW = STEP_FIGURES + 5  # the place that says whether a gradient overflowed


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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A window's loss, at the weights that ranks hold. Its gradients are in the parameters."""

    # As `_figures`, for all ranks from whose gradients an update is made.
    figures: torch.Tensor
    host_figures: list[float]  # the same, read on the host
    norm: float | None  # of the gradients before clipping; None if the job doesn't clip
    # Whether there are no gradients, because some overflowed or the step is a spike.
    is_skipped: bool = False
    spike: str = ""  # why the step is a spike, in words

    @property
    def loss(self) -> float:
        total, count = self.host_figures[:STEP_FIGURES]
        return total / count if count else math.nan


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
        observe: Callable[[Stepper], None] | None = None,
    ) -> StepResult:
        """Run forward and backward of every micro-batch, then reduce and clip the gradients, and
        update.

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
        sample_share = sum(batch.samples for batch in batches) / window.count
        if self.job.models:
            return self._own_step(
                window,
                batches,
                sample_share=sample_share,
                step=step,
                stop=stop,
                beat=beat,
                on_launched=on_launched,
                observe=observe,
            )
        evaluate = partial(
            self._evaluate,
            window,
            batches,
            step=step,
            stop=stop,
            beat=beat,
            on_launched=on_launched,
        )
        try:
            evaluation = evaluate(observe=observe)
        except EditsDifferError:
            if not isinstance(self.layout, Whole):
                raise
            self._set_once()
            evaluation = evaluate(observe=observe)
        norm = self.gradient_norm = evaluation.norm
        if self.needs_closure:
            evaluation = self._update_with_closure(
                evaluation, evaluate, sample_share=sample_share, step=step
            )
        elif not evaluation.is_skipped:
            self.update(self.optimizer)
        if self.merges_edits:
            self.edits.updated()
        if not evaluation.is_skipped:
            step_schedule(self.schedule)
        synced = self.step_sync.end_step(
            step + 1, evaluation.figures, evaluation.host_figures, beat
        )
        if synced is None:
            return StepResult((), 0, norm, is_settled=False)
        sample_share = synced.weight if self.step_sync.has_own_steps else sample_share
        return replace(
            self._step_result(synced, sample_share=sample_share, norm=norm, step=step),
            is_skipped=evaluation.is_skipped,
            spike=evaluation.spike,
        )

    def _evaluate(
        self,
        window: Window,
        batches: list[MicroBatch],
        *,
        step: int,
        stop: Callable[[], bool],
        beat: Callable[[str], None],
        on_launched: Callable[[], None],
        observe: Callable[[Stepper], None] | None = None,
        is_first: bool = True,
    ) -> Evaluation:
        """Run forward and backward of every micro-batch, then reduce and clip. This leaves the
        gradients of an update.

        is_first: whether this is the step's first evaluation. In later ones, the optimizer has to
        handle a loss that is not finite.
        """
        part = self.loss_number
        versions = (
            {} if self.has_begun else {name: version_of(p) for name, p in self.parameters.items()}
        )
        self._before_forwards()
        tallies, used = self.backward(window, batches, step=step, part=part, beat=beat)
        self.written |= {
            name
            for name, version in versions.items()
            if version_of(self.parameters[name]) != version
        }
        self.freezing.let_go(self.parameters, step, window.epoch)
        overflow = (
            None
            if self.scaling is None
            else self.scaling.unscale(
                [local_part(p.grad) for p in self.parameters.values() if p.grad is not None],
                self.device,
            )
        )
        squares = squared_norm(
            self.job.clip, self.parameters, self.layout.owned, self.mesh, self.device
        )
        figures = self.step_sync.all_reduce_figures(
            self._figures(tallies, used, stop(), overflow, self._digest(batches))
        )
        combined = torch.cat([figures, squares.reshape(1)])
        self.before_update()
        on_launched()
        # In an evaluation, the host waits for the device only here.
        *host_figures, norm_squared = combined.tolist()
        loss, count, _, summed, _, edited, unknown, overflowed, _, *users = host_figures
        if edited and self.merges_edits:
            self.edits.merge(self.mesh.group("replicas"), has_unknown=bool(unknown), step=step)
        mean = (
            (1.0 if self.scaling is None else self.scaling.expected_count(window.count)) / count
            if summed and (count)
            else float(count != 0)
        )
        is_skipped = self.scaling is not None and (bool(overflowed) or not math.isfinite(loss))
        has_overflowed, spike = is_skipped, ""
        if self.spikes is not None and count and not has_overflowed:
            norm = math.sqrt(norm_squared) * mean if self.job.clip is not None else None
            spike = self.spikes.judge(loss / count, norm)
            is_skipped = bool(spike)
        if is_first:  # only all replicas together know whether anything counts
            check_loss(
                0.0 if is_skipped else loss,
                max(count, 1.0) if self.step_sync.has_own_steps else count,
                tallies,
                step,
            )
        self._drop_unused(users)
        if not count:
            self._clear_gradients()  # a replica without samples takes no step
        if is_first and not self.step_sync.has_own_steps:
            self._check_used(users, step)
        if self.scaling is not None:
            self.scaling.update(is_skipped=has_overflowed, count=count, loss=loss, step=step)
        if is_skipped:
            self._clear_gradients()
        elif summed and count:
            self.scale_gradients(mean, self.parameters)
        if observe:
            observe(self)
        beat("optimizer")
        if is_skipped or self.job.clip is None:
            return Evaluation(figures, host_figures, None, is_skipped, spike)
        clip(self.job.clip, self.parameters, squares.sqrt() * mean)
        return Evaluation(figures, host_figures, math.sqrt(norm_squared) * mean)

    def _set_once(self) -> None:
        """Go back to the state before the first step, and set parameters by the samples of all
        replicas.

        In the first step each replica has set them by its own samples.
        """
        self.edits.put_back()
        self.buffers.put_back()
        set_once(self)
        self.buffers.look()

    def _own_step(
        self,
        window: Window,
        batches: list[MicroBatch],
        *,
        sample_share: float,
        step: int,
        stop: Callable[[], bool],
        beat: Callable[[str], None],
        on_launched: Callable[[], None],
        observe: Callable[[Stepper], None] | None,
    ) -> StepResult:
        """Take the step that the job brings, and then move its followers."""
        if step and not self.has_begun:
            self.untrained.clear()  # a resumed run was checked when it began
        verbs = Verbs(
            self,
            window,
            batches,
            step,
            beat,
            keeps_gradients=observe is not None,
            is_first=not self.has_begun,
        )
        self._before_forwards()
        verbs.take()
        if observe:
            for name, p in self.parameters.items():
                p.grad = verbs.gradients.get(name)
            observe(self)
            self._clear_gradients()
        if self.step_sync.has_own_steps:  # followers are synchronised as buffers are
            self._follow(step)
        flags = torch.tensor(
            [0.0, 0.0, float(stop()), 0.0, float(self._changes()[0]), self._digest(batches)],
            dtype=torch.float64,
        )
        flags = self.step_sync.all_reduce_figures(uploaded(flags, self.device))
        on_launched()
        _, _, stops, _, changed, digest = verbs.end(flags)
        # All ranks know a step's loss. If replicas take their own steps, it is the loss of so many
        # samples.
        weight = sample_share * window.count if self.step_sync.has_own_steps else 1.0
        host_figures = [
            verbs.loss * weight,
            weight,
            stops,
            0.0,
            changed,
            0.0,
            0.0,
            0.0,
            digest,
            *verbs.users.values(),
        ]
        synced = self.step_sync.end_step(
            step + 1, torch.tensor(host_figures, dtype=torch.float64), host_figures, beat
        )
        if synced is None:
            return StepResult((), 0, None, is_settled=False)
        sample_share = synced.weight if self.step_sync.has_own_steps else sample_share
        if not self.step_sync.has_own_steps and (first := self.untrained & verbs.trained):
            check_used(
                {
                    name: count
                    for name, count in verbs.users.items()
                    if name.partition(".")[0] in first
                },
                step,
            )
            self.untrained -= first
        result = replace(
            self._step_result(synced, sample_share=sample_share, norm=None, step=step),
            is_skipped=verbs.has_overflowed,
        )
        if not self.step_sync.has_own_steps:
            self._follow(step)
        if self.merges_edits:
            self.edits.updated()
        return result

    def _follow(self, step: int) -> None:
        """Move followers after a step, numbered from 0."""
        self.before_update()
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
            self._before_forwards()
        yield
        end_evaluation(self.synchronisers)
        if not meets:
            return
        changes, group = (
            uploaded(torch.tensor(self._changes()).float(), self.device),
            self.mesh.group("replicas"),
        )
        dist.all_reduce(changes, dist.ReduceOp.MAX, group=group)
        changed, edited, unknown = map(bool, changes.tolist())
        if edited:
            self.edits.merge(group, has_unknown=unknown, step=step)
        self.edits.updated()
        self.buffers.meet(sample_share, group, has_unsynced=changed)

    def settle(self, step: int) -> StepResult | None:
        """End the run after `step` steps: on return all replicas hold the same. Returns None if
        they already did.

        Collective if ranks have not synchronised after the last step.
        """
        synced = self.step_sync.finalize(step)
        if synced is None:
            return None
        return self._step_result(synced, sample_share=synced.weight, norm=None, step=step - 1)

    def _step_result(
        self, synced: SyncedFigures, *, sample_share: float, norm: float | None, step: int
    ) -> StepResult:
        """Return the step's result from the figures on which ranks agreed.

        sample_share: this replica's share of the samples that the figures are about.
        """
        stops, _, changed, _, _, _, digest, *users = synced.flags
        first = step + 2 - len(synced.figures)
        for number, (_, count) in enumerate(synced.figures):
            if not count:
                raise TrainingError(
                    f"the loss counts nothing in step {first + number}: its count is {count:g}",
                    hint="every target of the window is ignored; a larger batch makes this unlikely",
                )
        if (
            first == 1 and self.step_sync.has_own_steps and not self.job.models
        ):  # the steps of replicas may differ
            self._check_used(users, step)
        if len(self.mesh.replicas) > 1:
            self.buffers.meet(sample_share, self.mesh.group("replicas"), has_unsynced=bool(changed))
        return StepResult(
            tuple(loss / count for loss, count in synced.figures),
            int(stops),
            norm,
            is_settled=True,
            digest=int(digest),
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
    ) -> tuple[list[LossSum], set[str]]:
        """Compute the gradients of a window, as far as the plan's synchronisers reduce them.
        Collective as they are.

        Args:
            part: Which part of the window this rank computes; keys the random streams.
            tell: Called with the losses of a rank that computes whole replicas, before the last of
                its backwards begins.

        Returns:
            The loss of each micro-batch, and the names of parameters that this rank used.
        """
        self._clear_gradients()  # also of parameters that the optimizer leaves out
        work = WindowWork(self, window, batches, step, part, beat, tell)
        with blaming(self.job, self.part, window, batches, lambda: work.latest):
            self.layout.run(work.batches, work)
        self.freezing.refuse_thawed(self.local_parameters, self.parameters, step)
        work.drop_rows_of_stand_in()
        unused = set().union(*(synchroniser.unused() for synchroniser in self.synchronisers))
        used = {
            name for name, p in self.parameters.items() if p.grad is not None and name not in unused
        }
        beat("reduce")
        for synchroniser in reversed(self.synchronisers):
            synchroniser.finish()
        self.layout.finish()
        return work.tallies, used

    def _figures(
        self,
        tallies: list[LossSum],
        used: set[str],
        stop: bool,
        overflow: torch.Tensor | None,
        digest: float,
    ) -> torch.Tensor:
        """Return this rank's figures of a step, float64.

        These are: the loss sum; its count; whether the rank was asked to stop; whether the loss is
        a sum; whether its forwards changed state that is not synchronised yet, a parameter, and one
        that is not known yet; whether a gradient overflowed; the digest of its samples; and for
        each parameter whether it was used.

        Ranks without the model's output have no tallies and learn of the loss from others.

        overflow: on the device; see `LossScale.unscale`.
        """
        sums = sum(not tally.is_mean for tally in tallies) if self.mesh.is_first_of_same_loss else 0
        figures = self._with_loss(
            tallies,
            [
                float(stop),
                float(sums),
                *map(float, self._changes()),
                0.0,
                digest,
                *(float(name in used) for name in self.trainable),
            ],
        )
        if overflow is not None:
            figures[_OVERFLOW] = overflow
        return figures

    def _before_forwards(self) -> None:
        """Record the state from which the next forwards start."""
        if not self.has_begun and len(self.mesh.replicas) > 1:
            self.buffers.look()  # values restored from a checkpoint are no change
        self.has_begun = True
        if self.merges_edits:
            self.edits.begin()

    def _changes(self) -> tuple[bool, bool, bool]:
        """Return whether forwards changed state that is not synchronised yet, a parameter, and one
        that is not known yet.
        """
        edited = self.edits.end() if self.merges_edits else (False, False)
        return len(self.mesh.replicas) > 1 and bool(self.buffers.unsynced()), *edited

    def _drop_unused(self, users: list[float]) -> None:
        """Drop the gradient of a parameter that no rank used, as on one device.

        users: how many ranks used each trainable parameter.
        """
        for name, count in zip(self.trainable, users, strict=True):
            if not count and name in self.parameters:
                self.parameters[name].grad = None

    def _check_used(self, users: list[float], step: int) -> None:
        """Call `check_used` once, in the first step in which a parameter is unused."""
        if not self.saw_unused and not all(users):
            self.saw_unused = True
            if any(users) or not self.written:
                check_used(
                    {
                        name: count
                        for name, count in zip(self.trainable, users, strict=True)
                        if count or name not in self.written
                    },
                    step,
                )

    def _update_with_closure(
        self,
        first: Evaluation,
        evaluate: Callable[..., Evaluation],
        *,
        sample_share: float,
        step: int,
    ) -> Evaluation:
        """Update with an optimizer that decides how often it evaluates the loss. Collective as
        `_evaluate` is.

        Args:
            first: The step's first evaluation.
            evaluate: Makes another evaluation.
            sample_share: This replica's share of the window's samples.

        Returns:
            The first evaluation's loss, with what the last evaluation's forwards did.

        Raises:
            TrainingError: an evaluation's loss was not finite, and neither are the weights that
                resulted.
        """
        last, losses = first, [first.loss]

        def evaluate_again() -> float:
            nonlocal last
            if len(self.mesh.replicas) > 1:
                self.buffers.meet(
                    sample_share,
                    self.mesh.group("replicas"),
                    has_unsynced=bool(last.host_figures[_CHANGED]),
                )
            if self.merges_edits:
                self.edits.updated()  # so that the optimizer's writes don't count as a forward's
            last = evaluate(is_first=False)
            self._let_optimizer_keep_gradients()
            losses.append(last.loss)
            return last.loss

        self._let_optimizer_keep_gradients()
        if self.gathered is not None:
            step_gathered(self.optimizer, self.gathered, first.loss, evaluate_again)
            if not self.gathered.whole:
                mark_stepped(self.optimizer)  # schedules check this
        else:
            self.optimizer.step(Closure(first.loss, evaluate_again, self.parameters.values()))
        if not all(map(math.isfinite, losses)):
            self._refuse_weights_that_are_not_finite(losses, step)
        figures = torch.cat([first.figures[:STEP_FIGURES], last.figures[STEP_FIGURES:]])
        return Evaluation(
            figures,
            [*first.host_figures[:STEP_FIGURES], *last.host_figures[STEP_FIGURES:]],
            first.norm,
        )

    def _let_optimizer_keep_gradients(self) -> None:
        """Copy gradients of replicas, because they are summed in memory that the next evaluation
        overwrites.

        The gradients of one device stay.
        """
        if self.gathered is None and self.synchronisers:
            for p in self.parameters.values():
                p.grad = None if p.grad is None else p.grad.clone()

    def _refuse_weights_that_are_not_finite(self, losses: Sequence[float], step: int) -> None:
        """Refuse weights that are not finite after an update. Collective over all ranks.

        losses: those of the step's evaluations, of which some are not finite.
        """
        is_finite = all(
            bool(local_part(p.detach()).isfinite().all()) for p in self.parameters.values()
        )
        is_bad = torch.tensor(float(not is_finite), device=self.device)
        if self.mesh.world_size > 1:
            dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        if bool(is_bad):
            number = next(
                number for number, loss in enumerate(losses, 1) if not math.isfinite(loss)
            )
            raise TrainingError(
                f"the loss is {losses[number - 1]} in evaluation {number} of step {step + 1}, and "
                f"{type(self.optimizer).__name__} makes weights of it that are not finite",
                hint="a lower learning rate, a line search, or clip=1.0",
            )
