"""When a gradient is complete: backward tells of each time that it adds to one, and may add again.

A layer that is used several times in one backward is told of once, unless reentrant checkpoints run a backward of
their own for each use, or stages of one rank share it. So nothing leaves early in the first window, which shows which
parameters are added to again, and those never leave early afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.errors import TrainingError


class Arrivals:
    """Gradients of one window as they come.

    arrived: parameters with a gradient of this window. complete: those that are taken to get nothing more.

    Args:
        name: Of a parameter, for messages.
        has_left: Whether a parameter's gradient was sent off already.
    """

    def __init__(self, name: Callable[[torch.Tensor], str], has_left: Callable[[torch.Tensor], bool]) -> None:
        self._name, self._has_left = name, has_left
        self._repeated: set[torch.Tensor] = set()
        self._in_last: set[torch.Tensor] = set()
        self._is_first = True
        self.arrived: set[torch.Tensor] = set()
        self.complete: set[torch.Tensor] = set()

    def begin(self) -> None:
        """A window begins."""
        self.arrived, self.complete, self._in_last = set(), set(), set()

    def add(self, parameter: torch.Tensor, *, last: bool) -> bool:
        """Backward has added to a gradient. Whether it is complete now, as far as is known.

        last: whether it does so for the last micro-batch.

        Raises:
            TrainingError: the gradient was sent off already.
        """
        self.arrived.add(parameter)
        if parameter in self._in_last:
            self._repeated.add(parameter)
            if self._has_left(parameter):
                raise TrainingError(
                    f"backward added to the gradient of '{self._name(parameter)}' again after it was complete and sent "
                    "to the other replicas, which no backward before did; the weights of the step before are kept",
                    hint="use_reentrant=False in torch.utils.checkpoint, where a layer is used more than once")
        if last:
            self._in_last.add(parameter)
        if not last or self._is_first or parameter in self._repeated or parameter in self.complete:
            return False
        self.complete.add(parameter)
        return True

    def end(self) -> None:
        """All backwards of the window are through."""
        self._is_first = False
