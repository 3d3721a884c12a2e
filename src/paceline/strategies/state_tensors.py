"""State that a strategy keeps from step to step besides weights and optimizer; checkpoints hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A named tensor, or this rank's part of it.

    like: the parameter that it has the shape of and is cut like; "" for a tensor that is whole on every rank.
    replica: whether each replica has one of its own, under a name of its own; else all hold it alike.
    """

    name: str
    tensor: torch.Tensor
    like: str = ""
    replica: bool = False


class SavedState(Protocol):
    """What a checkpoint has of it."""

    def __contains__(self, name: object) -> bool: ...

    def replicas(self, kind: str) -> int:
        """How many replicas have tensors of their own, named KIND/REPLICA/..."""

    def read(self, name: str, like: str = "") -> torch.Tensor:
        """A tensor; this rank's part of it, cut like a parameter, if one is given."""


class NothingSaved:
    """A run that begins."""

    def __contains__(self, name: object) -> bool:
        return False

    def replicas(self, kind: str) -> int:
        return 0

    def read(self, name: str, like: str = "") -> torch.Tensor:
        raise KeyError(name)


NOTHING_SAVED = NothingSaved()
