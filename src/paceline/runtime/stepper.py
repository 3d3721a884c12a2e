"""One optimizer step on one rank, the same code for every plan: what differs is in the plan's synchronisers."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from paceline.errors import JobError, TrainingError
from paceline.job import Job
from paceline.plan import Plan
from paceline.runtime.buffers import ChangingBuffers
from paceline.runtime.feed import MicroBatch, example_batch
from paceline.runtime.loss import Tally, read_tally, require_gradient
from paceline.runtime.order import Window
from paceline.runtime.streams import seed_streams
from paceline.runtime.trace import Recorder
from paceline.strategies.compose import lay_out, prepare
from paceline.strategies.data.run import local
from paceline.strategies.layout import Layout
from paceline.strategies.mesh import Mesh, axes_cut
from paceline.strategies.shard.run import is_about_shards

ADAM_STATES = 2.0  # bytes of state a byte of parameters


@dataclass(frozen=True, slots=True)
class StepResult:
    """What all ranks agree on after a step.

    loss: sum over the window by its global count.
    stop: how many ranks were asked to stop.
    gradient_norm: before clipping; None if the job doesn't clip.
    """

    loss: float
    stop: int
    gradient_norm: float | None


def build_model(job: Job, device: torch.device) -> torch.nn.Module:
    """The job's model with the seed's initial weights, the same on every rank and under every plan.

    Raises:
        JobError: it is no module, or has nothing to train.
    """
    seed_streams(job.seed, "model")
    model = job.model()
    if not isinstance(model, torch.nn.Module):
        raise JobError(f"model returned {type(model).__name__} and not a torch.nn.Module")
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise JobError(f"the shape of '{name}' is not known before the first forward",
                           hint="give lazy modules their sizes, or run the model on one sample where it is built")
    if not any(p.requires_grad for p in model.parameters()):
        raise JobError("the model has no trainable parameter",
                       hint="every parameter has requires_grad=False, or the module registers none")
    model = model.to(device)
    return model.double() if job.precision == "float64" else model  # .to(dtype) would cut complex numbers in two


def autocast(job: Job, device: torch.device) -> AbstractContextManager[Any]:
    """The numeric context of the job's forward passes."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if job.precision == "bf16" else nullcontext()


def lay_out_job(model: torch.nn.Module, job: Job, *, plan: Plan, mesh: Mesh, device: torch.device,
                memory_bytes: Sequence[float] = ()) -> Layout:
    """What this rank runs of the job's model. Collective.

    memory_bytes: of each rank's device; without it nothing is too large.
    """
    dtype = torch.float64 if job.precision == "float64" else None
    return lay_out(model, plan=plan, mesh=mesh, device=device, memory_bytes=memory_bytes,
                   example=lambda samples: example_batch(job.data, samples).to(device, dtype),
                   context=lambda: autocast(job, device),
                   microbatch_samples=-(-job.batch // (plan.replicas * plan.num_microbatches)),
                   state_factor=ADAM_STATES)


def _kinds(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters that torch takes together: whole ones, and distributed ones of one mesh."""
    found: dict[Any, list[torch.nn.Parameter]] = {}
    for p in parameters:
        found.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return list(found.values())


def _stand_in(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """A parameter of the same shape with the memory of one element."""
    return torch.nn.Parameter(torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))


class _Window:
    """The work around the micro-batches of one step."""

    def __init__(self, stepper: Stepper, window: Window, batches: list[MicroBatch], step: int, part: int,
                 beat: Callable[[str], None]) -> None:
        self.stepper, self.window, self.step, self.part, self.beat = stepper, window, step, part, beat
        dtype = torch.float64 if stepper.job.precision == "float64" else None
        self.batches = [batch.to(stepper.device, dtype) for batch in batches]
        self.tallies: list[Tally] = []

    def before_forward(self, microbatch: int, stage: int) -> None:
        place = (self.part, microbatch, stage) if stage else (self.part, microbatch)
        seed_streams(self.stepper.job.seed, "step", self.step, *place)
        self.beat("forward")

    def loss(self, microbatch: int, output: Any) -> torch.Tensor:
        batch, job = self.batches[microbatch], self.stepper.job
        with autocast(job, self.stepper.device):
            tally = read_tally(job.loss(output, batch.target), samples=batch.samples or 1)
        require_gradient(tally)
        self.tallies.append(tally if batch.samples else Tally(torch.zeros_like(tally.value), 0.0, tally.is_mean))
        # A mean over samples has its weight known before backward; (sum, count) is divided after the reduction,
        # when the window's count is known. A stand-in weighs nothing.
        weight = batch.samples / self.window.count if tally.is_mean else float(batch.samples > 0)
        return tally.value * weight

    def record(self, what: str, label: str, start_s: float, end_s: float) -> None:
        if self.stepper.trace is not None:
            self.stepper.trace.add(what, label, start_s, end_s)

    def before_backward(self, microbatch: int) -> None:
        for synchroniser in self.stepper.synchronisers:
            synchroniser.begin(last=microbatch == len(self.batches) - 1)
        self.beat("backward")


class Stepper:
    """The model, optimizer and schedule of one rank, and how they take a step together with the other ranks.

    held: parameters of this rank by name, as it holds them (whole, or a shard). parameters: the trainable ones.
    trainable: all trainable parameters of the model; stand-ins without memory where another rank holds them.
    trace: notes what is done when, if it is set.
    groups: names of the parameters in each of the optimizer's groups, wherever they are held.
    """

    def __init__(self, job: Job, plan: Plan, mesh: Mesh, device: torch.device, *,
                 memory_bytes: Sequence[float] = ()) -> None:
        self.job, self.mesh, self.device = job, mesh, device
        self.replica = mesh.replica
        self.model = build_model(job, device)
        self.layout = lay_out_job(self.model, job, plan=plan, mesh=mesh, device=device, memory_bytes=memory_bytes)
        self.synchronisers = prepare(self.layout.module, plan=plan, mesh=mesh)
        self.model.train()
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.held = dict(self.layout.module.named_parameters())
        self.parameters = {name: p for name, p in self.held.items() if p.requires_grad}
        self.optimizer, self.groups = build_optimizer(job, self.trainable, self.parameters)
        self.schedule = build_schedule(job, self.optimizer)
        self.buffers = ChangingBuffers(self.model)
        self.saw_unused = False
        self.trace: Recorder | None = None

    def step(self, window: Window, batches: list[MicroBatch], *, step: int, stop: bool = False,
             beat: Callable[[str], None] = lambda phase: None,
             observe: Callable[[Stepper], None] | None = None) -> StepResult:
        """Forward and backward of every micro-batch, reduction, clipping, update.

        Collectives: those of the plan's rooms, then one small all-reduce of the loss over all ranks.

        Args:
            step: Number of the step, from 0; keys the random streams.
            stop: This rank was asked to stop; every rank learns of it in the result.
            beat: Told which phase begins.
            observe: Called when gradients are complete, before clipping.

        Raises:
            TrainingError: a loss that is not finite or can't be trained on, a parameter that nothing uses. No
                weight was changed.
        """
        part = self.mesh.rank // self.mesh.sizes["tensor"]  # ranks that compute one layer together draw alike
        tallies, used = self.backward(window, batches, step=step, part=part, beat=beat)
        loss, count, stops, users, is_mean = self._meet(tallies, used, stop)
        check_loss(loss, count, tallies, step)
        self._settle_unused(users, first=step)
        if not is_mean:
            self._scale_gradients(1.0 / count)
        if observe:
            observe(self)
        beat("optimizer")
        norm = self._clip()
        self._update()
        if self.schedule is not None:
            self.schedule.step()
        if len(self.mesh.replicas) > 1:
            self.buffers.meet(sum(batch.samples for batch in batches) / window.count, self.mesh.group("replicas"))
        return StepResult(loss / count, int(stops), norm)

    def backward(self, window: Window, batches: list[MicroBatch], *, step: int, part: int,
                 beat: Callable[[str], None] = lambda phase: None) -> tuple[list[Tally], set[str]]:
        """The gradients of a window, as far as the plan's synchronisers bring them together. Collective as they are.

        Args:
            part: Which part of the window this rank computes; keys the random streams.

        Returns:
            The loss of each micro-batch, and the names of parameters that this rank used.
        """
        self.layout.module.zero_grad()  # also of parameters that the optimizer leaves out
        work = _Window(self, window, batches, step, part, beat)
        self.layout.run(work.batches, work)
        unused = set().union(*(synchroniser.unused() for synchroniser in self.synchronisers))
        used = {name for name, p in self.parameters.items() if p.grad is not None and name not in unused}
        beat("reduce")
        for synchroniser in reversed(self.synchronisers):
            synchroniser.finish()
        self.layout.finish()
        return work.tallies, used

    def _meet(self, tallies: list[Tally], used: set[str],
              stop: bool) -> tuple[float, float, float, dict[str, float], bool]:
        """The window's loss sum, its count, ranks asked to stop, ranks that used each parameter, and the loss's kind.

        Ranks without the model's output have no tallies and learn of the loss here.
        """
        if self.mesh.coordinates["tensor"]:
            tallies = []  # the first of those that compute a loss together tells it
        totals = [tally.total for tally in tallies] or [torch.zeros((), dtype=torch.float64, device=self.device)]
        count = sum(torch.as_tensor(tally.count, dtype=torch.float64, device=self.device) for tally in tallies)
        sums = sum(not tally.is_mean for tally in tallies)
        flags = torch.tensor([float(stop), float(sums), *(float(name in used) for name in self.trainable)],
                             dtype=torch.float64)
        figures = torch.cat([torch.stack([torch.stack(totals).sum(), torch.as_tensor(
            count, dtype=torch.float64, device=self.device)]), flags.to(self.device)])
        if self.mesh.world_size > 1:
            dist.all_reduce(figures)
        loss, counted, stops, summed, *users = figures.tolist()
        return loss, counted, stops, dict(zip(self.trainable, users, strict=True)), not summed

    def _settle_unused(self, users: dict[str, float], *, first: int) -> None:
        """A parameter that no rank used gets no gradient, as on one device; in a run's first step it is refused.

        Parameters that stand in a list beside others that were used (experts, optional layers) may be unused.
        """
        if all(users.values()):
            return
        unused = [name for name, count in users.items() if not count]
        for name in unused:
            if name in self.parameters:
                self.parameters[name].grad = None
        if self.saw_unused or first:
            return
        self.saw_unused = True
        check_used(users)

    def _scale_gradients(self, factor: float) -> None:
        gradients = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _clip(self) -> float | None:
        """Scale all gradients down to the greatest norm; as `clip_grad_norm_`, over all parts of the model.

        Collective where gradients are sharded or in stages.
        """
        if self.job.clip is None:
            return None
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        cut: dict[tuple[str, ...], list[torch.Tensor]] = {}
        for name, p in self.parameters.items():
            if p.grad is not None and name in self.layout.owned:
                cut.setdefault(axes_cut(p), []).append(local(p.grad))
        # Ranks that hold parts of the model have other parameters, but cut them along the same axes.
        for axes in ((), ("shard",), ("tensor",), ("shard", "tensor")):
            own = torch.nn.utils.get_total_norm(cut.get(axes, [])).to(squares).square()
            for axis in axes if all(self.mesh.sizes[axis] > 1 for axis in axes) else ():
                dist.all_reduce(own, group=self.mesh.group(axis))
            squares += own
        if self.mesh.sizes[self.mesh.stage_axis] > 1:
            dist.all_reduce(squares, group=self.mesh.group(self.mesh.stage_axis))
        total = squares.sqrt()
        for kind in _kinds(self.parameters.values()):
            gradient = next((p.grad for p in kind if p.grad is not None), total)
            torch.nn.utils.clip_grads_with_norm_(kind, self.job.clip, total.to(gradient.dtype))
        return float(total)

    def _update(self) -> None:
        try:
            self.optimizer.step()
        except (RuntimeError, NotImplementedError) as error:
            if not is_about_shards(error):
                raise
            raise JobError(f"{type(self.optimizer).__name__} can't update sharded parameters: "
                           f"{str(error).splitlines()[0]}",
                           hint="leave out fused=True and foreach=True, or use an optimizer that treats every element "
                                "alike (AdamW, SGD), or a data=N plan, which keeps parameters whole") from error

    def model_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank holds of what `model.state_dict()` names: a tied parameter under each of its names."""
        first_name = {id(p): name for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if first_name[id(p)] in self.held:
                yield name, self.held[first_name[id(p)]]
        kept = set(self.model.state_dict(keep_vars=True)) if any(True for _ in self.model.buffers()) else set()
        yield from ((name, b) for name, b in self.model.named_buffers(remove_duplicate=False) if name in kept)


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


def build_optimizer(job: Job, trainable: Mapping[str, torch.nn.Parameter],
                    parameters: Mapping[str, torch.nn.Parameter]) -> tuple[torch.optim.Optimizer, list[list[str]]]:
    """The optimizer for what this rank holds, and the names in its groups of all parameters.

    The job's function sees every parameter, so that its groups are the same on every rank.

    Args:
        trainable: All parameters. parameters: Those that are here, as this rank holds them.
    """
    every = {name: parameters[name] if name in parameters else _stand_in(p) for name, p in trainable.items()}
    optimizer = job.optimizer(list(every.items()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(f"optimizer returned {type(optimizer).__name__} and not a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise JobError(f"{type(optimizer).__name__} evaluates the loss several times a step, and a step here does "
                       "so once", hint="an optimizer whose step() needs no closure, such as AdamW or SGD")
    known = {id(p): name for name, p in every.items()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    if strangers := sum(id(p) not in known for p in given):
        raise JobError(f"the optimizer holds {strangers} parameters that are not the model's",
                       hint="build it from the (name, parameter) pairs it is given")
    if left_out := set(known.values()) - {known[id(p)] for p in given}:
        import warnings

        warnings.warn(f"the optimizer leaves out {len(left_out)} trainable parameters, such as {min(left_out)}; "
                      "they will not change", stacklevel=2)
    groups = [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        here = [name in parameters for name in names]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [item for item, is_here in zip(group[key], here, strict=True) if is_here]
    return optimizer, groups


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
