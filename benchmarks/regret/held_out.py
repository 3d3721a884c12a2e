"""Jobs of other kinds than those in `jobs.py`. Until the run in `docs/results.md` nothing was fitted on them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.regret.jobs import Case, adamw, classifier, momentum, numbers, sgd, words

SIDE, PATCH = 32, 4  # of an image, and of its patches
PATCHES = (SIDE // PATCH) ** 2


class VisionTransformer(nn.Module):
    """Patches of an image through layers of an encoder, to a class."""

    def __init__(self, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.places = nn.Parameter(torch.zeros(1, PATCHES, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                6,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class UNet(nn.Module):
    """Two halvings of an image, and back, with a skip connection at each."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            _two_convolutions(*each)
            for each in ((3, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.grow = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.fourth = _two_convolutions(4 * width, 2 * width)
        self.grow_again = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last, self.head = _two_convolutions(2 * width, width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        whole = self.first(images)
        half = self.second(F.max_pool2d(whole, 2))
        x = self.grow(self.third(F.max_pool2d(half, 2)))
        x = self.grow_again(self.fourth(torch.cat((x, half), 1)))
        return self.head(self.last(torch.cat((x, whole), 1)).mean((2, 3)))


def _two_convolutions(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.GroupNorm(4, width),
        nn.SiLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.SiLU(),
    )


class Mixer(nn.Module):
    """Products across the patches of an image, and across their channels."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * PATCH**2, width)
        self.across = nn.ModuleList(
            nn.Sequential(nn.Linear(PATCHES, 128), nn.GELU(), nn.Linear(128, PATCHES))
            for _ in range(layers)
        )
        self.within = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(F.unfold(images, PATCH, stride=PATCH).transpose(1, 2))
        for across, within in zip(self.across, self.within, strict=True):
            x = x + across(x.transpose(1, 2)).transpose(1, 2)
            x = x + within(x)
        return self.head(x.mean(1))


class Gru(nn.Module):
    """The last state of a recurrent layer, to a class: a model without blocks."""

    def __init__(self, vocab: int = 4000, width: int = 192) -> None:
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(vocab, width),
            nn.GRU(width, width, 2, batch_first=True),
        )
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens))[0][:, -1])


class Gated(nn.Module):
    """One layer with a gate, three times: its parameters are used again."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, 3 * width), nn.Tanh(), nn.Linear(3 * width, width)
        )
        self.gate, self.norm, self.head = (
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.Linear(width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(x + self.inner(x) * torch.sigmoid(self.gate(x)))
        return self.head(x)


class Bert(nn.Module):
    """Transformers' own, to a class."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.model = BertForSequenceClassification(
            BertConfig(
                hidden_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=1024,
                vocab_size=8000,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                num_labels=10,
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


class VectorTowers(nn.Module):
    """Products, and convolutions, of the same vector: the first have far more parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.products = nn.Sequential(
            nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 64)
        )
        self.convolutions = nn.Sequential(
            nn.Unflatten(1, (2, 16, 16)),
            nn.Conv2d(2, 48, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, 48, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(4),
            nn.Flatten(),
            nn.Linear(768, 64),
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat((self.products(x), self.convolutions(x)), 1))


def _narrow() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 300),
        nn.ReLU(),
        *(part for _ in range(11) for part in (nn.Linear(300, 300), nn.ReLU())),
        nn.Linear(300, 10),
    )


def _wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3000, 5000), nn.ReLU(), nn.Linear(5000, 3000), nn.ReLU(), nn.Linear(3000, 10)
    )


_ON_TWO: dict[str, Case] = {
    name: Case(2, make)
    for name, make in {
        "vision transformer": classifier(
            VisionTransformer, lambda: numbers(3, SIDE, SIDE), adamw, 32
        ),
        "U-Net": classifier(UNet, lambda: numbers(3, SIDE, SIDE), momentum, 16),
        "mixer": classifier(Mixer, lambda: numbers(3, SIDE, SIDE), adamw, 64),
        "GRU": classifier(Gru, lambda: words(4000, 32), momentum, 32),
        "gated layers": classifier(Gated, lambda: numbers(1024), adamw, 128),
        "BERT": classifier(Bert, lambda: words(8000, 64), adamw, 16),
        "twelve narrow layers": classifier(_narrow, lambda: numbers(64), sgd, 256),
        "vector towers": classifier(VectorTowers, lambda: numbers(512), momentum, 64),
        "plain SGD, 5000 wide": classifier(_wide, lambda: numbers(3000), sgd, 24),
    }.items()
}
HELD_OUT_JOBS: dict[str, Case] = {
    **_ON_TWO,
    **{
        f"{name}, a core each": replace(_ON_TWO[name], threads=1)
        for name in ("U-Net", "vector towers")
    },
}
