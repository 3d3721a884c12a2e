"""Steps of optimizers that evaluate the loss themselves: L-BFGS and its line search, SAM,
extragradient.

Such an optimizer gets a closure, as in a plain loop. The closure zeroes gradients, runs the whole
window again and returns the window's loss. Under a plan every rank takes part in an evaluation.
Ranks that hold all parameters call the closure equally often, because they see equal losses and
gradients. If one rank updates what several hold in parts, it tells the others when to evaluate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.model.copy_on_write import TensorSnapshot
from paceline.training.optimizers.gather import GatheredTensors

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
