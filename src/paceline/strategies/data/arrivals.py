"""Decides when a gradient is complete. Backward reports each addition to a gradient, and may add to
it again.

If a layer is used several times in one backward, backward reports it once, with two exceptions:
reentrant checkpoints run a separate backward for each use, and stages of one rank may share the
layer. Therefore no gradient is sent early in the first window. That window shows which gradients
are added to again, and these are never sent early afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from paceline.base.errors import TrainingError


class GradientArrivals:
    """The arrivals of gradients in one window.

    Args:
        name: Returns the name of a parameter, or of the key that represents it here, for messages.
        has_left: Whether a parameter's gradient was already sent.
    """

    def __init__(self, name: Callable[[Any], str], has_left: Callable[[Any], bool]) -> None:
        self._name, self._has_left = name, has_left
        self._repeated: set[Hashable] = set()
        self._in_last: set[Hashable] = set()
        self.is_first = True  # whether this is the first window
        self.arrived: set[Hashable] = set()  # parameters with a gradient in this window
        self.complete: set[Hashable] = set()  # those that are expected to get no more additions

    def begin(self) -> None:
        """Begin a window."""
        self.arrived, self.complete, self._in_last = set(), set(), set()

    def add(self, parameter: Hashable, *, last: bool) -> bool:
        """Record that backward has added to a gradient.

        Args:
            last: Whether the backward is that of the last micro-batch.

        Returns:
            Whether the gradient is complete now, as far as is known.

        Raises:
            TrainingError: the gradient was already sent.
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
        """End the window after all its backwards."""
        self.is_first = False
