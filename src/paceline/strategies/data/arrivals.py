"""When a gradient is complete: backward reports each time that it adds to a gradient, and may add to it again.

If a layer is used several times in one backward, backward reports it once, with two exceptions: reentrant checkpoints
run a separate backward for each use, and stages of one rank may share the layer. Nothing therefore leaves early in the
first window. That window shows which parameters are added to again, and these never leave early afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from paceline.base.errors import TrainingError


class GradientArrivals:
    """Gradients of one window as they come.

    arrived: parameters with a gradient of this window. complete: those that are taken to get nothing more.
    is_first: whether this is the first window.

    Args:
        name: Of a parameter, or of what stands for it here, for messages.
        has_left: Whether a parameter's gradient was sent off already.
    """

    def __init__(self, name: Callable[[Any], str], has_left: Callable[[Any], bool]) -> None:
        self._name, self._has_left = name, has_left
        self._repeated: set[Hashable] = set()
        self._in_last: set[Hashable] = set()
        self.is_first = True
        self.arrived: set[Hashable] = set()
        self.complete: set[Hashable] = set()

    def begin(self) -> None:
        """A window begins."""
        self.arrived, self.complete, self._in_last = set(), set(), set()

    def add(self, parameter: Hashable, *, last: bool) -> bool:
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
                    hint="use_reentrant=False in torch.utils.checkpoint, where a layer is used more than once",
                )
        if last:
            self._in_last.add(parameter)
        if not last or self.is_first or parameter in self._repeated or parameter in self.complete:
            return False
        self.complete.add(parameter)
        return True

    def end(self) -> None:
        """All backwards of the window are through."""
        self.is_first = False
