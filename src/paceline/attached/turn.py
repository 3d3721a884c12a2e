"""The step that a script's loop takes with one batch: backwards and updates of its own order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.base.errors import PlanRefused, TrainingError, nearest
from paceline.base.streams import seed_streams
from paceline.job.named_optimizers import NamedOptimizers
from paceline.job.order import split
from paceline.strategies.compose import end_evaluation
from paceline.strategies.layout import Layout, Whole
from paceline.training.feed import MicroBatch
from paceline.training.loop import Loop
from paceline.training.own_step.named_parts import ModelPart
from paceline.training.own_step.step import OwnStep
from paceline.training.own_step.step_batch import joined
from paceline.training.prefetch import Fed
from paceline.training.rank_state import RankState
from paceline.training.scaling import power_of_two
from paceline.training.step import Backward
from paceline.training.window import WindowWork

Loss = Any  # a scalar, or (sum, count)


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
        gradients: The step's gradients before clipping, summed over the updates; kept if somebody
            looks at them.
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
        state.before_forwards()
        dtype = torch.float64 if state.job.precision == "float64" else None
        self.pieces = [batch.to(state.device, dtype) for batch in fed.placed]
        real = [piece for piece in self.pieces if piece.samples] or self.pieces[:1]
        self.batch = joined([piece.input[0] for piece in real], [max(p.samples, 1) for p in real])
        self.rows = self.taken.samples
        self.pending: Backward | None = None  # the first, if ranks still have to agree on it
        self.reached: set[str] = set()  # parameters of a backward that no update has used
        self.gradients = dict[str, torch.Tensor]()
        self._has_buffers = next(iter(state.model.buffers()), None) is not None
        self.used: set[str] = set()  # parameters that some backward gave a gradient
        self.num_updates = 0
        self._forwards = ExitStack()  # what surrounds the script's forwards
        seed_streams(state.job.seed, "step", self.taken.number, state.loss_number, 0)
        self._expect_forwards()

    def _expect_forwards(self) -> None:
        """Prepare for forwards of the script, which end with the next backward or update."""
        if self.state.merges_edits and self.taken.backwards and self.pending is None:
            self.state.edits.begin()  # so that no update is taken for an edit of a later forward
        for part in self.state.parts.values():
            hold(part.synchronisers)
            if isinstance(part.layout, Whole):
                self._forwards.enter_context(part.layout.surrounding(self.rows))
        self.taken.beat("forward")

    def backward(self, loss: Loss, trains: Sequence[str]) -> None:
        """Compute the gradients of a loss. Collective.

        Args:
            loss: The loss of this rank's rows: a mean over them or (sum, count). Or a function of a
                batch that returns it; it is called for each micro-batch.
            trains: Names of the models that get gradients.
        """
        state, is_function = self.state, callable(loss)
        if unknown := [name for name in trains if name not in state.parts]:
            raise TrainingError(f"no model '{unknown[0]}': {nearest(unknown[0], state.parts)}")
        if not is_function:
            self._refuse_tensor(trains)
        self._note("run.backward")
        self._agree()
        self.taken.go_on()
        parts = [state.parts[name] for name in trains]
        prefixes = tuple(part.prefix for part in parts)
        earlier = self._set_aside(prefixes)
        batches = [MicroBatch(None, None, self.rows)]
        if is_function:
            self._forwards.close()
            batches = [
                _ToCompute(
                    piece.input, None, piece.samples, function=self._of_rows(loss, piece.samples)
                )
                for piece in self.pieces
            ]
        else:
            inputs = [p for name, p in state.parameters.items() if name.startswith(prefixes)]
            layout = _Computed(
                parts[0].layout, loss, inputs if len(parts) < len(state.parts) else None
            )
            parts[0] = replace(parts[0], layout=layout)  # type: ignore[arg-type]
        work = _Work(self, batches, parts, runs_forwards=is_function)
        with collecting(state, trains) if is_function else nullcontext():
            self.pending = backward = self.taken.backward(parts, work)
        self._forwards.close()
        self.reached.update(backward.trainable)
        if not (state.has_one_backward and len(self.taken.backwards) == 1):
            self._agree()
        elif self._may_be_sum(loss, backward):
            self._divide(backward)
        for name, gradient in earlier.items():
            p = state.parameters[name]
            p.grad = gradient if p.grad is None else p.grad + gradient
        self.used.update(name for name, p in backward.parameters.items() if p.grad is not None)
        self._expect_forwards()

    def _of_rows(self, loss: Callable[[Any], Loss], rows: int) -> Callable[[Any], Loss]:
        """Return the function of a micro-batch with so many rows."""

        def call(batch: Any) -> Loss:
            whole, self.rows = self.rows, rows
            try:
                return loss(batch)
            finally:
                self.rows = whole

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
        if not all(isinstance(part.layout, Whole) for part in parts.values()):
            why = "splits the model over ranks"
        elif len(self.pieces) > 1:
            why = f"runs each batch in {len(self.pieces)} micro-batches"
        elif len(trains) < len(parts) and any(
            isinstance(part.layout, Whole) and part.layout.gathers_weights
            for part in parts.values()
        ):
            why = f"gathers each model's weights for its own backward, and '{trains[0]}' is trained"
        else:
            return
        raise PlanRefused(
            f"plan '{plan}' {why}, and run.backward is given a loss that is computed already",
            hint="run.backward(function), where function(batch) returns the loss: it is called for "
            "each micro-batch",
        )

    def _note(self, verb: str) -> None:
        """Report what the script calls before its collectives, because ranks may call other things."""
        if self.state.note_verb is not None:
            self.state.note_verb(self.taken.number + 1, verb)

    def _set_aside(self, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Remove and return gradients of earlier losses, which ranks have already summed."""
        earlier = {}
        for name, p in self.state.parameters.items():
            if not name.startswith(prefixes):
                continue
            if p.grad is not None and name in self.reached:
                earlier[name] = p.grad.clone()
            p.grad = None
        return earlier

    def _agree(self) -> None:
        """Agree about the pending backward, because no update follows it. Collective."""
        backward, self.pending = self.pending, None
        if backward is not None:
            self.taken.agree_later(backward)

    def update(self, optimizer: str) -> None:
        """Clip the gradients of an optimizer, step it and its schedule, and drop the gradients. Collective."""
        state, named = self.state, self.state.optimizer
        verb = f"run.update({optimizer!r})" if optimizer else "run.update()"
        names: Collection[str] = state.parameters
        if isinstance(named, NamedOptimizers):
            if optimizer not in named.members:
                raise TrainingError(
                    f"no optimizer '{optimizer}': {nearest(optimizer, named.members)}"
                )
            names = named.names[optimizer]
        elif optimizer:
            raise TrainingError(
                f"no optimizer '{optimizer}': pl.attach got one without a name", hint="run.update()"
            )
        parameters = {name: state.parameters[name] for name in names if name in state.parameters}
        if not self.reached.intersection(parameters):
            raise TrainingError(
                f"{verb} finds no gradient of what it updates",
                hint="run.backward(loss) before, in place of loss.backward()",
            )
        if all(p.grad is None for p in parameters.values()):
            if self.used.isdisjoint(parameters):
                raise TrainingError(
                    f"no loss of this batch uses what {verb} updates, such as '{min(parameters)}'",
                    hint="compute the loss from the model's output, without .detach() or no_grad",
                )
            raise TrainingError(
                "the gradients of run.backward were removed before run.update()",
                hint="leave optimizer.zero_grad() out: run.update() drops the gradients it has used",
            )
        self._note(verb)
        self._forwards.close()
        if self.pending is not None:
            self.taken.agree(self.pending)
            self.pending = None
        if self.loop.observe is not None:
            self._keep(parameters)
        self.taken.beat("optimizer")
        if not self.taken.is_skipped:
            state.before_update()
            state.step_optimizer(optimizer, parameters, self.taken.norm_on_device)
        for p in parameters.values():
            p.grad = None
        for part in state.parts.values():  # gathered weights are those before the update
            end_evaluation(part.synchronisers)
        if state.merges_edits:
            state.edits.updated()
        self.num_updates += 1
        self.reached -= parameters.keys()
        self.taken.norm_on_device = None
        self._expect_forwards()

    def _keep(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        for name, p in parameters.items():
            if p.grad is not None:
                earlier, gradient = self.gradients.get(name), p.grad.clone()
                self.gradients[name] = gradient if earlier is None else earlier + gradient

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
        if self.pending is not None:
            self._agree()
        waiting = [
            name
            for name in self.reached & state.parameters.keys()
            if state.parameters[name].grad is not None
        ]
        if waiting or not self.num_updates:
            of_what = f"the gradients of '{min(waiting)}'" if waiting else "a gradient"
            raise TrainingError(
                f"the loop asks for the next batch, and no run.update() has used {of_what} of step "
                f"{number}",
                hint="run.update() for each batch, in place of optimizer.step(): it clips, and steps "
                "optimizer and schedule. A batch of the loader is a step. For several micro-batches a "
                "step, give the loader the whole batch, and the plan accumulate=K. "
                "A loss that goes through a model which it doesn't train: run.backward(loss, 'generator')",
            )
        self._note("the next batch")
        state.has_one_backward &= len(self.taken.backwards) == 1
        if self.loop.observe is not None:
            for name, p in state.parameters.items():
                p.grad = self.gradients.get(name)
            self.loop.observe()
            for p in state.parameters.values():
                p.grad = None
        if state.merges_edits and self.taken.figures is not None and self._has_buffers:
            # The script may have written to a buffer after the update, in which ranks agreed.
            self.taken.is_decided = True
            self.taken.go_on()
        self.loop.count(self.fed, state.end_step(self.taken))


def hold(synchronisers: Sequence[Any]) -> None:
    """Prepare for a loss that may run a model several times before the step's own backward."""
    for synchroniser in synchronisers:
        if do := getattr(synchroniser, "hold", None):
            do()


@contextmanager
def collecting(state: RankState, trains: Collection[str]) -> Iterator[None]:
    """Let only these models get gradients inside the block. Other models run frozen."""
    others = [part for part in state.parts.values() if part.name not in trains]
    frozen = [p for part in others for p in part.layout.module.parameters() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    for part in others:
        for synchroniser in part.synchronisers:
            synchroniser.collect(on=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(True)
        for part in others:
            for synchroniser in part.synchronisers:
                synchroniser.collect(on=True)  # type: ignore[attr-defined]


class _Computed:
    """The layout of a model whose forward the script has run: only the backward is left.

    inputs: parameters whose gradients are computed; None for all that the loss depends on.
    """

    def __init__(
        self, layout: Layout, loss: Loss, inputs: Sequence[torch.nn.Parameter] | None
    ) -> None:
        self.layout, self.loss, self.inputs = layout, loss, inputs

    def run(self, batches: Sequence[MicroBatch], work: WindowWork) -> None:
        value = None
        if batches[0].samples or self.layout.meets_in_forward:
            value = work.loss(0, self.loss)
        work.before_backward(0)
        if value is not None and value.requires_grad:
            value.backward(inputs=self.inputs)

    def finish(self) -> None:
        self.layout.finish()


class _Work(WindowWork):
    """The micro-batches of one backward of a script."""

    def __init__(
        self,
        turn: Turn,
        batches: list[MicroBatch],
        parts: Sequence[ModelPart],
        *,
        runs_forwards: bool,
    ) -> None:
        state, taken = turn.state, turn.taken
        super().__init__(state, taken.window, batches, taken.number, state.loss_number, taken.beat)
        number = len(taken.backwards)
        self.batches = batches  # they are on the device
        self.runs_forwards, self.place = runs_forwards, (number,) if number else ()
        self.synchronisers = [each for part in parts for each in part.synchronisers]
        self.criterion = lambda loss, target: loss
        # Gradients of a loss that is a sum are about as large as those of a mean while they are summed.
        self.expected_count = power_of_two(taken.window.count)

    def before_forward(self, microbatch: int, stage: int) -> None:
        if self.runs_forwards:
            hold(self.synchronisers)
            super().before_forward(microbatch, stage)
