"""The step that a script's loop takes with one batch: backwards and updates of its own order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from paceline.attached.functions import Called, cut
from paceline.attached.gather import SumsOfRows
from paceline.base.errors import PlanRefused, TrainingError
from paceline.base.nested import map_tensors
from paceline.base.streams import seed_streams
from paceline.job.named_optimizers import NamedOptimizers
from paceline.job.order import split
from paceline.strategies.layout import Layout, Whole
from paceline.training.feed import MicroBatch
from paceline.training.loop import Loop
from paceline.training.own_step.gathered import gathered
from paceline.training.own_step.step import BackwardWork, OwnStep
from paceline.training.own_step.step_batch import joined
from paceline.training.prefetch import Fed
from paceline.training.step import Backward
from paceline.training.window import WindowWork

Loss = Any  # a scalar, or (sum, count)
FUNCTION_HINT = (
    "run.backward(function), where function(batch) returns the loss, or run.backward(function, batch) with a "
    "batch that the loop has made of this rank's rows: it is called for each micro-batch"
)


@dataclass(frozen=True, slots=True)
class _ToCompute(MicroBatch):
    """A micro-batch with the script's function of a batch."""

    function: Callable[[Any], Loss] | None = None

    def call(self, model: Any) -> Loss:
        assert self.function is not None
        (batch,) = self.input
        return self.function(batch)


class Turn:
    """The step of one batch on this rank.

    Attributes:
        batch: This rank's rows of the batch, as the loader yields them; the first row of the batch if
            this rank has none.
        rows: How many of them count; while a function of a micro-batch runs, of the micro-batch.
    """

    def __init__(self, loop: Loop, fed: Fed, *, reads_ahead: bool) -> None:
        """reads_ahead: whether the next samples may be read before the script asks for them."""
        run, state = loop.run, loop.run.stepper
        self.loop, self.fed, self.state = loop, fed, state
        self.taken = OwnStep(
            state,
            fed.window,
            fed.placed,
            run.step,
            stop=loop.is_asked,
            beat=run.beat,
            on_launched=loop.on_launched if reads_ahead else lambda: None,
        )
        self.taken.observe = loop.observe
        state.before_forwards()
        self.batch = batch_of(self.taken.pieces)
        self.rows = self.taken.samples
        # The latest backward, and its mean loss over all ranks, until they have agreed about it.
        self._untold: tuple[Backward, torch.Tensor] | None = None
        self._has_buffers = next(iter(state.model.buffers()), None) is not None
        self.used: set[str] = set()  # parameters that some backward gave a gradient
        self.meets = False  # whether ranks wait for each other in backwards of this batch
        self.in_function = False  # whether a function of a micro-batch runs
        self.num_updates = 0
        self._forwards = ExitStack()  # what surrounds the script's forwards
        seed_streams(state.job.seed, "step", self.taken.number, state.loss_number, 0)
        self._expect_forwards()

    def _expect_forwards(self) -> None:
        """Prepare for forwards of the script, which end with the next backward or update."""
        if self.state.merges_edits and self.taken.backwards and self.taken.pending is None:
            self.state.edits.begin()  # so that no update is taken for an edit of a later forward
        for part in self.state.parts.values():
            for synchroniser in part.synchronisers:
                synchroniser.hold()
            if isinstance(part.layout, Whole):
                self._forwards.enter_context(part.layout.surrounding(self.rows))
        self.taken.beat("forward")

    def backward(self, loss: Loss, trains: Sequence[str], batch: Any = None) -> torch.Tensor:
        """Compute the gradients of a loss, and return its mean over all ranks, which is known when these agree: NaN
        until then. Collective.

        Args:
            loss: The loss of this rank's rows: a mean over them or (sum, count). Or a function of a
                batch that returns it; it is called for each micro-batch.
            trains: Names of the models that get gradients.
            batch: What the function is called with, cut into micro-batches; by default that of the loader.
        """
        state, taken, is_function = self.state, self.taken, callable(loss)
        parts = [taken.part(name) for name in trains]
        if not is_function:
            self._refuse_tensor(trains)
        taken.check_backward("run.backward")
        taken.agree_on_pending()
        self._tell_loss()
        taken.go_on()
        batches = [MicroBatch(None, None, self.rows)]
        if is_function:
            self._forwards.close()
            batches = self._to_compute(loss, batch)
        else:
            inputs = list(state.trained_by(parts)[0].values())
            layout = _Computed(
                parts[0].layout,
                loss,
                inputs if len(parts) < len(state.parts) else None,
                meets=self.meets or parts[0].layout.meets_in_forward,
            )
            parts[0] = replace(parts[0], layout=layout)  # type: ignore[arg-type]
        number = len(taken.backwards)
        work = BackwardWork(taken, parts, batches, *([number] if number else []))
        work.batches, work.criterion = batches, lambda loss, target: loss
        with taken.collecting(trains) if is_function else nullcontext():
            backward = taken.add(parts, work)
        mean = torch.full((), math.nan, dtype=torch.float64, device=state.device)
        self._untold = backward, mean
        self._tell_loss()
        self._forwards.close()
        if taken.pending is not None and self.is_whole and self._may_be_sum(loss, backward):
            self._divide(backward)
        self.used.update(name for name, p in backward.parameters.items() if p.grad is not None)
        self._expect_forwards()
        return mean

    @property
    def is_whole(self) -> bool:
        """Whether this rank runs whole models."""
        return all(isinstance(part.layout, Whole) for part in self.state.parts.values())

    def _to_compute(self, loss: Callable[[Any], Loss], batch: Any) -> list[MicroBatch]:
        """Return the micro-batches of a batch, as the layout runs a function of them."""
        pieces = self.taken.pieces
        parts = cut(batch, pieces) if batch is not None else [p.input[0] for p in pieces]
        if isinstance(loss, Called):
            return [
                MicroBatch(loss.input_of(rows), None, piece.samples)
                for piece, rows in zip(pieces, parts, strict=True)
            ]
        return [
            _ToCompute((rows,), None, piece.samples, function=self._of_rows(loss, piece.samples))
            for piece, rows in zip(pieces, parts, strict=True)
        ]

    def _tell_loss(self) -> None:
        """Tell the script the mean loss of its latest backward, if ranks have agreed about it."""
        if self._untold is not None and self._untold[0].agreed is not None:
            backward, mean = self._untold
            mean.copy_(backward.agreed[0] / backward.agreed[1])  # type: ignore[index]
            self._untold = None

    def gather(self, value: Any, sums: SumsOfRows) -> Any:
        """Return the rows of all ranks for a value with rows of this one's. Collective.

        Raises:
            PlanRefused: it is called for a micro-batch, or not on all ranks.
        """
        plan = self.loop.run.plan
        if self.in_function and len(self.taken.pieces) > 1:
            raise PlanRefused(
                f"plan '{plan}' runs each batch in {len(self.taken.pieces)} micro-batches, and run.gather is "
                "called in a function of one",
                hint="a plan without microbatches=M. What needs no gradient can be gathered before run.backward, and "
                "a step of a pl.Job has ctx.backward(..., gather=True), which cuts such losses, too",
            )
        if (
            self.in_function
            and sums.size > 1
            and not all(part.layout.meets_in_forward for part in self.state.parts.values())
        ):
            raise PlanRefused(
                f"plan '{plan}' calls a loss that is a function only where a rank has rows, and run.gather in it "
                "waits for all ranks",
                hint="compute the loss in the loop, and give run.backward(loss) the tensor",
            )
        return map_tensors(partial(self._gathered, sums), value)

    def _gathered(self, sums: SumsOfRows, rows: torch.Tensor) -> torch.Tensor:
        if not rows.ndim or len(rows) != max(self.rows, 1):
            raise TrainingError(
                f"run.gather is given a tensor of shape {tuple(rows.shape)}, and this rank has "
                f"{max(self.rows, 1)} rows of the batch",
                hint="give it tensors with a row for each of the batch along dim 0: of two views that are "
                "joined, x.chunk(2)",
            )
        window = self.taken.window
        everyone = gathered(
            rows[: self.rows],
            first=self.state.part.cuts(window.count)[0].start,
            count=window.count,
            device=self.state.device,
            add_up=sums,
        )
        self.meets |= everyone.requires_grad
        return everyone

    def _of_rows(self, loss: Callable[[Any], Loss], rows: int) -> Callable[[Any], Loss]:
        """Return the function of a micro-batch with so many rows."""

        def call(batch: Any) -> Loss:
            whole, self.rows, self.in_function = self.rows, rows, True
            try:
                return loss(batch)
            finally:
                self.rows, self.in_function = whole, False

        return call

    def _may_be_sum(self, loss: Loss, backward: Backward) -> bool:
        """Whether a loss may be a sum on some rank. All ranks return the same."""
        if not callable(loss):
            return isinstance(loss, tuple | list)
        if not all(split(self.taken.window.count, self.state.part.shares)):
            return True  # a rank without rows hasn't called the function
        return not all(tally.is_mean for tally in backward.tallies)

    def _divide(self, backward: Backward) -> None:
        """Let the gradients of a loss that is a sum be those of its mean from here on, because the script
        may look at them before the update. Collective; the host waits for the device.
        """
        sums = [tally.count for tally in backward.tallies if not tally.is_mean]
        figures = torch.tensor(
            [float(len(sums)), float(sum(map(float, sums)))], dtype=torch.float64
        )
        figures = self.state.step_sync.all_reduce_figures(figures.to(self.state.device))
        num_sums, count = figures.tolist()
        if num_sums and count:
            factor = backward.expected_count / count
            self.state.scale_gradients(factor, backward.parameters)
            backward.expected_count = count

    def _refuse_tensor(self, trains: Sequence[str]) -> None:
        """Refuse a loss that is a tensor, where forwards have to be run for it.

        Raises:
            PlanRefused: nothing of the step was changed.
        """
        plan, parts = self.loop.run.plan, self.state.parts
        if len(self.taken.pieces) > 1:
            why = f"runs each batch in {len(self.taken.pieces)} micro-batches"
        elif len(trains) < len(parts) and any(
            isinstance(part.layout, Whole) and part.layout.gathers_weights
            for part in parts.values()
        ):
            why = f"gathers each model's weights for its own backward, and '{trains[0]}' is trained"
        else:
            return
        raise PlanRefused(
            f"plan '{plan}' {why}, and run.backward is given a loss that is computed already",
            hint=FUNCTION_HINT,
        )

    def update(self, optimizer: str) -> None:
        """Clip the gradients of an optimizer, step it and its schedule, and drop the gradients. Collective."""
        verb = f"run.update({optimizer!r})" if optimizer else "run.update()"
        if optimizer and not isinstance(self.state.optimizer, NamedOptimizers):
            raise TrainingError(
                f"no optimizer '{optimizer}': pl.attach got one without a name", hint="run.update()"
            )
        names = self.taken.names_of(
            optimizer, verb, hint="run.backward(loss) before, in place of loss.backward()"
        )
        parameters = self.state.parameters
        if self.is_whole and all(
            parameters[name].grad is None for name in parameters.keys() & names
        ):
            if self.used.isdisjoint(names):
                raise TrainingError(
                    f"no loss of this batch uses what {verb} updates, such as '{min(names)}'",
                    hint="compute the loss from the model's output, without .detach() or no_grad",
                )
            raise TrainingError(
                "the gradients of run.backward were removed before run.update()",
                hint="leave optimizer.zero_grad() out: run.update() drops the gradients it has used",
            )
        self._forwards.close()
        with self.loop.spikes.explaining(self.fed):
            self.taken.update(optimizer, names)
        self._tell_loss()
        self.num_updates += 1
        self._expect_forwards()

    def end(self) -> None:
        """Count the step, and let the run do what is due. Collective.

        Raises:
            TrainingError: the script has not trained with the batch.
        """
        self._forwards.close()
        state, number = self.state, self.taken.number + 1
        if not self.taken.backwards:
            raise TrainingError(
                f"the loop asks for the next batch, and nothing was trained with that of step {number}",
                hint="run.backward(loss) and run.update() for each batch, in place of "
                "loss.backward() and optimizer.step()",
            )
        waiting = self.taken.unused_gradients()
        if waiting or not self.num_updates:
            of_what = f"the gradients of '{min(waiting)}'" if waiting else "a gradient"
            raise TrainingError(
                f"the loop asks for the next batch, and no run.update() has used {of_what} of step "
                f"{number}",
                hint="run.update() for each batch, in place of optimizer.step(): it clips, and steps "
                "optimizer and schedule. A batch of the loader is a step. For several micro-batches a "
                "step, give the loader the whole batch, and the plan microbatches=M. "
                "A loss that goes through a model which it doesn't train: run.backward(loss, 'generator')",
            )
        if state.merges_edits and self.taken.figures is not None and self._has_buffers:
            # The script may have written to a buffer after the update, in which ranks agreed.
            self.taken.go_on()
        with self.loop.spikes.explaining(self.fed):
            result = state.end_step(self.taken)
            self.loop.spikes.judge(result)
        self.loop.count(self.fed, result)


def batch_of(pieces: Sequence[MicroBatch]) -> Any:
    """Return the rows of this rank's micro-batches as the loader yields them; the first row of the
    batch if this rank has none.

    Raises:
        PlanRefused: the loader gives micro-batches other shapes.
    """
    real = [piece for piece in pieces if piece.samples] or pieces[:1]
    try:
        return joined([piece.input[0] for piece in real], [max(p.samples, 1) for p in real])
    except TrainingError as error:
        raise PlanRefused(
            f"the plan runs each batch in {len(real)} micro-batches, and the loader makes them of several "
            f"shapes: {error.args[0]}",
            hint="pad all samples to one length, or take a plan with one micro-batch a step",
        ) from error


@dataclass(frozen=True)
class _Computed:
    """The layout of a model whose forward the script has run: only the backward is left.

    inputs: parameters whose gradients are computed; None for all that the loss depends on.
    meets: whether a rank without rows takes part, because others wait for it.
    """

    layout: Layout
    loss: Loss
    inputs: Sequence[torch.nn.Parameter] | None
    meets: bool

    def run(self, batches: Sequence[MicroBatch], work: WindowWork) -> None:
        value = None
        if batches[0].samples or self.meets:
            value = work.loss(0, self.loss)
        work.before_backward(0)
        if value is not None and value.requires_grad:
            value.backward(inputs=self.inputs)

    def finish(self) -> None:
        self.layout.finish()
