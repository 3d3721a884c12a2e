"""Full recomputation: each block keeps only its input and is computed again in backward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch.utils.checkpoint import checkpoint

from paceline.strategies.units import find_units

if TYPE_CHECKING:
    from torch import nn

    from paceline.plans import Plan
    from paceline.strategies.mesh import Mesh


IMPORTS: tuple[str, ...] = ()


def is_active(plan: Plan) -> bool:
    return plan.modifiers.recompute == "full"


def prepare(model: nn.Module, *, plan: Plan, mesh: Mesh) -> None:
    """Wrap the forward of every unit, so that the names of modules and parameters stay as they are.

    A model without units is recomputed whole. Random layers draw again what they drew: checkpoint restores the
    generators.
    """
    for unit in list(find_units(model).values()) or [model]:
        if getattr(unit, "runs_once", False):  # a piece of the user's own code, which may count how often it runs
            continue
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
