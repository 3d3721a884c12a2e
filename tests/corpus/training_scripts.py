"""Training scripts as people have them, of one model and one loss."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import paceline

from .own_steps import adam, small
from .registry import FEATURES, SAMPLES, entry, integers, make_job, numbers

# --- Segmentation: weights of classes, pixels that count nothing, a second head, groups with rates of their own -------

CLASSES, UNLABELLED = 4, 255


class Segmenter(nn.Module):
    """A backbone and two heads, as torchvision's: the second one only helps training."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict(
            {"stem": nn.Conv2d(3, 8, 3, padding=1), "deep": nn.Conv2d(8, 8, 3, stride=2, padding=1)}
        )
        self.classifier = nn.Sequential(
            nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, CLASSES, 1)
        )
        self.auxiliary = nn.Conv2d(8, CLASSES, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        stem = self.backbone["stem"](image).relu()
        deep = self.backbone["deep"](stem).relu()
        size = image.shape[-2:]
        return {
            "out": F.interpolate(
                self.classifier(deep), size=size, mode="bilinear", align_corners=False
            ),
            "aux": self.auxiliary(stem),
        }


def segmentation_loss(output: dict[str, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=output["out"].dtype)
    losses = [
        F.cross_entropy(
            output[name], target, weight=weight, ignore_index=UNLABELLED, reduction="sum"
        )
        for name in ("out", "aux")
    ]
    labelled = target[target != UNLABELLED]
    return losses[0] + 0.4 * losses[1], weight[labelled].sum()


@entry("segmentation with weights of classes, pixels that count nothing and a second head")
def segmentation() -> paceline.Job:
    masks = integers(CLASSES, SAMPLES, 6, 6)
    masks[integers(3, SAMPLES, 6, 6, seed=8) == 0] = UNLABELLED
    masks[3] = UNLABELLED  # an image without a label

    def optimizer(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        return torch.optim.SGD(
            [
                {"params": [pair for pair in named if pair[0].startswith("backbone")], "lr": 0.01},
                {"params": [pair for pair in named if not pair[0].startswith("backbone")]},
            ],
            lr=0.1,
            momentum=0.9,
            weight_decay=1e-4,
        )

    return make_job(
        Segmenter,
        data=TensorDataset(numbers(SAMPLES, 3, 6, 6), masks),
        loss=segmentation_loss,
        optimizer=optimizer,
        lr_schedule=lambda each: torch.optim.lr_scheduler.PolynomialLR(each, 6, power=0.9),
    )


# --- Speech: frames and texts of other lengths ------------------------------------------------------------------------


class Recogniser(nn.Module):
    """Halves the frames, reads them in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.subsampling = nn.Conv1d(5, 8, 3, stride=2, padding=1)
        self.recurrent = nn.GRU(8, 6, batch_first=True, bidirectional=True)
        self.letters = nn.Linear(12, 7)

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        halved = self.subsampling(frames.transpose(1, 2)).relu().transpose(1, 2)
        lengths = (lengths + 1) // 2
        packed = pack_padded_sequence(halved, lengths.cpu(), batch_first=True, enforce_sorted=False)
        read, _ = pad_packed_sequence(
            self.recurrent(packed)[0], batch_first=True, total_length=halved.shape[1]
        )
        return self.letters(read).log_softmax(-1), lengths


def spoken() -> list[tuple[Tensor, Tensor]]:
    """Utterances of 9 to 20 frames with 1 to 4 letters."""
    lengths, letters = integers(12, SAMPLES, seed=4) + 9, integers(4, SAMPLES, seed=5) + 1
    return [
        (numbers(int(length), 5, seed=index), integers(6, int(count), seed=index) + 1)
        for index, (length, count) in enumerate(zip(lengths, letters, strict=True))
    ]


def pad_speech(
    samples: list[tuple[Tensor, Tensor]],
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    frames, texts = zip(*samples, strict=True)
    return (
        {
            "frames": pad_sequence(frames, batch_first=True),
            "lengths": torch.tensor([len(f) for f in frames]),
        },
        (pad_sequence(texts, batch_first=True), torch.tensor([len(t) for t in texts])),
    )


def ctc(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    (scores, lengths), (letters, counts) = output, target
    return F.ctc_loss(scores.transpose(0, 1), letters, lengths, counts, zero_infinity=True)


@entry("speech of other lengths: frames are halved and packed, and the loss aligns letters")
def speech() -> paceline.Job:
    return make_job(
        Recogniser, data=spoken(), collate=pad_speech, loss=ctc, optimizer=adam, clip=5.0
    )


# --- nanoGPT: the model is given its targets and returns (logits, loss) -----------------------------------------------


class Writer(nn.Module):
    """The model of a well-known script: tied weights, targets in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(12, 8),
                "wpe": nn.Embedding(7, 8),
                "h": nn.ModuleList(
                    [
                        nn.TransformerEncoderLayer(
                            8, 2, 16, dropout=0.0, batch_first=True, norm_first=True
                        )
                        for _ in range(2)
                    ]
                ),
                "ln_f": nn.LayerNorm(8),
            }
        )
        self.lm_head = nn.Linear(8, 12, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](
            torch.arange(idx.shape[1], device=idx.device)
        )
        mask = nn.Transformer.generate_square_subsequent_mask(
            idx.shape[1], device=idx.device, dtype=x.dtype
        )
        for block in self.transformer["h"]:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.lm_head(self.transformer["ln_f"](x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(
                logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
            )
        return logits, loss


@entry("a language model that is given its targets and returns logits and loss")
def targets_in_forward() -> paceline.Job:
    tokens = integers(12, SAMPLES, 8)
    return make_job(
        Writer,
        data=[((row[:-1], row[1:]), row[1:]) for row in tokens],
        loss=lambda output, target: output[1],
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2, betas=(0.9, 0.95), eps=1e-3),
        clip=1.0,
    )


# --- SAM as its best known implementation has it ----------------------------------------------------------------------


class SAM(torch.optim.Optimizer):
    """Two evaluations a step: at the weights and at a worse point nearby."""

    def __init__(
        self,
        params: Any,
        base_optimizer: Any,
        rho: float = 0.05,
        adaptive: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, dict(rho=rho, adaptive=adaptive, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.norm(
            torch.stack(
                [
                    ((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2)
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            ),
            p=2,
        )
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(
                    (torch.pow(p, 2) if group["adaptive"] else 1.0)
                    * p.grad
                    * (group["rho"] / (norm + 1e-12))
                )

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, (
            "Sharpness Aware Minimization requires closure, but it was not provided"
        )
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


SAM.step_takes = "closure"  # type: ignore[attr-defined]


@entry("adaptive SAM around SGD with momentum")
def adaptive_sam() -> paceline.Job:
    return make_job(
        optimizer=lambda named: SAM(
            named, torch.optim.SGD, rho=0.5, adaptive=True, lr=0.1, momentum=0.9
        )
    )


# --- Graphs of other sizes --------------------------------------------------------------------------------------------


@dataclass
class Graphs:
    """Several graphs as one: nodes (nodes, features), edges (2, edges), of (nodes,): the graph of each node."""

    nodes: Tensor
    edges: Tensor
    of: Tensor
    count: int


class Messages(nn.Module):
    """Classifies graphs, or their nodes."""

    def __init__(self, *, pools: bool) -> None:
        super().__init__()
        self.first, self.last, self.pools = nn.Linear(4, 8), nn.Linear(8, 3), pools
        self.turns = nn.ModuleList([nn.Linear(16, 8) for _ in range(2)])

    def forward(self, graphs: Graphs) -> Tensor:
        x = self.first(graphs.nodes).tanh()
        sender, receiver = graphs.edges
        for turn in self.turns:
            came = torch.zeros_like(x).index_add(0, receiver, x[sender])
            x = x + turn(torch.cat([x, came], 1)).tanh()
        return self.last(
            x.new_zeros(graphs.count, x.shape[1]).index_add(0, graphs.of, x) if self.pools else x
        )


def graphs() -> list[tuple[Tensor, Tensor, int, Tensor]]:
    sizes = integers(5, SAMPLES, seed=6) + 2
    return [
        (
            numbers(int(size), 4, seed=index),
            integers(int(size), 2, 2 * int(size), seed=index),
            index % 3,
            integers(2, int(size), seed=index + 1),
        )
        for index, size in enumerate(sizes)
    ]


def join_graphs(
    samples: list[tuple[Tensor, Tensor, int, Tensor]],
) -> tuple[tuple[Graphs], tuple[Tensor, Tensor]]:
    nodes, edges, of, first = [], [], [], 0
    for number, (x, e, _, _) in enumerate(samples):
        nodes.append(x)
        edges.append(e + first)
        of.append(torch.full((len(x),), number))
        first += len(x)
    return (
        (Graphs(torch.cat(nodes), torch.cat(edges, 1), torch.cat(of), len(samples)),),
        (
            torch.tensor([label for _, _, label, _ in samples]),
            torch.cat([tags for *_, tags in samples]),
        ),
    )


@entry("graphs of other sizes in one batch, classified as graphs")
def graph_labels() -> paceline.Job:
    return make_job(
        lambda: Messages(pools=True),
        data=graphs(),
        collate=join_graphs,
        optimizer=adam,
        loss=lambda output, target: F.cross_entropy(output, target[0]),
    )


@entry("graphs of other sizes in one batch, whose nodes are classified, as a sum and a count")
def node_labels() -> paceline.Job:
    return make_job(
        lambda: Messages(pools=False),
        data=graphs(),
        collate=join_graphs,
        optimizer=adam,
        loss=lambda output, target: (
            F.cross_entropy(output, target[1], reduction="sum"),
            len(target[1]),
        ),
    )


# --- A tagger that returns its own loss of each sample ----------------------------------------------------------------


class Reader(nn.Module):
    """Reads words in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(6, 4, batch_first=True, bidirectional=True)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(words, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(
            self.recurrent(packed)[0], batch_first=True, total_length=words.shape[1]
        )[0]


class Tagger(nn.Module):
    """A conditional random field over padded words: given tags, it returns each sentence's negative log-likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.read = nn.Embedding(12, 6, padding_idx=0), Reader()
        self.emit, self.change = nn.Linear(8, 3), nn.Parameter(torch.zeros(3, 3))
        nn.init.normal_(self.change, std=0.1)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        lengths = (words != 0).sum(1)
        scores = self.emit(self.read(self.words(words), lengths))
        alpha, path = scores[:, 0], scores[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for place in range(1, words.shape[1]):
            counts = (place < lengths)[:, None]
            onward = (alpha[:, :, None] + self.change).logsumexp(1) + scores[:, place]
            alpha = torch.where(counts, onward, alpha)
            taken = self.change[tags[:, place - 1], tags[:, place]] + scores[:, place].gather(
                1, tags[:, place : place + 1]
            ).squeeze(1)
            path = path + torch.where(counts[:, 0], taken, 0.0)
        return alpha.logsumexp(1) - path


def sentences() -> list[dict[str, Tensor]]:
    lengths = integers(5, SAMPLES, seed=7) + 2
    return [
        {
            "words": integers(11, int(length), seed=index) + 1,
            "tags": integers(3, int(length), seed=index + 100),
        }
        for index, length in enumerate(lengths)
    ]


def pad_sentences(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: pad_sequence([sample[name] for sample in samples], batch_first=True)
        for name in ("words", "tags")
    }


@entry("a tagger that is given its tags and returns the likelihood of each sentence")
def random_field() -> paceline.Job:
    return make_job(
        Tagger,
        data=sentences(),
        collate=pad_sentences,
        loss=lambda output, batch: output.mean(),
        optimizer=adam,
    )


# --- Samples that are mixed in pairs ----------------------------------------------------------------------------------


class Mixed(Dataset[tuple[Tensor, Tensor]]):
    """Each item is a mixture with another item."""

    def __init__(self) -> None:
        self.x, self.y = numbers(SAMPLES, FEATURES), F.one_hot(integers(3, SAMPLES), 3).float()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        other = int(torch.randint(len(self), ()))
        part = torch.distributions.Beta(0.4, 0.4).sample()
        return part * self.x[index] + (1 - part) * self.x[other], part * self.y[index] + (
            1 - part
        ) * self.y[other]


@entry("samples that the data set mixes in pairs, with soft targets")
def mixed_pairs() -> paceline.Job:
    return make_job(data=Mixed(), loss=F.cross_entropy, optimizer=adam)


# --- Tokens that collate masks at random ------------------------------------------------------------------------------


class Masked(nn.Module):
    """Guesses the tokens that are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.net, self.last = nn.Embedding(12, 8), small(outputs=8)(), nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.net(self.words(tokens).flatten(0, 1))).unflatten(0, tokens.shape)


def mask_tokens(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """As Transformers' collator for language models: 15 % of tokens count, of which most are masked and some are
    others."""
    tokens = torch.stack(samples)
    labels, chance = tokens.clone(), torch.full(tokens.shape, 0.3)
    counts = torch.bernoulli(chance).bool()
    labels[~counts] = -100
    replaced = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & counts
    tokens[replaced] = 11
    other = torch.bernoulli(torch.full(labels.shape, 0.5)).bool() & counts & ~replaced
    tokens[other] = torch.randint(11, labels.shape, dtype=torch.long)[other]
    return tokens, labels


@entry("tokens that collate masks at random, counted over the whole batch")
def masked_by_collate() -> paceline.Job:
    def loss(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), (
            labels != -100
        ).sum()

    return make_job(
        Masked, data=list(integers(11, SAMPLES, 6)), collate=mask_tokens, optimizer=adam, loss=loss
    )


# --- Gradients that are clipped by value ------------------------------------------------------------------------------


class ClippedByValue(torch.optim.SGD):
    """Clips each number of a gradient before the step."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_value_(
            [p for group in self.param_groups for p in group["params"]], 0.01
        )
        return super().step(closure)


@entry("gradients clipped by value before SGD with momentum")
def clip_by_value() -> paceline.Job:
    return make_job(optimizer=lambda named: ClippedByValue(named, lr=0.5, momentum=0.9))


# --- Forecasts by quantiles: windows of several series, shuffled in a buffer ------------------------------------------


class Windows(IterableDataset[dict[str, Tensor]]):
    """Cut from each series in turn; which one leaves the buffer next is drawn."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        shuffle_buffer: list[dict[str, Tensor]] = []
        for series in numbers(5, 27, seed=6).cumsum(1):
            for start in range(0, 18, 2):
                shuffle_buffer.append(
                    {
                        "history": series[start : start + 6],
                        "future": series[start + 6 : start + 9],
                        "hour": torch.tensor(start % 24),
                    }
                )
                if len(shuffle_buffer) >= 8:
                    yield shuffle_buffer.pop(random.randrange(len(shuffle_buffer)))
        random.shuffle(shuffle_buffer)
        yield from shuffle_buffer


class Forecaster(nn.Module):
    """Scales each history by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.hours, self.recurrent, self.head = (
            nn.Embedding(24, 3),
            nn.LSTM(1, 6, 2, batch_first=True),
            nn.Linear(9, 9),
        )

    def forward(self, history: Tensor, hour: Tensor, future: Tensor | None = None) -> Tensor:
        middle, scale = history.mean(1, keepdim=True), history.std(1, keepdim=True) + 1e-5
        read = self.recurrent(((history - middle) / scale).unsqueeze(-1))[0][:, -1]
        quantiles = self.head(torch.cat([read, self.hours(hour)], 1)).unflatten(1, (3, 3))
        return quantiles * scale.unsqueeze(-1) + middle.unsqueeze(-1)


def pinball(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=output.dtype)
    off = batch["future"].unsqueeze(-1) - output
    return torch.maximum(quantiles * off, (quantiles - 1) * off).mean()


@entry("forecasts by quantiles, of a stream of windows that a buffer shuffles")
def quantiles_of_windows() -> paceline.Job:
    return make_job(
        Forecaster,
        data=Windows(),
        loss=pinball,
        optimizer=adam,
        epochs=2,
        steps=None,
        lr_schedule=lambda each: torch.optim.lr_scheduler.OneCycleLR(each, 1e-2, total_steps=10),
    )
