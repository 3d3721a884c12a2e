"""Metrics of all outputs at once, which can't be computed as sums over parts of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.base.errors import JobError


@dataclass(frozen=True)
class OfAllSamples:
    """A metric that is given the outputs and targets of all samples; see `whole`."""

    function: Callable[[Any, Any], Any]

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the metric of these samples.

        A function with a `reset`, as torchmetrics have, is reset first.
        """
        if callable(reset := getattr(self.function, "reset", None)):
            reset()
        return self.function(output, target)


def whole(function: Callable[[Any, Any], Any]) -> OfAllSamples:
    """Return a metric of the whole validation set, such as F1, R squared, or the exponential of a
    mean.

    Args:
        function: (output, target) -> a number. It is called once an evaluation, with the outputs
            and targets of all samples in their order, along dim 0, on the CPU; they must fit in
            each rank's memory.

    Raises:
        JobError: it is no function.
    """
    if not callable(function):
        raise JobError(f"pl.whole takes a function (output, target), got {type(function).__name__}")
    return OfAllSamples(function)
