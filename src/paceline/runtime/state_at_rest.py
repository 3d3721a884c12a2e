"""Weights and optimizer state that change between two updates: what finds memory that flips a bit.

Between an update and the next one nothing writes to the weights and the optimizer's state. So a rank notes fingerprints
of its own after an update, and compares them before the next update and before a checkpoint. No other rank needs to
hold the same, and the rank that finds a difference is the one whose memory changed.

torch counts the writes to each tensor. What it has seen written to, by a hook or a callback, is no finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.errors import DriftError
from paceline.runtime.drift import fingerprint
from paceline.strategies.mesh import local_part

if TYPE_CHECKING:
    from paceline.runtime.stepper import Stepper


@dataclass(frozen=True, slots=True)
class _Noted:
    """A tensor as it was after an update. writes: that torch had counted."""

    name: str
    tensor: torch.Tensor
    writes: int


class StateAtRest:
    """Fingerprints of a rank's weights and optimizer state after an update.

    What changes unseen before a launch's first comparison is what its code writes to, such as a forward through
    `.data`: it is left out from then on.

    every: steps from one after which they are taken to the next. step: after which they were taken last; None if they
        were let go since.
    """

    def __init__(self, stepper: Stepper, every: int) -> None:
        self.stepper, self.every = stepper, every
        self.step: int | None = None
        self._written: set[str] = set()
        self._is_first = True
        self._noted: list[_Noted] = []
        self._prints = torch.empty(0, dtype=torch.int64)

    def note(self, step: int) -> None:
        """This step, counted from 1, was taken."""
        if self._is_first or step % self.every == 0:
            self._noted = [_Noted(name, tensor, tensor._version) for name, tensor in _tensors(self.stepper)
                           if name not in self._written]
            self._prints, self.step = _prints(self._noted), step

    def check(self) -> None:
        """Compare, if there is something to compare. Collective over all ranks.

        Raises:
            DriftError: on all ranks; that of a rank whose memory changed is the one that counts.
        """
        if self.step is None:
            return
        differs = (_prints(self._noted) != self._prints).nonzero().flatten().tolist()
        changed = [each.name for each in map(self._noted.__getitem__, differs) if each.tensor._version == each.writes]
        if self._is_first:
            self._written |= set(changed)
            return
        mesh = self.stepper.mesh
        flags = torch.zeros(mesh.world_size, dtype=torch.int64, device=self.stepper.device)
        flags[mesh.rank] = len(changed)
        if mesh.world_size > 1:
            dist.all_reduce(flags)
        ranks = flags.nonzero().flatten().tolist()
        if ranks:
            raise self._error(ranks, changed)

    def forget(self) -> None:
        """An update follows: the tensors are let go."""
        self._noted, self.step, self._is_first = [], None, False

    def _error(self, ranks: Sequence[int], changed: Sequence[str]) -> DriftError:
        what = f"{changed[0]} and {len(changed) - 1} more" if len(changed) > 1 else "".join(changed) or "its state"
        error = DriftError(
            f"on {' and '.join(f'rank {rank}' for rank in ranks)}, {what} changed after the update of step "
            f"{self.step}, and nothing was seen to write to it; no update was made with it",
            hint="faulty memory; or code of yours that writes through .data or NumPy between two updates, but not "
                 "between the first two. No checkpoint has it: --resume goes on from the newest one")
        error.heard = self.stepper.mesh.rank not in ranks  # type: ignore[attr-defined]
        return error


def _tensors(stepper: Stepper) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's own parts, by what they are in a message. Weights are left out that forwards write to."""
    for name, p in stepper.local_parameters.items():
        if name not in stepper.edits.names:
            yield from _memory(f"'{name}'", p.detach())
    for name in stepper.optimizer_state.local_parameters():
        for key, value in stepper.optimizer_state.by_parameter(name):
            if isinstance(value, torch.Tensor):
                yield from _memory(f"the optimizer's {key} of '{name}'", value)


def _memory(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors of this rank that a tensor consists of: a quantized one has several."""
    tensor = local_part(tensor)
    if is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _memory(f"{part} of {name}", getattr(tensor, part))
    elif tensor.layout == torch.strided and tensor.numel():
        yield name, tensor


def _prints(noted: list[_Noted]) -> torch.Tensor:
    """On the CPU: the one time that the host waits for the device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    prints = [fingerprint(each.tensor) for each in noted]
    for each in prints:
        by_device.setdefault(each.device, []).append(each)
    values = {device: iter(torch.stack(each).tolist()) for device, each in by_device.items()}
    return torch.tensor([next(values[each.device]) for each in prints], dtype=torch.int64)
