"""Reference models: ordinary modules, and their profiles by dimensions, for which nothing is built.

Published measurements name models by their dimensions. Plans of them pass through the same functions as those of a
profile that was traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.models.formats import EAGER, FLOAT32, Formats, Kernels
from benchmarks.models.programs import Program, program, program_names
from benchmarks.models.sizes import DecoderSize
from benchmarks.models.transformer import decoder_profile

if TYPE_CHECKING:
    from benchmarks.models.decoder import Decoder

__all__ = [
    "EAGER",
    "FLOAT32",
    "Decoder",
    "DecoderSize",
    "Formats",
    "Kernels",
    "Program",
    "decoder_profile",
    "program",
    "program_names",
]


def __getattr__(name: str) -> Any:
    if name == "Decoder":  # torch is loaded only where a module is wanted
        from benchmarks.models.decoder import Decoder

        return Decoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
