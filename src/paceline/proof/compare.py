"""Compare what the ranks of a plan compute with one device, and give the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from paceline.checkpoint.dtypes import from_stored
from paceline.checkpoint.pieces import TensorPiece, pieces_of
from paceline.checkpoint.read import Checkpoint
from paceline.model.attributes import tensor_attributes
from paceline.model.randomness import WithoutRandomness
from paceline.proof.reference_loop import distance, is_weight, rates_of, sample_marks
from paceline.proof.tolerances import KINDS
from paceline.strategies.layout import Extent, Whole
from paceline.training import state
from paceline.training.feed import MicroBatch

# The kinds of tensors, by the sections of a checkpoint.
_STORED = {
    "parameters": "weight",
    "buffers": "buffer",
    "optimizer": "state",
}
# Beside differences, what a rank's record has; attributes of the recorder.
_RECORDED = (
    "replica",
    "parameter_names",
    "marks",
    "losses",
    "rates",
    "drawn",
    "repeats",
    "stored_elements",
    "evaluated",
    "first_step",
)
SAME_RATE = 1e-9  # relative; a schedule is a formula, computed by the same code on every rank


class DifferenceRecorder:
    """An observer on one rank that measures how far the rank's tensors, whole or shards, are from
    one device's.

    Args:
        folder: The folder of the reference.
        random: The switched-off random layers; they tell from which streams they would have drawn.
        first_step: The first step of the observed run; above 0 if it was resumed.
    """

    def __init__(self, folder: Path, random: WithoutRandomness, *, first_step: int = 0) -> None:
        self.folder, self.random, self.first_step = folder, random, first_step
        self.replica = 0
        self.parameter_names: list[str] = []
        self.marks: list[list[float]] = []
        self.losses: list[float] = []
        self.rates: list[list[float]] = []
        self.drawn: list[list[int]] = []
        self.repeats: list[int] = []
        self.stored_elements: dict[str, int] = {}
        self.evaluated: dict[str, float] = {}
        self.distances: dict[str, list[dict[str, float]]] = {
            kind: [] for kind in ("initial", *KINDS, "stored")
        }

    def initial(self, stepper: state.StateOwner) -> None:
        """Compare the weights before a forward may change them."""
        if not self.first_step:
            self._compare("initial", 0, stepper.local_parameters, stepper.layout.extents)

    def samples(self, step: int, batches: list[MicroBatch]) -> None:
        self.marks.append([mark for batch in batches for mark in sample_marks(batch).tolist()])
        self.random.forget()

    def gradients(self, step: int, stepper: state.StateOwner) -> None:
        if step == self.first_step:
            self.replica, self.parameter_names = stepper.replica, list(stepper.local_parameters)
            if not self.distances["initial"]:  # a worker of servers had no weights before
                self.initial(stepper)
        self.drawn.append(sorted(set(self.random.drawn)))
        self.repeats.append(self.random.most_repeats())
        self._compare(
            "gradient",
            step,
            {
                name: p.grad.to_dense() if p.grad.is_sparse else p.grad
                for name, p in stepper.parameters.items()
                if p.grad is not None
            },
            stepper.layout.extents,
        )

    def weights(self, step: int, stepper: state.StateOwner, loss: float) -> None:
        self.losses.append(loss)
        parameters = getattr(stepper, "local_parameters", stepper.parameters)
        weights = {name: p for name, p in parameters.items() if is_weight(p)}
        self._compare("weight", step, weights, stepper.layout.extents)
        if not hasattr(stepper, "optimizer"):  # a worker, whose servers have the rest
            return
        self.rates.append(rates_of(stepper.optimizer))
        answered = stepper.layout.owned_buffers
        buffers = {
            name: buffer for name, buffer in stepper.model.named_buffers() if name in answered
        }
        if isinstance(
            stepper.layout, Whole
        ):  # elsewhere modules that are taken whole keep theirs on one rank
            with safe_open(self.folder / f"buffer-{step}.safetensors", framework="pt") as reference:
                known = set(reference.keys())
            buffers |= {
                name: value for name, value in tensor_attributes(stepper.model) if name in known
            }
        self._compare("buffer", step, buffers, {})
        self._compare_stored(step, state.pieces(stepper))

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Note the figures of the run's evaluation; called on rank 0."""
        self.evaluated = {
            "loss" if name == "validation_loss" else name: value for name, value in figures.items()
        }

    def _compare(
        self,
        kind: str,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        extents: Mapping[str, Extent],
    ) -> None:
        """Note the greatest difference of each tensor's elements on this rank.

        A tensor that only one side has is compared with zeros.
        """
        distances = {}
        with safe_open(self.folder / f"{kind}-{step}.safetensors", framework="pt") as reference:
            names = set(reference.keys())
            for name, tensor in tensors.items():
                distances[name] = 0.0
                for piece in pieces_of(name, tensor, extents.get(name)):
                    expected = _region(reference, piece) if name in names else torch.zeros(())
                    distances[name] = max(distances[name], off_by(piece.tensor.cpu(), expected))
            distances |= {
                name: off_by(reference.get_tensor(name), None)
                for name in names - tensors.keys()
                if name in self.parameter_names
            }
        self.distances[kind].append(distances)

    def _compare_stored(self, step: int, pieces: Iterator[TensorPiece]) -> None:
        """Compare what this rank would write into a checkpoint."""
        distances: dict[str, float] = {}
        elements: dict[str, int] = {}
        files = {
            section: safe_open(self.folder / f"{kind}-{step}.safetensors", framework="pt")
            for section, kind in _STORED.items()
        }
        names = {f"{section}/{name}" for section, file in files.items() for name in file.keys()}  # noqa: SIM118  # no mapping
        for piece in (piece for piece in pieces if piece.name in names):
            expected = _region(files[piece.name.partition("/")[0]], piece)
            off = off_by(piece.tensor.cpu(), expected)
            distances[piece.name] = max(distances.get(piece.name, 0.0), off)
            elements[piece.name] = elements.get(piece.name, 0) + piece.tensor.numel()
        self.distances["stored"].append(distances)
        self.stored_elements = elements

    def to_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _RECORDED}, **self.distances}


def _region(file: Any, piece: TensorPiece) -> torch.Tensor:
    """Return the reference's elements for a piece."""
    name = piece.name if piece.name in file.keys() else piece.name.partition("/")[2]  # noqa: SIM118  # no mapping
    stored: torch.Tensor = (
        file.get_slice(name)[piece.region.slices((0,) * piece.tensor.ndim)]
        if piece.tensor.ndim
        else file.get_tensor(name)
    )
    return from_stored(stored, piece.tensor.dtype)


def off_by(actual: torch.Tensor, expected: torch.Tensor | None) -> float:
    """Return `distance`; infinite if it is NaN."""
    off = distance(actual, expected)
    return off if math.isfinite(off) else math.inf


def file_difference(
    checkpoint: Checkpoint, folder: Path, reference: Mapping[str, Any], *, step: int
) -> str | None:
    """Compare the files of a checkpoint after `step` steps with one device.

    Every tensor is read whole, as another plan's ranks together would read it.

    Args:
        folder: The folder of the reference.

    Returns:
        The first difference in words; None if there is none.
    """
    for section, kind in _STORED.items():
        limits = reference[f"{kind}_limit"][step - 1]
        with safe_open(folder / f"{kind}-{step - 1}.safetensors", framework="pt") as file:
            stored = {
                name.partition("/")[2]: name
                for name in checkpoint.tensors
                if name.startswith(f"{section}/")
            }
            for name in set(file.keys()) & stored.keys():
                actual = checkpoint.read(stored[name])
                off = off_by(actual, from_stored(file.get_tensor(name), actual.dtype))
                if not off <= limits[name]:
                    return (
                        f"the checkpoint after step {step} has another '{stored[name]}': off by {off:.3g}, "
                        f"{limits[name]:.3g} is allowed"
                    )
    return None


@dataclass(frozen=True, slots=True)
class Furthest:
    """The figure that is nearest to its limit, or furthest beyond it."""

    name: str  # of the parameter; "" for the loss
    step: int  # from 0
    off: float  # difference from one device
    allowed: float  # the limit
    ranks: tuple[int, ...] = ()  # ranks where the limit is exceeded
    # number of other parameters that exceed their limits in the same step
    others: int = 0

    @classmethod
    def of(
        cls, limits: Mapping[str, float], ranks: Sequence[Mapping[str, float]], step: int
    ) -> Furthest:
        """Return the figure of the ranks' differences by name that used up most of its limit."""
        excesses: dict[str, float] = {}
        for rank in ranks:
            for name, off in rank.items():
                excess = _excess(off, limits.get(name, 0.0))
                excesses[name] = max(excess, excesses.get(name, 0.0))
        if not excesses:
            return cls("", step, 0.0, 0.0)
        name = max(excesses, key=lambda name: excesses[name])
        offs, allowed = [rank.get(name, 0.0) for rank in ranks], limits.get(name, 0.0)
        return cls(
            name=name,
            step=step,
            off=max(offs),
            allowed=allowed,
            ranks=tuple(rank for rank, off in enumerate(offs) if _excess(off, allowed) > 1.0),
            others=sum(value > 1.0 for value in excesses.values()) - 1,
        )

    @property
    def excess(self) -> float:
        return _excess(self.off, self.allowed)

    def describe(self, kind: str, *, num_ranks: int) -> str:
        after = f" after step {self.step + 1}"
        noun, when = {
            "initial": ("initial weight", ""),
            "gradient": ("gradient", f" in step {self.step + 1}"),
            "weight": ("weight", after),
            "buffer": ("buffer", after),
            "stored": ("what a checkpoint would hold", after),
            "variable": ("variable", after),
            "value": ("value", after),
        }[kind]
        name = self.name.partition("/")[2].rpartition("/")[0] or self.name
        module = f" (module {name.rpartition('.')[0] or 'the model itself'})"
        where = (
            ""
            if num_ranks == 1
            else " on every rank"
            if len(self.ranks) == num_ranks
            else f" on rank {', '.join(map(str, self.ranks))}"
        )
        others = "parameters" if kind in ("initial", "gradient", "weight") else "tensors"
        rest = f", and so are {self.others} other {others}" if self.others else ""
        return (
            f"{noun} of '{self.name}'{module if kind != 'value' else ''} is off by {self.off:.3g}{when}{where}, "
            f"{self.allowed:.3g} is allowed{rest}"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of one plan in one precision with one device."""

    precision: str
    steps: int
    # The greatest differences of all steps and tensors.
    max_loss_diff: float
    max_gradient_diff: float
    max_param_diff: float
    max_buffer_diff: float
    # The figures that used up most of their limit; these need not be the greatest differences.
    loss: Furthest
    gradient: Furthest
    weight: Furthest
    # The first difference beyond its limit, in words; None if there is none.
    difference: str | None = None

    @property
    def worst_param(self) -> str:
        """The parameter whose weights used up most of their limit."""
        return self.weight.name

    @property
    def tolerance(self) -> float:
        """The limit of the weights of `worst_param`."""
        return self.weight.allowed

    @property
    def passed(self) -> bool:
        return self.difference is None


def judge(
    reference: dict[str, Any],
    ranks: list[dict[str, Any]],
    *,
    precision: str,
    forwards: int | None = None,
) -> Verdict:
    """Compare every rank's record with the reference, and return the verdict.

    The order is: samples and initial weights; then step by step loss, gradients, weights, buffers,
    what a checkpoint would hold, and learning rates; then the evaluation and the random streams.

    Args:
        reference: The result of `write_reference`.
        ranks: `DifferenceRecorder.to_dict()` of every rank, in order.
        forwards: The number of forwards of the whole model on a rank in a step, if the plan
            recomputes some of them. A rank may then draw no more than one device draws in that many
            forwards. None if nothing is recomputed.
    """
    first, steps = ranks[0]["first_step"], len(reference["losses"])
    span = range(
        first,
        min([steps, *(first + min(len(rank["losses"]), len(rank["marks"])) for rank in ranks)]),
    )
    if not span:
        nowhere, far = Furthest("", first, math.inf, 0.0), math.inf
        lacking = f"no step was taken by every rank, and one device took {steps - first}"
        return Verdict(precision, 0, far, far, far, far, nowhere, nowhere, nowhere, lacking)
    difference = next(
        (text for step in span if (text := "; ".join(_differences(reference, ranks, step)))), None
    )
    if difference is None and len(span) < steps - first:
        difference = f"the ranks took {len(span)} steps, and one device took {steps - first}"
    difference = (
        difference
        or _evaluation_difference(reference, ranks)
        or _stream_difference(reference, ranks, forwards)
    )
    furthest = {
        kind: max(
            (
                Furthest.of(reference[f"{kind}_limit"][step], _at(ranks, kind, step), step)
                for step in span
            ),
            key=lambda item: item.excess,
        )
        for kind in ("gradient", "weight")
    }
    losses = [
        Furthest("", step, _loss_off(reference, ranks, step), reference["loss_limit"][step])
        for step in span
    ]
    return Verdict(
        precision=precision,
        steps=len(span),
        max_loss_diff=max(loss.off for loss in losses),
        max_gradient_diff=_most(ranks, "gradient"),
        max_param_diff=_most(ranks, "weight"),
        max_buffer_diff=_most(ranks, "buffer"),
        loss=max(losses, key=lambda item: item.excess),
        **furthest,
        difference=difference,
    )


def _differences(
    reference: dict[str, Any], ranks: list[dict[str, Any]], step: int
) -> Iterator[str]:
    """Yield what is wrong in a step: where the difference begins, and how the loss shows it."""
    first = ranks[0]["first_step"]
    samples = _sample_difference(reference["marks"][step], ranks, step)
    if samples:
        yield samples
        return
    nowhere = set(reference["weight_limit"][step]) - {
        name for rank in ranks for name in rank["parameter_names"]
    }
    if nowhere:
        yield f"no rank holds '{min(nowhere)}'"
        return
    limits = (
        [("initial", {name: 0.0 for rank in ranks for name in rank["parameter_names"]})]
        if step == 0
        else []
    )
    limits += [(kind, reference[f"{kind}_limit"][step]) for kind in KINDS]
    limits.append(
        (
            "stored",
            {
                f"{section}/{name}": limit
                for section, kind in _STORED.items()
                for name, limit in reference[f"{kind}_limit"][step].items()
            },
        )
    )
    for kind, limit in limits:
        furthest = Furthest.of(limit, _at(ranks, kind, step), step)
        if furthest.excess > 1.0:
            yield furthest.describe(kind, num_ranks=len(ranks))
            break
    allowed, off = reference["loss_limit"][step], _loss_off(reference, ranks, step)
    if not off <= allowed:
        yield f"the loss of step {step + 1} is off by {off:.3g}, {allowed:.3g} is allowed"
    for number, rank in enumerate(ranks):
        rates = rank["rates"][step - first] if rank["rates"] else reference["rates"][step]
        if any(
            abs(a - b) > SAME_RATE * abs(b)
            for a, b in zip(rates, reference["rates"][step], strict=True)
        ):
            yield (
                f"the learning rate after step {step + 1} is {rates} on rank {number} and "
                f"{reference['rates'][step]} on one device"
            )
            break
    if step == len(reference["losses"]) - 1 and any(rank["stored"] for rank in ranks):
        yield from _lost_elements(reference, ranks, step)


def _lost_elements(
    reference: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], step: int
) -> Iterator[str]:
    """Yield an optimizer tensor of one device of which no rank, or more than one, would write some
    elements.

    A count of steps may be written several times, by each server that has a part of the parameter.
    """
    for name, size in reference["state_sizes"][step].items():
        elements = sum(rank["stored_elements"].get(f"optimizer/{name}", 0) for rank in ranks)
        if elements < size or elements > size > 1:
            yield f"a checkpoint would hold {elements} of {size} elements of the optimizer's '{name}'"
            return


def _evaluation_difference(
    reference: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> str | None:
    figures: dict[str, float] = next((rank["evaluated"] for rank in ranks if rank["evaluated"]), {})
    for name, value in figures.items():
        if name not in reference["evaluation"]:
            continue
        off, allowed = (
            abs(value - reference["evaluation"][name]),
            reference["evaluation_limit"][name],
        )
        if not off <= allowed:
            figure = "loss" if name == "loss" else f"metric '{name}'"
            return (
                f"the {figure} of the evaluation after the last step is {value:.6g} and "
                f"{reference['evaluation'][name]:.6g} on one device; {allowed:.3g} is allowed. It must be "
                "a mean over its samples or (sum, count): a root or a logarithm of a mean is neither"
            )
    return None


def _stream_difference(
    reference: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], forwards: int | None
) -> str | None:
    """Return how the random streams of ranks are wrong, in words; None if they are right.

    Random layers must not draw the same in two steps, on two replicas or in two micro-batches, and
    must draw the same again in recomputed forwards. The result is None for a job that seeds the
    generator itself.
    """
    if reference["seeds_itself"]:
        return None
    for number, rank in enumerate(ranks):
        for step, repeats in enumerate(rank["repeats"], rank["first_step"]):
            if repeats > max(reference["most_repeats"], 1):
                return (
                    f"random layers on rank {number} draw the same {repeats} times in the forwards of step "
                    f"{step + 1}: their streams must be keyed by the micro-batch"
                )
        seen: dict[int, int] = {}
        for step, drawn in enumerate(rank["drawn"], rank["first_step"]):
            most = reference["draws"][step] * (forwards or 0)
            if forwards is not None and len(drawn) > most:
                return (
                    f"random layers on rank {number} draw {len(drawn)} times in step {step + 1}, and its "
                    f"{forwards} forwards need {most}: what is recomputed must draw the same again"
                )
            again = next((seen[value] for value in drawn if value in seen), None)
            if again is not None:
                return (
                    f"random layers on rank {number} draw the same in steps {again + 1} and {step + 1}: their "
                    "streams must be keyed by the step"
                )
            seen |= dict.fromkeys(drawn, step)
    for number, rank in enumerate(ranks):
        for other_number, other in enumerate(ranks[:number]):
            if rank["replica"] != other["replica"] and any(
                set(a) & set(b) for a, b in zip(rank["drawn"], other["drawn"], strict=False)
            ):
                return (
                    f"random layers draw the same on ranks {other_number} and {number}, which see other samples: "
                    "their streams must be keyed by the replica"
                )
    return None


def _at(ranks: Sequence[Mapping[str, Any]], kind: str, step: int) -> list[dict[str, float]]:
    """Return each rank's record of a step; empty for a rank that doesn't hold such tensors."""
    return [
        rank[kind][step - rank["first_step"]] if len(rank[kind]) > step - rank["first_step"] else {}
        for rank in ranks
    ]


def _loss_off(reference: dict[str, Any], ranks: list[dict[str, Any]], step: int) -> float:
    offs = [
        abs(rank["losses"][step - rank["first_step"]] - reference["losses"][step]) for rank in ranks
    ]
    return max(offs) if all(map(math.isfinite, offs)) else math.inf


def _excess(off: float, allowed: float) -> float:
    """Return which part of the limit is used up; above 1 is too much."""
    return off / allowed if allowed else (math.inf if off else 0.0)


def _most(ranks: list[dict[str, Any]], kind: str) -> float:
    return max((off for rank in ranks for step in rank[kind] for off in step.values()), default=0.0)


def _sample_difference(
    expected: list[float | None], ranks: list[dict[str, Any]], step: int
) -> str | None:
    """Return which rank got other samples than its replica's part of the window; None if all are
    right.

    Replicas take their parts in order.
    """
    index = step - ranks[0]["first_step"]
    starts, start = {}, 0
    for rank in sorted(ranks, key=lambda rank: rank["replica"]):
        if rank["replica"] not in starts:
            starts[rank["replica"]] = start
            start += len(rank["marks"][index])
    for number, rank in enumerate(ranks):
        first, marks = starts[rank["replica"]], rank["marks"][index]
        expected_marks = expected[first : first + len(marks)]
        if len(expected_marks) < len(marks) or not all(map(_same_mark, marks, expected_marks)):
            return f"rank {number} was fed other samples in step {step + 1} than its part of the global batch"
    if start == len(expected):
        return None
    return f"the ranks used {start} samples in step {step + 1} and the global batch has {len(expected)}"


def _same_mark(mark: float, expected: float | None) -> bool:
    if expected is None:
        return True
    if math.isnan(mark) or math.isnan(expected):
        return math.isnan(mark) and math.isnan(expected)
    # Sums round with the batch's shape.
    return mark == expected or abs(mark - expected) <= 1e-9 * max(1.0, abs(expected))
