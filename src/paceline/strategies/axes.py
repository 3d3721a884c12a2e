"""What the axes of a mesh cut, and what ranks along each of them have in common. Everything else about an axis follows.

    axis       cuts                 what ranks along it do
    pipeline   modules              each runs its own stages; one has the loss
    parts      modules              the same, with stages as a placement says
    data       samples              each has all weights; gradients are summed, unless replicas take steps of their own
    shard      samples and weights  each holds parts of tensors; gradients are summed
    tensor     weights              each holds parts of tensors; all compute the same loss

Each is declared in the folder of its strategy. A strategy from outside brings axes of its own; see
`paceline.strategies.extensions`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh.

    name: its key in a plan.
    cuts_samples: ranks along it see different samples of a step; else all see the same.
    cuts_sequence: ranks along it see different positions of the same samples.
    cuts_weights: ranks along it hold different parts of some tensors; a tensor itself says which axes cut it. The rest
        of a tensor's elements, and what isn't cut, they hold alike.
    cuts_modules: ranks along it hold different modules, so that a parameter is on one of them alone.
    place: what messages call one place along an axis that cuts modules.
    """

    name: str
    cuts_samples: bool = False
    cuts_sequence: bool = False
    cuts_weights: bool = False
    cuts_modules: bool = False
    place: str = ""

    @property
    def cuts_batch(self) -> bool:
        """Whether ranks along it see different parts of a step's batch, so that gradients of what they hold alike are
        summed. What it cuts, each rank has the whole gradient of its own part of."""
        return self.cuts_samples or self.cuts_sequence

    @property
    def copies_weights(self) -> bool:
        """Whether each rank along it holds everything that the others hold."""
        return not (self.cuts_weights or self.cuts_modules)

    @property
    def computes_same_loss(self) -> bool:
        """Whether all ranks along it come to the same output: of the same batch, by all modules."""
        return not (self.cuts_batch or self.cuts_modules)
