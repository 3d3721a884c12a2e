"""The dimensions of the decoder transformers of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.base.errors import JobError

Form = Literal["gpt", "llama"]


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """The dimensions of a decoder transformer.

    Raises:
        JobError: sizes that don't go together.

    >>> DecoderSize(126, 16384, 128, 53248, 128256, sequence=8192, kv_heads=8, form="llama").num_parameters
    405853388800
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    sequence: int  # tokens of a sample
    kv_heads: int = 0
    # "gpt" has learned positions, layer norms, biases and GELU; "llama" has rotary positions, RMS
    # norms and SwiGLU.
    form: Form = "gpt"
    tied: bool = False  # whether the head is the embedding
    # The rank of the adapters (Hu et al. 2021) beside the product that makes queries, keys and
    # values, where the recipes of NeMo's measurements put them; all else is frozen. 0 if there are
    # no adapters and everything is trained.
    lora_rank: int = 0

    def __post_init__(self) -> None:
        figures = {
            name: getattr(self, name)
            for name in ("layers", "hidden", "heads", "ffn", "vocab", "sequence")
        }
        if wrong := [f"{name}={value}" for name, value in figures.items() if value < 1]:
            raise JobError(f"a decoder of {', '.join(wrong)}", hint="every size is at least 1")
        if self.lora_rank < 0:
            raise JobError(
                f"a decoder of lora_rank={self.lora_rank}",
                hint="a rank is at least 1; 0 is no adapters",
            )
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise JobError(
                f"hidden={self.hidden}, heads={self.heads} and kv_heads={self.kv_heads} don't divide",
                hint="heads divides hidden, and kv_heads divides heads",
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values."""
        return self.kv_heads * self.head_dim

    @property
    def matrices_per_layer(self) -> int:
        """The number of values in a layer's matrices."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_width)
        return attention + self.hidden * self.ffn * (3 if self.form == "llama" else 2)

    @property
    def vectors_per_layer(self) -> int:
        """The number of values in a layer's norms and biases."""
        if self.form == "llama":
            return 2 * self.hidden
        return (
            4 * self.hidden
            + (self.hidden + 2 * self.kv_width)
            + self.hidden
            + self.ffn
            + self.hidden
        )

    @property
    def adapters_per_layer(self) -> int:
        """The number of values in a layer's adapters, which lead to their rank and on to queries,
        keys and values.
        """
        return self.lora_rank * (2 * self.hidden + 2 * self.kv_width)

    @property
    def num_parameters(self) -> int:
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        ends = (
            self.hidden if self.form == "llama" else 2 * self.hidden + self.sequence * self.hidden
        )
        per_layer = self.matrices_per_layer + self.vectors_per_layer + self.adapters_per_layer
        return self.layers * per_layer + tables + ends
