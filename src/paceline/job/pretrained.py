"""Pretrained weights with which training begins: their source, and the model's name for each of
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Weights:
    """The arguments of `pretrained`; see there."""

    source: Any
    prefix: str = ""
    rename: Mapping[str, str | None] | Callable[[str], str | None] | None = None
    strict: bool = True

    @classmethod
    def of(cls, init: Any) -> Weights:
        """Return a job's `init`, in any form, as `Weights`."""
        return init if isinstance(init, Weights) else cls(init)

    def name(self, stored: str) -> str | None:
        """Return the model's name for a name of the source; None leaves the weight out.

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
        """Yield a message for everything that is wrong with the arguments."""
        if hasattr(self.source, "state_dict"):
            yield f"init must be weights, and a {type(self.source).__name__} is a module; give its state_dict()"
        elif not (isinstance(self.source, Mapping | str | os.PathLike) or callable(self.source)):
            yield (
                "init must be a state dict, a function that returns one, or the path of a safetensors file, of a "
                f"folder with one, or of a run, got {type(self.source).__name__}"
            )
        if not (self.rename is None or isinstance(self.rename, Mapping) or callable(self.rename)):
            yield f"rename must map names to names or be a function of a name, got {type(self.rename).__name__}"


def pretrained(
    source: Any,
    *,
    prefix: str = "",
    rename: Mapping[str, str | None] | Callable[[str], str | None] | None = None,
    strict: bool = True,
) -> Weights:
    """Return pretrained weights for `Job(init=...)` whose names differ from the model's.

    Args:
        source: A state dict, a function that returns one, or the path of a safetensors file, of a
            folder of Transformers (model.safetensors, or model.safetensors.index.json with its
            shards), of a run or of a checkpoint of a run.
        prefix: Text that is put before each name of the source, so that the weights go into one
            part of the model.
        rename: A mapping or a function from the source's names to the model's (before the prefix);
            None leaves a weight out.
        strict: Whether both sides must have the same names. With False, names that only one side
            has are skipped, and the model's other weights keep the seed's initial values.
    """
    return Weights(source, prefix, rename, strict)
