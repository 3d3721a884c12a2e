"""Models that nobody here wrote: of Transformers and of Keras, from tiny configurations."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

from .registry import FEATURES, SAMPLES, adamw, entry, integers, make_job, numbers

VOCABULARY = 24


def _next_token(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def _tokens() -> list[Any]:
    x = integers(VOCABULARY, SAMPLES, 7)
    return [({"input_ids": row[:-1]}, row[1:]) for row in x]


def _language_model(class_name: str, config_name: str, **options: Any) -> paceline.Job:
    import transformers

    def model() -> nn.Module:
        config = getattr(transformers, config_name)(
            vocab_size=VOCABULARY, use_cache=False, **options
        )
        config._attn_implementation = "sdpa"
        return getattr(transformers, class_name)(config)

    return make_job(model, data=_tokens(), loss=_next_token, steps=3)


@entry("GPT-2 of Transformers", needs="transformers")
def gpt2() -> paceline.Job:
    return _language_model(
        "GPT2LMHeadModel",
        "GPT2Config",
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


@entry(
    "Llama of Transformers, whose norms compute in float32", needs="transformers", tolerance=1e-5
)
def llama() -> paceline.Job:
    return _language_model(
        "LlamaForCausalLM",
        "LlamaConfig",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
    )


@entry("BERT of Transformers with a classifier", needs="transformers")
def bert() -> paceline.Job:
    import transformers

    def model() -> nn.Module:
        return transformers.BertForSequenceClassification(
            transformers.BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=24,
                max_position_embeddings=8,
                num_labels=3,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    x, mask = (
        integers(VOCABULARY, SAMPLES, 6),
        torch.arange(6) < integers(5, SAMPLES, seed=6)[:, None] + 2,
    )
    data = [
        ({"input_ids": a, "attention_mask": m.long()}, int(y))
        for a, m, y in zip(x, mask, integers(3, SAMPLES), strict=True)
    ]
    return make_job(
        model,
        data=data,
        steps=3,
        loss=lambda output, target: F.cross_entropy(output.logits, target),
    )


@entry("T5 of Transformers, encoder and decoder", needs="transformers", tolerance=1e-5)
def t5() -> paceline.Job:
    import transformers

    def model() -> nn.Module:
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY,
                d_model=16,
                d_kv=8,
                d_ff=24,
                num_layers=2,
                num_heads=2,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                use_cache=False,
            )
        )

    x, y = integers(VOCABULARY, SAMPLES, 6), integers(VOCABULARY, SAMPLES, 5, seed=8)
    data = [
        ({"input_ids": a, "decoder_input_ids": b[:-1]}, b[1:]) for a, b in zip(x, y, strict=True)
    ]
    return make_job(model, data=data, loss=_next_token, steps=3)


@entry("ViT of Transformers", needs="transformers")
def vit() -> paceline.Job:
    import transformers

    def model() -> nn.Module:
        return transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=24,
                image_size=8,
                patch_size=4,
                num_channels=2,
                num_labels=3,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    data = TensorDataset(numbers(SAMPLES, 2, 8, 8), integers(3, SAMPLES))
    return make_job(
        model,
        data=data,
        steps=3,
        loss=lambda output, target: F.cross_entropy(output.logits, target),
    )


@entry("a model of Keras on torch", needs="keras", tolerance=1e-4)
def keras() -> paceline.Job:
    os.environ.setdefault("KERAS_BACKEND", "torch")

    def model() -> nn.Module:
        import keras

        hidden = [keras.layers.Dense(8, activation="tanh") for _ in range(3)]
        return keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(3)])

    x = numbers(SAMPLES, FEATURES)
    return make_job(
        model,
        data=TensorDataset(x, numbers(SAMPLES, 3, seed=3)),
        precision="float32",
        optimizer=adamw,
    )
