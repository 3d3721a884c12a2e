"""The reference of a proof, which is one device's figures on disk, and the yardstick: how far
rounding moves each figure.

The same loop runs again with shaken gradients and with initial weights nudged by a unit in the last
place, with the samples of each batch in another order, and with every batch cut into 2 and 4
micro-batches. Shaking shows how the optimizer amplifies rounding: Adam turns the noise of a
gradient that is zero in exact arithmetic into steps of the learning rate. The run with nudged
weights has Adam's betas in float32, because the kernels of an update may hold them so. Ranks on
GPUs update with torch's fused Adam, where float32 turns 1 - 0.999 into 0.00099998713, while the
plain loop updates with 0.001. A second moment then differs by a hundred roundings although
gradients are equal.

Other kernels may compute a reordered or cut batch. If such a variation moves a figure much further
than rounding does, the samples of the batch are coupled, and the variation is no yardstick. Such
variations therefore count only up to a bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from paceline.base.errors import TrainingError
from paceline.base.streams import key_to_seed
from paceline.checkpoint.dtypes import load_tensors, save_tensors
from paceline.job import Job
from paceline.model.forward_state import ForwardState
from paceline.model.randomness import WithoutRandomness
from paceline.proof.device import TF32_EPSILON, rounds_to_tf32, tf32
from paceline.proof.order import whole_batches
from paceline.proof.reference_loop import (
    PlainRun,
    StepRecord,
    Variation,
    autocast,
    build_plain,
    distance,
    expected_marks,
    greatest,
    part_of_batch,
    unspoilt,
)
from paceline.torch_private.dispatch import TorchDispatchMode
from paceline.torch_private.pytree import tree_leaves
from paceline.training.feed import is_stream

ALLOWED = 10.0  # times the yardstick; see docs/verify.md
KINDS = ("gradient", "weight", "buffer")
ALL_KINDS = (*KINDS, "state")
# These move a figure of the run by a unit in the last place and leave the samples as they are, so
# their effects are those of rounding.
ROUNDING = (Variation(shake=1.0), Variation(shake=-1.0), Variation(nudge=1.0))
# These stand for other kernels, or other sums of the same terms. They also show a coupling of
# samples.
REORDERED = (Variation(permuted=True), Variation(cuts=2), Variation(cuts=4))
# A reordering may move a figure this many times as far as shaking does before it counts as a
# coupling. Sums of n terms in another order differ by up to about sqrt(n) roundings, and a batch
# has some thousand terms.
REORDERED_AT_MOST = 100.0
# How far an exact job may move when it is cut, relative to its size. Losses and layers may compute
# in float32 whatever they are given.
EXACT = {"fp8": 0.1, "bf16": 0.1, "fp16": 0.02, "tf32": 1e-3, "float32": 1e-3, "float64": 1e-5}
# tf32: proofs run on the CPU, where it is float32. fp8: plans compute in bf16, and layers then
# round to float8 by scales of each row; if that makes a flip of the last place larger, the
# variations show it.
EPSILON = {
    "fp8": torch.finfo(torch.bfloat16).eps,
    "bf16": torch.finfo(torch.bfloat16).eps,
    "fp16": torch.finfo(torch.float16).eps,
    "tf32": torch.finfo(torch.float32).eps,
    "float32": torch.finfo(torch.float32).eps,
    "float64": torch.finfo(torch.float64).eps,
}
PLANTED = 1e-3  # relative error of one gradient that a comparison must notice to prove anything
# files up to this size stay in memory once they are read; 128 of them are half a GiB
_KEPT_BYTES = 2**22

Named = dict[str, float]
Kinds = dict[str, Named]  # figures of a step by kind and name


def write_reference(
    job: Job, folder: Path, *, steps: int, random: WithoutRandomness, evaluation: Any = None
) -> dict[str, Any]:
    """Run the plain loop, then its variations. Its tensors go to files in `folder`, named by kind
    and step.

    Args:
        random: Switches random layers off; entered here, after the plain loop only if the job draws
            at all.
        evaluation: Data to evaluate on after the last step, samples with an index; None for no
            evaluation.

    Returns:
        draws: for each step, how often random layers draw.
        most_repeats: the most times that a forward draws the same number.
        seeds_itself: whether the job seeds the random generator itself during a step.
        losses, rates, marks, state_sizes, skipped: for each step, the loss, the learning rates, a
            mark for each sample, the elements of the optimizer's tensors by name, and whether loss
            scaling skipped it.
        loss_limit: for each step, the limit of the loss.
        gradient_limit, weight_limit, buffer_limit: for each step, the limit of any element of a
            tensor, by name.
        state_limit: the same for the optimizer's state, after each step.
        evaluation, evaluation_limit: figures by name after the last step, and their limits.
        not_evaluated: why there are no figures although data was given; None if there are, or if no
            data was given.
        yardstick: for losses, gradients and weights, the largest spread over the variations, the
            limit there, the parameter, and the step from 1.
        power: which planted errors the limits would have caught.
        epsilon: the rounding of the coarsest numbers that were computed with.
    """
    folder.mkdir(exist_ok=True)
    reference: dict[str, Any] = {
        "losses": [],
        "rates": [],
        "marks": [],
        "state_sizes": [],
        "draws": [],
        "skipped": [],
        "most_repeats": 0,
        "seeds_itself": False,
    }
    with random:
        epsilon = coarsest(job)
        floors, figures = _write_plain(job, folder, reference, steps, random, evaluation, epsilon)
    plain = PlainFigures(folder, reference["losses"], floors, figures, evaluation)
    with random if random.is_needed else nullcontext():
        rounding, reordered = (
            spreads_of(job, plain, group, epsilon) for group in (ROUNDING, REORDERED)
        )
    spreads = [
        {
            kind: {
                name: _spread(rounding[step][kind][name], reordered[step][kind][name], least)
                for name, least in named.items()
            }
            for kind, named in floor.items()
        }
        for step, floor in enumerate(floors)
    ]
    limits = limits_of(floors, spreads)
    return {
        **with_limits(reference, limits),
        "epsilon": epsilon,
        "evaluation": figures,
        "evaluation_limit": limits[-1]["evaluation"],
        "yardstick": {
            kind: _widest(spreads, limits, kind) for kind in ("loss", "gradient", "weight")
        },
        "power": _power(job, folder, limits),
    }


def limits_of(floors: Sequence[Kinds], spreads: Sequence[Kinds]) -> list[Kinds]:
    """Return the limit of each figure: `ALLOWED` times its spread under rounding, or times its
    floor if that is larger.
    """
    return [
        {
            kind: {name: ALLOWED * max(spread[kind][name], least) for name, least in named.items()}
            for kind, named in floor.items()
        }
        for spread, floor in zip(spreads, floors, strict=True)
    ]


def with_limits(figures: Mapping[str, Any], limits: Sequence[Kinds]) -> dict[str, Any]:
    """Return the figures of one device with their limits, as `write_reference` returns them."""
    return {
        **figures,
        "loss_limit": [limit["loss"][""] for limit in limits],
        **{f"{kind}_limit": [limit[kind] for limit in limits] for kind in ALL_KINDS},
    }


def _write_plain(
    job: Job,
    folder: Path,
    reference: dict[str, Any],
    steps: int,
    random: WithoutRandomness,
    evaluation: Any,
    epsilon: float,
) -> tuple[list[Kinds], Named]:
    """Run the plain loop: tensors go to files, figures into `reference`. Return floors by step, and
    the evaluation.
    """
    run = PlainRun(job)
    save_kind(folder, "initial", 0, {name: p.detach() for name, p in run.model.named_parameters()})
    floors: list[Kinds] = []
    for step, batch in enumerate(whole_batches(job, steps)):
        random.forget()
        # Marks are taken before the step, because a model may write to its inputs.
        reference["marks"].append(expected_marks(job, batch))
        record = run.step(batch)
        reference["draws"].append(len(random.drawn))
        reference["most_repeats"] = max(reference["most_repeats"], random.most_repeats())
        reference["seeds_itself"] |= bool(
            random.seeds - {key_to_seed(job.seed, "step", step, 0, 0)}
        )
        reference["losses"].append(record.loss)
        reference["rates"].append(record.rates)
        reference["skipped"].append(run.is_skipped)
        reference["state_sizes"].append(state_sizes(record))
        for kind in ALL_KINDS:
            save_kind(folder, kind, step, record.tensors(kind))
        floors.append(floors_of(record, epsilon, largest_loss=max(map(abs, reference["losses"]))))
    if job.precision == "fp16" and run.scale == 2.0 ** (16 - steps):
        raise TrainingError(
            f"gradients overflow in float16 in each of the {steps} steps that are compared, and loss "
            "scaling skips them",
            hint="--steps 20 leaves time for a smaller scale to be found",
        )
    figures, reference["not_evaluated"] = _first_evaluation(run, evaluation)
    # Metrics are often means in float32.
    floors[-1]["evaluation"] = {
        name: max(epsilon, 0.0 if name == "loss" else EPSILON["float32"]) * abs(value)
        for name, value in figures.items()
    }
    return floors, figures


def floors_of(record: StepRecord, epsilon: float, *, largest_loss: float) -> Kinds:
    """Return the floors of the limits, before they are multiplied by `ALLOWED`.

    No plan has to be nearer to one device than its floor.
    """
    # A gradient's own size says nothing about its rounding: terms that cancel leave noise of the terms' size.
    noise = epsilon * greatest(record.gradients.values())
    return {
        "loss": {"": epsilon * largest_loss},
        "gradient": dict.fromkeys(record.gradients, noise),
        "weight": {name: _eps(w, epsilon) * greatest([w]) for name, w in record.weights.items()},
        "buffer": {name: _eps(b, epsilon) * greatest([b]) for name, b in record.buffers.items()},
        "state": {
            name: max(_eps(s, epsilon) * greatest([s]), noise if s.is_floating_point() else 0.0)
            if s.numel() > 1
            else _eps(s, epsilon) * greatest([s])
            for name, s in record.state.items()
        },
    }


def _eps(tensor: torch.Tensor, epsilon: float) -> float:
    """Return the rounding of a tensor's elements; 0 for whole numbers, which must be equal."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return max(torch.finfo(tensor.dtype).eps, epsilon if tensor.dtype != torch.float64 else 0.0)


@dataclass(frozen=True)
class PlainFigures:
    """The figures of the plain loop, with which its variations are compared."""

    folder: Path  # the folder of the loop's tensors
    losses: list[float]  # of each step
    floors: list[Kinds]  # the least limits of figures, of each step
    figures: Named = field(default_factory=dict)  # of an evaluation, by name
    evaluation: Any = None  # the data of the evaluation


def spreads_of(
    job: Job,
    plain: PlainFigures,
    variations: Sequence[Variation],
    epsilon: float,
    *,
    shares: Sequence[int] = (1,),
    microbatches: int = 1,
) -> list[Kinds]:
    """Return how far the variations move each figure at most, by step, kind and name.

    Args:
        shares, microbatches: How the varied run cuts its batches.
    """
    spreads: list[Kinds] = [
        {kind: dict.fromkeys(names, 0.0) for kind, names in floor.items()} for floor in plain.floors
    ]
    for variation in variations:
        scaled = replace(
            variation, shake=variation.shake * epsilon, nudge=variation.nudge * epsilon
        )
        try:
            run = PlainRun(job, variation=scaled, shares=shares, microbatches=microbatches)
            _vary(run, plain, spreads)
        except Exception:
            if variation not in REORDERED:
                raise
            # A model may refuse so small a piece of a batch: a BatchNorm can't take one sample.
    return spreads


def _vary(run: PlainRun, plain: PlainFigures, spreads: list[Kinds]) -> None:
    """Widen the spreads by the results of one more run."""
    folder, losses = plain.folder, plain.losses
    for step, batch in enumerate(whole_batches(run.job, len(losses))):
        record = run.step(batch)
        if run.variation in REORDERED and bool(record.gradients) != bool(
            load_kind(folder, "gradient", step)
        ):
            return  # loss scaling skips other steps of smaller pieces, and that is no rounding
        widen(spreads[step]["loss"], {"": abs(record.loss - losses[step])})
        for kind in ALL_KINDS:
            tensors = record.tensors(kind)
            widen(
                spreads[step][kind],
                {
                    name: distance(tensor, tensors.get(name))
                    for name, tensor in load_kind(folder, kind, step).items()
                },
            )
    moved = run.evaluate(plain.evaluation) if plain.figures else {}
    widen(
        spreads[-1]["evaluation"],
        {name: abs(moved[name] - value) for name, value in plain.figures.items()},
    )


def _spread(rounding: float, reordered: float, least: float) -> float:
    """Return the spread of a figure.

    The spread of a reordered batch counts only up to a bound. Beyond it, the cause is a coupling of
    samples and not rounding.
    """
    return max(rounding, min(reordered, REORDERED_AT_MOST * max(rounding, least)))


def _widest(spreads: list[Kinds], limits: list[Kinds], kind: str) -> dict[str, Any]:
    """Return where rounding moves one device's own figures furthest, and the limit there."""
    spread, step, name = max(
        (spread, -step, name)
        for step, kinds in enumerate(spreads)
        for name, spread in kinds[kind].items()
    )
    return {
        "spread": spread,
        "tolerance": limits[-step][kind][name],
        "name": name or None,
        "step": 1 - step,
    }


def widen(spread: Named, distances: Mapping[str, float]) -> None:
    for name, moved in distances.items():
        spread[name] = max(spread[name], moved)


def _first_evaluation(run: PlainRun, data: Any) -> tuple[Named, str | None]:
    """Return the figures of an evaluation, or why a proof can't compare them."""
    if data is None:
        return {}, None
    before = ForwardState(run.model).now()
    try:
        figures = run.evaluate(data)
    except Exception as error:
        if run.job.validation is not None:
            raise
        return (
            {},
            f"the model fails in evaluation mode, which the job does not use: {type(error).__name__}: {error}",
        )
    if changed := [
        *before.attributes.changed(),
        *before.tensors.changed(),
    ]:  # it depends on which forwards came before, and so on how the samples are cut
        return {}, f"an evaluation changes '{changed[0]}' of the model"
    return figures, None


def evaluation_data(job: Job) -> Any:
    """Return samples that a proof evaluates on: the first of the job's validation data, else of its
    training data.

    They are two batches less one sample, so that ranks get unequal parts; None for streams.
    """
    data = job.data if job.validation is None else job.validation
    if job.models and job.own_validate is None:
        return None
    return (
        None if is_stream(data) else Subset(data, range(min(len(data), max(1, 2 * job.batch - 1))))
    )


# --- Other ways to cut a batch -------------------------------------------------------------------------------------


def write_cut(
    job: Job,
    folder: Path,
    whole: Mapping[str, Any],
    *,
    beside: Path,
    shares: Sequence[int],
    microbatches: int,
    variations: Sequence[Variation] = ROUNDING,
) -> dict[str, Any]:
    """Run one device that cuts every batch as a plan with these shares and micro-batches would.
    Tensors go to `folder`.

    Args:
        beside: The folder of `whole`.
        variations: They measure how far rounding moves the figures, if samples are coupled (a
            BatchNorm amplifies rounding the more, the fewer samples it sees), or if other steps are
            skipped than in `whole`.

    Returns:
        A reference like `whole`, but without an evaluation, because a loss that couples samples
        also depends on how ranks cut them there. `coupling` says what is further from `whole` than
        rounding allows, in words; None if nothing is. `overflow` says in which step gradients
        overflow only for whole batches or only for cut ones, so that loss scaling skips other
        steps; None if it skips the same ones.
    """
    run, losses, floors, coupling = (
        PlainRun(job, shares=shares, microbatches=microbatches),
        [],
        list[Kinds](),
        None,
    )
    overflow, rates, skipped, sizes = None, [], [], []
    folder.mkdir(exist_ok=True)
    save_kind(folder, "initial", 0, {name: p.detach() for name, p in run.model.named_parameters()})
    for step, batch in enumerate(whole_batches(job, len(whole["losses"]))):
        record = run.step(batch)
        losses.append(record.loss)
        rates.append(record.rates)
        skipped.append(run.is_skipped)
        sizes.append(state_sizes(record))
        for kind in ALL_KINDS:
            save_kind(folder, kind, step, record.tensors(kind))
        floors.append(
            {
                **floors_of(record, whole["epsilon"], largest_loss=max(map(abs, losses))),
                "evaluation": {},
            }
        )
        overflow = overflow or _overflow(step, skipped[-1], whole["skipped"][step])
        # After a step that only one of them skips, all figures differ.
        if coupling is None and overflow is None:
            coupling = _coupled(beside, step, record, whole)
    cut = {
        **whole,
        "losses": losses,
        "rates": rates,
        "skipped": skipped,
        "state_sizes": sizes,
        "evaluation": {},
        "coupling": coupling,
        "overflow": overflow,
    }
    if coupling is None and overflow is None:
        return cut
    spreads = spreads_of(
        job,
        PlainFigures(folder, losses, floors),
        variations,
        whole["epsilon"],
        shares=shares,
        microbatches=microbatches,
    )
    limits = [_wider(limit, whole, step) for step, limit in enumerate(limits_of(floors, spreads))]
    return {
        **with_limits(cut, limits),
        **({"power": _power(job, beside, limits)} if "power" in whole else {}),
    }


def state_sizes(record: StepRecord) -> dict[str, int]:
    """Return the number of elements of the optimizer's tensors after a step, by name."""
    return {name: tensor.numel() for name, tensor in record.state.items()}


def _overflow(step: int, cut: bool, whole: bool) -> str | None:
    """Say that only one of two devices skips a step: the one that cuts its batches, or the one that
    doesn't.

    Returns None if both skip it or neither does.
    """
    if cut == whole:
        return None
    return f"step {step + 1} overflows in float16 for {'a batch that is cut so' if cut else 'the whole batch'} alone"


def _wider(limit: Kinds, whole: Mapping[str, Any], step: int) -> Kinds:
    """Return the limits of a step, each at least as large as that of whole batches."""
    known = {
        "loss": {"": whole["loss_limit"][step]},
        "evaluation": {},
        **{kind: whole[f"{kind}_limit"][step] for kind in ALL_KINDS},
    }
    return {
        kind: {
            **named,
            **{name: max(least, named.get(name, 0.0)) for name, least in known[kind].items()},
        }
        for kind, named in limit.items()
    }


def _coupled(folder: Path, step: int, record: StepRecord, whole: Mapping[str, Any]) -> str | None:
    """Return the first figure in which a step with a cut batch differs from the one without; None
    if there is none.
    """
    for kind in KINDS:
        uncut = load_kind(folder, kind, step)
        for name, tensor in record.tensors(kind).items():
            limit = whole[f"{kind}_limit"][step].get(name, 0.0)
            off = distance(tensor, uncut.get(name))
            if not off <= limit:
                return f"{kind} of '{name}' in step {step + 1} by {off:.2g}"
    if not abs(record.loss - whole["losses"][step]) <= whole["loss_limit"][step]:
        return f"loss of step {step + 1} by {abs(record.loss - whole['losses'][step]):.2g}"
    return None


# --- Power ---------------------------------------------------------------------------------------------------------


def _power(job: Job, folder: Path, limits: Sequence[Mapping[str, Named]]) -> dict[str, Any]:
    """Return which planted errors the limits would have caught.

    Returns:
        gradients: the number of parameters whose gradient is more than noise in some step.
        caught: the number of these for which an error of `PLANTED` of the gradient is beyond its
            limit.
        missed: the others.
        dropped: whether a window without its last quarter is beyond its limit; None if that can't
            be told, for example because a window has one sample.
    """
    noticed: dict[str, bool] = {}
    for step, limit in enumerate(limits):
        gradients = load_kind(folder, "gradient", step)
        largest = greatest(gradients.values())
        for name, gradient in gradients.items():
            size = greatest([gradient])
            if size > largest * EPSILON[job.precision] * 1e3:
                noticed[name] = noticed.get(name, False) or PLANTED * size > limit["gradient"][name]
    missed = [name for name, is_caught in noticed.items() if not is_caught]
    return {
        "planted": PLANTED,
        "gradients": len(noticed),
        "caught": len(noticed) - len(missed),
        "missed": missed,
        "dropped": _drop_is_noticed(job, folder, limits[0]["gradient"]),
    }


def _drop_is_noticed(job: Job, folder: Path, limit: Named) -> bool | None:
    batch = next(whole_batches(job, 1))
    if batch.samples < 2:
        return None
    run, rest = PlainRun(job), part_of_batch(batch, range(max(1, batch.samples * 3 // 4)))
    whole = load_kind(folder, "gradient", 0)
    try:
        gradients = run.gradients(rest)
    except Exception:  # a BatchNorm can't take one sample
        return None
    if run.is_skipped or not whole:  # loss scaling found no scale yet in the first step
        return None
    kept = rest.samples / batch.samples
    return any(
        distance(gradient, gradients[name] * kept if name in gradients else None) > limit[name]
        for name, gradient in whole.items()
    )


# --- Files and precision -------------------------------------------------------------------------------------------


def save_kind(folder: Path, kind: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    save_tensors(folder / f"{kind}-{step}.safetensors", copies)


def load_kind(folder: Path, kind: str, step: int) -> dict[str, torch.Tensor]:
    path = folder / f"{kind}-{step}.safetensors"
    return _cached_tensors(path) if path.stat().st_size <= _KEPT_BYTES else load_tensors(path)


@lru_cache(maxsize=128)
def _cached_tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_tensors(path)


def coarsest(job: Job) -> float:
    """Return the rounding of the coarsest numbers that a forward computes with, whatever the job's
    precision says.

    Some layers, such as some norms and Keras's layers, compute in float32 whatever they are given.
    A GPU's matrix products and convolutions may use only ten bits of these numbers (TF32).
    """
    model = build_plain(job)
    seen = Dtypes({p.dtype for p in model.parameters() if p.requires_grad})
    if job.models:
        run = PlainRun(job)
        run.around_updates = seen.paused  # shaken gradients show the rounding of an update
        with seen:
            next(run.steps(1))
        return max(EPSILON[job.precision], seen.epsilon)
    for batch in whole_batches(job, 1):
        with autocast(job), seen:
            job.criterion(unspoilt(batch).call(model), batch.target)
    return max(EPSILON[job.precision], seen.epsilon)


class Dtypes(TorchDispatchMode):
    """A mode that records the floating-point types of operators' results, and whether an operator
    rounds to TF32.

    It leaves out float8 (see `EPSILON`).
    """

    def __init__(self, dtypes: set[torch.dtype]) -> None:
        super().__init__()
        self.dtypes, self.tf32, self.rounds_to_tf32 = dtypes, tf32(), False
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the context."""
        self.is_paused = True
        yield
        self.is_paused = False

    @property
    def epsilon(self) -> float:
        """The rounding of the coarsest numbers that were seen."""
        return max(
            [
                TF32_EPSILON if self.rounds_to_tf32 else 0.0,
                *(torch.finfo(dtype).eps for dtype in self.dtypes),
            ]
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        self.rounds_to_tf32 |= rounds_to_tf32(func, result, self.tf32)
        self.dtypes |= {
            leaf.dtype
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor)
            and leaf.is_floating_point()
            and leaf.ndim
            and leaf.itemsize > 1
        }
        return result
