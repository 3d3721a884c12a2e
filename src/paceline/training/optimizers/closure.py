"""Steps of optimizers that evaluate the loss themselves: L-BFGS and its line search, SAM,
extragradient.

Such an optimizer gets a closure, as in a plain loop. The closure zeroes gradients, runs the whole
window again and returns the window's loss. Under a plan every rank takes part in an evaluation.
Ranks that hold all parameters call the closure equally often, because they see equal losses and
gradients. If one rank updates what several hold in parts, it tells the others when to evaluate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.base.errors import TrainingError
from paceline.model.copy_on_write import TensorSnapshot
from paceline.strategies.mesh import local_part
from paceline.torch_private.optimizers import mark_stepped
from paceline.training.clipping import clip
from paceline.training.optimizers.gather import GatheredTensors
from paceline.training.optimizers.schedule import step_schedule

if TYPE_CHECKING:
    from paceline.training.rank_state import RankState
    from paceline.training.step import TrainingStep

Evaluate = Callable[
    [], float
]  # computes loss and gradients at the current weights; collective as the plan is


class Closure:
    """The closure that an optimizer calls in one step.

    The step's first evaluation is made before the optimizer is called, because some optimizers
    start from existing gradients (SAM). If the first call finds weights and gradients as that
    evaluation left them, the closure returns the result of that evaluation.
    """

    def __init__(self, loss: float, evaluate: Evaluate, parameters: Iterable[nn.Parameter]) -> None:
        self._loss, self._evaluate = loss, evaluate
        self._first: (
            list[tuple[nn.Parameter, TensorSnapshot, torch.Tensor | None, TensorSnapshot | None]]
            | None
        ) = [
            (
                p,
                TensorSnapshot(p),
                p.grad,
                None if p.grad is None or p.grad.is_sparse else TensorSnapshot(p.grad),
            )
            for p in parameters
        ]

    def __call__(self) -> torch.Tensor:
        """Return the window's mean loss, a float64 scalar. The gradients are in the parameters."""
        first, self._first = self._first, None
        if first is None or any(_is_changed(*each) for each in first):
            del first  # a write to a value that is still kept would copy it
            with torch.enable_grad():
                self._loss = self._evaluate()
        return torch.tensor(self._loss, dtype=torch.float64)


def _is_changed(
    parameter: nn.Parameter,
    weight: TensorSnapshot,
    gradient: torch.Tensor | None,
    value: TensorSnapshot | None,
) -> bool:
    return (
        weight.is_changed()
        or parameter.grad is not gradient
        or (value is not None and value.is_changed())
    )


def step_gathered(
    optimizer: Optimizer, gathered: GatheredTensors, loss: float, evaluate: Evaluate
) -> None:
    """Take a step of the rank that updates all of `gathered`. The other ranks evaluate when it
    does. Collective over its group.

    loss: the loss of the evaluation that was made already.
    """

    def evaluate_together() -> float:
        gathered.after_update()
        loss = evaluate()
        gathered.before_update()
        return loss

    def lead() -> float:
        _tell(gathered, is_over=False)
        return evaluate_together()

    gathered.before_update()
    if gathered.whole:
        optimizer.step(Closure(loss, lead, gathered.whole.values()))  # type: ignore[arg-type]
        _tell(gathered, is_over=True)
    else:
        while not _tell(gathered):
            evaluate_together()
    gathered.after_update()


def _tell(gathered: GatheredTensors, *, is_over: bool = False) -> bool:
    """Tell the group whether the optimizer's step is over. The group's first rank decides.
    Collective over the group.
    """
    device = next(iter(gathered.parameters.values())).device
    message = torch.tensor(int(is_over), device=device)
    dist.broadcast(message, group=gathered.group, group_src=0)
    return bool(message)


def update_with_closure(
    state: RankState, step: TrainingStep, first_loss: float, evaluate: Callable[..., float]
) -> None:
    """Update with an optimizer that decides how often it evaluates the loss. Collective as
    its evaluations are.

    Args:
        first_loss: Of the step's first evaluation, whose gradients are there.
        evaluate: Makes another evaluation, and returns its loss.

    Raises:
        TrainingError: an evaluation's loss was not finite, and neither are the weights that
            resulted.
    """
    losses = [first_loss]

    def evaluate_again() -> float:
        assert step.figures is not None
        if len(state.mesh.replicas) > 1:
            group, changed = state.mesh.group("replicas"), bool(step.figures.changed)
            state.buffers.meet(step.sample_share, group, has_unsynced=changed)
        state.before_forwards()
        losses.append(evaluate(is_again=True))
        step.beat("optimizer")
        _prepare(state, step)
        return losses[-1]

    _prepare(state, step)
    if state.gathered is not None:
        step_gathered(state.optimizer, state.gathered, first_loss, evaluate_again)
        if not state.gathered.whole:
            mark_stepped(state.optimizer)  # schedules check this
    else:
        state.optimizer.step(Closure(first_loss, evaluate_again, state.parameters.values()))
    if not all(map(math.isfinite, losses)):
        _refuse_weights_that_are_not_finite(state, losses, step.number)
    step_schedule(state.schedule)


def _prepare(state: RankState, step: TrainingStep) -> None:
    """Clip gradients, and copy those of replicas, because they are summed in memory that the next
    evaluation overwrites.

    The gradients of one device stay.
    """
    if step.norm_on_device is not None:
        clip(state.job.clip, state.parameters, step.norm_on_device)
    if state.gathered is None and state.synchronisers:
        for p in state.parameters.values():
            p.grad = None if p.grad is None else p.grad.clone()


def _refuse_weights_that_are_not_finite(
    state: RankState, losses: Sequence[float], step: int
) -> None:
    """Refuse weights that are not finite after an update. Collective over all ranks.

    losses: those of the step's evaluations, of which some are not finite.
    """
    is_finite = all(
        bool(local_part(p.detach()).isfinite().all()) for p in state.parameters.values()
    )
    is_bad = torch.tensor(float(not is_finite), device=state.device)
    if state.mesh.world_size > 1:
        dist.all_reduce(is_bad, dist.ReduceOp.MAX)
    if bool(is_bad):
        number = next(number for number, loss in enumerate(losses, 1) if not math.isfinite(loss))
        raise TrainingError(
            f"the loss is {losses[number - 1]} in evaluation {number} of step {step + 1}, and "
            f"{type(state.optimizer).__name__} makes weights of it that are not finite",
            hint="a lower learning rate, a line search, or clip=1.0",
        )
