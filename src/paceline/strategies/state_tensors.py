"""State that a strategy keeps from step to step besides weights and optimizer state.

Checkpoints contain it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A named tensor, or this rank's part of it."""

    name: str
    tensor: torch.Tensor
    # The parameter with the same shape and the same cut; "" for a tensor that is whole on every
    # rank.
    like: str = ""
    # Whether each replica has its own tensor under its own name. Otherwise all hold the same
    # tensor.
    replica: bool = False


class SavedState(Protocol):
    """The state tensors of a checkpoint."""

    def __contains__(self, name: object) -> bool: ...

    def replicas(self, kind: str) -> int:
        """Return the number of replicas that have their own tensors, named KIND/REPLICA/..."""

    def read(self, name: str, like: str = "") -> torch.Tensor:
        """Return a tensor or, if a parameter `like` is given, this rank's part, cut like the
        parameter."""


class NothingSaved:
    """The saved state of a run that begins: there is none."""

    def __contains__(self, name: object) -> bool:
        return False

    def replicas(self, kind: str) -> int:
        return 0

    def read(self, name: str, like: str = "") -> torch.Tensor:
        raise KeyError(name)


NOTHING_SAVED = NothingSaved()
