"""Strategies of other packages, found by the entry-point group `paceline.strategies`.

Each entry point names a `Strategy`. Its axes are keys of plans like all others. A plan's text lists
them before the built-in keys.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from paceline.strategies.axes import Axis

GROUP = "paceline.strategies"


@cache
def extensions() -> tuple[Any, ...]:
    """Return the `Strategy` values of other packages in the order of their entry points' names.

    A strategy that can't be imported is left out with a warning.
    """
    known: list[Any] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            known.append(entry.load())
        except (
            Exception
        ) as error:  # an error in another package must not keep other plans from running
            warnings.warn(
                f"the strategy '{entry.name}' ({entry.value}) can't be loaded and is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
    return tuple(known)


def axes() -> dict[str, Axis]:
    """Return the axes that strategies of other packages add to the mesh, by name."""
    return {axis.name: axis for strategy in extensions() for axis in strategy.keys.axes}
