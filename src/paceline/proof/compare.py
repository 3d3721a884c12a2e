"""What the planned ranks compute, held against one device, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from paceline.proof.reference import KINDS, sample_marks
from paceline.runtime.checkpoint.pieces import pieces_of
from paceline.runtime.feed import MicroBatch
from paceline.runtime.state import Holder
from paceline.strategies.layout import Extent


class Recorder:
    """An observer on one rank: how far what it holds, whole tensors or shards, is from one device's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.replica = 0
        self.held: list[str] = []
        self.marks: list[list[float]] = []
        self.losses: list[float] = []
        self.distances: dict[str, list[dict[str, float]]] = {kind: [] for kind in ("initial", *KINDS)}

    def samples(self, step: int, batches: list[MicroBatch]) -> None:
        self.marks.append([mark for batch in batches for mark in sample_marks(batch).tolist()])

    def gradients(self, step: int, stepper: Holder) -> None:
        if step == 0:
            self.replica, self.held = stepper.replica, list(stepper.held)
            self._compare("initial", step, stepper.held, stepper.layout.extents)
        self._compare("gradient", step, {name: p.grad.to_dense() if p.grad.is_sparse else p.grad
                                         for name, p in stepper.parameters.items() if p.grad is not None},
                      stepper.layout.extents)

    def weights(self, step: int, stepper: Holder, loss: float) -> None:
        self.losses.append(loss)
        self._compare("weight", step, stepper.parameters, stepper.layout.extents)

    def _compare(self, kind: str, step: int, tensors: Mapping[str, torch.Tensor],
                 extents: Mapping[str, Extent]) -> None:
        """The greatest distance of each tensor's elements on this rank; one that only one side has counts as zeros."""
        found = {}
        with safe_open(self.folder / f"{kind}-{step}.safetensors", framework="pt") as reference:
            known = set(reference.keys())
            for name, tensor in tensors.items():
                found[name] = 0.0
                for piece in pieces_of(name, tensor, extents.get(name)):
                    theirs = torch.zeros(())
                    if name in known:
                        theirs = (reference.get_slice(name)[piece.region.slices((0,) * tensor.ndim)] if tensor.ndim
                                  else reference.get_tensor(name))
                    found[name] = max(found[name], _greatest(piece.tensor.cpu() - theirs))
            found |= {name: _greatest(reference.get_tensor(name))
                      for name in known - tensors.keys() if name in self.held}
        self.distances[kind].append(found)

    def to_dict(self) -> dict[str, Any]:
        return {"replica": self.replica, "held": self.held, "marks": self.marks, "losses": self.losses,
                **self.distances}


def _greatest(difference: torch.Tensor) -> float:
    if not difference.numel():
        return 0.0
    greatest = float(difference.abs().max())
    return greatest if math.isfinite(greatest) else math.inf


@dataclass(frozen=True, slots=True)
class Furthest:
    """What came nearest to its limit, or went furthest beyond it.

    name: of the parameter; "" for the loss. step: from 0. off, allowed: how far it is from one device's, and may be.
    ranks: where it is beyond its limit. others: so many parameters are beyond theirs too, in that step.
    """

    name: str
    step: int
    off: float
    allowed: float
    ranks: tuple[int, ...] = ()
    others: int = 0

    @property
    def excess(self) -> float:
        return _excess(self.off, self.allowed)

    def describe(self, kind: str, *, num_ranks: int) -> str:
        what, when = {"initial": ("initial weight", ""), "gradient": ("gradient", f" in step {self.step + 1}"),
                      "weight": ("weight", f" after step {self.step + 1}")}[kind]
        module = self.name.rpartition(".")[0] or "the model itself"
        where = ("" if num_ranks == 1 else " on every rank" if len(self.ranks) == num_ranks
                 else f" on rank {', '.join(map(str, self.ranks))}")
        rest = f", and so are {self.others} other parameters" if self.others else ""
        return (f"{what} of '{self.name}' (module {module}) is off by {self.off:.3g}{when}{where}, "
                f"{self.allowed:.3g} is allowed{rest}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One plan in one precision against one device.

    max_loss_diff, max_gradient_diff, max_param_diff: the greatest difference of all.
    loss, gradient, weight: what used up most of what it may differ by, which need not be the greatest difference.
    difference: The first thing that differs by more than it may, in words; None if nothing does.
    """

    precision: str
    steps: int
    max_loss_diff: float
    max_gradient_diff: float
    max_param_diff: float
    loss: Furthest
    gradient: Furthest
    weight: Furthest
    difference: str | None = None

    @property
    def worst_param(self) -> str:
        """The parameter whose weights used up most of what they may differ by."""
        return self.weight.name

    @property
    def tolerance(self) -> float:
        """What the weights of `worst_param` may differ by."""
        return self.weight.allowed

    @property
    def passed(self) -> bool:
        return self.difference is None


def judge(reference: dict[str, Any], ranks: list[dict[str, Any]], *, precision: str) -> Verdict:
    """Hold every rank's record against the reference, step by step: samples, initial weights, loss, gradients, weights.

    reference: what `write_reference` gave, with the `marks` of every step's samples.
    ranks: `Recorder.to_dict()` of every rank, in order.
    """
    steps = len(reference["losses"])
    differing = ("; ".join(said) for step in range(steps) if (said := list(_differences(reference, ranks, step))))
    furthest = {kind: max((_furthest(reference[f"{kind}_limit"][step], [rank[kind][step] for rank in ranks], step)
                           for step in range(steps)), key=lambda item: item.excess) for kind in KINDS}
    losses = [Furthest("", step, _loss_off(reference, ranks, step), reference["loss_limit"][step])
              for step in range(steps)]
    return Verdict(
        precision=precision, steps=steps, max_loss_diff=max(loss.off for loss in losses),
        max_gradient_diff=_most(ranks, "gradient"), max_param_diff=_most(ranks, "weight"),
        loss=max(losses, key=lambda item: item.excess), **furthest, difference=next(differing, None))


def _differences(reference: dict[str, Any], ranks: list[dict[str, Any]], step: int) -> Iterator[str]:
    """What is wrong in a step: where it begins, and how the loss shows it."""
    samples = _sample_difference(reference["marks"][step], ranks, step)
    if samples:
        yield samples
        return
    nowhere = set(reference["weight_limit"][step]) - {name for rank in ranks for name in rank["held"]}
    if nowhere:
        yield f"no rank holds '{min(nowhere)}'"
        return
    limits = [("initial", {name: 0.0 for rank in ranks for name in rank["held"]})] if step == 0 else []
    limits += [(kind, reference[f"{kind}_limit"][step]) for kind in KINDS]
    for kind, limit in limits:
        found = _furthest(limit, [rank[kind][step] for rank in ranks], step)
        if found.excess > 1.0:
            yield found.describe(kind, num_ranks=len(ranks))
            break
    allowed, off = reference["loss_limit"][step], _loss_off(reference, ranks, step)
    if not off <= allowed:
        yield f"the loss of step {step + 1} is off by {off:.3g}, {allowed:.3g} is allowed"


def _loss_off(reference: dict[str, Any], ranks: list[dict[str, Any]], step: int) -> float:
    return max(abs(rank["losses"][step] - reference["losses"][step]) for rank in ranks)


def _excess(off: float, allowed: float) -> float:
    """How much of what is allowed is used up; above 1 is too much."""
    return off / allowed if allowed else (math.inf if off else 0.0)


def _furthest(limits: dict[str, float], ranks: list[dict[str, float]], step: int) -> Furthest:
    def excess(name: str) -> float:
        return max(_excess(rank.get(name, 0.0), limits.get(name, 0.0)) for rank in ranks)

    names = list(dict.fromkeys(name for rank in ranks for name in rank))
    excesses = {name: excess(name) for name in names}
    name = max(names, key=lambda name: excesses[name])
    allowed = limits.get(name, 0.0)
    return Furthest(name=name, step=step, off=max(rank.get(name, 0.0) for rank in ranks), allowed=allowed,
                    ranks=tuple(r for r, rank in enumerate(ranks) if _excess(rank.get(name, 0.0), allowed) > 1.0),
                    others=sum(value > 1.0 for value in excesses.values()) - 1)


def _most(ranks: list[dict[str, Any]], kind: str) -> float:
    return max((off for rank in ranks for step in rank[kind] for off in step.values()), default=0.0)


def _sample_difference(expected: list[float], ranks: list[dict[str, Any]], step: int) -> str | None:
    """Which rank was fed other samples than its replica's part of the window. Replicas take theirs in order."""
    starts, start = {}, 0
    for rank in sorted(ranks, key=lambda rank: rank["replica"]):
        if rank["replica"] not in starts:
            starts[rank["replica"]] = start
            start += len(rank["marks"][step])
    for number, rank in enumerate(ranks):
        first, own = starts[rank["replica"]], rank["marks"][step]
        theirs = expected[first:first + len(own)]
        if len(theirs) < len(own) or not all(map(_same_mark, own, theirs)):
            return f"rank {number} was fed other samples in step {step + 1} than its part of the global batch"
    if start == len(expected):
        return None
    return f"the ranks used {start} samples in step {step + 1} and the global batch has {len(expected)}"


def _same_mark(mine: float, theirs: float) -> bool:
    if math.isnan(mine) or math.isnan(theirs):
        return math.isnan(mine) and math.isnan(theirs)
    return mine == theirs or abs(mine - theirs) <= 1e-9 * max(1.0, abs(theirs))  # sums round with the batch's shape
