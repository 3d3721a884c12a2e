"""Find what keeps plans that cut the batch from equalling one device. One device finds it, and
names a way out.

A model must be the same if it is built twice. A loss must be a mean or a (sum, count). No layer and
no loss may let the samples of a batch influence each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from paceline.base.errors import TrainingError
from paceline.base.nested import map_tensors
from paceline.job import AUTOCAST, Job
from paceline.job.batch_loss import BatchLoss, computing
from paceline.model.attributes import is_same
from paceline.model.copy_on_write import lazy_copy
from paceline.model.forward_state import function_kept, state_kept
from paceline.proof.device import Dtypes, autocast
from paceline.proof.order import later_batches, whole_batches
from paceline.proof.reference_loop import (
    WHOLE,
    BatchCut,
    PlainRun,
    Variation,
    build_plain,
    cut_batch,
    distance,
    greatest,
    part_of_batch,
    rows,
    unspoilt,
)
from paceline.proof.replicas import summed
from paceline.proof.tolerances import ALLOWED, EXACT, exact_mean
from paceline.torch_private.modules import BatchNorm
from paceline.torch_private.pytree import tensor_leaves, tree_leaves
from paceline.training.feed import MicroBatch
from paceline.training.metrics import has_rows, unlike_its_parts

UNCUT = "plans that don't cut the batch, such as tensor=N and place=N, are exact as it is"
_NO_COUPLING = (
    "a scalar loss is the mean over its samples, anything else (sum, count), and no layer mixes samples; "
    f"what all samples of the step share is gathered (ctx.gather); {UNCUT}"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why no plan that cuts the batch can equal one device."""

    # "weights" that the seed doesn't fix; a "loss" that is no mean over its samples; "samples" that
    # influence each other; a layer that "changes" with every forward
    kind: Literal["weights", "loss", "samples", "changes"]
    # modules or parameters that cause it; "the loss" if that causes it; empty if the cause is
    # unknown
    names: tuple[str, ...]
    reason: str  # what was seen
    instead: str  # the conversion that makes the job exact

    def __str__(self) -> str:
        return f"{self.reason}. {self.instead[:1].upper()}{self.instead[1:]}"

    def to_dict(self) -> dict[str, Any]:
        """Return the problem as a certificate contains it."""
        return {
            "kind": self.kind,
            "names": list(self.names),
            "found": self.reason,
            "instead": self.instead,
        }

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Problem:
        """Return the problem from the result of `to_dict`."""
        return cls(
            document["kind"], tuple(document["names"]), document["found"], document["instead"]
        )


def job_problem(job: Job, *, steps: int) -> Problem | None:
    """Return the first reason why no plan that cuts the batch can be exact; None if there is
    none.
    """
    return (
        _unsteady_weights(job)
        or loss_problem(job, whole_batches(job, steps))
        or _coupling(job, steps=steps)
    )


def _unsteady_weights(job: Job) -> Problem | None:
    first, second = (dict(build_plain(job).named_parameters()) for _ in range(2))
    for name, p in first.items():
        if name not in second or not torch.equal(p, second[name]):
            return Problem(
                "weights",
                (name,),
                "the initial weights are not fixed by the seed: "
                f"'{name}' differs between two models built alike",
                "draw them from torch's, NumPy's or Python's own generator, without seeding it",
            )
    return None


# --- The loss -----------------------------------------------------------------------------------------------------

_FEW = 4  # samples of a window that are examined
# Errors of a loss for an output that is not cut by samples. They say nothing about the loss.
_NOT_CUT = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, TrainingError)


def loss_problem(job: Job, batches: Iterable[MicroBatch]) -> Problem | None:
    """Check whether the loss compares samples, or is a scalar that is no mean over its samples."""
    if job.own_step is not None:  # it may have several losses
        return None
    model, loss = build_plain(job), job.criterion
    if job.compute is not None:
        return _compute_problem(job, computing(model), batches)
    # The loss is called several times with one target, and may write to it.
    job = replace(job, loss=lambda output, target: loss(output, map_tensors(lazy_copy, target)))
    for batch in (batch for batch in batches if batch.samples > 1):
        with autocast(job):  # a forward may take gradients
            output = map_tensors(torch.Tensor.detach, unspoilt(batch).call(model))
        for check in (_comparing, _no_mean):
            with suppress(*_NOT_CUT):
                if problem := check(job, output, batch):
                    return problem
    return None


def computation_keeps_state(job: Job, model: nn.Module) -> bool:
    """Whether the job's `compute` gives another loss if it is called again with the same model and
    batch. The result is False if it can't be called again.
    """
    if job.compute is None:
        return False
    batch = next(whole_batches(job, 1))
    with suppress(Exception), function_kept(job.compute, model):
        first, second = (_loss_of(job, model, [batch]) for _ in range(2))
        return math.isfinite(first) and first != second
    return False


def _compute_problem(job: Job, model: nn.Module, batches: Iterable[MicroBatch]) -> Problem | None:
    """Check whether what `compute` returns for a batch is not what its parts give together.

    The model is in evaluation mode, in which layers seldom mix samples.
    """
    assert job.compute is not None
    computation = BatchLoss(model, job.compute).eval()
    for batch in (batch for batch in batches if batch.samples > 1):

        def tally(part: range, batch: MicroBatch = batch) -> tuple[float, float]:
            some = batch if len(part) == batch.samples else part_of_batch(batch, part)
            return _tally(job, computation, some, batch.samples)

        with suppress(*_NOT_CUT):
            if words := unlike_its_parts(tally, batch.samples, near=EXACT[job.precision]):
                return Problem(
                    "loss",
                    ("the loss",),
                    f"the job couples the samples of a batch: the loss of compute is {words}; a "
                    "comparison of samples, ignored targets or weights do this",
                    "a scalar is the mean over its samples, anything else (sum, count); a loss that compares "
                    f"samples needs all of them: let an item of the data hold them; {UNCUT}",
                )
    return None


def later_problem(job: Job, model: nn.Module, *, steps: int | None) -> Problem | None:
    """Check whether some samples of the job have another loss when they are cut unevenly than when
    they are whole.

    An even cut of the first batch may not show that: both halves may have as many tokens, or the
    same longest sequence. All checks together use no more samples than a batch has.

    Args:
        job: Its random layers are off.
        model: A trained model; its state is left as it was.
        steps: Of the job; None if the end of its data decides.
    """
    samples = min(_FEW, job.batch)
    has_own_step = job.own_step is not None  # it needs new models for each batch
    count = 1 if has_own_step else job.batch // samples
    batches = (
        [part_of_batch(next(whole_batches(job, 1)), range(samples))]
        if steps is None
        else later_batches(job, steps=steps, count=count, samples=samples)
    )
    if job.precision in AUTOCAST:  # the rounding of autocast would hide a difference
        job = replace(job, precision="float32")
    for batch in (batch for batch in batches if batch.samples > 1):
        seen = Dtypes({p.dtype for p in model.parameters() if p.is_floating_point()})
        first, value, cut = max(1, batch.samples // 3), 0.0, 0.0
        with suppress(Exception), seen:  # the model or the loss may refuse so few samples
            parts = [
                part_of_batch(batch, part) for part in (range(first), range(first, batch.samples))
            ]
            if has_own_step:
                value, cut = (
                    PlainRun(job, Variation(cut=cut)).step(unspoilt(batch)).loss
                    for cut in (WHOLE, BatchCut((1, 2)))
                )
            else:
                value, cut = _loss_of(job, model, [batch]), _loss_of(job, model, parts)
        exact = max(
            exact_mean("float64" if job.precision == "float64" else "float32"),
            ALLOWED * seen.epsilon,
        )
        if abs(cut - value) > exact * max(1.0, abs(value)):
            symptom = (
                f"the loss of {batch.samples} samples is {value:.6g}, and {cut:.6g} if they are cut in {first} "
                f"and {batch.samples - first}"
            )
            return (
                loss_problem(job, [batch])
                or _collated_otherwise(batch, parts[0], symptom)
                or _described(job, model, batch, symptom)
            )
    return None


def _collated_otherwise(batch: MicroBatch, part: MicroBatch, symptom: str) -> Problem | None:
    """Check whether the job's collate gives the first samples another input if it collates only
    part of the batch.
    """
    same = rows(batch.input, range(part.samples), batch.samples)
    if all(map(is_same, tree_leaves(same), tree_leaves(part.input))):
        return None
    return Problem(
        "samples",
        ("collate",),
        "the job couples the samples of a batch: collate gives a sample another "
        f"input in a part of a batch, by a figure of all that are there (the longest, a mean): {symptom}",
        "let it take such figures over all data or each sample, or keep them out of the loss by a mask; "
        f"{UNCUT}",
    )


def _loss_of(job: Job, model: nn.Module, pieces: Sequence[MicroBatch]) -> float:
    """Return the loss of all micro-batches, each computed from the model's current state."""
    whole = sum(piece.samples for piece in pieces)
    totals, counts = zip(*(_tally(job, model, piece, whole) for piece in pieces), strict=True)
    return float(sum(totals) / sum(counts))


def _tally(job: Job, model: nn.Module, piece: MicroBatch, whole: int) -> tuple[float, float]:
    """Return the loss of a micro-batch of `whole` samples as a sum and a count."""
    piece = unspoilt(piece)
    with state_kept(model), autocast(job):
        value = job.criterion(piece.call(model), piece.target)
    return summed(value, piece.samples, whole)


def _comparing(job: Job, output: Any, batch: MicroBatch) -> Problem | None:
    """Check whether the gradient of some samples' outputs changes with the outputs of the
    others.
    """
    half = batch.samples // 2

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        """Return outputs whose second half is moved towards the first, so that they stay in their
        range.
        """
        if not _by_sample(tensor, batch.samples):
            return tensor
        others = tensor[: batch.samples - half].flip(0)
        return torch.cat([tensor[:half], (tensor[half:] + others) / 2])

    def gradients(values: Any) -> list[torch.Tensor]:
        values = map_tensors(
            lambda t: t.detach().clone().requires_grad_() if _by_sample(t, batch.samples) else t,
            values,
        )
        leaves = [t for t in _tensors(values) if t.requires_grad]
        with torch.enable_grad(), autocast(job):
            value = job.criterion(values, batch.target)
        total = value[0] if isinstance(value, tuple | list) else value
        if not leaves or not total.requires_grad:
            return []
        of_leaves = torch.autograd.grad(total, leaves, allow_unused=True)
        return [g[:half] for g in of_leaves if g is not None]

    before, after = gradients(output), gradients(map_tensors(moved, output))
    off = max((distance(a, b) for a, b in zip(before, after, strict=True)), default=0.0)
    if off <= EXACT[job.precision] * greatest(before):
        return None
    return Problem(
        "samples",
        ("the loss",),
        "the job couples the samples of a batch: the loss compares them, for the "
        "gradient of some changes with the outputs of others",
        "let an item of the data hold all samples that are compared, or gather them in a step of your own "
        f"(ctx.gather); {UNCUT}",
    )


def _no_mean(job: Job, output: Any, batch: MicroBatch) -> Problem | None:
    """Check whether a scalar loss is no mean over its samples, for one output and its parts."""
    with torch.no_grad(), autocast(job):
        value = job.criterion(output, batch.target)
        if isinstance(value, tuple | list) or not any(
            has_rows(t, batch.samples) for t in _tensors(output)
        ):
            return None

    def tally(part: range) -> tuple[float, float]:
        mean = value
        if len(part) < batch.samples:
            some = rows(output, part, batch.samples), _targets(batch, part)
            with torch.no_grad(), autocast(job):
                mean = job.criterion(*some)
        return float(mean) * len(part), len(part)

    if words := unlike_its_parts(tally, batch.samples, near=exact_mean(job.precision)):
        return Problem(
            "loss",
            ("the loss",),
            f"the loss is a scalar and not the mean over its samples: {words}; ignored targets or weights do this",
            "return (sum, count) instead of a scalar: the sum of the loss (reduction='sum' in torch's "
            "losses), and the number or weight of what it counts (such as the targets that are not "
            "ignored); or pl.total(sum), which is divided by nothing",
        )
    return None


def _targets(batch: MicroBatch, part: range) -> Any:
    """Return the targets of some samples.

    They are collated again if they don't lie along dim 0, as lists of boxes don't.
    """
    if all(has_rows(leaf, batch.samples) for leaf in tree_leaves(batch.target)):
        return rows(batch.target, part, batch.samples)
    return part_of_batch(batch, part).target


# --- Layers -------------------------------------------------------------------------------------------------------


def _coupling(job: Job, *, steps: int) -> Problem | None:
    """Check whether cutting a batch changes its gradients by more than rounding: its samples then
    influence each other.
    """
    whole, cut = PlainRun(job), PlainRun(job, Variation(cut=BatchCut(microbatches=2)))
    for step, batch in enumerate(whole_batches(job, steps)):
        try:
            _copy_tensors(whole.model, cut.model)
            cut_gradients = cut.step(unspoilt(batch)).gradients
        except Exception:  # a BatchNorm can't take one sample
            cut_gradients = {}
        gradients = whole.step(unspoilt(batch)).gradients
        if not gradients or not cut_gradients:  # loss scaling may skip a step, too
            continue
        moved = {name: distance(g, cut_gradients.get(name)) for name, g in gradients.items()}
        name = max(moved, key=lambda name: moved[name])
        if not moved[name] <= EXACT[job.precision] * greatest(gradients.values()):
            return _described(
                job,
                whole.model,
                batch,
                f"cutting the batch of step {step + 1} in two moves the gradient of "
                f"'{name}' by {moved[name]:.2g} on one device already",
            )
    return None


@torch.no_grad()
def _copy_tensors(source: nn.Module, target: nn.Module) -> None:
    of_source, of_target = ((*m.parameters(), *m.buffers()) for m in (source, target))
    for tensor, copy in zip(of_source, of_target, strict=True):
        copy.copy_(tensor)


def _described(job: Job, model: nn.Module, batch: MicroBatch, symptom: str) -> Problem:
    """Describe the problem by the first layer whose output for some samples depends on the others,
    if there is one.
    """
    norms = tuple(path for path, module in model.named_modules() if isinstance(module, BatchNorm))
    if job.own_step is not None:  # it runs them in ways of its own
        layers = f" ({', '.join(norms[:3])} use the statistics of a micro-batch)" if norms else ""
        reason = f"the step couples the samples of a batch{layers}: {symptom}"
        return Problem("samples", norms, reason, _NO_COUPLING)
    whole, repeated, part = (
        _outputs(job, model, inputs) for inputs in (batch, batch, cut_batch(batch, 2)[0])
    )
    changing = _first_difference(job, model, whole, repeated, batch.samples)
    if changing is not None:
        kind = type(model.get_submodule(changing)).__name__
        return Problem(
            "changes",
            (changing,),
            f"'{changing}' ({kind}) gives another output each time it is called "
            f"with the same input: {symptom}",
            "a layer must not change in a forward; keep what it counts out of what it computes",
        )
    mixing = _first_difference(job, model, whole, part, batch.samples)
    coupled = f"the job couples the samples of a batch: {symptom}"
    if mixing is None:
        return Problem(
            "samples",
            (),
            f"{coupled}, and no layer's output shows where",
            "look for a loss or a hook that mixes samples, or a scalar loss that divides by something else "
            f"than samples (nodes, boxes, tokens): it returns (sum, count). {UNCUT[:1].upper()}{UNCUT[1:]}",
        )
    layer = model.get_submodule(mixing)
    if mixing in norms:
        return Problem(
            "samples",
            norms,
            f"{coupled}. {len(norms)} BatchNorm layer{'s' * (len(norms) > 1)}, "
            f"such as '{mixing}', use the statistics of a micro-batch",
            "data=N, shard=N and their products with one micro-batch a rank join those of all ranks and are "
            f"exact. GroupNorm or LayerNorm make all plans exact: {_group_norm(layer)} in the place of "
            f"'{mixing}'; {UNCUT}",
        )
    return Problem(
        "samples",
        (mixing,),
        f"{coupled}. '{mixing}' ({type(layer).__name__}) mixes samples",
        f"let it compute each sample by itself (reduce over dim 1 and later, never over dim 0); {UNCUT}",
    )


def _group_norm(norm: nn.Module) -> str:
    """Return the code of a GroupNorm with at least four channels per group, for the same
    channels.
    """
    channels = int(norm.num_features)  # type: ignore[arg-type]
    groups = math.gcd(32, channels)
    while groups > 1 and channels // groups < 4:
        groups //= 2
    return f"nn.GroupNorm({groups}, {channels})"


def _outputs(job: Job, model: nn.Module, batch: MicroBatch) -> list[tuple[str, list[torch.Tensor]]]:
    """Return every module's outputs, in the order in which the modules finished."""
    outputs: list[tuple[str, list[torch.Tensor]]] = []

    def note(path: str) -> Callable[..., None]:
        return lambda module, inputs, output: outputs.append(
            (path, [t.detach().clone() for t in _tensors(output)])
        )

    handles = [module.register_forward_hook(note(path)) for path, module in model.named_modules()]
    with autocast(job):
        unspoilt(batch).call(model)
    for handle in handles:
        handle.remove()
    return outputs


def _first_difference(
    job: Job,
    model: nn.Module,
    whole: Sequence[tuple[str, list[torch.Tensor]]],
    other: Sequence[tuple[str, list[torch.Tensor]]],
    samples: int,
) -> str | None:
    """Return the first module whose outputs differ for the samples that both have; None if none
    does.

    Tensors that don't have the samples along dim 0 are not compared.
    """
    for (path, outputs), (_, other_outputs) in zip(whole, other, strict=False):
        for a, b in zip(outputs, other_outputs, strict=False):
            if not _by_sample(a, samples) or b.ndim != a.ndim or a.shape[1:] != b.shape[1:]:
                continue
            if distance(a[: len(b)], b) > EXACT[job.precision] * max(1.0, greatest([a])):
                return path
    return None


def _by_sample(tensor: torch.Tensor, samples: int) -> bool:
    return tensor.is_floating_point() and has_rows(tensor, samples)


def _tensors(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    map_tensors(tensors.append, value)
    return tensors or tensor_leaves(value)
