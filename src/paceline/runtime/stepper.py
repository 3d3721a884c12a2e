"""One optimizer step on one rank, the same code for every plan: what differs is in the plan's synchronisers."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
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
from paceline.runtime.feed import MicroBatch
from paceline.runtime.loss import Tally, read_tally, require_gradient
from paceline.runtime.order import Window
from paceline.runtime.streams import seed_streams
from paceline.strategies.compose import prepare
from paceline.strategies.data.run import local
from paceline.strategies.mesh import Mesh
from paceline.strategies.shard.run import is_about_shards


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


class Stepper:
    """The model, optimizer and schedule of one rank, and how they take a step together with the other ranks.

    parameters: trainable ones by name, as this rank holds them (whole, or a shard).
    """

    def __init__(self, job: Job, plan: Plan, mesh: Mesh, device: torch.device) -> None:
        self.job, self.mesh, self.device = job, mesh, device
        self.model = build_model(job, device)
        self.synchronisers = prepare(self.model, plan=plan, mesh=mesh)
        self.model.train()
        self.held = dict(self.model.named_parameters())
        self.parameters = {name: p for name, p in self.held.items() if p.requires_grad}
        self.optimizer = self._build_optimizer()
        self.schedule = self._build_schedule()
        self.buffers = ChangingBuffers(self.model)
        self.saw_unused = False

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
        self.model.zero_grad()  # also of parameters that the optimizer leaves out
        tallies = [self._microbatch(window, batch, step=step, number=number, last=number == len(batches) - 1, beat=beat)
                   for number, batch in enumerate(batches)]
        unused = set().union(*(synchroniser.unused() for synchroniser in self.synchronisers))
        used = [p.grad is not None and name not in unused for name, p in self.parameters.items()]
        beat("reduce")
        for synchroniser in reversed(self.synchronisers):
            synchroniser.finish()
        loss, count, stops, users = self._meet(tallies, used, stop)
        self._check_loss(loss, count, tallies, step)
        self._settle_unused(users, first=step)
        if not tallies[0].is_mean:
            self._scale_gradients(1.0 / count)
        if observe:
            observe(self)
        beat("optimizer")
        norm = self._clip()
        self._update()
        if self.schedule is not None:
            self.schedule.step()
        if self.mesh.world_size > 1:
            self.buffers.meet(sum(batch.samples for batch in batches) / window.count)
        return StepResult(loss / count, int(stops), norm)

    def _microbatch(self, window: Window, batch: MicroBatch, *, step: int, number: int, last: bool,
                    beat: Callable[[str], None]) -> Tally:
        for synchroniser in self.synchronisers:
            synchroniser.begin(last=last)
        seed_streams(self.job.seed, "step", step, self.mesh.rank, number)
        batch = batch.to(self.device, torch.float64 if self.job.precision == "float64" else None)
        beat("forward")
        with autocast(self.job, self.device):
            samples = batch.samples or 1
            tally = read_tally(self.job.loss(batch.call(self.model), batch.target), samples=samples)
        require_gradient(tally)
        # A mean over samples has its weight known before backward; (sum, count) is divided after the reduction,
        # when the window's count is known. A stand-in weighs nothing.
        weight = batch.samples / window.count if tally.is_mean else float(batch.samples > 0)
        beat("backward")
        (tally.value * weight).backward()
        return tally if batch.samples else Tally(torch.zeros_like(tally.value), 0.0, tally.is_mean)

    def _meet(self, tallies: list[Tally], used: list[bool], stop: bool) -> tuple[float, float, float, list[float]]:
        """The window's loss sum, its count, ranks asked to stop, and ranks that used each parameter."""
        total = torch.stack([tally.total for tally in tallies]).sum()
        count = sum(torch.as_tensor(tally.count, dtype=torch.float64, device=self.device) for tally in tallies)
        flags = torch.tensor([float(stop), *map(float, used)], dtype=torch.float64)
        figures = torch.cat([torch.stack([total, torch.as_tensor(count)]), flags.to(self.device)])
        if self.mesh.world_size > 1:
            dist.all_reduce(figures)
        loss, counted, stops, *users = figures.tolist()
        return loss, counted, stops, users

    def _check_loss(self, loss: float, count: float, tallies: list[Tally], step: int) -> None:
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

    def _settle_unused(self, users: list[float], *, first: int) -> None:
        """A parameter that no rank used gets no gradient, as on one device; in a run's first step it is refused.

        Parameters that stand in a list beside others that were used (experts, optional layers) may be unused.
        """
        if all(users):
            return
        unused = [name for name, count in zip(self.parameters, users, strict=True) if not count]
        for name in unused:
            self.parameters[name].grad = None
        if self.saw_unused or first:
            return
        self.saw_unused = True
        family = lambda name: re.sub(r"\.\d+\.", ".*.", name)  # noqa: E731
        alive = {family(name) for name in self.parameters if name not in unused}
        never = [name for name in unused if family(name) == name or family(name) not in alive]
        if len(never) == len(self.parameters):
            raise TrainingError("the loss does not depend on the model: no parameter has a gradient")
        if never:
            shown = ", ".join(never[:5]) + (f" and {len(never) - 5} more" if len(never) > 5 else "")
            raise TrainingError(f"the loss does not depend on {len(never)} of {len(self.parameters)} parameters: "
                                f"{shown}", hint="remove them, or freeze them with requires_grad_(False)")

    def _scale_gradients(self, factor: float) -> None:
        gradients = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _clip(self) -> float | None:
        """Scale all gradients down to the greatest norm; as `clip_grad_norm_`, but shards and whole ones may mix."""
        if self.job.clip is None:
            return None
        held = list(self.parameters.values())
        kinds = [kind for sharded in (False, True) if (kind := [p for p in held if hasattr(p, "to_local") == sharded])]
        norms = [torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
        whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        total = whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
        for kind in kinds:
            torch.nn.utils.clip_grads_with_norm_(kind, self.job.clip, total)
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
        """What `model.state_dict()` names on one device: a tied parameter under each of its names."""
        first_name = {id(p): name for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            yield name, self.held[first_name[id(p)]]
        kept = set(self.model.state_dict(keep_vars=True)) if any(True for _ in self.model.buffers()) else set()
        yield from ((name, b) for name, b in self.model.named_buffers(remove_duplicate=False) if name in kept)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.job.optimizer(list(self.parameters.items()))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JobError(f"optimizer returned {type(optimizer).__name__} and not a torch.optim.Optimizer")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise JobError(f"{type(optimizer).__name__} evaluates the loss several times a step, and a step here does "
                           "so once", hint="an optimizer whose step() needs no closure, such as AdamW or SGD")
        known = {id(p): name for name, p in self.parameters.items()}
        given = [p for group in optimizer.param_groups for p in group["params"]]
        if strangers := sum(id(p) not in known for p in given):
            raise JobError(f"the optimizer holds {strangers} parameters that are not the model's",
                           hint="build it from the (name, parameter) pairs it is given")
        if left_out := set(known.values()) - {known[id(p)] for p in given}:
            import warnings

            warnings.warn(f"the optimizer leaves out {len(left_out)} trainable parameters, such as {min(left_out)}; "
                          "they will not change", stacklevel=2)
        return optimizer

    def _build_schedule(self) -> Any:
        if self.job.lr_schedule is None:
            return None
        schedule = self.job.lr_schedule(self.optimizer)
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise JobError("ReduceLROnPlateau waits for a metric, and a schedule is stepped by optimizer steps alone",
                           hint="use a schedule of steps, such as CosineAnnealingLR or LambdaLR")
        if not hasattr(schedule, "step"):
            raise JobError(f"lr_schedule returned {type(schedule).__name__} and not a learning-rate scheduler")
        return schedule
