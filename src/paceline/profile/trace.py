"""A job's profile from its own program, run on tensors that have shapes but no memory."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from paceline.capture.casts import cast_alone
from paceline.capture.probe import sparsely_trained
from paceline.errors import JobError, PacelineError
from paceline.job import AUTOCAST, Job
from paceline.launch.fork import cuda_left_alone, in_a_fork
from paceline.profile.profile import Affine, Parameter, Profile, Segment, Work, growing
from paceline.profile.recorder import Levels, Place, Recorder, Tallied, follow
from paceline.strategies.units import find_units
from paceline.values import plain, value_of

_CPU = torch.device("cpu")
# Bytes of optimizer state a parameter byte where the optimizer can't be run: Adam's two moments.
ASSUMED_STATE_FACTOR = 2
# A network without convolutions or weight sharing: one multiplication and one addition a parameter and sample,
# twice that in backward.
ASSUMED_FLOPS_PER_PARAMETER = 2
TRIAL_TIMEOUT_S = 60.0  # of a fork that runs the model on fake tensors


def profile_job(job: Job, *, samples: int = 2, device: str = "cpu") -> Profile:
    """What one forward, backward and update of a job costs, as figures that grow with the samples.

    Runs the job's model, loss and optimizer on fake tensors, which cost no memory, with `samples` samples and
    with a whole batch, and takes the line between the two. A model that fake tensors can't run (its course
    depends on values, it has kernels of its own) is run for real on `device`, with `samples` and twice as many; one
    that fails there too is priced by its parameters alone. `Profile.notes` says so. For a GPU all of it happens in a
    fork of this process, unless it uses GPUs already.

    Reads the first `samples` items of the data. Leaves the random generators of Python, NumPy and torch as they
    were, and no hooks.

    Raises:
        JobError: the model is no module.
        Exception: whatever the model's own constructor raises; a RuntimeError in its place where a fork ran it.
    """
    if device == "cpu" or torch.cuda.is_initialized():
        return _profile(job, samples, torch.device(device))
    found: Profile = value_of(in_a_fork(lambda: plain(_profile(job, samples, torch.device(device)))))
    return found


def _profile(job: Job, samples: int, device: torch.device) -> Profile:
    notes: list[str] = []
    with kept_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real run will show them
        try:
            items = first_items(job.data, samples)
        except Exception as error:
            return _from_parameters(job, [f"the data gave no samples ({_named(error)})"])
        if found := _tried("on fake tensors", lambda: _fit(_fake_runs(job, items), (), cast_parameters(job)), notes):
            return found
    with kept_generators(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how = "for real" if device.type == "cpu" else f"for real on {device}"
        if found := _tried(how, lambda: _fit(_real_runs(job, items, device), tuple(notes)), notes):
            return found
        return _from_parameters(job, notes)


def _tried(how: str, profile: Callable[[], Profile], notes: list[str]) -> Profile | None:
    """A profile that is made so; None, and a note why, where it can't be."""
    try:
        return profile()
    except JobError:
        raise
    except Exception as error:
        notes.append(f"could not be run {how} ({_named(error)})")
        return None


@dataclass(frozen=True)
class _Run:
    """One traced step.

    pieces: of each segment. state_bytes: None if the optimizer could not be run.
    """

    samples: int
    batch_bytes: int
    model: nn.Module
    units: tuple[str, ...]
    pieces: list[str]
    recorder: Recorder
    state_bytes: dict[str, int] | None


def _fake_runs(job: Job, items: list[Any]) -> tuple[_Run, _Run]:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = build(job)
        if not all(isinstance(p, FakeTensor) for p in model.parameters()):
            raise TypeError("model returned a module that existed before")
        batch = tree_map(lambda t: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t, default_collate(items))
        first = _trace(job, model, batch, samples=len(items), factor=1)
        model = build(job)
        factor = max(2, -(-job.batch // len(items)))
        return first, _trace(job, model, batch, samples=len(items) * factor, factor=factor)


def _real_runs(job: Job, items: list[Any], device: torch.device) -> tuple[_Run, _Run]:
    batch = default_collate(items)
    model = build(job)  # stays as it is: the job may hand out one module again and again
    first, second = (_trace(job, copy.deepcopy(model).to(device), batch, samples=len(items) * factor, factor=factor,
                            device=device)
                     for factor in (1, 2))
    return first, second


def cast_parameters(job: Job, device: torch.device = _CPU) -> frozenset[str]:
    """Names of the parameters that autocast casts before anything computes with them, from runs on fake tensors of the
    device: `shard=N` gathers them cast. None where fake tensors can't run the model.

    None of fp8 either: torchao's layers take float32 weights to float8.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    if job.precision not in AUTOCAST or job.precision == "fp8":
        return frozenset()
    try:
        with kept_generators(device), warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            warnings.simplefilter("ignore")  # the real run will show them
            model = build(job)
            if not all(isinstance(p, FakeTensor) for p in model.parameters()):  # one that existed before
                return frozenset()
            inputs, target = (
                tree_map(lambda t: mode.from_tensor(t).to(device) if isinstance(t, torch.Tensor) else t, part)
                for part in default_collate(first_items(job.data, 2)))
            _move(model, device)

            def loss() -> Any:
                with autocast(job, device.type):
                    return job.loss(_call(model, inputs), target)

            return cast_alone(model, loss, getattr(torch, AUTOCAST[job.precision]))
    except Exception:
        return frozenset()


def cast_parameters_of_rank(job: Job, device: torch.device) -> frozenset[str]:
    """`cast_parameters` for a process that trains the model afterwards.

    The model's code may keep tensors, as in a cache of positions, and would find fake ones there. So a fork of this
    process tries it first. None are named if that keeps a fake tensor, fails, or takes more than a minute.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    def fakes() -> set[int]:
        gc.collect()
        return {id(value) for value in gc.get_objects() if issubclass(type(value), FakeTensor)}

    def tried() -> list[str]:
        before = fakes()
        names = sorted(cast_parameters(job))
        return [] if fakes() - before else names

    if job.precision not in AUTOCAST or job.precision == "fp8":
        return frozenset()
    try:
        names = frozenset(in_a_fork(tried, timeout_s=TRIAL_TIMEOUT_S))
    except (PacelineError, RuntimeError):
        return frozenset()
    return names & cast_parameters(job, device) if names and device.type != "cpu" else names


def _move(model: nn.Module, device: torch.device) -> None:
    """A model of fake tensors to a device; `Module.to` can't swap those."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device == device:
                    continue
                if id(tensor) not in moved:
                    copied = tensor.detach().to(device)
                    moved[id(tensor)] = tensor, (nn.Parameter(copied, tensor.requires_grad)
                                                 if isinstance(tensor, nn.Parameter) else copied)
                held[name] = moved[id(tensor)][1]


def build(job: Job) -> nn.Module:
    model = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(f"model returned {type(model).__name__} and not a torch.nn.Module")
    return model.to(torch.float64) if job.precision == "float64" else model


def _trace(job: Job, model: nn.Module, batch: tuple[Any, Any], *, samples: int, factor: int,
           device: torch.device = _CPU) -> _Run:
    """One step of the model with `factor` copies of the batch."""
    def taken(value: Any) -> Any:
        made = as_the_job_takes(value, job, samples, factor)
        return made.to(device) if isinstance(made, torch.Tensor) and device.type != "cpu" else made

    inputs, target = (tree_map(taken, part) for part in batch)
    units = find_units(model)
    recorder = Recorder()
    pieces = follow(recorder, {**units, **_outer_pieces(model, units)}, model)
    recorder.ignore([*model.parameters(), *model.buffers(), *tree_leaves((inputs, target))])
    model.train()
    with recorder:
        with autocast(job, device.type):
            loss = job.loss(_call(model, inputs), target)
        loss = loss[0] if isinstance(loss, tuple | list) else loss
        recorder.move_to(Place(len(pieces) - 1, "backward"))
        loss.backward()
        state_bytes = _trace_update(job, model, recorder)
    batch_bytes = sum(t.numel() * t.element_size() for t in tree_leaves((inputs, target))
                      if isinstance(t, torch.Tensor))
    return _Run(samples, batch_bytes, model, tuple(units), pieces, recorder, state_bytes)


def _trace_update(job: Job, model: nn.Module, recorder: Recorder) -> dict[str, int] | None:
    """Clip and step. The first step makes the optimizer's state, the second one is counted.

    Returns:
        Bytes of state by parameter name; None if the optimizer can't be run.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    recorder.move_to(Place(-1, "update"))
    try:
        optimizer = job.optimizer(named)
        optimizer.step()
        recorder.move_to(Place(0, "update"))
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in named], job.clip)
        optimizer.step()
    except Exception:
        return None
    return {name: _state_bytes(optimizer, p) for name, p in named}


def state_factor(job: Job, model: nn.Module) -> float:
    """Bytes that the job's optimizer keeps for a byte of trainable parameters, from a step of it on fake tensors.

    An optimizer that can't be run so counts as one with two moments.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with kept_generators(), FakeTensorMode():
        named = [(name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype))) for name, p in model.named_parameters()
                 if p.requires_grad]
        for _, p in named:
            p.grad = torch.empty_like(p)
        try:
            optimizer = job.optimizer(named)
            optimizer.step()
        except Exception:
            return ASSUMED_STATE_FACTOR
    held = sum(_state_bytes(optimizer, p) for _, p in named)
    return held / max(1, sum(p.numel() * p.element_size() for _, p in named))


def _state_bytes(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(dict(optimizer.state.get(parameter, {})))
               if isinstance(t, torch.Tensor))


def _outer_pieces(model: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Modules outside the units that own parameters, the largest that hold no unit and are not the model itself."""
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if path in units or not any(True for _ in child.parameters()):
                continue
            is_called = type(child).forward is not nn.Module.forward
            if not is_called or any(unit.startswith(f"{path}.") for unit in units):
                visit(child, f"{path}.")
            else:
                found[path] = child

    visit(model, "")
    return found


def _fit(runs: tuple[_Run, _Run], notes: tuple[str, ...], cast: frozenset[str] = frozenset()) -> Profile:
    """The line through two runs, figure by figure. cast: see `cast_parameters`."""
    first, second = runs
    if first.pieces != second.pieces:
        raise ValueError("the model takes another course for another number of samples")
    sides = [_Side(run) for run in runs]

    def line(figure: Callable[[_Side], float]) -> Affine:
        return Affine.through((first.samples, figure(sides[0])), (second.samples, figure(sides[1])))

    def work(place: Place) -> Work:
        return Work(line(lambda s: s.work(place).flops), line(lambda s: s.work(place).moved_bytes),
                    line(lambda s: s.work(place).function_bytes), sides[0].work(place).operators,
                    growing(*(s.work(place).products for s in sides), samples=(first.samples, second.samples)))

    def segment(number: int) -> Segment:
        ahead, back = Place(number, "forward"), Place(number, "backward")
        return Segment(
            unit=first.pieces[number] if first.pieces[number] in first.units else "",
            forward=work(ahead), backward=work(back),
            kept_bytes=line(lambda s: s.levels(ahead).end - s.levels(ahead).start),
            output_bytes=line(lambda s: s.run.recorder.outputs.get(number, 0)),
            forward_peak_bytes=line(lambda s: s.levels(ahead).peak - s.levels(ahead).start),
            backward_peak_bytes=line(lambda s: max(0, s.levels(back).peak - s.levels(ahead).end)),
            gradients=tuple(first.recorder.gradients[number]),
        )

    if first.state_bytes is None:
        notes += (f"the optimizer could not be run on fake tensors: {ASSUMED_STATE_FACTOR} bytes of state a byte",)
    update = Place(0, "update")
    held = sides[0].levels(update)
    segments = tuple(segment(number) for number in range(len(first.pieces)))
    return Profile(
        parameters=_parameters(first.model, first.units, first.state_bytes, cast),
        segments=tuple(s for s in segments if s != Segment()),
        buffer_bytes=_buffer_bytes(first.model),
        batch_bytes=line(lambda s: s.run.batch_bytes),
        update=work(update), update_peak_bytes=held.peak - held.start,
        notes=notes,
    )


class _Side:
    """One run's figures by place."""

    def __init__(self, run: _Run) -> None:
        self.run, self._levels = run, run.recorder.levels()

    def work(self, place: Place) -> Tallied:
        return self.run.recorder.work.get(place, Tallied())

    def levels(self, place: Place) -> Levels:
        return self._levels.get(place, Levels(0, 0, 0))


def first_items(data: Any, count: int) -> list[Any]:
    """The first items, again and again if there are too few.

    Raises:
        TypeError: the data is an iterator, and reading it would take samples away from the training.
    """
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return [data[i % len(data)] for i in range(count)]
    stream = iter(data)
    if stream is data:
        raise TypeError("an iterator can be read only once")
    found = list(islice(stream, count))
    return [found[i % len(found)] for i in range(count)]


def as_the_job_takes(value: Any, job: Job, samples: int, factor: int) -> Any:
    """A tensor of the batch, repeated along dim 0 and in the job's type."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() and value.shape[0] * factor == samples:
        value = value.repeat(factor, *[1] * (value.dim() - 1))
    return value.to(torch.float64) if job.precision == "float64" and value.is_floating_point() else value


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def autocast(job: Job, kind: str = "cpu") -> AbstractContextManager[Any]:
    name = AUTOCAST.get(job.precision)
    return nullcontext() if name is None else torch.autocast(kind, dtype=getattr(torch, name))


@contextmanager
def kept_generators(device: torch.device = _CPU) -> Iterator[None]:
    """Leave the global random generators of the CPU as they are found, and GPUs alone: nothing here runs on them, and
    a process that has asked for them can't fork ranks that use them. A GPU that is named may be used; its generator is
    left as it is found, too."""
    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()
    is_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if is_gpu else []), nullcontext() if is_gpu else cuda_left_alone():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _named(error: Exception) -> str:
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line[:200]}" if first_line else type(error).__name__


def _from_parameters(job: Job, notes: list[str]) -> Profile:
    """A rough profile of a model that can be built but not be run."""
    model = build(job)
    units = find_units(model)
    parameters = _parameters(model, tuple(units), None)
    segments = []
    for unit in ("", *units):
        owned = [p for p in model.named_parameters()
                 if p[0] in {q.name for q in parameters if q.unit == unit}]
        flops = float(ASSUMED_FLOPS_PER_PARAMETER * sum(p.numel() for _, p in owned))
        segments.append(Segment(unit, Work(Affine(0, flops)), Work(Affine(0, 2 * flops)),
                                gradients=tuple(name for name, p in owned if p.requires_grad)))
    moved = sum(2 * p.num_bytes + 2 * p.state_bytes + p.gradient_bytes for p in parameters)
    return Profile(
        parameters, tuple(segments), buffer_bytes=_buffer_bytes(model), update=Work(moved_bytes=Affine(moved)),
        notes=(*notes, "priced by its parameters alone: activations are left out"),
    )


def _parameters(model: nn.Module, units: tuple[str, ...], state_bytes: dict[str, int] | None,
                cast: frozenset[str] = frozenset()) -> tuple[Parameter, ...]:
    made, sparse = [], sparsely_trained(model)
    for name, p in model.named_parameters():
        num_bytes = p.numel() * p.element_size()
        assumed = ASSUMED_STATE_FACTOR * num_bytes if p.requires_grad else 0
        made.append(Parameter(
            name, unit=next((unit for unit in units if name.startswith(f"{unit}.")), ""), num_bytes=num_bytes,
            rows=p.shape[0] if p.dim() else 1, dtype=str(p.dtype).removeprefix("torch."),
            trainable=p.requires_grad, state_bytes=assumed if state_bytes is None else state_bytes.get(name, 0),
            is_sparse=name in sparse, gathered_part=0.5 if name in cast else 1.0,
        ))
    return tuple(made)


def _buffer_bytes(model: nn.Module) -> int:
    return sum(b.numel() * b.element_size() for b in model.buffers())
