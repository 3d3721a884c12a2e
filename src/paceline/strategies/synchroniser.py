"""A strategy's synchronisers act in a step, beside its changes of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from paceline.strategies.state_tensors import SavedState, StateTensor


class Synchroniser(Protocol):
    """Runs the collectives of one strategy at the right moments of a step.

    A class that inherits from it leaves out the moments at which it has nothing to do.
    """

    def begin(self, *, last: bool) -> None:
        """Prepare for the forward of the next micro-batch.

        last: whether it is the last one of the update.
        """
        return

    def unused(self) -> set[str]:
        """Return the names of parameters that no backward of this rank has reached.

        They have a gradient only because other ranks may have one. Valid before `finish`.
        """
        return set()

    def finish(self) -> None:
        """Complete the gradients after the last backward.

        On return, every gradient that this rank holds covers the whole window.
        """
        return

    def hold(self) -> None:
        """Prepare for a loss that may go back through the model before the step's own backward."""
        return

    def collect(self, *, on: bool) -> None:
        """Set whether the next forwards and backwards are for this model's gradients."""
        return

    def end_evaluation(self) -> None:
        """Drop weights that were gathered for a forward: the next one trains, with other weights."""
        return

    def summary(self) -> Mapping[str, Any]:
        """Return figures of all ranks by their key in `summary.json`. Collective."""
        return {}

    @property
    def sent_bytes(self) -> float:
        """The bytes that this rank has sent to other replicas so far."""
        return 0.0

    def kept(self) -> Iterable[StateTensor]:
        """Return the state for a checkpoint. Its tensors change as training goes on."""
        return ()

    def restore(self, saved: SavedState) -> list[str]:
        """Continue from a checkpoint's state.

        Returns descriptions of state that could not be restored.
        """
        return []
