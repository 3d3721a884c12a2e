"""Weights that training begins with: where they are read from, and which of the model's names each goes to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Weights:
    """What `weights` was given; see there."""

    source: Any
    prefix: str = ""
    rename: Mapping[str, str | None] | Callable[[str], str | None] | None = None
    strict: bool = True

    @classmethod
    def of(cls, init: Any) -> Weights:
        """A job's `init`, whichever form it has."""
        return init if isinstance(init, Weights) else cls(init)

    def name(self, stored: str) -> str | None:
        """The model's name for one of the source's; None leaves it out.

        >>> Weights({}, prefix="encoder.", rename={"w": "weight", "head": None}).name("w")
        'encoder.weight'
        """
        renamed: str | None = stored
        if callable(self.rename):
            renamed = self.rename(stored)
        elif self.rename is not None:
            renamed = self.rename.get(stored, stored)
        return None if renamed is None else self.prefix + renamed

    def problems(self) -> Iterator[str]:
        """What is wrong with it, in words."""
        if hasattr(self.source, "state_dict"):
            yield f"init must be weights, and a {type(self.source).__name__} is a module; give its state_dict()"
        elif not (isinstance(self.source, Mapping | str | os.PathLike) or callable(self.source)):
            yield (
                "init must be a state dict, a function that returns one, or the path of a safetensors file, of a "
                f"folder with one, or of a run, got {type(self.source).__name__}"
            )
        if not (self.rename is None or isinstance(self.rename, Mapping) or callable(self.rename)):
            yield f"rename must map names to names or be a function of a name, got {type(self.rename).__name__}"


def weights(
    source: Any,
    *,
    prefix: str = "",
    rename: Mapping[str, str | None] | Callable[[str], str | None] | None = None,
    strict: bool = True,
) -> Weights:
    """Pretrained weights for `Job(init=...)` whose names are not all the model's own.

    Args:
        source: A state dict, a function that returns one, or the path of a safetensors file, of a folder of
            Transformers (model.safetensors, or model.safetensors.index.json with its shards), of a run or of a
            checkpoint of a run.
        prefix: Is put before each name of the source, so that it goes into one part of the model.
        rename: The source's names to the model's (before the prefix), as a mapping or a function; None leaves a weight
            out.
        strict: Whether both sides must have the same names. Without it, what only one side has is passed over; the
            model's others keep the seed's initial values.
    """
    return Weights(source, prefix, rename, strict)
