"""What the planned ranks compute, held against one device, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from paceline.proof.reference import sample_marks
from paceline.runtime.feed import MicroBatch
from paceline.runtime.stepper import Stepper

ALLOWED = 10.0  # times the yardstick; see DESIGN: how equal is equal


class Recorder:
    """An observer on one rank: how far each tensor is from one device's. Whole tensors are gathered to compare."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marks: list[list[float]] = []
        self.losses: list[float] = []
        self.gradient: list[dict[str, float]] = []
        self.weight: list[dict[str, float]] = []

    def samples(self, step: int, batches: list[MicroBatch]) -> None:
        self.marks.append([mark for batch in batches for mark in sample_marks(batch).tolist()])

    def gradients(self, step: int, stepper: Stepper) -> None:
        self.gradient.append(self._distances("gradient", step, {n: p.grad for n, p in stepper.parameters.items()}))

    def weights(self, step: int, stepper: Stepper, loss: float) -> None:
        self.losses.append(loss)
        self.weight.append(self._distances("weight", step, dict(stepper.parameters)))

    def _distances(self, kind: str, step: int, tensors: dict[str, Any]) -> dict[str, float]:
        found = {}
        with safe_open(self.folder / f"{kind}-{step}.safetensors", framework="pt") as reference:
            known = set(reference.keys())
            for name, tensor in tensors.items():
                mine = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                mine = torch.zeros(0) if mine is None else mine.detach().cpu()
                theirs = reference.get_tensor(name) if name in known else torch.zeros_like(mine)
                if mine.numel() == 0:
                    mine = torch.zeros_like(theirs)
                distance = (mine - theirs).abs().max() if mine.numel() else torch.zeros(())
                found[name] = float("inf") if not torch.isfinite(distance) else float(distance)
        return found

    def to_dict(self) -> dict[str, Any]:
        return {"marks": self.marks, "losses": self.losses, "gradient": self.gradient, "weight": self.weight}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One plan in one precision against one device.

    difference: the first thing that differs by more than the yardstick allows, in words; None if nothing does.
    tolerance: what the worst weight was allowed.
    """

    precision: str
    steps: int
    max_loss_diff: float
    max_gradient_diff: float
    max_param_diff: float
    worst_param: str
    tolerance: float
    difference: str | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return self.difference is None


def judge(reference: dict[str, Any], ranks: list[dict[str, Any]], *, precision: str) -> Verdict:
    """Hold every rank's record against the reference, step by step: samples, loss, gradients, weights."""
    epsilon = torch.finfo(torch.float64 if precision == "float64" else torch.float32).eps
    steps = len(reference["losses"])
    first: str | None = None
    worst = (0.0, "", 0.0, 0.0)  # ratio, name, difference, tolerance
    for step in range(steps):
        first = first or _sample_difference(reference["marks"][step], [rank["marks"][step] for rank in ranks], step)
        loss = reference["losses"][step]
        allowed = ALLOWED * max(reference["loss_spread"][step], epsilon * abs(loss))
        for number, rank in enumerate(ranks):
            off = abs(rank["losses"][step] - loss)
            if not off <= allowed and first is None:
                first = f"the loss of step {step + 1} on rank {number} is off by {off:.3g}, {allowed:.3g} is allowed"
        for kind in ("gradient", "weight"):
            limits = _limits(reference, kind, step, epsilon)
            off, allowed, name, number = _worst([rank[kind][step] for rank in ranks], limits)
            if off > allowed and first is None:
                module = name.rpartition(".")[0] or "the model"
                first = (f"{kind} of '{name}' (module {module}) on rank {number} is off by {off:.3g} "
                         f"after step {step + 1}, {allowed:.3g} is allowed")
            if kind == "weight":
                worst = max(worst, (off / allowed if allowed else float(off > 0), name, off, allowed))
    return Verdict(
        precision=precision, steps=steps,
        max_loss_diff=max(abs(rank["losses"][s] - reference["losses"][s]) for rank in ranks for s in range(steps)),
        max_gradient_diff=_greatest(rank["gradient"] for rank in ranks),
        max_param_diff=_greatest(rank["weight"] for rank in ranks),
        worst_param=worst[1], tolerance=worst[3], difference=first)


def _limits(reference: dict[str, Any], kind: str, step: int, epsilon: float) -> dict[str, float]:
    """What each tensor may differ by: ten times what reordering moved it, or what its dtype can tell apart."""
    spread, size = reference[f"{kind}_spread"][step], reference[f"{kind}_size"][step]
    return {name: ALLOWED * max(spread[name], epsilon * size[name]) for name in spread}


def _worst(ranks: list[dict[str, float]], limits: dict[str, float]) -> tuple[float, float, str, int]:
    """The tensor and rank furthest beyond its limit: difference, limit, name, rank."""
    def excess(item: tuple[float, float, str, int]) -> float:
        off, allowed, _, _ = item
        return off / allowed if allowed else (float("inf") if off else 0.0)

    return max(((off, limits.get(name, 0.0), name, number)
                for number, rank in enumerate(ranks) for name, off in rank.items()), key=excess)


def _greatest(records: Iterable[list[dict[str, float]]]) -> float:
    return max((off for record in records for step in record for off in step.values()), default=0.0)


def _sample_difference(expected: list[float], ranks: list[list[float]], step: int) -> str | None:
    """Which rank was fed other samples than its part of the window."""
    start = 0
    for number, rank in enumerate(ranks):
        theirs = expected[start:start + len(rank)]
        if len(theirs) < len(rank) or not all(map(_same_mark, rank, theirs)):
            return f"rank {number} was fed other samples in step {step + 1} than its part of the global batch"
        start += len(rank)
    if start == len(expected):
        return None
    return f"the ranks used {start} samples in step {step + 1} and the global batch has {len(expected)}"


def _same_mark(mine: float, theirs: float) -> bool:
    return mine == theirs or abs(mine - theirs) <= 1e-9 * max(1.0, abs(theirs))  # sums round with the batch's shape
