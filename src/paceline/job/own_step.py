"""The values that a job with its own step function uses: named optimizers, followers, and checks of
both.

Named models become one module, `named_models.NamedModels`, and named optimizers become one
optimizer. So checkpoints, proofs and messages all name a parameter as `MODEL.NAME`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from paceline.base.errors import TrainingError

if TYPE_CHECKING:
    import torch


ModelNames = str | tuple[str, ...]


def computed_in_loop(
    *given: Any, state: Mapping[str, Any], tried: Callable[..., Any] | None = None
) -> Any:
    """The loss, or with several models the step, of a job whose loop is a script's.

    Nobody calls a loss. A step is only tried, where a plan has to know what models write to: by `tried`. So is
    a loss that is recorded with its model.
    """
    if tried is None:
        raise AssertionError("the script's loop computes the loss")
    return tried(*given)


def is_of_script(job: Any) -> bool:
    """Whether a script's own loop trains and evaluates."""
    return getattr(job.training_step or job.loss, "func", None) is computed_in_loop


@dataclass(frozen=True)
class Optimizer:
    """One of a job's named optimizers, if it needs more than a function that builds it.

    Args:
        build: Builds the optimizer from (name, parameter) pairs; names are `MODEL.NAME`.
        parameters: The parameters that it updates: a model's name, several names, or a function
            (name, parameter) -> whether it updates this one. By default these are all parameters of
            the model that has the optimizer's name. Each trainable parameter has one optimizer.
        lr_schedule: Builds a learning-rate scheduler from the optimizer; it is stepped after each
            of its updates.
        clip: Greatest norm of the gradients of an update.
    """

    build: Callable[[Any], Any]
    parameters: ModelNames | Callable[[str, Any], bool] | None = None
    lr_schedule: Callable[[Any], Any] | None = None
    clip: float | None = None


@dataclass(frozen=True)
class FollowerModel:
    """A model whose weights are a function of another's; made by `ema`, `copy_every` and `frozen`.

    It begins as its source, runs in evaluation mode, and no loss trains it. After each step in
    which it moves, it takes over the source's buffers as they are.
    """

    source: str | Callable[[], Any]  # name of a model, or a function that builds a frozen one
    # The part of its own weights that a move keeps, or a function that gives it for a step, from 0.
    # A follower of 1.0 never moves.
    momentum: float | Callable[[int], float]
    every: int = 1  # steps between moves

    @property
    def is_moving(self) -> bool:
        """Whether the follower moves after some step."""
        return callable(self.momentum) or self.momentum != 1.0

    def momentum_after(self, step: int) -> float:
        """Return the part of its own weights that it keeps after a step, counted from 0; 1.0 if it
        does not move.

        Raises:
            TrainingError: the job's function returns no number from 0 to 1.
        """
        if (step + 1) % self.every:
            return 1.0
        if not callable(self.momentum):
            return self.momentum
        momentum = self.momentum(step)
        if not isinstance(momentum, int | float) or not 0 <= momentum <= 1:
            raise TrainingError(
                f"the momentum of a follower of {self.source!r} must be a number from 0 to 1, and its "
                f"function returned {momentum!r} for step {step}"
            )
        return float(momentum)


def ema(source: str, momentum: float | Callable[[int], float]) -> FollowerModel:
    """Return the exponential moving average of a model's weights as a follower.

    After each step it becomes `momentum * itself + (1 - momentum) * source`.

    Args:
        momentum: A number from 0 to 1, or a function of the number of the step, from 0, that
            returns it: `lambda step: step / (step + 1)` gives the mean of the weights after every
            step. Every rank calls it, so it must depend on the step alone.
    """
    return FollowerModel(source, momentum)


def copy_every(source: str, steps: int) -> FollowerModel:
    """Return a copy of a model's weights that is renewed every `steps` steps, such as a target
    network.
    """
    return FollowerModel(source, 0.0, steps)


def frozen(source: str | Callable[[], Any]) -> FollowerModel:
    """Return a model that never changes: a teacher that `source` builds, or a named model with its
    initial weights.
    """
    return FollowerModel(source, 1.0)


class BackwardResult:
    """The result of `StepContext.backward`. Ranks may exchange what is asked of it, so all must ask
    alike.

    It is false, so that `ctx.backward(...) or ctx.update(...)` in a lambda takes both.
    """

    def __init__(self, loss: Callable[[], torch.Tensor], outputs: Callable[[], Any]) -> None:
        self._loss, self._outputs = loss, outputs

    @cached_property
    def loss(self) -> torch.Tensor:
        """The loss over all samples of the step, equal on every rank: a scalar in float64, without
        gradient.
        """
        return self._loss()

    @cached_property
    def outputs(self) -> Any:
        """The model's outputs for this process's samples, without gradients, as `run` returns them."""
        return self._outputs()

    def __bool__(self) -> bool:
        return False


class StepContext(Protocol):
    """The operations of a job's own step function.

    Tensors that are given and returned have this process's samples along dim 0. On one device these
    are all samples of the step, otherwise a part of them; a step function need not know which.
    """

    step: int  # number of the step, from 0

    @property
    def places(self) -> torch.Tensor:
        """The positions of this process's samples among all of the step: whole numbers of shape
        (samples,).

        On one device they are 0, 1, 2, ... They are the rows of `gather`'s result that belong to
        this process.
        """

    def alike(self) -> AbstractContextManager[None]:
        """Return a context in which every rank draws the same random numbers, whatever the shape:
        `with ctx.alike():`.

        It is for random numbers that do not belong to samples. Outside of it, a tensor with as many
        rows as this process has samples counts as one of samples.
        """

    def gather(self, value: Any) -> Any:
        """Return tensors with the rows of all samples of the step, equal on every rank and without
        gradients.

        The tensors that are given have a row for each sample of this process. Collective. It can't
        be used inside a loss.
        """

    def run(self, model: str, inputs: Any, *, grad: bool | None = None, cut: bool = True) -> Any:
        """Return a model's output for inputs: a tensor, a tuple for *args, a mapping for **kwargs,
        or the batch itself.

        In a loss, a gradient flows through the model to its inputs; only the models that `backward`
        names get gradients of their own. Elsewhere the model runs without gradients, and
        `grad=True` is refused.

        Args:
            cut: Whether inputs are cut into micro-batches. With False the inputs are of the whole
                step, as `gather` returns them, or of no sample, and every rank runs the model on
                them once. So buffers that the forward writes stay equal.
        """

    def backward(
        self,
        model: ModelNames,
        inputs: Any,
        loss: Callable[..., Any],
        *more: Any,
        gather: bool = False,
    ) -> BackwardResult:
        """Add the gradients of a loss to a model's, and return the loss and the outputs. Collective.

        The engine cuts inputs and `more` into micro-batches, runs the model on each, and calls
        `loss(output, batch, *more)` once for each, where batch is the micro-batch of the step's
        batch. The loss returns a scalar, the mean over its samples, or (sum, count).

        Args:
            model: The model that runs and is trained. Of several names, the first one runs and all
                are trained.
            gather: Whether the loss is called once, with the outputs of all samples of the step,
                their batch and their part of `more`. Gradients then go to all outputs. This is for
                losses that compare samples. If other ranks have some of the samples, the model runs
                twice, with the same random numbers. Only one model can be named, and such a loss
                runs no model.
        """

    def log(self, name: str, value: Any) -> None:
        """Record a figure of the step in metrics.jsonl, over the samples of all processes.

        In a loss, the figure is of the loss's micro-batch, and otherwise of this process's samples.

        Args:
            value: A scalar, the mean over these samples; or (sum, count); or `paceline.total(sum)`.
        """

    def update(self, optimizer: str) -> None:
        """Clip the gradients of an optimizer's parameters, step it and its schedule, and drop the
        gradients. Collective.
        """


def spec(optimizer: Any) -> Optimizer:
    """Return a job's named optimizer as an `Optimizer`, even if a function was given."""
    return optimizer if isinstance(optimizer, Optimizer) else Optimizer(optimizer)
