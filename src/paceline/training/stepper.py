"""Takes one optimizer step on one rank. The code is the same for every plan; plans differ in their
synchronisers.
"""

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
from paceline.training.loss import LossSum
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


class Stepper:
    """The model, optimizer and schedule of one rank. It takes steps together with the other ranks.

    Attributes:
        local_parameters: This rank's parameters by name, in the form in which it holds them (whole,
            or a shard).
        parameters: The trainable ones of these.
        trainable: All trainable parameters of the model; stand-ins without memory if another rank
            holds them.
        trace: Records which work is done when, if it is set.
        after_backward: Called when a window's gradients are computed, if it is set.
        spikes: Judges each step before its update, if it is set; see `watch`.
        groups: Names of the parameters in each of the optimizer's groups, on whichever rank they
            are.
        job_state: The state that the job keeps outside its models.
        speaks_for_job: Whether that state is saved as it is on this rank.
        has_modes: Whether the optimizer has other weights for evaluations.
        trains: Whether the weights that it trains are in place.
        made: What the job's functions made; see `as_made`.
        optimizer_state: The state of the optimizer that is saved.
        gathered: Tensors that the optimizer updates whole although ranks hold parts of them.
        own_parts: Tensors held in parts of which the optimizer updates this rank's part.
        needs_closure: Whether the optimizer evaluates the loss itself.
        sparsely_trained: Parameters of this rank that get sparse gradients.
        forwards_may_write: Whether a forward might write to a parameter. This is not checked on
            CPUs.
        freezing: Which parameters are frozen in which steps.
        scaling: The scaling of losses; None except in fp16.
        loss_number: This rank's number among those that compute a loss; keys random streams.
        named_update: Takes the step of one of several optimizers, given its name and its parameters
            on this rank.
        before_update: Called before tensors are written to that only updates change; in each step,
            and sometimes more than once.
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
        """Prepare the job for this rank.

        shares: the share of each replica in the global batch; equal ones if there are none.
        """
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
        # This rank computes the loss for the first samples of each step.
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
            None  # reports each verb of a job's own step
        )
        self.saw_unused = False
        self.written: set[str] = (
            set()
        )  # parameters to which the first step wrote before its update, because hooks may update
        self.untrained = set(job.models)  # models that no loss has trained so far
        self.gradient_norm: float | None = None  # of the last step, before clipping
        self.trace: TraceRecorder | None = None
        self.after_backward: Callable[[], None] | None = None
        self.spikes: Spikes | None = None

    def watch(self, spikes: Spikes) -> None:
        """Make no update with a spike.

        Raises:
            PlanRefused: each replica takes its own steps.
            JobError: the optimizer evaluates the loss itself.
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
        """Load the job's initial weights, before the optimizer or anything else has seen those of
        the seed.
        """
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

    def is_for_updates(self, name: str) -> bool:
        """Whether nothing but an update writes to a tensor of a checkpoint: no forward, and no
        strategy of the plan.
        """
        return name.startswith("optimizer/") or (
            name.startswith("parameters/") and not self.forwards_may_write
        )

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
        if self.after_backward is not None:
            self.after_backward()
        return work.tallies, used

    def _digest(self, batches: Sequence[MicroBatch]) -> float:
        """Return the digest of the samples that this rank reports. One rank of a replica reports
        those of the replica.
        """
        return (
            float(sum(batch.digest for batch in batches))
            if self.mesh.is_first_of_same_samples
            else 0.0
        )

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

    def loss_figures(
        self,
        tallies: list[LossSum],
        flags: Sequence[float],
        used: set[str],
        trainable: Sequence[str],
    ) -> torch.Tensor:
        """Return this rank's figures of a loss, float64.

        These are: the loss sum, its count, whether the loss is a sum, the flags, and for each of
        these parameters whether it was used.
        """
        sums = sum(not tally.is_mean for tally in tallies) if self.mesh.is_first_of_same_loss else 0
        return self._with_loss(
            tallies, [float(sums), *flags, *(float(name in used) for name in trainable)]
        )

    def _with_loss(self, tallies: list[LossSum], figures: Sequence[float]) -> torch.Tensor:
        """Return this rank's loss sum and its count, followed by the other figures; float64."""
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
        """Return a model's outputs, on every rank that has the step's samples."""
        if self.mesh.sizes[self.mesh.stage_axis] == 1:
            return outputs
        return from_last_stage(outputs, self.mesh, self.device)

    @property
    def all_go_back(self) -> bool:
        """Whether ranks wait for each other in backward."""
        return self.mesh.holds_parts or self.layout.meets_in_forward

    @property
    def merges_edits(self) -> bool:
        """Whether replicas hold the same parameters after every step."""
        return len(self.mesh.replicas) > 1 and not self.step_sync.has_own_steps

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

    def _clear_gradients(self) -> None:
        for p in self.local_parameters.values():
            if p.grad is not None:
                p.grad = None

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

    def scale_gradients(
        self, factor: float | torch.Tensor, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        """Multiply the gradients of these parameters by a factor, in place.

        factor: may be on the device, as a scalar in float64.
        """
        gradients = [local_part(p.grad) for p in parameters.values() if p.grad is not None]
        if not gradients:
            return
        if isinstance(factor, torch.Tensor) and gradients[0].dtype == torch.float32:
            factor = factor.float()  # so that one kernel can scale all of them
        torch._foreach_mul_(gradients, factor)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step of the optimizer, or of one of several. Collective if ranks hold parts of
        tensors that it sees whole.
        """
        self.own_parts.before_update()
        if self.gathered is not None:
            self.gathered.before_update()
        try:
            if any(group["params"] for group in optimizer.param_groups):
                optimizer.step()
            else:  # other ranks update everything; schedules check whether a step was taken
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
        """Switch an optimizer that has other weights for evaluations to these or to the trained
        weights.

        Collective if ranks hold parts of tensors that it sees whole.
        """
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
        """Clip the gradients of one of several optimizers, and step it and its schedule. Collective
        as `update` is.

        parameters: those on this rank that it updates.
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
                self.optimizer._opt_called = True  # schedules check this
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

    @property
    def sent_bytes(self) -> float:
        """The bytes that this rank has sent to other replicas so far: gradients or weights, and the
        values on which they agree.
        """
        return self.step_sync.met_bytes + sum(
            synchroniser.sent_bytes for synchroniser in self.synchronisers
        )

    def kept(self) -> Iterator[StateTensor]:
        """Yield the state of the plan's strategies."""
        for synchroniser in self.synchronisers:
            yield from synchroniser.kept()
