"""Runs a job's own step on one rank: models, gradients of losses, updates. The step's code is the
same for every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from paceline.base.errors import PlanRefused, TrainingError
from paceline.base.nested import map_tensors
from paceline.base.streams import seed_streams
from paceline.job.own_step import BackwardResult, ModelNames
from paceline.model.casts import autocast
from paceline.model.forward_state import ForwardState
from paceline.strategies.batch_norm.run import apart
from paceline.strategies.layout import Whole
from paceline.training.feed import MicroBatch
from paceline.training.loss import read_tally, with_gradient, without_total
from paceline.training.own_step.gathered import gathered
from paceline.training.own_step.named_parts import ModelPart
from paceline.training.own_step.step import BackwardWork, OwnStep
from paceline.training.own_step.step_batch import GatheredBatch, StepBatch, input_of, joined
from paceline.training.own_step.step_draws import WindowDraws
from paceline.training.step import Backward


class Verbs:
    """The context of a job's own step on one rank; see `StepContext`."""

    def __init__(self, taken: OwnStep) -> None:
        self.taken = taken
        self.state, self.window, self.step = taken.state, taken.window, taken.number
        state, window = self.state, self.window
        self.batch = StepBatch(taken.pieces)
        self.first = min(
            state.part.cuts(window.count)[0].start, window.count - 1
        )  # place of the first sample here
        self.draws = WindowDraws(
            rows=len(self.batch),
            first=self.first,
            count=window.count,
            key=(state.job.seed, "own step", self.step),
            device=state.device,
            dtype=state.job.input_dtype,
        )
        self.number = 0  # number of verbs so far; it keys their random streams
        self.loss_samples: int | None = None  # of the micro-batch whose loss is computed now
        self.is_over_all = False  # whether one of all samples is

    def take(self) -> None:
        """Run the user's step. Collective as its verbs are."""
        step = self.state.job.own_step
        assert step is not None
        with self.draws:
            returned: Any = step(self, self.batch)
        if returned is not None:
            raise TrainingError(
                f"the step returned {type(returned).__name__}, which nothing would record",
                hint="validation_step= returns figures, of the validation data; a step returns nothing",
            )
        if not self.taken.backwards:
            raise TrainingError("the step trains nothing: it calls no ctx.backward")
        if waiting := self.taken.unused_gradients():
            raise TrainingError(
                f"the step ends with gradients of '{min(waiting)}' that no update has used",
                hint="ctx.update(...) of its optimizer after ctx.backward(...)",
            )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a step's context has no '{name}': it has alike, backward, gather, log, places, run, step and update. "
            "Models are run by name, ctx.run('generator', x); what needs their weights, such as an inner loop of "
            "gradient steps, belongs in a model's forward"
        )

    @property
    def in_loss(self) -> bool:
        """Whether the loss of a micro-batch is computed now."""
        return self.loss_samples is not None

    def log(self, name: str, value: Any) -> None:
        """See `StepContext`."""
        samples = self.loss_samples
        here = sum(piece.samples for piece in self.batch.pieces)
        self.taken.logged.add(
            name,
            value,
            source=f"ctx.log({name!r})",
            samples=here if samples is None else samples,
            whole=here if self.is_over_all else self.window.count,
            in_loss=self.in_loss,
        )
        self.taken.go_on()

    # --- Running -----------------------------------------------------------------------------------------------

    @property
    def places(self) -> torch.Tensor:
        """See `StepContext`. If replicas take their own steps, places count among the replica's own
        samples.
        """
        first = 0 if self.state.step_sync.has_own_steps else self.first
        return torch.arange(first, first + len(self.batch), device=self.state.device)

    def alike(self) -> AbstractContextManager[None]:
        """See `StepContext`."""
        return self.draws.alike()

    def gather(self, value: Any) -> Any:
        """See `StepContext`. Collective. If replicas take their own steps, a replica already has
        all samples of its step.
        """
        if self.in_loss:
            raise TrainingError(
                "ctx.gather is called inside a loss, which sees a micro-batch",
                hint="gather in the step, and let the loss close over what it returns",
            )
        with self.draws.paused(), torch.no_grad():
            return map_tensors(self._gathered, input_of(value))

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        if not rows.ndim or len(rows) != len(self.batch):
            raise TrainingError(
                f"ctx.gather is given a tensor of shape {tuple(rows.shape)}, and the batch has "
                f"{len(self.batch)} samples along dim 0",
                hint="give it tensors with a row a sample",
            )
        if self.state.step_sync.has_own_steps or self.state.step_sync.world_size == 1:
            return rows.detach().clone()
        is_here = self.state.mesh.is_first_of_same_samples and any(
            piece.samples for piece in self.batch.pieces
        )
        return gathered(
            rows if is_here else rows[:0],
            first=self.first,
            count=self.window.count,
            device=self.state.device,
            add_up=self.state.step_sync.all_reduce_figures,
        )

    def run(self, model: str, inputs: Any, *, grad: bool | None = None, cut: bool = True) -> Any:
        """See `StepContext`. Collective where the plan's forwards are."""
        part = self.taken.part(model)
        if self.in_loss:
            with self.draws.makes_on.paused():
                return self._run_in_loss(part, inputs, grad=grad is not False)
        if grad:
            raise TrainingError(
                f"ctx.run('{model}', grad=True) outside of a loss would have no backward",
                hint="run it inside the loss that ctx.backward is given, where gradients flow through",
            )
        if not cut and isinstance(inputs, StepBatch):
            raise TrainingError(
                f"ctx.run('{model}', batch, cut=False) would run other samples on each rank",
                hint="give it ctx.gather(batch), or leave cut=False out",
            )
        with self._verb():
            return (
                self._run_without_gradients(part, inputs) if cut else self._run_alike(part, inputs)
            )

    def _run_alike(self, part: ModelPart, inputs: Any) -> Any:
        """Return the output for inputs that all ranks have. Random numbers are drawn alike on each
        rank.
        """
        seed_streams(self.state.job.seed, "step", self.step, "alike", self.number)
        with torch.no_grad(), autocast(self.state.job, self.state.device), apart():
            output = part.layout.forward(MicroBatch(inputs, None, self.window.count))
        return self.state.shared_outputs(part, [output])[0]

    def _run_without_gradients(self, part: ModelPart, inputs: Any) -> Any:
        outputs, rows = [], []
        has_samples = any(piece.samples for piece in self.batch.pieces)
        for number, (piece, piece_inputs) in enumerate(
            zip(
                self.batch.pieces,
                self.batch.cut(inputs, f"what '{part.name}' is run with"),
                strict=True,
            )
        ):
            is_needed = piece.samples or (not has_samples and not number)
            if not is_needed and not part.layout.meets_in_forward:
                continue
            seed_streams(
                self.state.job.seed,
                "step",
                self.step,
                self.state.loss_number,
                number,
                self.number,
            )
            with torch.no_grad(), autocast(self.state.job, self.state.device):
                output = part.layout.forward(MicroBatch(piece_inputs, None, piece.samples))
            if is_needed:
                outputs.append(output)
                rows.append(max(piece.samples, 1))
        return joined(self.state.shared_outputs(part, outputs), rows)

    def _run_in_loss(self, part: ModelPart, inputs: Any, *, grad: bool) -> Any:
        batch = MicroBatch(input_of(inputs), None, 1)
        if isinstance(part.layout, Whole):
            with nullcontext() if grad else torch.no_grad():
                return batch.call(part.layout.module)
        if (
            part.name in self.state.job.followers
            and self.state.mesh.sizes[self.state.mesh.stage_axis] == 1
        ):
            with torch.no_grad():
                return part.layout.forward(batch)
        raise PlanRefused(
            f"a loss runs '{part.name}', and this plan splits each model over ranks by itself: a loss can't go through "
            "a second split model, nor through one twice",
            hint="data=N and shard=N plans run such a step. What needs no gradient can be run before: "
            f"y = ctx.run('{part.name}', ...) and ctx.backward(..., loss, y); several terms of one model can be "
            "backwards of their own, whose gradients add up",
        )

    # --- Gradients ---------------------------------------------------------------------------------------------

    def backward(
        self,
        model: ModelNames,
        inputs: Any,
        loss: Callable[..., Any],
        *more: Any,
        gather: bool = False,
    ) -> BackwardResult:
        """See `StepContext`. Collective."""
        names = (model,) if isinstance(model, str) else tuple(model)
        parts = [self.taken.part(name) for name in names]
        if follower := next((name for name in names if name in self.state.job.followers), None):
            raise TrainingError(
                f"ctx.backward would train '{follower}', which is a follower",
                hint="followers change with their source alone; a model in models= is trained",
            )
        if self.in_loss:
            raise TrainingError("ctx.backward is called inside a loss", hint="call it in the step")
        if len(parts) > 1 and not all(isinstance(part.layout, Whole) for part in parts):
            raise PlanRefused(
                f"one loss trains {' and '.join(map(repr, names))}, and this plan splits each model over "
                "ranks by itself",
                hint="a data=N or shard=N plan",
            )
        self.taken.check_backward("ctx.backward")
        if gather:
            loss, more = self._loss_of_rows(parts[0], inputs, loss, more)
        batches = self._batches(names[0], inputs, more)
        with self._verb(), self.taken.collecting(names):
            work = _Work(self, parts, batches, loss)
            backward = self.taken.add(parts, work)
        return BackwardResult(
            partial(self._mean, backward), partial(self._outputs, parts[0], batches, work.outputs)
        )

    def _mean(self, backward: Backward) -> torch.Tensor:
        """Return the loss of all samples. Collective if ranks still have to agree about it."""
        if self.taken.pending is backward:
            with self.draws.paused():
                # Loss scaling divides gradients when ranks decide, and more may be added to these.
                self.taken.agree_on_pending(decides=self.state.scaling is None)
        assert backward.agreed is not None
        loss, count = backward.agreed[:2].to(self.state.device)
        return loss / count

    def _outputs(
        self, part: ModelPart, batches: Sequence[MicroBatch], outputs: Mapping[int, Any]
    ) -> Any:
        """Return the outputs of this rank's samples, by those of its micro-batches. Collective under
        plans with stages.
        """
        numbers = [number for number, batch in enumerate(batches) if batch.samples] or [0]
        if isinstance(part.layout, Whole) and not outputs:  # nothing went back without samples
            with self.draws.paused(), torch.no_grad(), autocast(self.state.job, self.state.device):
                outputs = {0: part.layout.forward(batches[0])}
        here = [outputs[number] for number in numbers if number in outputs]
        return joined(self.state.shared_outputs(part, here), self.batch.rows)

    def _loss_of_rows(
        self, part: ModelPart, inputs: Any, loss: Callable[..., Any], more: tuple[Any, ...]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return a mean over samples whose gradients equal those of a loss over all samples, and
        its arguments for each sample.

        A first forward without gradients gives the outputs of all samples, and the loss is computed
        from them. A second forward with the same random numbers gives this rank's rows, which are
        weighted by the loss's slopes at the first outputs. Collective.
        """
        is_alone = self.state.step_sync.has_own_steps or self.state.step_sync.world_size == 1
        if is_alone and sum(piece.samples > 0 for piece in self.batch.pieces) == 1:
            return loss, more
        if not isinstance(part.layout, Whole):
            raise PlanRefused(
                f"a loss over all samples runs '{part.name}' twice, and this plan splits each model over "
                "ranks by itself",
                hint="a data=N or shard=N plan",
            )
        output = self._run_first(part, inputs)
        leaves: list[torch.Tensor] = []
        with self.draws.paused():
            everyone = map_tensors(lambda tensor: self._leaf(tensor, leaves), output)
            samples = len(self.batch) if self.state.step_sync.has_own_steps else self.window.count
            batch = GatheredBatch(
                self.batch, lambda value: map_tensors(self._gathered, value), samples
            )
            others = [map_tensors(self._gathered, input_of(each)) for each in more]
            seed_streams(self.state.job.seed, "step", self.step, "alike", self.number)
            self.is_over_all = True
            with autocast(self.state.job, self.state.device), self.draws.makes_on:
                tally = with_gradient(
                    read_tally(
                        without_total(
                            loss(everyone, batch, *others), samples=samples, whole=self.window.count
                        ),
                        samples=samples,
                    ),
                    everyone,
                    backward_goes_on=True,
                )
            value = tally.value if tally.is_mean else tally.value / tally.count
            self.is_over_all = False
            slopes = torch.autograd.grad(value, leaves, allow_unused=True)
        used = [number for number, slope in enumerate(slopes) if slope is not None]
        rows = [
            (slopes[number][self.places], leaves[number].detach()[self.places]) for number in used
        ]
        return partial(self._weighted, part.name, used, samples, value.detach()), tuple(
            zip(*rows, strict=True)
        )

    def _run_first(self, part: ModelPart, inputs: Any) -> Any:
        """Return the output of the forward for which backward will be called, and leave the model
        as it was.
        """
        assert isinstance(part.layout, Whole)
        buffers = ForwardState(part.layout.module).now().tensors
        with self._verb():
            output = self._run_without_gradients(part, inputs)
        self.number -= 1
        buffers.restore()
        return output

    def _leaf(self, rows: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
        """Return an output of all samples as a leaf, to compute a gradient with respect to it."""
        with torch.no_grad():
            everyone = self._gathered(rows)
        if everyone.is_floating_point():
            if everyone.dtype is torch.float16:  # slopes may be too small for float16
                everyone = everyone.float()
            leaves.append(everyone.requires_grad_())
        return everyone

    def _weighted(
        self,
        name: str,
        used: list[int],
        samples: int,
        value: torch.Tensor,
        output: Any,
        batch: Any,
        slopes: tuple[torch.Tensor, ...],
        known: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Return the sum of the outputs weighted by their slopes, as a number with the value of the
        loss.
        """
        outputs: list[torch.Tensor] = []
        map_tensors(
            lambda tensor: outputs.append(tensor) if tensor.is_floating_point() else None, output
        )
        product = value.new_zeros(())
        for number, slope, before in zip(used, slopes, known, strict=True):
            if self.taken.is_first and not _is_alike(outputs[number].detach(), before):
                raise TrainingError(
                    f"'{name}' gives another output when it is run again, and a loss over all samples "
                    "runs it twice in a step",
                    hint="keep what changes with a forward in buffers, and draw from torch's, NumPy's "
                    "or Python's own generators",
                )
            product = product + (outputs[number] * slope).sum() * (samples / len(slope))
        return product - product.detach() + value

    def _batches(self, name: str, inputs: Any, more: tuple[Any, ...]) -> list[MicroBatch]:
        """Return micro-batches whose target is what the loss is given beside the output."""
        cut = self.batch.cut(inputs, f"what '{name}' is run with")
        others = [self.batch.cut(each, "what the loss is given") for each in more]
        return [
            MicroBatch(
                piece_inputs,
                (StepBatch([piece]), *(each[number] for each in others)),
                piece.samples,
            )
            for number, (piece, piece_inputs) in enumerate(zip(self.batch.pieces, cut, strict=True))
        ]

    def update(self, optimizer: str) -> None:
        """See `StepContext` and `OwnStep.update`."""
        names = self.taken.names_of(
            optimizer, f"ctx.update('{optimizer}')", hint="ctx.backward(...) of its model before"
        )
        with self.draws.paused():
            self.taken.update(optimizer, names)

    # --- Around a verb -----------------------------------------------------------------------------------------

    @contextmanager
    def _verb(self) -> Iterator[None]:
        """Run a verb's models inside the block. Their random numbers come from separate streams."""
        with self.draws.paused():
            self.taken.agree_on_pending()
            self.taken.go_on()
            self.number += 1
            if self.state.merges_edits:
                self.state.edits.begin()
            yield


def _is_alike(repeated: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two outputs are equal up to the differences of kernels that do not repeat their
    results to the bit.
    """
    return (
        bool((repeated - other).abs().amax() <= 0.02 * other.abs().amax())
        if repeated.numel()
        else True
    )


class _Work(BackwardWork):
    """The micro-batches of one backward, whose loss runs as the step does."""

    def __init__(
        self,
        verbs: Verbs,
        parts: Sequence[ModelPart],
        batches: list[MicroBatch],
        loss: Callable[..., Any],
    ) -> None:
        super().__init__(verbs.taken, parts, batches, verbs.number)
        self.verbs, self.criterion, self.given_loss = verbs, self._given_loss, loss
        self.outputs: dict[int, Any] = {}  # by micro-batch

    def _given_loss(self, output: Any, target: tuple[Any, ...]) -> Any:
        with self.verbs.draws.makes_on:
            return self.given_loss(output, *target)

    def loss(self, microbatch: int, output: Any) -> torch.Tensor:
        self.verbs.loss_samples = self.batches[microbatch].samples
        self.outputs[microbatch] = map_tensors(torch.Tensor.detach, output)
        try:
            return super().loss(microbatch, output)
        finally:
            self.verbs.loss_samples = None
