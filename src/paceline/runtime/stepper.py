"""One optimizer step on one rank, the same code for every plan: what differs is in the plan's synchronisers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from paceline.capture.attributes import in_float64
from paceline.capture.compare import MAX_BYTES, is_comparable
from paceline.capture.examine import module_with_unseen_state
from paceline.capture.float8 import in_float8, left_in_bf16
from paceline.capture.probe import (
    NOTHING,
    Observed,
    choosing,
    followers,
    has_own_code,
    limited_by_norm,
    may_choose,
    may_write,
    sparsely_trained,
    written_by,
)
from paceline.cluster import Device
from paceline.errors import JobError, PlanRefused, TrainingError
from paceline.job import AUTOCAST, Job
from paceline.launch.logs import logger
from paceline.plans import Plan
from paceline.profile.trace import cast_parameters_of_rank, state_factor
from paceline.runtime.attributes import ChangingAttributes
from paceline.runtime.buffers import ChangingBuffers
from paceline.runtime.edits import Edits
from paceline.runtime.feed import DataShard, MicroBatch, evaluation_feed, example_batch
from paceline.runtime.loss import Tally, read_tally, with_gradient
from paceline.runtime.optimizers.build import build_optimizer, refuse_closure
from paceline.runtime.optimizers.closure import Closure, step_gathered
from paceline.runtime.order import Window
from paceline.runtime.scaling import LossScale
from paceline.runtime.streams import kept_streams, seed_model, seed_streams
from paceline.runtime.trace import TraceRecorder
from paceline.runtime.upload import uploaded
from paceline.strategies.compose import (
    Synchroniser,
    end_evaluation,
    held_elsewhere,
    holds_parts,
    lay_out,
    may_be_elsewhere,
    no_edits,
    observed_of,
    prepare,
    refuse_unseen_state,
    runs_again,
    step_sync_of,
)
from paceline.strategies.data.sparse import with_dense_gradient
from paceline.strategies.layout import CutBasis, Layout, ModelUse
from paceline.strategies.mesh import Mesh, axes_cut, is_about_parts, local_part
from paceline.strategies.shard.run import is_sharded
from paceline.strategies.spill import CannotSpill, Spill
from paceline.strategies.state_tensors import StateTensor
from paceline.strategies.step_sync import STEP_FIGURES, SyncedFigures
from paceline.strategies.units import find_units

_CHANGED = STEP_FIGURES + 2  # where a step's figures say whether forwards changed state that is not met yet
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
    is_skipped: whether gradients overflowed under loss scaling, and nothing was updated.
    """

    losses: tuple[float, ...]
    stop: int
    gradient_norm: float | None
    is_settled: bool
    is_skipped: bool = False


def build_model(job: Job, device: torch.device) -> torch.nn.Module:
    """The job's model with the seed's initial weights, the same on every rank and under every plan.

    Raises:
        JobError: it is no module, or has nothing to train.
    """
    seed_model(job.seed)
    model = job.model()
    if not isinstance(model, torch.nn.Module):
        raise JobError(f"model returned {type(model).__name__} and not a torch.nn.Module",
                       hint="a job trains one module; several can be parts of one, whose forward says what runs")
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise JobError(f"the shape of '{name}' is not known before the first forward",
                           hint="give lazy modules their sizes, or run the model on one sample where it is built")
    if not any(p.requires_grad for p in model.parameters()):
        raise JobError("the model has no trainable parameter",
                       hint="every parameter has requires_grad=False, or the module registers none")
    model = model.to(device)
    if job.precision == "fp8":
        return in_float8(model)
    return in_float64(model) if job.precision == "float64" else model


def autocast(job: Job, device: torch.device) -> AbstractContextManager[Any]:
    """The numeric context of the job's forward passes."""
    name = AUTOCAST.get(job.precision)
    return nullcontext() if name is None else torch.autocast(device.type, dtype=getattr(torch, name))


@dataclass(frozen=True)
class Prepared:
    """A job's model, what this rank runs of it, and how its gradients meet.

    attributes: what the model keeps in Python attributes, as the job's function made it.
    forwards_may_write: whether a forward might write to a parameter; not looked at on CPUs.
    """

    model: torch.nn.Module
    layout: Layout
    synchronisers: list[Synchroniser]
    attributes: ChangingAttributes
    forwards_may_write: bool


def prepare_job(job: Job, *, plan: Plan, mesh: Mesh, device: torch.device,
                devices: Sequence[Device] = ()) -> Prepared:
    """Build the job's model and let this rank hold its part of it. Collective.

    Where a rank holds a part, no more than that and one more tensor need memory at a time.

    devices: of each rank; without them nothing is too large.
    """
    dtype = torch.float64 if job.precision == "float64" else None

    def build() -> tuple[Spill | None, torch.nn.Module]:
        if not holds_parts(plan):
            return None, build_model(job, device)
        spill, model = build_in_files(job, torch.device("cpu"))
        return spill, model if may_be_elsewhere(plan, model) else model.to(device)

    spill, model = build()
    observed, is_used = NOTHING, False
    if runs_again(plan) and is_comparable(model):
        _refuse_unseen_state(job, plan, model, spill, device)
        is_used = True
    elif runs_again(plan) and has_own_code(model) and mesh.rank == 0:
        logger.warning("the model has more than %d MiB of parameters and was not tried for state that none of its "
                       "attributes shows (a count in a closure, say); recompute=full would change such a state twice "
                       "a step", MAX_BYTES // 1024**2)
    if observed_of(plan):
        here = torch.device("cpu") if may_be_elsewhere(plan, model) else device
        observed, is_run = observe(job, plan, model, spill, here)
        is_used |= is_run
    if is_used:
        del spill, model
        spill, model = build()
    observed = replace(observed, sparse=sparsely_trained(model))
    if "casts" in observed_of(plan) and job.precision in AUTOCAST:
        observed = replace(observed, cast=cast_parameters_of_rank(job, device),
                           cast_dtype=getattr(torch, AUTOCAST[job.precision]))
    forwards_may_write = device.type == "cpu" or bool(limited_by_norm(model)) or may_write(model)
    running, attributes = spill.running if spill is not None else nullcontext, ChangingAttributes(model)
    use = ModelUse(
        lambda samples: example_batch(job, samples).to(device, dtype), lambda: autocast(job, device),
        {"the loss": job.criterion, **{f"metric '{name}'": metric for name, metric in job.metrics.items()}},
        partial(_evaluation_batch, job, plan, mesh, device) if job.validation is not None else None, running)
    basis = CutBasis(-(-job.batch // (plan.replicas * plan.num_microbatches)), lambda: state_factor(job, model),
                     devices, job.precision)
    layout = lay_out(model, use, basis, plan=plan, mesh=mesh, device=device)
    with running():
        synchronisers = prepare(layout.module, plan=plan, mesh=mesh, observed=observed,
                                device=device if may_be_elsewhere(plan, model) else None)
        layout.let_go()
        if spill is not None:
            elsewhere = held_elsewhere(plan, layout.module)
            spill.bring_in([*(p for p in layout.module.parameters() if p not in elsewhere), *model.buffers()])
    attributes.disregard_new()
    return Prepared(model, layout, synchronisers, attributes, forwards_may_write)


def _evaluation_batch(job: Job, plan: Plan, mesh: Mesh, device: torch.device) -> MicroBatch:
    """The first micro-batch of an evaluation on this rank, where replicas have equal shares."""
    part = DataShard((1,) * plan.replicas, mesh.replica, plan.num_microbatches)
    with kept_streams():
        batch = next(evaluation_feed(job.validation, batch=job.batch, part=part, seed=job.seed,
                                     collate=job.collate))
    return batch.to(device, torch.float64 if job.precision == "float64" else None)


def _refuse_unseen_state(job: Job, plan: Plan, model: torch.nn.Module, spill: Spill | None,
                         device: torch.device) -> None:
    """
    Raises:
        PlanRefused: running a part of the model a second time would change a state that the model doesn't show.
    """
    here = torch.device("cpu") if spill is not None else device
    batch = example_batch(job, 2).to(here, torch.float64 if job.precision == "float64" else None)
    path, running = None, spill.running if spill else nullcontext
    with suppress(Exception), autocast(job, here):  # what fails here fails in the first step, too
        path = module_with_unseen_state(model.train(), *batch.arguments(), running=running)
    if path is not None:
        refuse_unseen_state(model, plan, path)


def observe(job: Job, plan: Plan, model: torch.nn.Module, spill: Spill | None,
            device: torch.device) -> tuple[Observed, bool]:
    """What the model's forward does, as far as a plan must know of it beforehand, and whether the model was run for
    that: it is not fit for use then.

    Raises:
        PlanRefused: parameters lie on servers, which would not learn of what a worker writes to them.
    """
    edited, chooses = limited_by_norm(model), frozenset[str]()
    compares = "choices" in observed_of(plan) and may_choose(model, find_units(model))
    is_run = compares or may_write(model)
    if is_run:
        dtype = torch.float64 if job.precision == "float64" else None
        batches = [example_batch(job, 2, first=2 * k).to(device, dtype) for k in range(4 if compares else 2)]
        is_elsewhere, running = (spill.holds, spill.running) if spill else (lambda tensor: False, nullcontext)
        with suppress(Exception), autocast(job, device), running():  # what fails here fails in the first step, too
            edited |= written_by(lambda: batches[0].call(model.train()), model, is_elsewhere)
            in_memory = [name for name, p in model.named_parameters() if name in edited and not is_elsewhere(p)]
            if in_memory and "writes to parts" in observed_of(plan):
                edited -= followers(in_memory, model, find_units(model),
                                    (partial(batches[0].call, model), partial(batches[1].call, model)))
            if compares:
                chooses = choosing(model, find_units(model), [partial(batch.call, model) for batch in batches])
    if edited and (why := no_edits(plan)):
        raise PlanRefused(f"a forward changes the parameter '{min(edited)}' in place, and {why}",
                          hint="use a data=N plan if all replicas change it alike, or one that doesn't cut the batch: "
                               "single or tensor=N")
    return Observed(edited, chooses), is_run


def build_in_files(job: Job, device: torch.device) -> tuple[Spill | None, torch.nn.Module]:
    """The model with its weights in files, or in memory where that can't be or they are no more than what stays there
    of files too."""
    try:
        spill = Spill()
        with spill.building():
            model = build_model(job, device)
    except JobError:
        raise
    except Exception as error:  # of the user's own code, too: then it comes again
        first = (str(error).splitlines() or [""])[0]
        logger.warning("every rank takes memory for the whole model to begin with: it could not be built in files (%s)",
                       first if isinstance(error, CannotSpill) else f"{type(error).__name__}: {first}")
        return None, build_model(job, device)
    tensors = [*model.parameters(), *model.buffers()]
    if sum(tensor.nbytes for tensor in tensors) <= spill.resident_bytes:
        spill.bring_in(tensors)
        return None, model
    if (left := spill.in_memory_bytes(model.parameters())) > spill.resident_bytes:
        logger.warning("every rank takes %.0f MB for the whole model to begin with: that much of it was not made by "
                       "torch on the thread that calls model()", left / 1e6)
    return spill, model


def _kinds(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Parameters that torch takes together: whole ones, and distributed ones of one mesh."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for p in parameters:
        by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return list(by_mesh.values())


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A window's loss, at the weights that ranks hold; its gradients are in the parameters.

    figures: as `_figures`, of all whose gradients an update is made of. known: the same, read. norm: of the gradients
        before clipping; None if the job doesn't clip. is_skipped: whether there are none, as some overflowed.
    """

    figures: torch.Tensor
    known: list[float]
    norm: float | None
    is_skipped: bool = False

    @property
    def loss(self) -> float:
        total, count = self.known[:STEP_FIGURES]
        return total / count if count else math.nan


class _Window:
    """The work around the micro-batches of one step."""

    def __init__(self, stepper: Stepper, window: Window, batches: list[MicroBatch], step: int, part: int,
                 beat: Callable[[str], None], tell: Callable[[list[Tally]], None]) -> None:
        self.stepper, self.window, self.step, self.part, self.beat = stepper, window, step, part, beat
        self.tell = tell
        dtype = torch.float64 if stepper.job.precision == "float64" else None
        self.batches = [batch.to(stepper.device, dtype) for batch in batches]
        self.tallies: list[Tally] = []
        self.set_aside: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        own_samples = sum(batch.samples for batch in batches)
        self.samples = max(own_samples, 1) if stepper.step_sync.has_own_steps else window.count
        scaling = stepper.scaling
        self.scale = 1.0 if scaling is None else scaling.scale
        self.sum_scale = 1.0 if scaling is None else self.scale / scaling.expected_count(window.count)

    def before_forward(self, microbatch: int, stage: int) -> None:
        place = (self.part, microbatch, stage) if stage else (self.part, microbatch)
        seed_streams(self.stepper.job.seed, "step", self.step, *place)
        self.beat("forward")

    def loss(self, microbatch: int, output: Any) -> torch.Tensor:
        batch, job = self.batches[microbatch], self.stepper.job
        with autocast(job, self.stepper.device):
            tally = read_tally(self._explained_loss(output, batch.target), samples=batch.samples or 1)
            tally = with_gradient(tally, output, backward_goes_on=self.stepper.all_go_back)
        self.tallies.append(tally if batch.samples else Tally(torch.zeros_like(tally.value), 0.0, tally.is_mean))
        # A mean over samples has its weight known before backward; (sum, count) is divided when the count of all the
        # samples is known: the window's, or this replica's own where it takes steps of its own. A stand-in weighs
        # nothing.
        weight = (batch.samples / self.samples * self.scale if tally.is_mean
                  else float(batch.samples > 0) * self.sum_scale)
        value = tally.value.float() if tally.value.dtype == torch.float16 else tally.value  # which a scale may not fit
        return value * weight

    def _explained_loss(self, output: Any, target: Any) -> Any:
        """The job's loss, refused where it is made of shards."""
        try:
            value = self.stepper.job.criterion(output, target)
        except (RuntimeError, NotImplementedError) as error:
            if not is_about_parts(error):
                raise
            raise _reads_shards(str(error).splitlines()[0]) from error
        for part in value if isinstance(value, tuple | list) else [value]:
            if hasattr(part, "device_mesh"):
                raise _reads_shards("it became a DTensor")
        return value

    def record(self, what: str, label: str, start_s: float, end_s: float) -> None:
        if self.stepper.trace is not None:
            self.stepper.trace.add(what, label, start_s, end_s)

    def before_backward(self, microbatch: int) -> None:
        is_last = microbatch == len(self.batches) - 1
        self.drop_rows_of_stand_in()
        if not self.batches[microbatch].samples:
            self.set_aside = {p: p.grad for p in self.stepper.sparsely_trained}
            for p in self.set_aside:
                p.grad = None
        for synchroniser in self.stepper.synchronisers:
            synchroniser.begin(last=is_last)
        if is_last:
            self.tell(self.tallies)
        self.beat("backward")

    def drop_rows_of_stand_in(self) -> None:
        """A stand-in adds zeros, and in a sparse gradient those are rows that an optimizer would update."""
        for p, gradient in self.set_aside.items():
            p.grad = gradient
        self.set_aside = {}


def _reads_shards(what: str) -> PlanRefused:
    return PlanRefused("the loss uses parameters of the model, and under this plan a rank holds parts of them where "
                       f"it is computed ({what})",
                       hint="use a data=N plan, or shard=N zero=2, which keeps parameters whole between forward and "
                            "backward")


class Stepper:
    """The model, optimizer and schedule of one rank, and how they take a step together with the other ranks.

    held: parameters of this rank by name, as it holds them (whole, or a shard). parameters: the trainable ones.
    trainable: all trainable parameters of the model; stand-ins without memory where another rank holds them.
    trace: notes what is done when, if it is set.
    groups: names of the parameters in each of the optimizer's groups, wherever they are held.
    optimizer_state: what is to be kept of the optimizer. gathered: what it updates whole though ranks hold parts.
    own_parts: what it updates of tensors that ranks hold in parts. needs_closure: whether it evaluates the loss itself.
    sparsely_trained: parameters of this rank that get sparse gradients.
    forwards_may_write: whether a forward might write to a parameter; not looked at on CPUs.
    scaling: of losses; None but in fp16.
    """

    def __init__(self, job: Job, plan: Plan, mesh: Mesh, device: torch.device, *,
                 devices: Sequence[Device] = ()) -> None:
        self.job, self.mesh, self.device = job, mesh, device
        self.replica = mesh.replica
        self.all_go_back = mesh.holds_parts  # ranks meet in backward
        prepared = prepare_job(job, plan=plan, mesh=mesh, device=device, devices=devices)
        self.model, self.layout, self.synchronisers = prepared.model, prepared.layout, prepared.synchronisers
        self.attributes, self.forwards_may_write = prepared.attributes, prepared.forwards_may_write
        self.step_sync = step_sync_of(self.synchronisers, mesh)
        self.model.train()
        if job.precision == "fp8" and mesh.rank == 0 and (left := left_in_bf16(self.model)):
            logger.info("linear layers that stay in bf16: %s",
                        "; ".join(f"'{path}' {reason}" for path, reason in left.items()))
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.held = dict(self.layout.module.named_parameters())
        self.parameters = {name: p for name, p in self.held.items() if p.requires_grad}
        sparse = sparsely_trained(self.model)
        self.sparsely_trained = [p for name, p in self.parameters.items() if name in sparse]
        built = build_optimizer(job, self.trainable, self.parameters, mesh=mesh, sparse=sparse)
        refuse_closure(built, plan)
        self.optimizer, self.groups, self.optimizer_state = built.optimizer, built.groups, built.state
        self.gathered, self.own_parts = built.gathered, built.own_parts
        self.needs_closure = built.behaviour.needs_closure
        self.scaling = LossScale() if job.precision == "fp16" else None
        if self.scaling is not None and self.needs_closure:
            raise JobError(f"{type(self.optimizer).__name__} evaluates the loss itself, and a step of loss scaling has "
                           "one evaluation", hint='precision="bf16" or "float32", or an optimizer without a closure')
        self.schedule = build_schedule(job, self.optimizer)
        self.buffers = ChangingBuffers(self.model, with_frozen=self.step_sync.has_own_steps)
        self.edits = Edits({name: p for name, p in self.held.items() if not is_sharded(p)})
        self.has_begun = False
        self.saw_unused = False
        self.trace: TraceRecorder | None = None

    def step(self, window: Window, batches: list[MicroBatch], *, step: int, stop: Callable[[], bool] = lambda: False,
             beat: Callable[[str], None] = lambda phase: None, ahead: Callable[[], None] = lambda: None,
             observe: Callable[[Stepper], None] | None = None) -> StepResult:
        """Forward and backward of every micro-batch, reduction, clipping, update.

        Collectives: those of the plan's rooms, and one small all-reduce of the loss over all ranks where they meet.

        Args:
            step: Number of the step, from 0; keys the random streams.
            stop: Whether this rank was asked to stop, asked after the backward; every rank learns of it in the result.
            beat: Told which phase begins.
            ahead: Called when all but the update was launched, before the host waits for the device.
            observe: Called when gradients are complete, before clipping.

        Raises:
            TrainingError: a loss that is not finite or can't be trained on, a parameter that nothing uses. No
                weight was changed.
        """
        own_part = sum(batch.samples for batch in batches) / window.count
        evaluate = partial(self._evaluate, window, batches, step=step, stop=stop, beat=beat, ahead=ahead)
        evaluation = evaluate(observe=observe)
        norm = evaluation.norm
        if self.needs_closure:
            evaluation = self._update_with_closure(evaluation, evaluate, own_part=own_part, step=step)
        elif not evaluation.is_skipped:
            self._update()
        if self._merges_edits:
            self.edits.updated()
        if self.schedule is not None and not evaluation.is_skipped:
            self.schedule.step()
        met = self.step_sync.end_step(step + 1, evaluation.figures, evaluation.known, beat)
        if met is None:
            return StepResult((), 0, norm, is_settled=False)
        own_part = met.weight if self.step_sync.has_own_steps else own_part
        return replace(self._learn(met, own_part=own_part, norm=norm, step=step), is_skipped=evaluation.is_skipped)

    def _evaluate(self, window: Window, batches: list[MicroBatch], *, step: int, stop: Callable[[], bool],
                  beat: Callable[[str], None], ahead: Callable[[], None],
                  observe: Callable[[Stepper], None] | None = None,
                  is_first: bool = True) -> Evaluation:
        """Forward and backward of every micro-batch, reduction, clipping: leaves the gradients of an update.

        is_first: of the step; of others a loss that is not finite is the optimizer's affair.
        """
        part = self.mesh.loss_number
        self._look()
        tallies, used = self.backward(window, batches, step=step, part=part, beat=beat)
        overflow = None if self.scaling is None else self.scaling.unscale(
            [local_part(p.grad) for p in self.parameters.values() if p.grad is not None], self.device)
        squares = self._squared_norm()
        figures = self.step_sync.all_reduce_figures(self._figures(tallies, used, stop(), overflow))
        together = torch.cat([figures, squares.reshape(1)])
        ahead()
        # The one time in an evaluation that the host waits for the device.
        *known, norm_squared = together.tolist()
        loss, count, _, summed, _, edited, unknown, overflowed, *users = known
        is_skipped = self.scaling is not None and (bool(overflowed) or not math.isfinite(loss))
        if is_first:  # whether anything counts is known of all replicas together
            check_loss(0.0 if is_skipped else loss, max(count, 1.0) if self.step_sync.has_own_steps else count, tallies,
                       step)
        self._drop_unused(users)
        if not count:
            self._let_go_of_gradients()  # a replica without samples of its own takes no step
        if is_first and not step and not self.step_sync.has_own_steps:
            self._refuse_unused(users)  # before the first update
        mean = (1.0 if self.scaling is None else self.scaling.expected_count(window.count)) / count if summed and (
            count) else float(count != 0)
        if self.scaling is not None:
            self.scaling.update(is_skipped=is_skipped, count=count, loss=loss, step=step)
        if is_skipped:
            self._let_go_of_gradients()
        elif summed and count:
            self._scale_gradients(mean)
        if observe:
            observe(self)
        if edited and self._merges_edits:
            self.edits.merge(self.mesh.group("replicas"), news=bool(unknown), step=step)
        beat("optimizer")
        norm = None if is_skipped else self._clip(squares, norm_squared, mean)
        return Evaluation(figures, known, norm, is_skipped)

    @contextmanager
    def evaluating(self, own_part: float, *, step: int) -> Iterator[None]:
        """While the model is evaluated: what its forwards change of its state meets as after a step. Collective over
        the replicas.

        Args:
            own_part: This replica's, of the samples that the model is evaluated on.
        """
        meets = len(self.mesh.replicas) > 1 and not self.step_sync.has_own_steps
        if meets:
            self._look()
        yield
        end_evaluation(self.synchronisers)
        if not meets:
            return
        changes, group = uploaded(torch.tensor(self._changes()).float(), self.device), self.mesh.group("replicas")
        dist.all_reduce(changes, dist.ReduceOp.MAX, group=group)
        changed, edited, unknown = map(bool, changes.tolist())
        if edited:
            self.edits.merge(group, news=unknown, step=step)
        self.edits.updated()
        self.buffers.meet(own_part, group, news=changed)

    def settle(self, step: int) -> StepResult | None:
        """The run ends after `step` steps: on return all replicas hold the same. None if they already did.

        Collective where ranks have not met after the last step.
        """
        met = self.step_sync.finalize(step)
        return None if met is None else self._learn(met, own_part=met.weight, norm=None, step=step - 1)

    def _learn(self, met: SyncedFigures, *, own_part: float, norm: float | None, step: int) -> StepResult:
        """What follows from a meeting. own_part: this replica's, of the samples that it was about."""
        stops, _, changed, _, _, _, *users = met.flags
        first = step + 2 - len(met.figures)
        for number, (_, count) in enumerate(met.figures):
            if not count:
                raise TrainingError(f"the loss counts nothing in step {first + number}: its count is {count:g}",
                                    hint="every target of the window is ignored; a larger batch makes this unlikely")
        if first == 1 and self.step_sync.has_own_steps:
            self._refuse_unused(users)
        if len(self.mesh.replicas) > 1:
            self.buffers.meet(own_part, self.mesh.group("replicas"), news=bool(changed))
        return StepResult(tuple(loss / count for loss, count in met.figures), int(stops), norm, is_settled=True)

    def backward(self, window: Window, batches: list[MicroBatch], *, step: int, part: int,
                 beat: Callable[[str], None] = lambda phase: None,
                 tell: Callable[[list[Tally]], None] = lambda tallies: None) -> tuple[list[Tally], set[str]]:
        """The gradients of a window, as far as the plan's synchronisers bring them together. Collective as they are.

        Args:
            part: Which part of the window this rank computes; keys the random streams.
            tell: Told the losses of a rank that computes whole replicas before the last of its backwards begins.

        Returns:
            The loss of each micro-batch, and the names of parameters that this rank used.
        """
        self._let_go_of_gradients()  # also of parameters that the optimizer leaves out
        work = _Window(self, window, batches, step, part, beat, tell)
        self.layout.run(work.batches, work)
        work.drop_rows_of_stand_in()
        unused = set().union(*(synchroniser.unused() for synchroniser in self.synchronisers))
        used = {name for name, p in self.parameters.items() if p.grad is not None and name not in unused}
        beat("reduce")
        for synchroniser in reversed(self.synchronisers):
            synchroniser.finish()
        self.layout.finish()
        return work.tallies, used

    def _figures(self, tallies: list[Tally], used: set[str], stop: bool, overflow: torch.Tensor | None) -> torch.Tensor:
        """This rank's loss sum, its count, whether it was asked to stop, whether the loss is a sum, whether its
        forwards changed state that is not met yet, a parameter, and one that is not known yet, whether a gradient
        overflowed, and for each parameter whether it was used; float64.

        Ranks without the model's output have no tallies and learn of the loss from others.

        overflow: on the device; see `LossScale.unscale`.
        """
        if not self.mesh.is_first_of_same_loss:
            tallies = []
        on_device = [tally.count for tally in tallies
                     if isinstance(tally.count, torch.Tensor) and tally.count.device.type != "cpu"]
        count = sum(float(tally.count) for tally in tallies
                    if not isinstance(tally.count, torch.Tensor) or tally.count.device.type == "cpu")
        sums = sum(not tally.is_mean for tally in tallies)
        figures = uploaded(torch.tensor([0.0, count, float(stop), float(sums), *map(float, self._changes()), 0.0,
                                         *(float(name in used) for name in self.trainable)], dtype=torch.float64),
                           self.device)
        if tallies:
            figures[0] += torch.stack([tally.total.to(self.device) for tally in tallies]).sum()
        if overflow is not None:
            figures[_OVERFLOW] = overflow
        if on_device:
            figures[1] += torch.stack([count.double() for count in on_device]).sum()
        return figures

    @property
    def _merges_edits(self) -> bool:
        """Whether replicas hold the same parameters after every step."""
        return len(self.mesh.replicas) > 1 and not self.step_sync.has_own_steps

    def _look(self) -> None:
        """Forwards come next: see what they start from."""
        if not self.has_begun and len(self.mesh.replicas) > 1:
            self.buffers.look()  # what a checkpoint brought back is no change
        self.has_begun = True
        if self._merges_edits:
            self.edits.begin()

    def _changes(self) -> tuple[bool, bool, bool]:
        """Whether forwards changed state that replicas don't meet yet, a parameter, and one that is not known yet."""
        edited = self.edits.end() if self._merges_edits else (False, False)
        return len(self.mesh.replicas) > 1 and bool(self.buffers.news()), *edited

    def _let_go_of_gradients(self) -> None:
        for p in self.held.values():
            if p.grad is not None:
                p.grad = None

    def _drop_unused(self, users: list[float]) -> None:
        """A parameter that nobody used gets no gradient, as on one device. users: of each trainable parameter."""
        for name, count in zip(self.trainable, users, strict=True):
            if not count and name in self.parameters:
                self.parameters[name].grad = None

    def _refuse_unused(self, users: list[float]) -> None:
        """Refuse a parameter that no rank used in a run's first step.

        Parameters that stand in a list beside others that were used (experts, optional layers) may be unused.
        """
        unused = [name for name, count in zip(self.trainable, users, strict=True) if not count]
        if not unused or self.saw_unused:
            return
        self.saw_unused = True
        check_used(dict(zip(self.trainable, users, strict=True)))

    def _scale_gradients(self, factor: float) -> None:
        gradients = [local_part(p.grad) for p in self.parameters.values() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _squared_norm(self) -> torch.Tensor:
        """Of all gradients, over all parts of the model; 0 if the job doesn't clip.

        Collective where gradients are sharded or in stages.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.job.clip is None:
            return squares
        cut: dict[tuple[str, ...], list[torch.Tensor]] = {}
        parameters = {name: with_dense_gradient(p) for name, p in self.parameters.items()}
        for name, p in parameters.items():
            if p.grad is not None and name in self.layout.owned:
                gradient = local_part(p.grad)
                cut.setdefault(axes_cut(p), []).append(
                    torch.view_as_real(gradient) if gradient.is_complex() else gradient)
        # Ranks that hold parts of the model have other parameters, but cut them along the same axes.
        for axes in self.mesh.cut_by:
            gradients = cut.get(axes, [])
            squared = (torch.nn.utils.get_total_norm(gradients).to(squares).square() if gradients
                       else torch.zeros_like(squares))
            for axis in axes if all(self.mesh.sizes[axis] > 1 for axis in axes) else ():
                dist.all_reduce(squared, group=self.mesh.group(axis))
            squares += squared
        if self.mesh.sizes[self.mesh.stage_axis] > 1:
            dist.all_reduce(squares, group=self.mesh.group(self.mesh.stage_axis))
        return squares

    def _clip(self, squares: torch.Tensor, known: float, factor: float) -> float | None:
        """Scale all gradients down to the greatest norm, as `clip_grad_norm_`. Returns the norm before.

        squares: the norm's square on the device. known: the same, read. factor: by which gradients were scaled since.
        """
        if self.job.clip is None:
            return None
        total = squares.sqrt() * factor
        for kind in _kinds(map(with_dense_gradient, self.parameters.values())):
            gradient = next((p.grad for p in kind if p.grad is not None), total)
            torch.nn.utils.clip_grads_with_norm_(kind, self.job.clip, total.to(gradient.dtype.to_real()))
        return math.sqrt(known) * factor

    def _update(self) -> None:
        self.own_parts.before_update()
        if self.gathered is not None:
            self.gathered.before_update()
        try:
            if any(group["params"] for group in self.optimizer.param_groups):
                self.optimizer.step()
            else:  # other ranks update all; schedules look whether a step was taken
                self.optimizer._opt_called = True  # type: ignore[attr-defined]
        except (RuntimeError, NotImplementedError) as error:
            if not is_about_parts(error):
                raise
            raise JobError(f"{type(self.optimizer).__name__} can't update sharded parameters: "
                           f"{str(error).splitlines()[0]}",
                           hint="use an optimizer that treats every element alike (AdamW, SGD; fused=True and "
                                "foreach=True work with them), or a data=N plan, which keeps parameters whole"
                           ) from error
        self.own_parts.after_update()
        if self.gathered is not None:
            self.gathered.after_update()

    def _update_with_closure(self, first: Evaluation, evaluate: Callable[..., Evaluation], *, own_part: float,
                             step: int) -> Evaluation:
        """The update of an optimizer that evaluates the loss as often as it likes. Collective as `_evaluate` is.

        Args:
            first: The step's first evaluation. evaluate: Makes another.
            own_part: This replica's, of the window's samples.

        Returns:
            The first evaluation's loss, and what the last one's forwards did.

        Raises:
            TrainingError: an evaluation's loss was not finite, and neither are the weights that were made of it.
        """
        last, losses = first, [first.loss]

        def again() -> float:
            nonlocal last
            if len(self.mesh.replicas) > 1:
                self.buffers.meet(own_part, self.mesh.group("replicas"), news=bool(last.known[_CHANGED]))
            if self._merges_edits:
                self.edits.updated()  # the optimizer's writes are no forward's
            last = evaluate(is_first=False)
            self._let_optimizer_keep_gradients()
            losses.append(last.loss)
            return last.loss

        self._let_optimizer_keep_gradients()
        if self.gathered is not None:
            step_gathered(self.optimizer, self.gathered, first.loss, again)
            if not self.gathered.whole:
                self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules look
        else:
            self.optimizer.step(Closure(first.loss, again, self.parameters.values()))  # type: ignore[arg-type]
        if not all(map(math.isfinite, losses)):
            self._refuse_weights_that_are_not_finite(losses, step)
        figures = torch.cat([first.figures[:STEP_FIGURES], last.figures[STEP_FIGURES:]])
        return Evaluation(figures, [*first.known[:STEP_FIGURES], *last.known[STEP_FIGURES:]], first.norm)

    def _let_optimizer_keep_gradients(self) -> None:
        """Replicas sum gradients in memory that the next evaluation overwrites; those of one device stay."""
        if self.gathered is None and self.synchronisers:
            for p in self.parameters.values():
                p.grad = None if p.grad is None else p.grad.clone()

    def _refuse_weights_that_are_not_finite(self, losses: Sequence[float], step: int) -> None:
        """Collective over all ranks. losses: of the step's evaluations, of which some are not finite."""
        is_finite = all(bool(local_part(p.detach()).isfinite().all()) for p in self.parameters.values())
        is_bad = torch.tensor(float(not is_finite), device=self.device)
        if self.mesh.world_size > 1:
            dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        if bool(is_bad):
            number = next(number for number, loss in enumerate(losses, 1) if not math.isfinite(loss))
            raise TrainingError(f"the loss is {losses[number - 1]} in evaluation {number} of step {step + 1}, and "
                                f"{type(self.optimizer).__name__} makes weights of it that are not finite",
                                hint="a lower learning rate, a line search, or clip=1.0")

    @property
    def sent_bytes(self) -> float:
        """What this rank has sent to other replicas so far: gradients or weights, and what they agree on."""
        return self.step_sync.met_bytes + sum(synchroniser.sent_bytes for synchroniser in self.synchronisers)

    def kept(self) -> Iterator[StateTensor]:
        """State of the plan's rooms."""
        for synchroniser in self.synchronisers:
            yield from synchroniser.kept()


def check_loss(loss: float, count: float, tallies: Sequence[Tally], step: int) -> None:
    """Refuse a window's loss that no update can be made from.

    tallies: those of this rank; if none of them is at fault, another rank's report comes first.
    """
    if math.isfinite(loss) and count > 0:
        return
    if math.isfinite(loss):
        raise TrainingError(f"the loss counts nothing in step {step + 1}: its count is {count:g}",
                            hint="every target of the window is ignored; a larger batch makes this unlikely")
    here = not all(bool(torch.isfinite(tally.value)) for tally in tallies)
    error = TrainingError(
        f"the loss is {'infinite' if math.isinf(loss) else 'not a number (NaN)'} in step {step + 1}; "
        "the weights of the step before are kept",
        hint="a lower learning rate, clip=1.0, or a look at the samples of this step")
    error.heard = not here  # type: ignore[attr-defined]  # another rank's loss; that rank's report comes first
    raise error


def check_used(users: Mapping[str, float]) -> None:
    """Refuse parameters that nothing uses, unless they stand in a list beside others that were used.

    users: ranks that used each trainable parameter, by name.
    """
    unused = [name for name, count in users.items() if not count]
    family = lambda name: re.sub(r"\.\d+\.", ".*.", name)  # noqa: E731
    alive = {family(name) for name, count in users.items() if count}
    never = [name for name in unused if family(name) == name or family(name) not in alive]
    if len(never) == len(users):
        raise TrainingError("the loss does not depend on the model: no parameter has a gradient")
    if never:
        shown = ", ".join(never[:5]) + (f" and {len(never) - 5} more" if len(never) > 5 else "")
        raise TrainingError(f"the loss does not depend on {len(never)} of {len(users)} parameters: "
                            f"{shown}", hint="remove them, or freeze them with requires_grad_(False)")


def build_schedule(job: Job, optimizer: torch.optim.Optimizer) -> Any:
    """The job's learning-rate schedule; None if it has none."""
    if job.lr_schedule is None:
        return None
    schedule = job.lr_schedule(optimizer)
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise JobError("ReduceLROnPlateau waits for a metric, and a schedule is stepped by optimizer steps alone",
                       hint="use a schedule of steps, such as CosineAnnealingLR or LambdaLR")
    if not hasattr(schedule, "step"):
        raise JobError(f"lr_schedule returned {type(schedule).__name__} and not a learning-rate scheduler")
    return schedule
