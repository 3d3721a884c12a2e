"""The axes of a mesh. An axis states what it cuts and what ranks along it have in common.

Everything else about an axis follows from these facts.

    axis       cuts                 what ranks along it do
    pipeline   modules              each runs its own stages; one has the loss
    parts      modules              the same; a placement assigns the modules
    data       samples              each has all weights; gradients are summed,
                                    unless replicas take steps of their own
    shard      samples and weights  each holds parts of tensors; gradients are summed
    tensor     weights              each holds parts of tensors; all compute the same loss

A strategy of another package can add axes; see `paceline.strategies.extensions`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh."""

    name: str  # the axis's key in a plan
    # Ranks along the axis see different samples of a step. Otherwise all see the same samples.
    cuts_samples: bool = False
    # Ranks along the axis see different positions of the same samples.
    cuts_sequence: bool = False
    # Ranks along the axis hold different parts of some tensors. A tensor itself says which axes cut
    # it. The ranks hold equal copies of every tensor that is not cut.
    cuts_weights: bool = False
    # Ranks along the axis hold different modules, so that only one of them has a given parameter.
    cuts_modules: bool = False
    place: str = ""  # the word that messages use for one place along an axis that cuts modules

    @property
    def cuts_batch(self) -> bool:
        """Whether ranks along the axis see different parts of a step's batch.

        Gradients of weights that these ranks hold alike are summed. Of weights that the axis cuts,
        each rank has the whole gradient of its own part.
        """
        return self.cuts_samples or self.cuts_sequence

    @property
    def copies_weights(self) -> bool:
        """Whether each rank along the axis holds everything that the others hold."""
        return not (self.cuts_weights or self.cuts_modules)

    @property
    def computes_same_loss(self) -> bool:
        """Whether all ranks along the axis compute the same output, from the same batch and by all
        modules."""
        return not (self.cuts_batch or self.cuts_modules)


PIPELINE = Axis("pipeline", cuts_modules=True, place="stage")
PARTS = Axis("parts", cuts_modules=True, place="part")
DATA = Axis("data", cuts_samples=True)
SHARD = Axis("shard", cuts_samples=True, cuts_weights=True)
TENSOR = Axis("tensor", cuts_weights=True)
# Outermost first: ranks with successive numbers are neighbours along the last axis.
AXES = (PIPELINE, PARTS, DATA, SHARD, TENSOR)
