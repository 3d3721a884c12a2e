"""A job's profile from its own program, run on tensors that have shapes but no memory."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import nn

from paceline.base.errors import JobError, PacelineError
from paceline.base.fork import cuda_left_alone, in_a_fork
from paceline.base.nested import map_batch
from paceline.base.streams import kept_streams
from paceline.cluster.gpu_use import start_autograd_without_gpus
from paceline.job import AUTOCAST, Job
from paceline.job.batches import arguments_of, collated
from paceline.job.foreign_fields import model_hint
from paceline.job.modes import for_training
from paceline.model.attributes import in_float64
from paceline.model.casts import autocast, cast_alone
from paceline.model.cost.attention import SparedBySelective
from paceline.model.cost.blocks import CalledAgain, NotStoodFor, Repeats, unit_of
from paceline.model.cost.fakes import FakeModel, convertible
from paceline.model.cost.profile import (
    Affine,
    Parameter,
    Profile,
    Segment,
    Work,
    growing_figures,
)
from paceline.model.cost.recorder import (
    SparedScores,
    StepPosition,
    WorkRecorder,
    follow,
)
from paceline.model.cost.repeated_layers import Chain, left_out
from paceline.model.cost.updates import let_fuse
from paceline.model.forward_effects import sparsely_trained
from paceline.model.graph import without_cache
from paceline.model.units import find_units, is_callable, recurrent_units
from paceline.torch_private.fake_tensors import LOGGER, FakeTensor, FakeTensorMode
from paceline.torch_private.modules import BatchOrInstanceNorm
from paceline.torch_private.pytree import tensor_leaves, tree_leaves

_CPU = torch.device("cpu")
# Bytes of optimizer state a parameter byte where the optimizer can't be run: Adam's two moments.
ASSUMED_STATE_FACTOR = 2
# A network without convolutions or weight sharing: one multiplication and one addition a parameter and sample,
# twice that in backward.
ASSUMED_FLOPS_PER_PARAMETER = 2
MOST_REAL_BYTES = 256 * 2**20  # of a run on tensors that have memory
ASSUMED_NOTE = (
    "its course depends on values, which were made up: numbers are 1, conditions are false, and masks "
    "choose everything"
)
TRIAL_TIMEOUT_S = 60.0  # of a fork that runs the model on fake tensors


def profile_job(
    job: Job,
    *,
    samples: int = 2,
    device: str = "cpu",
    like: Profile | None = None,
    built: FakeModel | None = None,
) -> Profile:
    """What one forward, backward and update of a job costs, as figures that grow with the samples.

    Runs the job's model, loss and optimizer on fake tensors, which cost no memory, with `samples` samples and
    with a whole batch, and takes the line between the two. A model that fake tensors can't run (its course
    depends on values, it has kernels of its own) is run for real on `device`, with `samples` and twice as many, if that
    takes at most MOST_REAL_BYTES. A larger one is run on fake tensors with values that are made up, and one that fails
    there too is priced by its parameters alone. `Profile.notes` says so. For a GPU all of it happens in a
    fork of this process, unless it uses GPUs already.

    like: Of the same job in another precision of the same weights; its update is this one's, and is not run again.
    built: The job's model, where somebody has it or will need it.

    Reads the first `samples` items of the data. Leaves the random generators of Python, NumPy and torch as they
    were, and no hooks.

    Raises:
        JobError: the model is no module.
        Exception: whatever the model's own constructor raises; a RuntimeError in its place where a fork ran it.
    """
    if device == "cpu" or torch.cuda.is_initialized():
        start_autograd_without_gpus()
        return _profile(job, samples, torch.device(device), like, built)
    profile: Profile = in_a_fork(lambda: _profile(job, samples, torch.device(device), like, built))
    return profile


def _profile(
    job: Job, samples: int, device: torch.device, like: Profile | None, built: FakeModel | None
) -> Profile:
    notes: list[str] = []
    with kept_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real run will show them
        try:
            items = first_items(job.data, samples)
        except Exception as error:
            return _from_parameters(job, [f"the data gave no samples ({_named(error)})"])
        if profile := _tried(
            "on fake tensors",
            lambda: _profile_of_fakes(job, items, built or fake_model(job), like),
            notes,
        ):
            return profile
    with kept_generators(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assumed = _tried(
            "with assumed values",
            lambda: replace(
                _profile_of_fakes(job, items, fake_model(job, assumes=True), like),
                notes=(ASSUMED_NOTE,),
            ),
            [],
        )
        needed_bytes = _bytes_for_real(job, assumed, 2 * samples)
        how = "for real" if device.type == "cpu" else f"for real on {device}"
        if needed_bytes > MOST_REAL_BYTES:
            notes.append(
                f"is not run {how}, which takes {needed_bytes:,.0f} bytes or more and may take "
                f"{MOST_REAL_BYTES:,}"
            )
        elif profile := _tried(
            how,
            lambda: _fit(
                _real_runs(job, items, device, updates=like is None), tuple(notes), like=like
            ),
            notes,
        ):
            return profile
        if assumed is not None:
            return replace(assumed, notes=(*notes, *assumed.notes))
        return _from_parameters(job, notes)


def _bytes_for_real(job: Job, assumed: Profile | None, samples: int) -> float:
    """The least that a real run takes: parameters and their gradients, and activations where they are known."""
    if assumed is not None:
        kept_bytes = sum(s.kept_bytes.at(samples) for s in assumed.segments)
        return (
            kept_bytes
            + assumed.parameter_bytes
            + sum(p.gradient_bytes + p.state_bytes for p in assumed.parameters)
        )
    model = _without_memory(job)
    return sum(
        p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in model.parameters()
    )


def _without_memory(job: Job) -> nn.Module:
    """The model on fake tensors; for real if its constructor can't be run on those."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), convertible():
            return build(job)
    except JobError:
        raise
    except Exception:
        return build(job)


def _tried(how: str, profile: Callable[[], Profile], notes: list[str]) -> Profile | None:
    """A profile that is made so; None, and a note why, where it can't be."""
    level = LOGGER.level  # else it prints the traceback that the note sums up
    LOGGER.setLevel(logging.CRITICAL)
    try:
        return profile()
    except JobError:
        raise
    except Exception as error:
        notes.append(f"could not be run {how} ({_named(error)})")
        return None
    finally:
        LOGGER.setLevel(level)


@dataclass(frozen=True)
class _Run:
    """One traced step.

    pieces: of each segment. course: numbers of segments in the order in which the whole model has them, with their
    pieces: of blocks that were left out, those of others. repeats: blocks that were not run, as others are like them.
    state_bytes: None if the optimizer could not be run, or was not. spared: by recompute=selective.
    """

    samples: int
    batch_bytes: int
    model: nn.Module
    units: tuple[str, ...]
    pieces: list[str]
    course: list[tuple[int, str]]
    recorder: WorkRecorder
    repeats: Repeats
    state_bytes: dict[str, int] | None
    spared: dict[StepPosition, SparedScores]


def _profile_of_fakes(
    job: Job, items: list[Any], built: FakeModel, like: Profile | None
) -> Profile:
    """One block of each kind is run, unless the model runs a block more than once. like: see `profile_job`."""

    def profile(*, each: bool) -> Profile:
        return _fit(
            _fake_runs(job, items, built, each=each, updates=like is None),
            (),
            cast_parameters(job, built=built, each=each),
            like,
        )

    def look(model: nn.Module) -> None:
        inputs, target = _on_fakes(built, job, items)
        model.train()
        with without_cache(model), autocast(job):
            job.criterion(_call(model, inputs), target)

    built.look_for_chains(find_units, look)
    try:
        return profile(each=False)
    except (CalledAgain, NotStoodFor):
        built.chains = ()
        return profile(each=True)


def _on_fakes(built: FakeModel, job: Job, items: list[Any]) -> Any:
    """Samples as a batch."""
    return map_batch(built.mode.from_tensor, collated(items, job.collate))


def _fake_runs(
    job: Job, items: list[Any], built: FakeModel, *, updates: bool = True, each: bool = True
) -> tuple[_Run, _Run]:
    """updates: whether the first run has an update. each: whether each block is run, though it is like another one."""

    def run(factor: int, *, updates: bool) -> _Run:
        with built.lent() as model:
            return _trace(
                job,
                model,
                _on_fakes(built, job, items),
                samples=len(items) * factor,
                factor=factor,
                whole=built if not each else None,
                updates=updates,
            )

    return run(1, updates=updates), run(max(2, -(-job.batch // len(items))), updates=False)


def _real_runs(
    job: Job, items: list[Any], device: torch.device, *, updates: bool
) -> tuple[_Run, _Run]:
    batch = collated(items, job.collate)
    model = build(job)  # stays as it is: the job may hand out one module again and again
    first, second = (
        _trace(
            job,
            copy.deepcopy(model).to(device),
            batch,
            samples=len(items) * factor,
            factor=factor,
            updates=updates and factor == 1,
            device=device,
        )
        for factor in (1, 2)
    )
    return first, second


def cast_parameters(
    job: Job, device: torch.device = _CPU, *, built: FakeModel | None = None, each: bool = True
) -> frozenset[str]:
    """Names of the parameters that autocast casts before anything computes with them, from runs on fake tensors of the
    device: `shard=N` gathers them cast. None where fake tensors can't run the model. built, each: see `_fake_runs`.

    None of fp8 either: torchao's layers take float32 weights to float8.
    """
    if job.precision not in AUTOCAST or job.precision == "fp8":
        return frozenset()
    built = built or fake_model(job)
    try:
        with kept_generators(device), warnings.catch_warnings(), built.lent() as model:
            warnings.simplefilter("ignore")  # the real run will show them
            inputs, target = map_batch(
                lambda t: built.mode.from_tensor(t).to(device),
                collated(first_items(job.data, 2), job.collate),
            )
            if device.type != "cpu":
                model.to(device)
            repeats = Repeats({} if each else find_units(model), lambda: 0)

            def loss() -> Any:
                with repeats.standing_in(), without_cache(model), autocast(job, device):
                    return job.criterion(_call(model, inputs), target)

            cast_names = cast_alone(model, loss, getattr(torch, AUTOCAST[job.precision]))
            repeats.stand_for(left_out(built.chains or ()))
            return frozenset(
                name for name in built.parameters if repeats.traced(name) in cast_names
            )
    except NotStoodFor:
        raise
    except Exception:
        return frozenset()


def cast_parameters_of_rank(job: Job, device: torch.device) -> frozenset[str]:
    """`cast_parameters` for a process that trains the model afterwards.

    The model's code may keep tensors, as in a cache of positions, and would find fake ones there. So a fork of this
    process tries it first. None are named if that keeps a fake tensor, fails, or takes more than a minute.
    """

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


def build(job: Job) -> nn.Module:
    """The job's model, in float64 if the job is. In a mode of fake tensors `convertible` has to be entered."""
    model = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(
            f"model returned {type(model).__name__} and not a torch.nn.Module",
            hint=model_hint(model),
        )
    return in_float64(model) if job.precision == "float64" else model


def fake_model(job: Job, *, assumes: bool = False) -> FakeModel:
    """The job's model without memory. assumes: see `FakeModel`."""
    return FakeModel(lambda: _build_fake(job), assumes=assumes)


def _build_fake(job: Job) -> nn.Module:
    """The model without memory, in a fake mode. A module that existed before, such as a pretrained base of adapters,
    stays as it is: a copy of it takes its place."""
    model = build(job)
    tensors = [*model.parameters(), *model.buffers()]
    if all(isinstance(tensor, FakeTensor) for tensor in tensors):
        return model
    stand_ins: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    for tensor in (
        tensors
    ):  # not clones: torch 2.13 crashes some time after real tensors were copied in a fake mode
        if not isinstance(tensor, FakeTensor):
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            stand_ins[id(tensor)] = (
                nn.Parameter(empty, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
    return copy.deepcopy(model, stand_ins)


def _trace(
    job: Job,
    model: nn.Module,
    batch: tuple[Any, Any],
    *,
    samples: int,
    factor: int,
    updates: bool = False,
    device: torch.device = _CPU,
    whole: FakeModel | None = None,
) -> _Run:
    """One step of the model with `factor` copies of the batch. updates: whether the update, too, which is the same for
    any number of samples. whole: of which one block of each kind is run; None runs each."""

    inputs, target = map_batch(
        lambda t: as_the_job_takes(t, job, samples, factor).to(device), batch
    )
    units = find_units(model)
    recorder = WorkRecorder()
    model.train()
    repeats = Repeats(units if whole else {}, lambda: recorder.place.segment)
    chains = whole.chains or () if whole else ()
    pieces = follow(recorder, {**units, **_outer_pieces(model, units)}, model)
    recorder.ignore([*model.parameters(), *model.buffers(), *tree_leaves((inputs, target))])
    spared = SparedBySelective(recorder)
    with recorder, repeats.standing_in():
        with without_cache(model), autocast(job, device), spared:
            loss = job.criterion(_call(model, inputs), target)
        repeats.stand_for(left_out(chains))
        loss = loss[0] if isinstance(loss, tuple | list) else loss
        recorder.move_to(StepPosition(len(pieces) - 1, "backward"))
        loss.backward()
        named = whole.parameters.items() if whole else model.named_parameters()
        state_bytes = (
            _trace_update(
                job, [(name, p) for name, p in named if p.requires_grad], recorder, repeats
            )
            if updates
            else None
        )
    batch_tensors = {id(leaf): leaf for leaf in tensor_leaves((inputs, target))}
    batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in batch_tensors.values())
    return _Run(
        samples,
        batch_bytes,
        model,
        (*units, *left_out(chains)),
        pieces,
        _course(pieces, chains),
        recorder,
        repeats,
        state_bytes,
        spared.spared,
    )


def _course(pieces: Sequence[str], chains: Sequence[Chain]) -> list[tuple[int, str]]:
    """See `_Run.course`. Blocks that are left out come in the middle of a chain: its last blocks stay what they are,
    under the names of the last ones of all."""
    course = list(enumerate(pieces))
    for chain in chains:
        begin, middle, end = (
            max(place for place, (_, piece) in enumerate(course) if piece == chain.unit(number - 1))
            for number in (chain.kept - 2 * chain.period, chain.kept - chain.period, chain.kept)
        )
        names = {chain.unit(number): number for number in range(chain.kept)}
        left_out = chain.total - chain.kept

        def later(
            part: list[tuple[int, str]],
            by: int,
            names: dict[str, int] = names,
            chain: Chain = chain,
        ) -> list[tuple[int, str]]:
            return [
                (number, chain.unit(names[piece] + by) if piece in names else piece)
                for number, piece in part
            ]

        period = course[begin + 1 : middle + 1]
        course[middle + 1 : end + 1] = [
            *(
                entry
                for more in range(chain.period, left_out + 1, chain.period)
                for entry in later(period, more)
            ),
            *later(course[middle + 1 : end + 1], left_out),
        ]
    return course


def _trace_update(
    job: Job, named: list[tuple[str, nn.Parameter]], recorder: WorkRecorder, repeats: Repeats
) -> dict[str, int] | None:
    """Clip and step the parameters that are trained. The first step makes the optimizer's state, the second one is
    counted: of the blocks that were run, and then once more with one more block of each kind, each in a place of its
    own.

    Returns:
        Bytes of state by parameter name; None if the optimizer can't be run.
    """
    recorder.move_to(StepPosition(-1, "update"))  # the first, which is not counted
    try:
        optimizer = for_training(job.optimizer, named)
        let_fuse(optimizer)
        with _gradients_of_more(named, repeats, [units[0] for units in repeats.kinds.values()]):
            optimizer.step()
        for number, more in enumerate([[], *([units[0]] for units in repeats.kinds.values())]):
            with _gradients_of_more(named, repeats, more):
                recorder.move_to(StepPosition(number, "update"))
                if job.clip is not None:
                    torch.nn.utils.clip_grad_norm_([p for _, p in named], job.clip)
                optimizer.step()
                recorder.move_to(StepPosition(-1, "update"))
    except Exception:
        return None
    parameter_of = dict(named)
    return {name: _state_bytes(optimizer, parameter_of[repeats.traced(name)]) for name, _ in named}


@contextmanager
def _gradients_of_more(
    named: Sequence[tuple[str, nn.Parameter]], repeats: Repeats, units: Sequence[str]
) -> Iterator[None]:
    """Give parameters of units that were not run gradients where those that stand for them have some."""
    parameter_of = dict(named)
    trained = [
        p
        for name, p in named
        if name.startswith(tuple(f"{unit}." for unit in units))
        and parameter_of[repeats.traced(name)].grad is not None
    ]
    for p in trained:
        p.grad = torch.empty_like(p)
    try:
        yield
    finally:
        for p in trained:
            p.grad = None


def state_factor(job: Job, model: nn.Module) -> float:
    """Bytes that the job's optimizer keeps for a byte of trainable parameters, from a step of it on fake tensors.

    An optimizer that can't be run so counts as one with two moments.
    """
    with kept_generators(), FakeTensorMode():
        named = [
            (name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype)))
            for name, p in model.named_parameters()
            if p.requires_grad
        ]
        for _, p in named:
            p.grad = torch.empty_like(p)
        try:
            optimizer = for_training(job.optimizer, named)
            optimizer.step()
        except Exception:
            return ASSUMED_STATE_FACTOR
    state_bytes = sum(_state_bytes(optimizer, p) for _, p in named)
    return state_bytes / max(1, sum(p.numel() * p.element_size() for _, p in named))


def _state_bytes(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    return sum(
        t.numel() * t.element_size()
        for t in tensor_leaves(dict(optimizer.state.get(parameter, {})))
    )


def _outer_pieces(model: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Modules outside the units that own parameters, the largest that hold no unit and are not the model itself."""
    pieces: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if path in units or not any(True for _ in child.parameters()):
                continue
            if not is_callable(child) or any(unit.startswith(f"{path}.") for unit in units):
                visit(child, f"{path}.")
            else:
                pieces[path] = child

    visit(model, "")
    return pieces


def _fit(
    runs: tuple[_Run, _Run],
    notes: tuple[str, ...],
    cast: frozenset[str] = frozenset(),
    like: Profile | None = None,
) -> Profile:
    """The line through two runs, figure by figure; the update is the first one's, or that of a profile that is `like`
    this one. cast: see `cast_parameters`."""
    first, second = runs
    if first.pieces != second.pieces or first.repeats.traced_of != second.repeats.traced_of:
        raise ValueError("the model takes another course for another number of samples")
    state_bytes = (
        first.state_bytes if like is None else {p.name: p.state_bytes for p in like.parameters}
    )
    if state_bytes is None:
        notes += (
            f"the optimizer could not be run on fake tensors: {ASSUMED_STATE_FACTOR} bytes of state a byte",
        )

    @cache
    def segment(number: int) -> Segment:
        small, large = (
            run.recorder.segment(number, spared=run.spared.get(StepPosition(number, "forward")))
            for run in runs
        )
        return growing_figures(small, large, samples=(first.samples, second.samples))

    segments = (
        replace(
            segment(first.repeats.traced_of.get(number, number)),
            unit=piece if piece in first.units else "",
            gradients=_gradients(first, number, piece),
        )
        for number, piece in first.course
    )
    return Profile(
        parameters=_parameters(first.model, first.units, state_bytes, cast),
        segments=tuple(s for s in segments if s != Segment()),
        buffer_bytes=_buffer_bytes(first.model),
        statistics_bytes=_statistics_bytes(first.model),
        batch_bytes=Affine.through(*((run.samples, run.batch_bytes) for run in runs)),
        update=_update(first) if like is None else like.update,
        update_peak_bytes=_update_peak_bytes(first) if like is None else like.update_peak_bytes,
        notes=notes,
        recurrent=tuple(recurrent_units(first.model)),
    )


def _gradients(run: _Run, number: int, unit: str) -> tuple[str, ...]:
    """Names of parameters whose gradients a segment completes; of a block that was not run as of the one that was."""
    names = run.recorder.gradients[number]
    traced = run.repeats.traced_of.get(number, number)
    if traced == number:
        return tuple(names)
    other = run.pieces[traced]
    return (
        *names,
        *(
            f"{unit}{name.removeprefix(other)}"
            for name in run.recorder.gradients[traced]
            if name.startswith(f"{other}.")
        ),
    )


def _update(run: _Run) -> Work:
    """Of all parameters."""

    def whole(name: str) -> float:
        return _of_all_blocks(run, lambda place: getattr(run.recorder.work[place], name))

    return Work(
        Affine(whole("flops")),
        Affine(whole("moved_bytes")),
        Affine(whole("function_bytes")),
        whole("operators"),
    )


def _update_peak_bytes(run: _Run) -> int:
    levels = run.recorder.levels
    return round(_of_all_blocks(run, lambda place: levels[place].peak - levels[place].start))


def _of_all_blocks(run: _Run, figure: Callable[[StepPosition], float]) -> float:
    """A figure of the update, from what one more block of each kind adds to it."""
    base = figure(StepPosition(0, "update"))
    return base + sum(
        len(units) * (figure(StepPosition(number, "update")) - base)
        for number, units in enumerate(run.repeats.kinds.values(), 1)
    )


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
    items = list(islice(stream, count))
    return [items[i % len(items)] for i in range(count)]


def as_the_job_takes(value: torch.Tensor, job: Job, samples: int, factor: int) -> torch.Tensor:
    """A tensor of the batch, repeated along dim 0 and in the job's type."""
    if value.dim() and value.shape[0] * factor == samples:
        value = value.repeat(factor, *[1] * (value.dim() - 1))
    return (
        value.to(torch.float64)
        if job.precision == "float64" and value.is_floating_point()
        else value
    )


def _call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = arguments_of(inputs)
    return model(*args, **kwargs)


@contextmanager
def kept_generators(device: torch.device = _CPU) -> Iterator[None]:
    """Leave the global random generators of the CPU as they are found, and GPUs alone: nothing here runs on them, and
    a process that has asked for them can't fork ranks that use them. A GPU that is named may be used; its generator is
    left as it is found, too."""
    is_gpu = device.type == "cuda"
    with (
        kept_streams([device] if is_gpu else []),
        nullcontext() if is_gpu else cuda_left_alone(),
    ):
        yield


def _named(error: Exception) -> str:
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line[:200]}" if first_line else type(error).__name__


def _from_parameters(job: Job, notes: list[str]) -> Profile:
    """A rough profile of a model that can be built but not be run."""
    model = _without_memory(job)
    units = find_units(model)
    parameters = _parameters(model, tuple(units), None)
    segments = []
    for unit in ("", *units):
        owned = [
            p
            for p in model.named_parameters()
            if p[0] in {q.name for q in parameters if q.unit == unit}
        ]
        flops = float(ASSUMED_FLOPS_PER_PARAMETER * sum(p.numel() for _, p in owned))
        segments.append(
            Segment(
                unit,
                Work(Affine(0, flops)),
                Work(Affine(0, 2 * flops)),
                gradients=tuple(name for name, p in owned if p.requires_grad),
            )
        )
    moved = sum(2 * p.num_bytes + 2 * p.state_bytes + p.gradient_bytes for p in parameters)
    return Profile(
        parameters,
        tuple(segments),
        buffer_bytes=_buffer_bytes(model),
        statistics_bytes=_statistics_bytes(model),
        update=Work(moved_bytes=Affine(moved)),
        notes=(*notes, "priced by its parameters alone: activations are left out"),
        recurrent=tuple(recurrent_units(model)),
    )


def _parameters(
    model: nn.Module,
    units: tuple[str, ...],
    state_bytes: dict[str, int] | None,
    cast: frozenset[str] = frozenset(),
) -> tuple[Parameter, ...]:
    made, sparse, known = [], sparsely_trained(model), frozenset(units)
    for name, p in model.named_parameters():
        num_bytes = p.numel() * p.element_size()
        assumed = ASSUMED_STATE_FACTOR * num_bytes if p.requires_grad else 0
        made.append(
            Parameter(
                name,
                unit=unit_of(name, known),
                num_bytes=num_bytes,
                rows=p.shape[0] if p.dim() else 1,
                dtype=str(p.dtype).removeprefix("torch."),
                trainable=p.requires_grad,
                state_bytes=assumed if state_bytes is None else state_bytes.get(name, 0),
                is_sparse=name in sparse,
                gathered_part=0.5 if name in cast else 1.0,
            )
        )
    return tuple(made)


def _buffer_bytes(model: nn.Module) -> int:
    return sum(b.numel() * b.element_size() for b in model.buffers())


def _statistics_bytes(model: nn.Module) -> int:
    """Of BatchNorm's running statistics, but of layers that the model's own `train` leaves frozen: other buffers that a
    forward writes are rare, and not looked for."""
    model.train()
    return sum(
        buffer.nbytes
        for module in model.modules()
        if isinstance(module, BatchOrInstanceNorm) and module.training
        for buffer in module.buffers(recurse=False)
    )
