"""Jobs whose models can be split: by others (Transformers, Keras) and of every shape that is hard to cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jobs.classification import (
    MixtureOfExperts,
    Sentences,
    adamw,
    classification_job,
    tagging_job,
    token_loss,
)
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline

VOCABULARY, LENGTH = 40, 7


class Tokens(Dataset[Any]):
    """19 sentences; the target is the next token, and some are ignored."""

    def __init__(self, **inputs: Callable[[int], Tensor]) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return 19

    def __getitem__(self, index: int) -> Any:
        ids = (torch.arange(LENGTH) * (index + 3) + index) % VOCABULARY
        target = ids.roll(-1)
        target[: index % 3] = -100
        return {
            "input_ids": ids,
            **{name: make(index) for name, make in self.inputs.items()},
        }, target


def next_token_loss(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Of a Transformers output."""
    return (
        F.cross_entropy(output.logits.flatten(0, 1), target.flatten(), reduction="sum"),
        (target != -100).sum(),
    )


def transformers_job(name: str) -> paceline.Job:
    """A small model of Transformers, from its configuration."""
    import transformers as hf

    llama_like = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    models: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                n_embd=24,
                n_layer=4,
                n_head=4,
                vocab_size=VOCABULARY,
                n_positions=16,
                use_cache=False,
                bos_token_id=1,
                eos_token_id=2,
            )
        ),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**llama_like)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**llama_like, head_dim=6)),
        "bert": lambda: hf.BertForMaskedLM(
            hf.BertConfig(
                hidden_size=24,
                intermediate_size=40,
                num_hidden_layers=4,
                num_attention_heads=4,
                vocab_size=VOCABULARY,
                max_position_embeddings=16,
            )
        ),
        "mixtral": lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**llama_like, num_local_experts=4, experts_implementation="eager")
        ),  # grouped_mm takes no float64
    }
    inputs = {"attention_mask": lambda index: (torch.arange(LENGTH) < LENGTH - index % 2).long()}
    data = Tokens(**(inputs if name == "bert" else {}))
    return classification_job(
        models[name], data=data, loss=next_token_loss, optimizer=adamw, clip=1.0
    )


class UNet(nn.Module):
    """Two levels down, a middle, two up; skips cross the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 6, 3, padding=1, stride=2)]
        )
        self.middle = nn.Sequential(nn.Conv1d(6, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
        self.up = nn.ModuleList(
            [nn.ConvTranspose1d(12, 4, 2, stride=2), nn.Conv1d(8, 3, 3, padding=1)]
        )

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.down[0](x.unsqueeze(1)))
        second = torch.relu(self.down[1](first))
        up = torch.relu(self.up[0](torch.cat([self.middle(second), second], 1)))
        return self.up[1](torch.cat([up, first], 1)).mean(-1)


class Chain(nn.Module):
    """All that torch's own pipelines get wrong, and small: tied embeddings, a weight that two blocks share, and a skip
    from the first piece to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(3)]
        )
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        first = h = self.embed(ids) * mask.unsqueeze(-1)
        for block in self.blocks:
            h = h + block(h)
        return {"logits": self.head(h + first)}


class TwoTower(nn.Module):
    """Two inputs, each through its own tower; a score from both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 8))
        self.right = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 8))
        self.scale = nn.Parameter(torch.ones(3, 8))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.left(user) * self.right(item)) @ self.scale.t()


class GatedExperts(nn.Module):
    """Experts of which every sample takes a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.ModuleDict(
                    {
                        "gate": nn.Linear(6, 3),
                        "experts": nn.ModuleList(
                            [
                                nn.Sequential(nn.Linear(6, 10), nn.SiLU(), nn.Linear(10, 6))
                                for _ in range(3)
                            ]
                        ),
                    }
                )
                for _ in range(2)
            ]
        )
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            weights = torch.softmax(block["gate"](x), -1)
            x = x + sum(
                weights[:, k, None] * expert(x) for k, expert in enumerate(block["experts"])
            )
        return self.out(x)


class Recurrent(nn.Module):
    """An embedding, an LSTM and a head that reads the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 5)
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.lstm(self.embed(x.unflatten(1, (3, 2))))
        return self.out(self.norm(steps[:, -1]))


class Pairs(Dataset[Any]):
    """17 pairs of inputs."""

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> Any:
        x = torch.sin(torch.arange(12.0) * (index + 1))
        return {"user": x[:6], "item": x[6:]}, index % 3


def keras_job() -> paceline.Job:
    """A Keras 3 model on the torch backend."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    def model() -> Any:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [
                keras.layers.Input((6,)),
                keras.layers.Dense(10, activation="gelu"),
                keras.layers.Dropout(0.1),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.LayerNormalization(),
                keras.layers.Dense(3),
            ]
        )

    return classification_job(model, optimizer=adamw)


def split_job(name: str) -> paceline.Job:
    """One of the jobs by name."""
    jobs: dict[str, Callable[[], paceline.Job]] = {
        "unet": lambda: classification_job(UNet, optimizer=adamw),
        "two-tower": lambda: classification_job(TwoTower, data=Pairs(), optimizer=adamw, clip=0.5),
        "experts": lambda: classification_job(GatedExperts, optimizer=adamw),
        "lstm": lambda: classification_job(Recurrent, optimizer=adamw),
        "routed": lambda: classification_job(MixtureOfExperts, optimizer=adamw, clip=0.5, batch=9),
        "keras": keras_job,
        "tied": lambda: tagging_job(optimizer=adamw, clip=0.5),
        "chain": lambda: classification_job(
            Chain, data=Sentences(), loss=token_loss, optimizer=adamw, clip=0.1
        ),
    }
    return jobs[name]() if name in jobs else transformers_job(name)


TRANSFORMERS = ("gpt2", "llama", "qwen3", "bert", "mixtral")
OWN = ("unet", "two-tower", "experts", "routed", "lstm", "tied", "keras", "chain")
