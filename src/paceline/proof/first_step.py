"""One device's first step, for the check before a run.

This module first computes limits without extra cost, and measures limits only if needed.

Each variation of a yardstick costs a forward and a backward. A first update can be judged without
them, by the rounding of the job's precision, and by how far the update moves if gradients are
shaken by a unit in the last place. These limits are never above those of `write_reference`, so
figures within them need nothing more. Only for figures beyond them, the yardstick is measured and
the batch is cut as the plan cuts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.base.streams import key_to_seed
from paceline.job import Job
from paceline.model.losses import RepeatableLoss
from paceline.model.randomness import WithoutRandomness
from paceline.proof.kept_rows import kept_rows
from paceline.proof.order import later_batches, whole_batches
from paceline.proof.problems import loss_problem, uneven_problem
from paceline.proof.reference_loop import (
    PlainRun,
    StepRecord,
    Variation,
    autocast,
    distance,
    expected_marks,
    gradients_of,
    greatest,
    part_of_batch,
)
from paceline.proof.tolerances import (
    ALL_KINDS,
    EPSILON,
    Dtypes,
    Kinds,
    PlainFigures,
    floors_of,
    limits_of,
    save_kind,
    spreads_of,
    state_sizes,
    widen,
    with_limits,
    write_cut,
)

_SHORT_S = 0.1  # Shorter steps lose more by waking threads and waiting for them than they gain.
# Seconds between questions whether cores are free; an operator of a long step takes about as long.
_ASKED_S = 0.02
_NUDGED = (Variation(nudge=1.0),)
_FEW = 4  # samples of a window that are examined


class FirstStep:
    """One device's first step with the whole batch; its tensors go to files in `folder`, as in
    `write_reference`.

    Args:
        random: Switches random layers off; entered here.
        take_cores: Called repeatedly in a step that is long enough to gain from more threads, until
            it returns that it has taken them.
    """

    def __init__(
        self, job: Job, folder: Path, random: WithoutRandomness, *, take_cores: Callable[[], bool]
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.job, self.folder, self.random = job, folder, random
        repeatable = RepeatableLoss(job.criterion)
        with random:
            self.run = run = PlainRun(job if job.models else replace(job, loss=repeatable))
            save_kind(
                folder, "initial", 0, {name: p.detach() for name, p in run.model.named_parameters()}
            )
            batch = next(whole_batches(job, 1))
            marks = [expected_marks(job, batch)]  # a model may write to what it is given
            random.forget()
            self.dtypes = _Watched({p.dtype for _, p in run.named}, take_cores)
            if job.models:
                run.around_updates = self.dtypes.paused
                with self.dtypes:
                    self.record = run.step(batch)
                loss, keeps_state = self.record.loss, False
            else:
                with self.dtypes:
                    loss = run.backward(batch)
                self.weights = [p.detach().clone() for p in run.model.parameters()]
                self.gradients = [
                    None if p.grad is None else p.grad.clone() for p in run.model.parameters()
                ]
                with autocast(job):
                    keeps_state = repeatable.keeps_state()
                self.record = run.update(loss, gradients_of(run.model))
        for kind in ALL_KINDS:
            save_kind(folder, kind, 0, self.record.tensors(kind))
        self.figures: dict[str, Any] = {
            "losses": [loss],
            "rates": [self.record.rates],
            "marks": marks,
            "draws": [len(random.drawn)],
            "most_repeats": random.most_repeats(),
            "seeds_itself": bool(random.seeds - {key_to_seed(job.seed, "step", 0, 0, 0)}),
            "skipped": [run.is_skipped],
            "overflow": None,
            "evaluation": {},
            "evaluation_limit": {},
            "coupling": None,
            "loss_keeps_state": keeps_state,
            "left_on": sorted(random.left_on),
            "state_sizes": [state_sizes(self.record)],
            "kept_rows": None,
            "cause": None,
        }
        if not job.models:
            with (
                random if random.is_needed else nullcontext(),
                suppress(Exception),
            ):  # the model may refuse half a batch
                self.figures["kept_rows"] = kept_rows(run, batch)

    def look_further(self, *, steps: int | None) -> None:
        """Look for problems that the first update does not show: uneven cuts, or other samples; see
        `uneven_problem`.

        All checks together use no more samples than a batch has.

        Args:
            steps: Of the whole job; None if the end of its data decides.
        """
        job, samples = self.job, min(_FEW, self.job.batch)
        # A job's own step needs new models for each batch.
        count = 1 if self.job.models else job.batch // samples
        if self.random.left_on:
            return
        with (
            self.random if self.random.is_needed else nullcontext(),
            suppress(Exception),
        ):  # the run will report it
            batches = (
                [part_of_batch(next(whole_batches(job, 1)), range(samples))]
                if steps is None
                else later_batches(job, steps=steps, count=count, samples=samples)
            )
            self.figures["cause"] = (
                str(problem) if (problem := uneven_problem(job, self.run.model, batches)) else None
            )

    def narrow(self) -> dict[str, Any]:
        """Return a reference like that of `write_reference`, with limits that need no second
        forward.
        """
        return self._reference(EPSILON[self.job.precision], ())

    def measured(
        self, *, shares: Sequence[int], microbatches: int, cut_folder: Path
    ) -> dict[str, Any]:
        """Return a reference with measured limits. Tensors of cut batches go to `cut_folder`; see
        `write_cut`.
        """
        epsilon = max(EPSILON[self.job.precision], self.dtypes.epsilon)
        with self.random if self.random.is_needed else nullcontext():
            reference = self._reference(epsilon, _NUDGED)
            if len(shares) > 1 or microbatches > 1:
                reference = write_cut(
                    self.job,
                    cut_folder,
                    reference,
                    beside=self.folder,
                    shares=shares,
                    microbatches=microbatches,
                    variations=_NUDGED,
                )
            if reference["coupling"] is not None:
                with suppress(Exception):  # the cause is only additional information
                    problem = loss_problem(self.job, steps=1)
                    reference["cause"] = str(problem) if problem is not None else reference["cause"]
        return reference

    def _reference(self, epsilon: float, variations: Sequence[Variation]) -> dict[str, Any]:
        floors = [
            {
                **floors_of(self.record, epsilon, largest_loss=abs(self.record.loss)),
                "evaluation": {},
            }
        ]
        spreads = spreads_of(
            self.job, PlainFigures(self.folder, self.figures["losses"], floors), variations, epsilon
        )
        with self.random if self.random.is_needed else nullcontext(), suppress(Exception):
            # If an optimizer can't be made a second time for one model, the limits omit its shaken
            # update.
            for kind, moved in self._shaken(epsilon).items():
                widen(spreads[0][kind], moved)
        return with_limits({**self.figures, "epsilon": epsilon}, limits_of(floors, spreads))

    def _shaken(self, epsilon: float) -> Kinds:
        """Return how far weights and optimizer state move if the same gradients are shaken by
        `epsilon`.
        """
        if self.job.models:
            shaken = PlainRun(self.job, variation=Variation(shake=epsilon))
            return self._moved(shaken.step(next(whole_batches(self.job, 1))))
        run = self.run
        with torch.no_grad():
            for p, weight, gradient in zip(
                run.model.parameters(), self.weights, self.gradients, strict=True
            ):
                p.copy_(weight)
                p.grad = None if gradient is None else gradient.clone()
        run.make_optimizer()
        run.draws.manual_seed(0)
        run.num_steps = 0
        record = run.update(
            self.record.loss, {}, shake=epsilon * greatest(self.record.gradients.values())
        )
        return self._moved(record)

    def _moved(self, record: StepRecord) -> Kinds:
        return {
            kind: {
                name: distance(tensor, record.tensors(kind).get(name))
                for name, tensor in self.record.tensors(kind).items()
            }
            for kind in ("weight", "state")
        }


class _Watched(Dtypes):
    """Record dtypes and also call `take_cores`, once operators have run for a while."""

    def __init__(self, seen: set[torch.dtype], take_cores: Callable[[], bool]) -> None:
        super().__init__(seen)
        self.take_cores, self.has_taken, self.asks_at_s = (
            take_cores,
            False,
            time.monotonic() + _SHORT_S,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.has_taken and time.monotonic() > self.asks_at_s:
            self.has_taken, self.asks_at_s = self.take_cores(), time.monotonic() + _ASKED_S
        return super().__torch_dispatch__(func, types, args, kwargs)
