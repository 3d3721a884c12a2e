"""How far a plan may be from one device: ten times the yardstick, which is how far rounding moves
one device's own figures, and no less than a floor.

To measure the yardstick, the plain loop runs again with shaken gradients and with initial weights
nudged by a unit in the last place, with the samples of each batch in another order, and with every
batch cut into 2 and 4 micro-batches. Shaking shows how the optimizer amplifies rounding: Adam turns
the noise of a gradient that is zero in exact arithmetic into steps of the learning rate. The run
with nudged weights has Adam's betas in float32, because the kernels of an update may hold them so.
Ranks on GPUs update with torch's fused Adam, where float32 turns 1 - 0.999 into 0.00099998713,
while the plain loop updates with 0.001. A second moment then differs by a hundred roundings
although gradients are equal.

Other kernels may compute a reordered or cut batch. If such a variation moves a figure much further
than rounding does, the samples of the batch are coupled, and the variation is no yardstick. Such
variations therefore count only up to a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.proof.reference_loop import BatchCut, StepRecord, Variation, greatest

ALLOWED = 10.0  # times the yardstick; see docs/verify.md
KINDS = ("gradient", "weight", "buffer")
ALL_KINDS = (*KINDS, "state")
# These move a figure of the run by a unit in the last place and leave the samples as they are, so
# their effects are those of rounding.
ROUNDING = (Variation(shake=1.0), Variation(shake=-1.0), Variation(nudge=1.0))
# These stand for other kernels, or other sums of the same terms. They also show a coupling of
# samples.
REORDERED = (Variation(permuted=True), *(Variation(cut=BatchCut(microbatches=n)) for n in (2, 4)))
# A reordering may move a figure this many times as far as shaking does before it counts as a
# coupling. Sums of n terms in another order differ by up to about sqrt(n) roundings, and a batch
# has some thousand terms.
REORDERED_AT_MOST = 100.0
# How far an exact job may move when it is cut, relative to its size. Losses and layers may compute
# in float32 whatever they are given.
EXACT = {"fp8": 0.1, "bf16": 0.1, "fp16": 0.02, "tf32": 1e-3, "float32": 1e-3, "float64": 1e-5}
_MEAN_IN_FLOAT32 = 1e-4
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
Named = dict[str, float]
Kinds = dict[str, Named]  # figures of a step by kind and name


def exact_mean(precision: str) -> float:
    """Return how far a mean of values may be from the mean of its parts, relative to its size."""
    # A mean of values in float32 is this exact, however many there are. Class weights can move it
    # by no more than a thousandth.
    return _MEAN_IN_FLOAT32 if precision == "float32" else EXACT[precision]


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
        "evaluation": {},
    }


def _eps(tensor: torch.Tensor, epsilon: float) -> float:
    """Return the rounding of a tensor's elements; 0 for whole numbers, which must be equal."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return max(torch.finfo(tensor.dtype).eps, epsilon if tensor.dtype != torch.float64 else 0.0)


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


def spread_of(rounding: float, reordered: float, least: float) -> float:
    """Return the spread of a figure.

    The spread of a reordered batch counts only up to a bound. Beyond it, the cause is a coupling of
    samples and not rounding.
    """
    return max(rounding, min(reordered, REORDERED_AT_MOST * max(rounding, least)))


def widen(spread: Named, distances: Mapping[str, float]) -> None:
    for name, moved in distances.items():
        spread[name] = max(spread[name], moved)
