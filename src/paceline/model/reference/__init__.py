"""Reference models: ordinary modules, and their profiles by dimensions, for which nothing is
built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.cluster.sizes import EAGER, FLOAT32, DecoderSize, Formats, Kernels
from paceline.model.reference.transformer import decoder_profile

if TYPE_CHECKING:
    from paceline.model.reference.decoder import Decoder

__all__ = ["EAGER", "FLOAT32", "Decoder", "DecoderSize", "Formats", "Kernels", "decoder_profile"]


def __getattr__(name: str) -> Any:
    if name == "Decoder":  # torch is loaded only where a module is wanted
        from paceline.model.reference.decoder import Decoder

        return Decoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
