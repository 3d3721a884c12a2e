"""Refuses losses from which no update can be made: a loss that is not finite, counts nothing or
uses no parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch

from paceline.base.errors import TrainingError
from paceline.base.logs import logger
from paceline.training.loss import LossSum
from paceline.training.parts.spikes import Spike


def check_loss(
    loss: float, count: float, tallies: Sequence[LossSum], step: int, *, is_updated: bool = False
) -> None:
    """Refuse a window's loss from which no update can be made.

    Args:
        tallies: Those of this rank. If none of them is at fault, another rank's report comes first.
        is_updated: Whether the step's updates are already made. They are only in memory.
    """
    if math.isfinite(loss) and count > 0:
        return
    if math.isfinite(loss):
        raise TrainingError(
            f"the loss counts nothing in step {step + 1}: its count is {count:g}",
            hint="every target of the window is ignored; a larger batch makes this unlikely",
        )
    is_of_this_rank = not all(bool(torch.isfinite(tally.value)) for tally in tallies)
    raise Spike(
        f"the loss is {'infinite' if math.isinf(loss) else 'not a number (NaN)'} in step {step + 1}; "
        f"{'nothing of this step is saved' if is_updated else 'the weights of the step before are kept'}",
        hint="a lower learning rate, clip=1.0, or a look at the samples of this step",
        heard=not is_of_this_rank,
    )


def check_used(users: Mapping[str, float], step: int) -> None:
    """Refuse a loss that uses no parameter, and warn of parameters that it does not use.

    There is no warning for parameters in a list beside used ones (experts, optional layers).

    Args:
        users: How many ranks used each trainable parameter in the step, by name.
        step: Number of the step, from 0.
    """
    unused = [name for name, count in users.items() if not count]
    if len(unused) == len(users):
        raise TrainingError(
            "the loss does not depend on the model: no parameter has a gradient",
            hint="compute it from the model's output, and let no hook in backward take gradients away",
        )
    family = lambda name: re.sub(r"\.\d+\.", ".*.", name)  # noqa: E731
    alive = {family(name) for name, count in users.items() if count}
    unused = [name for name in unused if family(name) == name or family(name) not in alive]
    if unused:
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        logger.info(
            f"the loss of step {step + 1} does not depend on {len(unused)} of {len(users)} parameters: "
            f"{shown}. A step updates only what its loss depends on, as under PyTorch alone"
        )
