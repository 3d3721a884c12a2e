"""Strategies of other packages: whatever is installed under the entry-point group `paceline.strategies`.

Each entry point names a `Strategy`. Its axes are keys of plans like any other, written before the built-in ones.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.strategies.axes import Axis
    from paceline.strategies.strategy import Strategy

GROUP = "paceline.strategies"


@cache
def extensions() -> tuple[Strategy, ...]:
    """Strategies from outside, by the names of their entry points. One that can't be imported is left out with a
    warning."""
    known: list[Strategy] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            known.append(entry.load())
        except (
            Exception
        ) as error:  # of somebody else's code, which must not keep other plans from running
            warnings.warn(
                f"the strategy '{entry.name}' ({entry.value}) can't be loaded and is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
    return tuple(known)


def axes() -> dict[str, Axis]:
    """What strategies from outside add to the mesh, by name."""
    return {axis.name: axis for strategy in extensions() for axis in strategy.keys.axes}
