"""The figures that a job's `compute` gives of a step beside its loss, over the samples of all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from paceline.base.errors import PlanRefused, TrainingError, nearest
from paceline.job.phases import FIGURES
from paceline.training.loss import LossSum


class StepMetrics:
    """The names of a step's figures, and their sums and counts in the message of ranks.

    Ranks without samples or without the model's output give no figures, so ranks agree on the names
    in the first step.
    """

    def __init__(self, *, has_any: bool, is_apart: bool) -> None:
        """is_apart: whether replicas take steps of their own."""
        self.names: tuple[str, ...] | None = None if has_any else ()
        self.is_apart = is_apart

    def message(
        self, tallies: Mapping[str, Sequence[LossSum]], device: torch.device
    ) -> torch.Tensor:
        """Return this rank's sums and counts, on the device. Collective in the first step.

        Raises:
            TrainingError: a name is taken, or new after the first step.
            PlanRefused: replicas don't add figures up in each step.
        """
        if self.names is None:
            self.names = self._agreed(list(tallies), device)
        if new := [name for name in tallies if name not in self.names]:
            raise TrainingError(
                f"compute returns the figure '{new[0]}', which the first step did not have: "
                f"{nearest(new[0], self.names)}",
                hint="return every figure in the first step; one that nothing counts in is (0, 0)",
            )
        nothing = torch.zeros(2, dtype=torch.float64, device=device)
        return torch.cat(
            [nothing[:0]]
            + [
                sum((tally.on(device) for tally in tallies.get(name, ())), nothing)
                for name in self.names
            ]
        )

    def read(self, values: Sequence[float]) -> dict[str, float | None]:
        """Return the figures from the sums and counts of all ranks; None where nothing counts, and
        for what is no number.
        """
        assert self.names is not None
        pairs = zip(values[::2], values[1::2], strict=True)
        return {
            name: total / count if count and math.isfinite(total) else None
            for name, (total, count) in zip(self.names, pairs, strict=True)
        }

    def _agreed(self, here: list[str], device: torch.device) -> tuple[str, ...]:
        """Return the names that some rank has, on all ranks. Collective."""
        text = json.dumps(sorted(here)).encode() if here else b""
        size = torch.tensor(len(text), device=device)
        self._most(size)
        letters = torch.tensor(list(text.ljust(int(size), b"\0")), dtype=torch.uint8, device=device)
        self._most(letters)
        joined = bytes(letters.tolist())
        if here and joined != text:
            raise TrainingError(
                f"compute returns the figures {', '.join(here)} here, and others on another rank",
                hint="return every figure for every batch; one that nothing counts in is (0, 0)",
            )
        names = tuple(json.loads(joined)) if joined else ()
        if taken := FIGURES.intersection(names):
            raise TrainingError(
                f"compute returns the figure '{min(taken)}': every run has a figure of that name",
                hint="give the figure another name",
            )
        if names and self.is_apart:
            raise PlanRefused(
                f"compute returns the figure '{names[0]}', and under this plan replicas take steps of their "
                "own and don't add up what they measure in each",
                hint="data=N and shard=N plans do; or return the loss alone",
            )
        return names

    @staticmethod
    def _most(values: torch.Tensor) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1 and values.numel():
            dist.all_reduce(values, dist.ReduceOp.MAX)
