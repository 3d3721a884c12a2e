"""Models that compute activations again by themselves, in either form of torch's checkpoints."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import paceline

from .libraries import VOCABULARY, _next_token, _tokens
from .registry import FEATURES, Block, Net, entry, make_job


@entry("a reentrant checkpoint of every block")
def reentrant_blocks() -> paceline.Job:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.last(x)

    return make_job(Checkpointed)


@entry("a checkpoint of a function over several blocks, with a keyword and two results")
def checkpointed_function() -> paceline.Job:
    class Checkpointed(Net):
        def run(self, x: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
            for block in self.blocks[:2]:
                x = block(x)
            return x, x * scale

        def forward(self, x: Tensor) -> Tensor:
            x, scaled = checkpoint(self.run, self.first(x), use_reentrant=False, scale=0.5)
            return self.last(self.blocks[2](x + scaled))

    return make_job(Checkpointed)


@entry("checkpoint_sequential over a list of blocks")
def checkpointed_sequence() -> paceline.Job:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(
                checkpoint_sequential(self.blocks, 2, self.first(x), use_reentrant=False)
            )

    return make_job(Checkpointed)


def _checkpointed_llama(**options: Any) -> paceline.Job:
    import transformers

    def model() -> nn.Module:
        built = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY,
                use_cache=False,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=8,
            )
        )
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        return built

    return make_job(model, data=_tokens(), loss=_next_token, steps=3)


@entry(
    "Llama of Transformers with gradient_checkpointing_enable", needs="transformers", tolerance=1e-5
)
def checkpointed_llama() -> paceline.Job:
    return _checkpointed_llama(use_reentrant=False)


@entry("the same with reentrant checkpoints", needs="transformers", tolerance=1e-5)
def reentrant_llama() -> paceline.Job:
    return _checkpointed_llama(use_reentrant=True)
