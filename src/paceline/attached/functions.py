"""Losses that are functions of a batch, under plans that split the model.

Ranks run parts of the model, so that the script's own call of it can't run there. Its function is recorded together
with the model, as a module that is called with a batch, and the layout runs the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.base.errors import TrainingError
from paceline.job import Job
from paceline.job.compute import BatchLossBuilder
from paceline.job.own_step import computed_in_loop
from paceline.model.forward_state import cells_of
from paceline.model.reads import frozen
from paceline.training.feed import MicroBatch
from paceline.training.own_step.step_batch import StepBatch, map_rows

if TYPE_CHECKING:
    from paceline.training.rank_state import RankState

_KEPT = 32  # most functions of a script that are told apart
_FUNCTION = (
    "_paceline_function"  # of the module, where recordings look for the variables that it reads
)
_recording = [False]  # whether a function is called for a recording


@dataclass(frozen=True)
class Called:
    """A function of the script. Recordings know it by its number."""

    function: Callable[[Any], Any]
    number: int

    def __call__(self, batch: Any) -> Any:
        return self.function(batch)

    def input_of(self, batch: Any) -> Any:
        """Return the input of the module that is recorded: the batch, and which function gets it."""
        return ((batch, self.number),)


class Functions:
    """The functions that a script gives, one for all that compute the same: a loop may make its lambda anew."""

    def __init__(self) -> None:
        self._known: dict[int, Called] = {}
        self._count = 0

    def called(self, function: Callable[[Any], Any], module: nn.Module | None = None) -> Called:
        """Return a function as it is recorded. module: the one that is recorded, if it is built."""
        key = _key(function)
        called = next((c for c in self._known.values() if _key(c.function) == key), None)
        if called is None:
            self._count += 1
            called = self._known[self._count] = Called(function, self._count)
            self._known.pop(self._count - _KEPT, None)
        if module is not None:
            vars(module)[_FUNCTION] = called.function
        return called

    def compute(self, model: nn.Module, given: tuple[Any, int]) -> Any:
        """Return what a function gives for a batch, for a recording."""
        batch, number = given
        before, _recording[0] = _recording[0], True
        try:
            return self._known[number].function(batch)
        finally:
            _recording[0] = before

    def answer_calls(self, module: nn.Module, state: RankState) -> None:
        """Let the script's own module run in the layout where the loop calls it, such as to look at its outputs."""
        forward, (part,) = module.forward, state.parts.values()

        def call(given: tuple[Any, Any]) -> Any:
            return module(*given[0], **given[1])

        def run(*args: Any, **kwargs: Any) -> Any:
            if _recording[0]:
                return forward(*args, **kwargs)
            if torch.is_grad_enabled():
                raise TrainingError(
                    "the loop calls the model for gradients outside of the function of run.backward, under a "
                    "plan that splits the model",
                    hint="call it inside of run.backward(function), or with torch.no_grad()",
                )
            given = self.called(call, state.model).input_of((args, kwargs))
            mode, state.model.training = state.model.training, module.training
            try:
                output = part.layout.forward(MicroBatch(given, None, 1))
            finally:
                state.model.training = mode
            return state.shared_outputs(part, [output])[0]

        vars(module)["forward"] = run

    def recorded(self, job: Job, called: Called, collate: ShownBatch) -> Job:
        """Return the job of a script's loop with the module that is recorded in place of its model."""
        loss: Any = job.loss
        builder = BatchLossBuilder(job.model, self.compute, None)

        def build() -> nn.Module:
            module: nn.Module = builder()
            vars(module)[_FUNCTION] = called.function
            return module

        return replace(
            job,
            model=build,
            loss=partial(computed_in_loop, state=loss.keywords["state"], tried=_as_computed),
            collate=collate,
        )


def _key(function: Any) -> Any:
    """Return what is equal for functions that compute the same now."""
    if isinstance(function, partial):
        return _key(function.func), frozen(function.args), frozen(function.keywords)
    own = getattr(function, "__func__", function)
    if not hasattr(own, "__code__"):
        return frozen(function)
    cells = [frozen(value) for _, value in cells_of(own)]
    bound = frozen(getattr(function, "__self__", None))
    return own.__code__, bound, frozen(own.__defaults__), frozen(own.__kwdefaults__), cells


def refuse_recording(verb: str) -> None:
    """Refuse what a recorded function can't ask for, because it is called when it is recorded and not in each step.

    Raises:
        TrainingError: such a function is being recorded.
    """
    if _recording[0]:
        raise TrainingError(
            f"{verb} is used inside of the function of run.backward, which is recorded under a plan that "
            "splits the model, and not called in each step",
            hint="use what the batch holds, such as len(batch[0]); log outside of the function, or a data=N "
            "plan, which calls it",
        )


class ShownBatch:
    """Collates samples, or while a model is laid out, makes batches like one that the script has given."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate
        self.__qualname__ = type(collate).__qualname__  # by which a run that goes on knows it
        self._shown: tuple[Any, int, Called] | None = None

    @contextmanager
    def showing(self, batch: Any, rows: int, called: Called) -> Iterator[None]:
        """Make batches of these rows inside the block, for a function."""
        self._shown = batch, rows, called
        try:
            yield
        finally:
            self._shown = None

    @property
    def of_stacked(self) -> Any:
        """See `WholeBatch`."""
        return None if self._shown is not None else getattr(self.collate, "of_stacked", None)

    def __call__(self, items: list[Any]) -> Any:
        if self._shown is None:
            return self.collate(items)
        batch, rows, called = self._shown
        places = [place % rows for place in range(len(items))]
        return called.input_of(some_rows(batch, rows, places)), None


def some_rows(value: Any, rows: int, places: Sequence[int]) -> Any:
    """Return rows of a batch that has `rows`, by their places."""

    def taken(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf)(leaf[place] for place in places)
        return leaf[list(places)] if leaf.ndim and len(leaf) == rows else leaf

    return map_rows(taken, value, rows)


def cut(batch: Any, pieces: list[MicroBatch]) -> list[Any]:
    """Cut a batch that the script has made of this rank's rows into those of each micro-batch.

    Raises:
        TrainingError: a tensor in it has another number of rows.
    """
    try:
        return StepBatch(pieces).cut(batch, "the batch of run.backward")
    except TrainingError as error:
        error.hint = "close over what belongs to no row of the batch in the function"
        raise


def _as_computed(output: Any, target: None) -> Any:
    return output
