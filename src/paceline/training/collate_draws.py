"""Makes random numbers that a job's collate draws for a sample the same under every plan, however
the window is cut.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.job.batches import Collate, of_stacked
from paceline.job.order import Window
from paceline.model.randomness import is_switched_off
from paceline.training.own_step.step_draws import WindowDraws


class CollateDraws:
    """Keys the random numbers that collate functions draw by torch's operators. Functions that draw
    nothing run unchanged.

    Args:
        seed: The seed of the job.
        is_needed: Whether draws are keyed from the first batch on. By default they are keyed from
            the first batch on that is seen to draw. The caller must then read and collate its
            samples once more. If draws are switched off, nothing is keyed.
    """

    def __init__(self, seed: int, *, is_needed: bool = False) -> None:
        self.seed, self.is_needed = seed, is_needed

    def keyed(self, collate: Collate | None, cut: range, window: Window) -> Collate | None:
        """Return the collate function for these samples of a window. `cut` has their places in it.

        If there are none, one sample of the window stands in.
        """
        if collate is None or of_stacked(collate):  # torch stacks samples without a draw
            return collate

        def keyed(items: list[Any]) -> Any:
            if is_switched_off():
                return collate(items)
            if not self.is_needed:
                before = torch.get_rng_state()
                batch = collate(items)
                self.is_needed = not torch.equal(before, torch.get_rng_state())
                return batch
            with WindowDraws(
                rows=max(len(cut), 1),
                first=cut.start if len(cut) else 0,
                count=window.count,
                key=(self.seed, "collate", window.epoch, window.start),
                device=torch.device("cpu"),
                is_step=False,
            ):
                return collate(items)

        return keyed
