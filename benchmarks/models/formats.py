"""The bytes that a model's values take, and the kernels between its products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Formats:
    """The bytes that one value takes, by its use."""

    activation: int = 4  # a value of a tensor between layers
    weight: int = 4  # of a parameter, as a rank keeps it
    gradient: int = 4  # of a parameter, as a rank keeps it
    state: int = 8  # optimizer state of a parameter, with a master copy if there is one
    gathered: int = 4  # a parameter on its way to ranks that share it
    reduced: int = 4  # a gradient on its way to other ranks


FLOAT32 = Formats()


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels between a decoder's large products, as far as bytes and launches depend on
    them.
    """

    # "fused" never writes the scores. "plain" writes them and their softmax, and keeps what
    # backward needs.
    attention: Literal["fused", "plain"] = "fused"
    # "eager" runs norms, positions and activation functions operator by operator, "fused" each in
    # one kernel.
    elementwise: Literal["eager", "fused"] = "eager"
    dropout: bool = False  # whether dropout follows attention's softmax and precedes each sum


EAGER = Kernels()
