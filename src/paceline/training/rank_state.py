"""Holds what one rank trains: its model, optimizer and schedule, prepared for a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.base.errors import JobError, PlanRefused
from paceline.base.logs import logger
from paceline.cluster.devices import Device
from paceline.job import Job
from paceline.job.modes import has_modes, set_mode
from paceline.job.named_optimizers import NamedOptimizers
from paceline.model.float8 import left_in_bf16
from paceline.model.forward_effects import sparsely_trained
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.compose import (
    step_sync_of,
)
from paceline.strategies.mesh import Mesh, is_about_parts, local_part
from paceline.strategies.plan import Plan
from paceline.strategies.shard.run import is_sharded
from paceline.strategies.state_tensors import NOTHING_SAVED, StateTensor
from paceline.torch_private.optimizers import mark_stepped
from paceline.training.clipping import clip, squared_norm
from paceline.training.feed import DataShard, MicroBatch
from paceline.training.freezing import Freezing
from paceline.training.job_options import as_made
from paceline.training.job_state import JobState
from paceline.training.optimizers.build import build_optimizer, refuse_kinds
from paceline.training.optimizers.schedule import build_schedule, step_schedule
from paceline.training.own_step.followers import refuse_apart
from paceline.training.own_step.named_parts import ModelPart, load_models, prepare_models
from paceline.training.own_step.stage_outputs import from_last_stage
from paceline.training.parts.spikes import Spikes
from paceline.training.refusals import check_used
from paceline.training.replicas.buffers import ChangingBuffers
from paceline.training.replicas.inplace_parameters import Edits
from paceline.training.scaling import LossScale
from paceline.training.trace import TraceRecorder


class RankState:
    """The model, optimizer and schedule of one rank, as a plan's strategies hold them.

    Attributes:
        local_parameters: This rank's parameters by name, in the form in which it holds them (whole,
            or a shard).
        parameters: The trainable ones of these.
        trainable: All trainable parameters of the model; stand-ins without memory if another rank
            holds them.
        trace: Records which work is done when, if it is set.
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
        logs_nothing: Why steps have no figures beside the loss; "" if they may have.
        logged_names: The names of figures that steps logged, alike on all ranks.
        freezing: Which parameters are frozen in which steps.
        scaling: The scaling of losses; None except in fp16.
        loss_number: This rank's number among those that compute a loss; keys random streams.
        named_update: Takes the step of one of several optimizers; see `step_optimizer`.
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
        self.named_update: Callable[..., None] = self.step_optimizer
        self.replica = mesh.replica
        self.part = DataShard(shares or (1,) * plan.replicas, mesh.replica, plan.num_microbatches)
        prepared, self.parts = prepare_models(
            job, plan=plan, mesh=mesh, device=device, devices=devices
        )
        self.model, self.layout, self.synchronisers = (
            prepared.model,
            prepared.layout,
            prepared.synchronisers,
        )
        self.attributes = prepared.attributes
        self.step_sync = step_sync_of(self.synchronisers, mesh)
        self.logged_names: tuple[str, ...] = ()
        self.logs_nothing = (
            "under this plan replicas take steps of their own, and don't add up what they measure in each"
            if self.step_sync.has_own_steps
            else ""
        )
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
            and not (job.own_step is not None and mesh.coordinates[mesh.stage_axis])
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
        # Parameters to which the first step wrote before its update, because hooks may update.
        self.written: set[str] = set()
        self._trained_by: dict[
            tuple[str, ...], tuple[dict[str, torch.nn.Parameter], list[str]]
        ] = {}
        # Whether the steps of the job's own that this rank took had one backward each.
        self.has_one_backward = True
        self.unchecked = set(self.trainable)  # parameters for which `check_used` is still due
        self.gradient_norm: float | None = None  # of the last step, before clipping
        self.metrics: Mapping[str, float | None] = {}  # what the job logged in the last step
        self.trace: TraceRecorder | None = None
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
        module = self.layout.module
        elsewhere = ActivePlan(plan).held_elsewhere(module)
        held = {name: p for name, p in module.named_parameters() if p not in elsewhere}
        load_models(self.job, self.model, held, self.layout.extents)
        for synchroniser in self.synchronisers:
            synchroniser.restore(NOTHING_SAVED)

    def digest(self, batches: Sequence[MicroBatch]) -> float:
        """Return the digest of the samples that this rank reports. One rank of a replica reports
        those of the replica.
        """
        return (
            float(sum(batch.digest for batch in batches))
            if self.mesh.is_first_of_same_samples
            else 0.0
        )

    @property
    def has_unsynced_buffers(self) -> bool:
        """Whether forwards changed state that is not synchronised yet."""
        return len(self.mesh.replicas) > 1 and bool(self.buffers.unsynced())

    def trained_by(
        self, parts: Sequence[ModelPart]
    ) -> tuple[dict[str, torch.nn.Parameter], list[str]]:
        """Return the trainable parameters of some models: those of this rank, and the names of all."""
        names = tuple(part.name for part in parts)
        if names not in self._trained_by:
            prefixes = tuple(part.prefix for part in parts)
            self._trained_by[names] = (
                {name: p for name, p in self.parameters.items() if name.startswith(prefixes)},
                [name for name in self.trainable if name.startswith(prefixes)],
            )
        return self._trained_by[names]

    def check_used(self, users: Mapping[str, float], step: int) -> None:
        """Call `refusals.check_used` once for a parameter, in the first step in which the losses of its
        model leave one out.

        users: how many ranks used each parameter of these models in the step, by name.
        """
        users = {name: count for name, count in users.items() if name in self.unchecked}
        if all(users.values()):
            return
        self.unchecked -= users.keys()
        if any(users.values()) or not self.written:
            check_used({n: c for n, c in users.items() if c or n not in self.written}, step)

    def shared_outputs(self, part: ModelPart, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return a model's outputs, on every rank that has the step's samples."""
        return from_last_stage(outputs, part.layout.output_place, self.mesh, self.device)

    @property
    def all_go_back(self) -> bool:
        """Whether ranks wait for each other in backward."""
        return self.mesh.holds_parts or self.layout.meets_in_forward

    @property
    def merges_edits(self) -> bool:
        """Whether replicas hold the same parameters after every step."""
        return len(self.mesh.replicas) > 1 and not self.step_sync.has_own_steps

    def clear_gradients(self) -> None:
        """Drop all gradients that this rank holds."""
        for p in self.local_parameters.values():
            if p.grad is not None:
                p.grad = None

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

    def before_forwards(self) -> None:
        """Record the state from which the next forwards start."""
        if not self.has_begun and len(self.mesh.replicas) > 1:
            self.buffers.look()  # values restored from a checkpoint are no change
        self.has_begun = True
        if self.merges_edits:
            self.edits.begin()

    def unscale(self, parameters: Mapping[str, torch.nn.Parameter]) -> torch.Tensor:
        """Divide the gradients of these parameters by the loss scale; see `LossScale.unscale`."""
        assert self.scaling is not None
        gradients = [local_part(p.grad) for p in parameters.values() if p.grad is not None]
        return self.scaling.unscale(gradients, self.device)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step of the optimizer, or of one of several. Collective if ranks hold parts of
        tensors that it sees whole.
        """
        try:
            with self._updating():
                if any(group["params"] for group in optimizer.param_groups):
                    optimizer.step()
                else:  # other ranks update everything; schedules check whether a step was taken
                    mark_stepped(optimizer)
        except (RuntimeError, NotImplementedError) as error:
            if not is_about_parts(error):
                raise
            raise JobError(
                f"{type(optimizer).__name__} can't update sharded parameters: "
                f"{str(error).splitlines()[0]}",
                hint="use an optimizer that treats every element alike (AdamW, SGD; fused=True and "
                "foreach=True work with them), or a data=N plan, which keeps parameters whole",
            ) from error

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Let the optimizer have the tensors inside the block that it updates in place of this rank's. Collective if
        it sees tensors whole of which ranks hold parts.
        """
        forms: list[Any] = [self.own_parts, *([] if self.gathered is None else [self.gathered])]
        for form in forms:
            form.before_update()
        yield
        for form in forms:
            form.after_update()

    def set_mode(self, *, trains: bool) -> None:
        """Switch an optimizer that has other weights for evaluations to these or to the trained
        weights.

        Collective if ranks hold parts of tensors that it sees whole.
        """
        with self._updating():
            set_mode(self.optimizer, is_training=trains)
        self.trains = trains

    def step_optimizer(
        self,
        name: str,
        parameters: Mapping[str, torch.nn.Parameter],
        norm: torch.Tensor | None = None,
    ) -> None:
        """Clip the gradients of an optimizer, and step it and its schedule. Collective as `update` is.

        Args:
            name: Of one of several optimizers; "" of a job's only one.
            parameters: Those on this rank that it updates.
            norm: Of their gradients, if it is known.
        """
        optimizer, greatest, schedule = self.optimizer, self.job.clip, self.schedule
        if isinstance(optimizer, NamedOptimizers):
            greatest, optimizer = optimizer.clips[name], optimizer.members[name]
            schedule = schedule.of(name) if schedule is not None else None
        if greatest is not None and norm is None:
            owned = self.layout.owned
            norm = squared_norm(greatest, parameters, owned, self.mesh, self.device).sqrt()
        clip(greatest, parameters, norm)
        self.update(optimizer)
        step_schedule(schedule)

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
