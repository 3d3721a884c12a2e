"""One optimizer step on one rank, the same code for every plan: what differs is in the plan's synchronisers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.errors import JobError, PlanRefused, TrainingError
from paceline.base.logs import logger
from paceline.cluster.devices import Device
from paceline.job import Job
from paceline.job.modes import has_modes, set_mode
from paceline.job.order import Window
from paceline.job.pretrained import Weights
from paceline.model.float8 import left_in_bf16
from paceline.model.forward_effects import sparsely_trained
from paceline.strategies.compose import (
    end_evaluation,
    held_elsewhere,
    step_sync_of,
)
from paceline.strategies.layout import Whole
from paceline.strategies.mesh import Mesh, is_about_parts, local_part
from paceline.strategies.plan import Plan
from paceline.strategies.shard.run import is_sharded
from paceline.strategies.state_tensors import NOTHING_SAVED, StateTensor
from paceline.strategies.step_sync import STEP_FIGURES, SyncedFigures
from paceline.training.blame import blaming
from paceline.training.clipping import clip, squared_norm
from paceline.training.feed import DataShard, MicroBatch
from paceline.training.freezing import Freezing
from paceline.training.initial import load_initial
from paceline.training.job_options import as_made
from paceline.training.job_state import JobState
from paceline.training.loss import Tally
from paceline.training.optimizers.build import build_optimizer, refuse_kinds
from paceline.training.optimizers.closure import Closure, step_gathered
from paceline.training.optimizers.schedule import build_schedule, step_schedule
from paceline.training.own_step.followers import follow, refuse_apart
from paceline.training.own_step.named_parts import ModelPart, load_models, prepare_models
from paceline.training.own_step.stage_outputs import from_last_stage
from paceline.training.own_step.verbs import Verbs
from paceline.training.parts.spikes import Spikes
from paceline.training.prepare import prepare_job
from paceline.training.refusals import check_loss, check_used
from paceline.training.replicas.buffers import ChangingBuffers
from paceline.training.replicas.inplace_parameters import Edits, EditsDifferError
from paceline.training.replicas.set_once import set_once
from paceline.training.scaling import LossScale
from paceline.training.trace import TraceRecorder
from paceline.training.upload import uploaded
from paceline.training.window import WindowWork

_CHANGED = (
    STEP_FIGURES + 2
)  # where a step's figures say whether forwards changed state that is not met yet
_OVERFLOW = STEP_FIGURES + 5  # where they say whether a gradient overflowed


@dataclass(frozen=True, slots=True)
class StepResult:
    """What all ranks agree on after a step.

    losses: of every step since ranks last met, this one's last: the sum over a window by its global count. None where
        ranks don't meet after this step.
    stop: how many ranks were asked to stop.
    gradient_norm: before clipping; None if the job doesn't clip, and of a step that was skipped. A replica's own where
        it takes steps of its own.
    is_settled: whether the run may be saved and evaluated here.
    is_skipped: whether nothing was updated, as gradients overflowed under loss scaling, or as the step is a spike.
    spike: why it is one, in words; "" if it is none.
    digest: of the samples that all replicas used in the steps of `losses`; see `order.digest`.
    """

    losses: tuple[float, ...]
    stop: int
    gradient_norm: float | None
    is_settled: bool
    is_skipped: bool = False
    spike: str = ""
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A window's loss, at the weights that ranks hold; its gradients are in the parameters.

    figures: as `_figures`, of all whose gradients an update is made of. host_figures: the same, read on the host.
    norm: of the gradients before clipping; None if the job doesn't clip. is_skipped: whether there are none, as some
        overflowed or as the step is a spike. spike: why it is one, in words.
    """

    figures: torch.Tensor
    host_figures: list[float]
    norm: float | None
    is_skipped: bool = False
    spike: str = ""

    @property
    def loss(self) -> float:
        total, count = self.host_figures[:STEP_FIGURES]
        return total / count if count else math.nan


class Stepper:
    """The model, optimizer and schedule of one rank, and how they take a step together with the other ranks.

    local_parameters: those of this rank by name, as it holds them (whole, or a shard). parameters: the trainable ones.
    trainable: all trainable parameters of the model; stand-ins without memory where another rank holds them.
    trace: notes what is done when, if it is set. after_backward: called when a window's gradients are there, if it is.
    spikes: judges each step before its update, if it is set; see `watch`.
    groups: names of the parameters in each of the optimizer's groups, wherever they are held.
    job_state: what the job keeps outside its models. speaks_for_job: whether it is saved as it is on this rank.
    has_modes: whether the optimizer has other weights for evaluations. trains: whether those that it trains are in
        place.
    made: what the job's functions made; see `as_made`.
    optimizer_state: what is to be kept of the optimizer. gathered: what it updates whole though ranks hold parts.
    own_parts: what it updates of tensors that ranks hold in parts. needs_closure: whether it evaluates the loss itself.
    sparsely_trained: parameters of this rank that get sparse gradients.
    forwards_may_write: whether a forward might write to a parameter; not looked at on CPUs.
    freezing: which parameters are frozen in which steps.
    scaling: of losses; None but in fp16.
    loss_number: of this rank among those that compute a loss; keys random streams.
    named_update: takes the step of an optimizer of several, given its name and its parameters that are here.
    before_update: called before what only updates write to is written to; in each step, and at times more than once.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        *,
        devices: Sequence[Device] = (),
        shares: Sequence[int] = (),
    ) -> None:
        """shares: of each replica in the global batch; equal ones if there are none."""
        self.job, self.mesh, self.device = job, mesh, device
        self.loss_number = mesh.loss_number
        self.named_update: Callable[[str, Mapping[str, torch.nn.Parameter]], None] = (
            self.step_optimizer
        )
        self.before_update: Callable[[], None] = lambda: None
        self.replica = mesh.replica
        self.part = DataShard(shares or (1,) * plan.replicas, mesh.replica, plan.num_microbatches)
        self.parts: dict[str, ModelPart] = {}
        if job.models:
            prepared, self.parts = prepare_models(
                job, plan=plan, mesh=mesh, device=device, devices=devices
            )
        else:
            prepared = prepare_job(job, plan=plan, mesh=mesh, device=device, devices=devices)
        self.model, self.layout, self.synchronisers = (
            prepared.model,
            prepared.layout,
            prepared.synchronisers,
        )
        self.attributes, self.forwards_may_write = prepared.attributes, prepared.forwards_may_write
        self.step_sync = step_sync_of(self.synchronisers, mesh)
        self.freezing = Freezing(job, self.model)
        self.freezing.refuse_kept(self.kept())
        self._begin_from(plan)
        self.model.train()
        if job.precision == "fp8" and mesh.rank == 0 and (reasons := left_in_bf16(self.model)):
            logger.info(
                "linear layers that stay in bf16: %s",
                "; ".join(f"'{path}' {reason}" for path, reason in reasons.items()),
            )
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.local_parameters = dict(self.layout.module.named_parameters())
        self.parameters = {name: p for name, p in self.local_parameters.items() if p.requires_grad}
        sparse = sparsely_trained(self.model)
        self.sparsely_trained = [p for name, p in self.parameters.items() if name in sparse]
        built = build_optimizer(job, self.trainable, self.parameters, mesh=mesh, sparse=sparse)
        refuse_kinds(built, plan)
        self.optimizer: Any
        self.optimizer, self.groups, self.optimizer_state = (
            built.optimizer,
            built.groups,
            built.state,
        )
        self.gathered, self.own_parts = built.gathered, built.own_parts
        self.needs_closure = built.behaviour.needs_closure
        # The loss is computed here, for the first samples of each step.
        self.speaks_for_job = (
            not mesh.replica
            and mesh.is_first_of_same_loss
            and self.layout.has_output
            and not (job.models and mesh.coordinates[mesh.stage_axis])
        )
        self.job_state = JobState(job, self.model)
        self.has_modes, self.trains = has_modes(self.optimizer), True
        self.scaling = LossScale() if job.precision == "fp16" else None
        if self.scaling is not None and self.needs_closure:
            raise JobError(
                f"{type(self.optimizer).__name__} evaluates the loss itself, and a step of loss scaling has "
                "one evaluation",
                hint='precision="bf16" or "float32", or an optimizer without a closure',
            )
        self.schedule = build_schedule(job, self.optimizer)
        self.made = as_made(job, self.optimizer_state, self.schedule)
        refuse_apart(job.followers, self.local_parameters)
        self.buffers = ChangingBuffers(self.model, with_frozen=self.step_sync.has_own_steps)
        self.edits = Edits(
            {name: p for name, p in self.local_parameters.items() if not is_sharded(p)}
        )
        self.has_begun = False
        self.note_verb: Callable[[int, str], None] | None = (
            None  # leaves word of each verb of a step of one's own
        )
        self.saw_unused = False
        self.written: set[str] = (
            set()
        )  # parameters that the first step wrote to before its update: hooks may update
        self.untrained = set(job.models)  # by no loss so far
        self.gradient_norm: float | None = None  # of the last step, before clipping
        self.trace: TraceRecorder | None = None
        self.after_backward: Callable[[], None] | None = None
        self.spikes: Spikes | None = None

    def watch(self, spikes: Spikes) -> None:
        """Let no spike be updated with.

        Raises:
            PlanRefused: replicas take steps of their own. JobError: the optimizer evaluates the loss itself.
        """
        if self.step_sync.has_own_steps:
            raise PlanRefused(
                f"--on-spike {spikes.action}: under this plan replicas take steps of their own",
                hint="data=N and shard=N decide about each step together",
            )
        if self.needs_closure:
            raise JobError(
                f"--on-spike {spikes.action}: {type(self.optimizer).__name__} evaluates the loss itself, "
                "several times in a step",
                hint="leave --on-spike out, or take an optimizer without a closure",
            )
        self.spikes = spikes

    def _begin_from(self, plan: Plan) -> None:
        """The job's initial weights, before the optimizer or anything else has seen those of the seed."""
        if self.job.init is None:
            return
        if self.parts:
            load_models(
                self.job,
                self.model,
                dict(self.layout.module.named_parameters()),
                self.layout.extents,
            )
        else:
            module = self.layout.module
            elsewhere = held_elsewhere(plan, module)
            load_initial(
                Weights.of(self.job.init),
                self.model,
                {name: p for name, p in module.named_parameters() if p not in elsewhere},
                self.layout.extents,
            )
        for synchroniser in self.synchronisers:
            synchroniser.restore(NOTHING_SAVED)

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
        """Forward and backward of every micro-batch, reduction, clipping, update.

        Collectives: those of the plan's rooms, and one small all-reduce of the loss over all ranks where they meet.

        Args:
            step: Number of the step, from 0; keys the random streams.
            stop: Whether this rank was asked to stop, asked after the backward; every rank learns of it in the result.
            beat: Told which phase begins.
            on_launched: Called when all but the update was launched, before the host waits for the device.
            observe: Called when gradients are complete, before clipping.

        Raises:
            TrainingError: a loss that is not finite or can't be trained on, or that uses no parameter. No weight was
                changed, but by the updates of a step that the job brings: they are not to be saved.
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
        """Forward and backward of every micro-batch, reduction, clipping: leaves the gradients of an update.

        is_first: of the step; of others a loss that is not finite is the optimizer's affair.
        """
        part = self.loss_number
        versions = (
            {} if self.has_begun else {name: p._version for name, p in self.parameters.items()}
        )
        self._before_forwards()
        tallies, used = self.backward(window, batches, step=step, part=part, beat=beat)
        self.written |= {
            name for name, version in versions.items() if self.parameters[name]._version != version
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
        # The one time in an evaluation that the host waits for the device.
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
        if is_first:  # whether anything counts is known of all replicas together
            check_loss(
                0.0 if is_skipped else loss,
                max(count, 1.0) if self.step_sync.has_own_steps else count,
                tallies,
                step,
            )
        self._drop_unused(users)
        if not count:
            self._clear_gradients()  # a replica without samples of its own takes no step
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
        """Go back to before the first step, in which replicas have set parameters by other samples each, and set them
        by those of all."""
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
        """The step that the job brings, and then its followers."""
        if step and not self.has_begun:
            self.untrained.clear()  # a resumed run was looked at when it began
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
        if self.step_sync.has_own_steps:  # followers meet as buffers do
            self._follow(step)
        flags = torch.tensor(
            [0.0, 0.0, float(stop()), 0.0, float(self._changes()[0]), self._digest(batches)],
            dtype=torch.float64,
        )
        flags = self.step_sync.all_reduce_figures(uploaded(flags, self.device))
        on_launched()
        _, _, stops, _, changed, digest = verbs.end(flags)
        # A step's loss is known on all ranks, or else of so many samples.
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
        """While the model is evaluated: what its forwards change of its state meets as after a step. Collective over
        the replicas.

        Args:
            sample_share: This replica's, of the samples that the model is evaluated on.
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
        """The run ends after `step` steps: on return all replicas hold the same. None if they already did.

        Collective where ranks have not met after the last step.
        """
        synced = self.step_sync.finalize(step)
        if synced is None:
            return None
        return self._step_result(synced, sample_share=synced.weight, norm=None, step=step - 1)

    def _step_result(
        self, synced: SyncedFigures, *, sample_share: float, norm: float | None, step: int
    ) -> StepResult:
        """What follows from a meeting. sample_share: this replica's, of the samples that it was about."""
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
        ):  # whose steps may differ
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
        tell: Callable[[list[Tally]], None] = lambda tallies: None,
    ) -> tuple[list[Tally], set[str]]:
        """The gradients of a window, as far as the plan's synchronisers bring them together. Collective as they are.

        Args:
            part: Which part of the window this rank computes; keys the random streams.
            tell: Told the losses of a rank that computes whole replicas before the last of its backwards begins.

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
        if self.after_backward is not None:
            self.after_backward()
        return work.tallies, used

    def _digest(self, batches: Sequence[MicroBatch]) -> float:
        """Of the samples that this rank is to tell of: one rank of a replica tells of the replica's."""
        return (
            float(sum(batch.digest for batch in batches))
            if self.mesh.is_first_of_same_samples
            else 0.0
        )

    def _figures(
        self,
        tallies: list[Tally],
        used: set[str],
        stop: bool,
        overflow: torch.Tensor | None,
        digest: float,
    ) -> torch.Tensor:
        """This rank's loss sum, its count, whether it was asked to stop, whether the loss is a sum, whether its
        forwards changed state that is not met yet, a parameter, and one that is not known yet, whether a gradient
        overflowed, the digest of its samples, and for each parameter whether it was used; float64.

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

    def loss_figures(
        self, tallies: list[Tally], flags: Sequence[float], used: set[str], trainable: Sequence[str]
    ) -> torch.Tensor:
        """This rank's loss sum, its count, whether the loss is a sum, flags, and for each of these parameters whether
        it was used; float64."""
        sums = sum(not tally.is_mean for tally in tallies) if self.mesh.is_first_of_same_loss else 0
        return self._with_loss(
            tallies, [float(sums), *flags, *(float(name in used) for name in trainable)]
        )

    def _with_loss(self, tallies: list[Tally], figures: Sequence[float]) -> torch.Tensor:
        """This rank's loss sum and its count before other figures; float64."""
        if not self.mesh.is_first_of_same_loss:
            tallies = []
        on_device = [
            tally.count
            for tally in tallies
            if isinstance(tally.count, torch.Tensor) and tally.count.device.type != "cpu"
        ]
        count = sum(
            float(tally.count)
            for tally in tallies
            if not isinstance(tally.count, torch.Tensor) or tally.count.device.type == "cpu"
        )
        combined = uploaded(torch.tensor([0.0, count, *figures], dtype=torch.float64), self.device)
        if tallies:
            combined[0] += torch.stack([tally.total.to(self.device) for tally in tallies]).sum()
        if on_device:
            combined[1] += torch.stack([count.double() for count in on_device]).sum()
        return combined

    def shared_outputs(self, part: ModelPart, outputs: Sequence[Any]) -> Sequence[Any]:
        """What a model returned, on every rank that has the step's samples."""
        if self.mesh.sizes[self.mesh.stage_axis] == 1:
            return outputs
        return from_last_stage(outputs, self.mesh, self.device)

    @property
    def all_go_back(self) -> bool:
        """Whether ranks meet in backward."""
        return self.mesh.holds_parts or self.layout.meets_in_forward

    @property
    def merges_edits(self) -> bool:
        """Whether replicas hold the same parameters after every step."""
        return len(self.mesh.replicas) > 1 and not self.step_sync.has_own_steps

    def _before_forwards(self) -> None:
        """Forwards come next: see what they start from."""
        if not self.has_begun and len(self.mesh.replicas) > 1:
            self.buffers.look()  # what a checkpoint brought back is no change
        self.has_begun = True
        if self.merges_edits:
            self.edits.begin()

    def _changes(self) -> tuple[bool, bool, bool]:
        """Whether forwards changed state that replicas don't meet yet, a parameter, and one that is not known yet."""
        edited = self.edits.end() if self.merges_edits else (False, False)
        return len(self.mesh.replicas) > 1 and bool(self.buffers.unsynced()), *edited

    def _clear_gradients(self) -> None:
        for p in self.local_parameters.values():
            if p.grad is not None:
                p.grad = None

    def _drop_unused(self, users: list[float]) -> None:
        """A parameter that nobody used gets no gradient, as on one device. users: of each trainable parameter."""
        for name, count in zip(self.trainable, users, strict=True):
            if not count and name in self.parameters:
                self.parameters[name].grad = None

    def _check_used(self, users: list[float], step: int) -> None:
        """See `check_used`; once, in the first step in which a parameter is unused."""
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

    def scale_gradients(
        self, factor: float | torch.Tensor, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        """Of these parameters, in place. factor: may be on the device, as a scalar in float64."""
        gradients = [local_part(p.grad) for p in parameters.values() if p.grad is not None]
        if not gradients:
            return
        if isinstance(factor, torch.Tensor) and gradients[0].dtype == torch.float32:
            factor = factor.float()  # which lets one kernel scale all of them
        torch._foreach_mul_(gradients, factor)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer, or of one of several. Collective where ranks hold parts of what it sees whole."""
        self.own_parts.before_update()
        if self.gathered is not None:
            self.gathered.before_update()
        try:
            if any(group["params"] for group in optimizer.param_groups):
                optimizer.step()
            else:  # other ranks update all; schedules look whether a step was taken
                optimizer._opt_called = True  # type: ignore[attr-defined]
        except (RuntimeError, NotImplementedError) as error:
            if not is_about_parts(error):
                raise
            raise JobError(
                f"{type(optimizer).__name__} can't update sharded parameters: "
                f"{str(error).splitlines()[0]}",
                hint="use an optimizer that treats every element alike (AdamW, SGD; fused=True and "
                "foreach=True work with them), or a data=N plan, which keeps parameters whole",
            ) from error
        self.own_parts.after_update()
        if self.gathered is not None:
            self.gathered.after_update()

    def set_mode(self, *, trains: bool) -> None:
        """Let an optimizer that has other weights for evaluations put those in place, or those that are trained.
        Collective where ranks hold parts of what it sees whole."""
        self.before_update()
        self.own_parts.before_update()
        if self.gathered is not None:
            self.gathered.before_update()
        set_mode(self.optimizer, is_training=trains)
        self.own_parts.after_update()
        if self.gathered is not None:
            self.gathered.after_update()
        self.trains = trains
        if self.merges_edits:
            self.edits.updated()

    def step_optimizer(self, name: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Clip the gradients of an optimizer of several, step it and its schedule. Collective as `update` is.

        parameters: that it updates and that are here.
        """
        self.before_update()
        greatest = self.optimizer.clips[name]
        squares = squared_norm(greatest, parameters, self.layout.owned, self.mesh, self.device)
        clip(greatest, parameters, squares.sqrt())
        self.update(self.optimizer.members[name])
        if self.schedule is not None:
            step_schedule(self.schedule.of(name))

    def _update_with_closure(
        self,
        first: Evaluation,
        evaluate: Callable[..., Evaluation],
        *,
        sample_share: float,
        step: int,
    ) -> Evaluation:
        """The update of an optimizer that evaluates the loss as often as it likes. Collective as `_evaluate` is.

        Args:
            first: The step's first evaluation. evaluate: Makes another.
            sample_share: This replica's, of the window's samples.

        Returns:
            The first evaluation's loss, and what the last one's forwards did.

        Raises:
            TrainingError: an evaluation's loss was not finite, and neither are the weights that were made of it.
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
                self.edits.updated()  # the optimizer's writes are no forward's
            last = evaluate(is_first=False)
            self._let_optimizer_keep_gradients()
            losses.append(last.loss)
            return last.loss

        self._let_optimizer_keep_gradients()
        if self.gathered is not None:
            step_gathered(self.optimizer, self.gathered, first.loss, evaluate_again)
            if not self.gathered.whole:
                self.optimizer._opt_called = True  # schedules look
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
        """Replicas sum gradients in memory that the next evaluation overwrites; those of one device stay."""
        if self.gathered is None and self.synchronisers:
            for p in self.parameters.values():
                p.grad = None if p.grad is None else p.grad.clone()

    def _refuse_weights_that_are_not_finite(self, losses: Sequence[float], step: int) -> None:
        """Collective over all ranks. losses: of the step's evaluations, of which some are not finite."""
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

    @property
    def sent_bytes(self) -> float:
        """What this rank has sent to other replicas so far: gradients or weights, and what they agree on."""
        return self.step_sync.met_bytes + sum(
            synchroniser.sent_bytes for synchroniser in self.synchronisers
        )

    def kept(self) -> Iterator[StateTensor]:
        """State of the plan's rooms."""
        for synchroniser in self.synchronisers:
            yield from synchroniser.kept()
