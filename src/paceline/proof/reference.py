"""The reference of a proof: what one device computes in its first steps, and how far a plan may be
from it.

Tensors are in files of a folder, named by kind and step. Everything else is in a document, with a
limit for each figure. `verify` measures all limits (`write_reference`). The check of a first update
takes one step (`write_first_step`). It begins with limits that need no second forward, which are
never above those of `write_reference`, and measures some only for a plan that exceeds these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
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
from paceline.proof.device import Dtypes
from paceline.proof.order import whole_batches
from paceline.proof.reference_loop import (
    WHOLE,
    BatchCut,
    PlainRun,
    StepRecord,
    Variation,
    distance,
    expected_marks,
    greatest,
    part_of_batch,
)
from paceline.proof.tolerances import (
    ALL_KINDS,
    EPSILON,
    KINDS,
    REORDERED,
    ROUNDING,
    Kinds,
    Named,
    floors_of,
    limits_of,
    spread_of,
    widen,
)
from paceline.training.feed import is_stream

PLANTED = 1e-3  # relative error of one gradient that a comparison must notice to prove anything
# files up to this size stay in memory once they are read; 128 of them are half a GiB
_KEPT_BYTES = 2**22
# The figures that one device has of its own if it cuts its batches; the others are as of whole ones.
_OF_CUT = ("folder", "losses", "rates", "skipped", "state_sizes")


class PlainSteps:
    """The first steps of a plain loop, taken when this is made.

    Attributes:
        figures: What `write_reference` returns without limits.
        floors: The least limits of each step's figures.

    Args:
        random: Switches random layers off; entered by the caller.
        epsilon: The rounding of the coarsest numbers that the job computes with; by default the
            first step shows it.
        is_examined: As for `PlainRun`.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        *,
        steps: int,
        random: WithoutRandomness,
        cut: BatchCut = WHOLE,
        epsilon: float | None = None,
        is_examined: bool = False,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.job, self.folder, self.cut = job, folder, cut
        self.run = PlainRun(job, Variation(cut=cut), is_examined=is_examined)
        dtypes = Dtypes({p.dtype for _, p in self.run.named})
        self.run.dtypes = dtypes if epsilon is None else None
        initial = {name: p.detach() for name, p in self.run.model.named_parameters()}
        save_kind(folder, "initial", 0, initial)
        self.evaluation, self.floors = None, list[Kinds]()
        self.figures: dict[str, Any] = {
            "folder": str(folder),
            "most_repeats": 0,
            "seeds_itself": False,
            "evaluation": {},
        }
        for step, batch in enumerate(whole_batches(job, steps)):
            random.forget()
            marks = expected_marks(job, batch)  # before the step: a model may write to its inputs
            record = self.run.step(batch)
            if step == 0:
                self.epsilon = epsilon or max(EPSILON[job.precision], dtypes.epsilon)
                self.run.dtypes = None
            own_seed = key_to_seed(job.seed, "step", step, 0, 0)
            self.figures["most_repeats"] = max(self.figures["most_repeats"], random.most_repeats())
            self.figures["seeds_itself"] |= bool(random.seeds - {own_seed})
            of_step = {
                "marks": marks,
                "draws": len(random.drawn),
                "losses": record.loss,
                "rates": record.rates,
                "skipped": self.run.is_skipped,
                "state_sizes": {name: tensor.numel() for name, tensor in record.state.items()},
            }
            for name, value in of_step.items():
                self.figures.setdefault(name, []).append(value)
            for kind in ALL_KINDS:
                save_kind(folder, kind, step, record.tensors(kind))
            largest_loss = max(map(abs, self.figures["losses"]))
            self.floors.append(floors_of(record, self.epsilon, largest_loss=largest_loss))

    def evaluate(self, data: Any) -> None:
        """Evaluate the model after the last step, and note the figures, or why a proof can't
        compare them.

        Args:
            data: Samples with an index; None for no evaluation.
        """
        figures, reason, before = dict[str, float](), None, ForwardState(self.run.model).now()
        try:
            figures = self.run.evaluate(data) if data is not None else {}
        except Exception as error:
            if self.job.validation is not None:
                raise
            reason = (
                "the model fails in evaluation mode, which the job does not use: "
                f"{type(error).__name__}: {error}"
            )
        if changed := [*before.attributes.changed(), *before.tensors.changed()]:
            # It depends on which forwards came before, and so on how the samples are cut.
            figures, reason = {}, reason or f"an evaluation changes '{changed[0]}' of the model"
        self.evaluation = data if figures else None
        self.figures |= {"evaluation": figures, "not_evaluated": reason}
        # Metrics are often means in float32.
        self.floors[-1]["evaluation"] = {
            name: max(self.epsilon, 0.0 if name == "loss" else EPSILON["float32"]) * abs(value)
            for name, value in figures.items()
        }

    def spreads(self, variations: Sequence[Variation]) -> list[Kinds]:
        """Return how far the variations move each figure at most, by step, kind and name."""
        spreads: list[Kinds] = [
            {kind: dict.fromkeys(names, 0.0) for kind, names in floor.items()}
            for floor in self.floors
        ]
        for variation in variations:
            scaled = replace(
                variation,
                shake=variation.shake * self.epsilon,
                nudge=variation.nudge * self.epsilon,
                cut=variation.cut if self.cut.is_whole else self.cut,
            )
            try:
                self._vary(PlainRun(self.job, scaled), spreads)
            except Exception:
                if variation not in REORDERED:
                    raise
                # A model may refuse so small a piece of a batch: a BatchNorm can't take one sample.
        return spreads

    def _vary(self, run: PlainRun, spreads: list[Kinds]) -> None:
        """Widen the spreads by the results of one more run."""
        for step, record in enumerate(run.steps(len(self.floors))):
            if run.variation in REORDERED and bool(record.gradients) != bool(
                load_kind(self.folder, "gradient", step)
            ):
                return  # loss scaling skips other steps of smaller pieces, and that is no rounding
            widen(spreads[step]["loss"], {"": abs(record.loss - self.figures["losses"][step])})
            self.widen(spreads[step], step, record, ALL_KINDS)
        if self.evaluation is not None:
            moved = run.evaluate(self.evaluation)
            figures = self.figures["evaluation"].items()
            widen(
                spreads[-1]["evaluation"],
                {name: abs(moved[name] - value) for name, value in figures},
            )

    def widen(self, spread: Kinds, step: int, record: StepRecord, kinds: Sequence[str]) -> None:
        """Widen the spread of a step's tensors by another record of it."""
        for kind in kinds:
            tensors, plain = record.tensors(kind), load_kind(self.folder, kind, step)
            widen(
                spread[kind],
                {name: distance(tensor, tensors.get(name)) for name, tensor in plain.items()},
            )

    def document(self, limits: Sequence[Kinds]) -> dict[str, Any]:
        """Return the figures with their limits."""
        return {
            **self.figures,
            "epsilon": self.epsilon,
            "evaluation_limit": limits[-1]["evaluation"],
            "loss_limit": [limit["loss"][""] for limit in limits],
            **{f"{kind}_limit": [limit[kind] for limit in limits] for kind in ALL_KINDS},
        }


def write_reference(
    job: Job, folder: Path, *, steps: int, random: WithoutRandomness, evaluation: Any = None
) -> dict[str, Any]:
    """Run the plain loop, then its variations.

    Args:
        random: Switches random layers off; entered here, after the plain loop only if the job draws
            at all.
        evaluation: Data to evaluate on after the last step, samples with an index; None for no
            evaluation.

    Returns:
        folder: of the tensors.
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
    with random:
        plain = PlainSteps(job, folder, steps=steps, random=random)
        if job.precision == "fp16" and plain.run.scale == 2.0 ** (16 - steps):
            raise TrainingError(
                f"gradients overflow in float16 in each of the {steps} steps that are compared, and loss "
                "scaling skips them",
                hint="--steps 20 leaves time for a smaller scale to be found",
            )
        plain.evaluate(evaluation)
    with random if random.is_needed else nullcontext():
        rounding, reordered = (plain.spreads(group) for group in (ROUNDING, REORDERED))
    spreads = [
        {
            kind: {
                name: spread_of(rounding[step][kind][name], reordered[step][kind][name], least)
                for name, least in named.items()
            }
            for kind, named in floor.items()
        }
        for step, floor in enumerate(plain.floors)
    ]
    limits = limits_of(plain.floors, spreads)
    return {
        **plain.document(limits),
        "yardstick": {
            kind: _widest(spreads, limits, kind) for kind in ("loss", "gradient", "weight")
        },
        "power": _power(job, folder, limits),
    }


def write_first_step(
    job: Job, folder: Path, *, random: WithoutRandomness, variations: Sequence[Variation] = ()
) -> tuple[dict[str, Any], PlainRun]:
    """Take one step.

    The limits are the rounding of the job's precision, and how far the update moves if gradients
    are shaken by a unit in the last place.

    Args:
        random: As for `write_reference`.
        variations: They measure further limits; then the rounding is that of the coarsest numbers.

    Returns:
        A document like that of `write_reference`, and the loop after its step.
    """
    epsilon = None if variations else EPSILON[job.precision]
    with random:
        plain = PlainSteps(job, folder, steps=1, random=random, epsilon=epsilon, is_examined=True)
    with random if random.is_needed else nullcontext():
        spreads = plain.spreads(variations)
        with suppress(Exception):
            # If an optimizer can't be made a second time for one model, the limits omit its shaken
            # update.
            record = plain.run.shaken(plain.epsilon)
            plain.widen(spreads[0], 0, record, ("weight", "state"))
    return plain.document(limits_of(plain.floors, spreads)), plain.run


def write_cut(
    job: Job, whole: Mapping[str, Any], *, cut: BatchCut, variations: Sequence[Variation] = ROUNDING
) -> dict[str, Any]:
    """Run one device that cuts every batch as a plan would. Its folder is in that of `whole`.

    Args:
        whole: The reference of whole batches.
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
    folder = Path(whole["folder"]) / f"cut-{'-'.join(map(str, cut.shares))}-{cut.microbatches}"
    steps = len(whole["losses"])
    # The caller has switched random layers off; which streams they draw from is known of `whole`.
    plain = PlainSteps(
        job, folder, steps=steps, random=WithoutRandomness(), cut=cut, epsilon=whole["epsilon"]
    )
    own = {name: plain.figures[name] for name in _OF_CUT}
    coupling = overflow = None
    for step in range(steps):
        overflow = overflow or _overflow(step, own["skipped"][step], whole["skipped"][step])
        # After a step that only one of them skips, all figures differ.
        if coupling is None and overflow is None:
            coupling = _coupled(step, own, whole)
    together = {**whole, **own, "evaluation": {}, "coupling": coupling, "overflow": overflow}
    if coupling is None and overflow is None:
        return together
    limits = [
        _wider(limit, whole, step)
        for step, limit in enumerate(limits_of(plain.floors, plain.spreads(variations)))
    ]
    document = plain.document(limits)
    return {
        **together,
        **{name: value for name, value in document.items() if name.endswith("_limit")},
        **({"power": _power(job, Path(whole["folder"]), limits)} if "power" in whole else {}),
    }


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


def _coupled(step: int, cut: Mapping[str, Any], whole: Mapping[str, Any]) -> str | None:
    """Return the first figure in which a step with a cut batch differs from the one without; None
    if there is none.
    """
    for kind in KINDS:
        uncut = load_kind(Path(whole["folder"]), kind, step)
        for name, tensor in load_kind(Path(cut["folder"]), kind, step).items():
            limit = whole[f"{kind}_limit"][step].get(name, 0.0)
            off = distance(tensor, uncut.get(name))
            if not off <= limit:
                return f"{kind} of '{name}' in step {step + 1} by {off:.2g}"
    off = abs(cut["losses"][step] - whole["losses"][step])
    return None if off <= whole["loss_limit"][step] else f"loss of step {step + 1} by {off:.2g}"


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


def evaluation_data(job: Job) -> Any:
    """Return samples that a proof evaluates on: the first of the job's validation data, else of its
    training data.

    They are two batches less one sample, so that ranks get unequal parts; None for streams.
    """
    data = job.data if job.validation is None else job.validation
    if is_stream(data) or (job.own_step is not None and job.own_validate is None):
        return None
    return Subset(data, range(min(len(data), max(1, 2 * job.batch - 1))))


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
        gradients = run.step(rest).gradients
    except Exception:  # a BatchNorm can't take one sample
        return None
    if run.is_skipped or not whole:  # loss scaling found no scale yet in the first step
        return None
    kept = rest.samples / batch.samples
    return any(
        distance(gradient, gradients[name] * kept if name in gradients else None) > limit[name]
        for name, gradient in whole.items()
    )


# --- Files ---------------------------------------------------------------------------------------------------------


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
