"""Small jobs that reach what differs on a GPU: fused kernels, draws, statistics, numbers of the host."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import paceline


class Blocks(nn.Module):
    """Blocks with a skip over all of them and a parameter without dimensions, which FSDP leaves whole."""

    def __init__(
        self, *, drop: float = 0.0, width: int = 16, depth: int = 4, outputs: int = 4
    ) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Linear(width, 2 * width),
                    nn.GELU(),
                    nn.Linear(2 * width, width),
                    nn.Dropout(drop),
                )
                for _ in range(depth)
            ]
        )
        self.gain = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.gain * x + skip)


class Branches(nn.Module):
    """Two ways from the input to the output that know nothing of each other."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
            for _ in range(2)
        )
        self.last = nn.Linear(2 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.left(x), self.right(x)], 1))


class InFloat32(nn.Module):
    """A region that its author keeps in float32 where the rest is in half precision."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.mix(x.float()).tanh()


class Attention(nn.Module):
    """A byte model of two blocks, with torch's fused attention."""

    def __init__(self, *, drop: float = 0.0, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.table, self.heads, self.drop = nn.Embedding(11, width), heads, drop
        self.mixes = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(2)])
        self.outs = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for mix, out in zip(self.mixes, self.outs, strict=True):
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in mix(x).chunk(3, -1)
            )
            x = x + out(
                F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, dropout_p=self.drop if self.training else 0.0
                )
                .transpose(1, 2)
                .flatten(2)
            )
        return self.last(self.norm(x)).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.last = (
            nn.Embedding(11, 8),
            nn.LSTM(8, 8, batch_first=True),
            nn.Linear(8, 11),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.rnn(self.table(tokens))[0]).transpose(1, 2)


class OnGpusAlone(Blocks):
    """Has kernels for no other device, like Triton's."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            raise NotImplementedError("no kernel for the CPU")
        return super().forward(x)


class Changing(Blocks):
    """Leaves blocks out in two steps, after ranks have learnt which one comes next."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = skip = self.first(x)
        for block in self.blocks[:2] if self.calls in (5, 6) else self.blocks:
            x = x + block(x)
        return self.last(self.gain * x + skip)


class Parting(Changing):
    """The first rank alone does so; what it counts is no state of the module."""

    counted: ClassVar[list[None]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.counted.append(None)
        self.calls = 0 if x.device.index else len(self.counted) - 1
        return super().forward(x)


class WrongOnOne(Blocks):
    """Computes something else on the second GPU, as a driver's or a kernel's error would."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.001 if x.device.index == 1 else 1.0)


class Put(Blocks):
    """Uses an operator that has no deterministic form."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + 0.0 * x.clone().put_(
            torch.zeros(1, dtype=torch.int64, device=x.device), x.new_zeros(1)
        )


class Reused(Blocks):
    """Uses one block twice, each time in a reentrant checkpoint, so that backward adds to its weights twice, and
    leaves out another one in every other step."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], *self.blocks[2:]):
            if block is not self.blocks[2] or self.calls % 2:
                x = x + checkpoint(block, x, use_reentrant=True)
        return self.last(self.gain * x)


class Hungry(nn.Module):
    """Takes memory on GPUs that nobody knows of before."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = [torch.empty(1 << 20, device=x.device) for _ in range(4 if x.is_cuda else 0)]
        return self.last(x) + 0.0 * len(kept)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def numbers(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 8, generator=generator), torch.randn(samples, 4, generator=generator)
    )


class Augmented(Dataset[Any]):
    """Draws for each sample; one of them can't be read."""

    def __init__(self, *, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.broken:
            raise ValueError("a sample is broken")
        return torch.randn(8) * random.random(), torch.randn(4) + float(np.random.rand())


class Stream(IterableDataset[Any]):
    """Three windows and a short one in each pass, drawn while they are read."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(40):
            yield torch.randn(8), torch.randn(4)


class Restless(torch.optim.SGD):
    """Draws from all generators of the process in its update."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(
                    1e-3 * (random.random() + float(np.random.rand()) + torch.rand(1).item())
                )


def words(samples: int) -> TensorDataset:
    tokens = torch.randint(11, (samples, 7), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())


def furthest(output: Tensor, target: Tensor) -> float:
    """A metric that is a Python number."""
    return (output - target).abs().mean().item()


def regression(model: Callable[[], nn.Module], **changes: Any) -> paceline.Job:
    fields: dict[str, Any] = {
        "model": model,
        "data": numbers(48),
        "loss": F.mse_loss,
        "batch": 12,
        "steps": 4,
        "precision": "float64",
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
    }
    return paceline.Job(**{**fields, **changes})


def language(model: Callable[[], nn.Module], **changes: Any) -> paceline.Job:
    return regression(model, **{"data": words(48), "loss": F.cross_entropy, **changes})


def penalty(critic: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """For each sample, of a slope between a real and a drawn one that differs from 1; uses second derivatives."""
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1) ** 2


def gan() -> paceline.Job:
    """Two backwards, an update that clips and one that doesn't, an average and a copy."""

    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x, _ = batch
        noise = torch.randn(len(x), 8, dtype=x.dtype)
        fake, mix = ctx.run("generator", noise), torch.rand(len(x), 1, dtype=x.dtype)

        def of_critic(real: Tensor, batch: Any, fake: Tensor, mix: Tensor) -> tuple[Tensor, int]:
            critic = lambda given: ctx.run("critic", given)  # noqa: E731
            return (critic(fake) - real).sum() + penalty(critic, batch.input, fake, mix).sum(), len(
                real
            )

        ctx.backward("critic", x, of_critic, fake, mix)
        ctx.update("critic")
        ctx.backward("generator", noise, lambda fake, batch: -ctx.run("critic", fake).mean())
        ctx.update("generator")

    adam = lambda named: torch.optim.Adam(named, lr=1e-2, eps=1e-3)  # noqa: E731
    return paceline.Job(
        models={
            "generator": lambda: Blocks(depth=2, outputs=8),
            "critic": lambda: Blocks(depth=2, outputs=1),
        },
        optimizers={"generator": adam, "critic": paceline.Optimizer(adam, clip=0.5)},
        training_step=step,
        followers={
            "average": paceline.ema("generator", 0.9),
            "renewed": paceline.copy_every("critic", 2),
        },
        data=numbers(48),
        batch=12,
        steps=4,
        precision="float64",
    )


def distillation() -> paceline.Job:
    """A student and a teacher that never changes, whose soft targets a loss is given; no optimizer but one."""

    def step(ctx: paceline.StepContext, batch: Any) -> None:
        soft = ctx.run("teacher", batch)
        ctx.backward(
            "student",
            batch,
            lambda output, batch, soft: F.mse_loss(output, batch.target + soft),
            soft,
        )
        ctx.backward("student", batch, lambda output, batch: output.square().mean())  # adds up
        ctx.update("student")

    return paceline.Job(
        models={"student": lambda: Blocks(depth=2)},
        training_step=step,
        optimizers={"student": lambda named: torch.optim.AdamW(named, lr=1e-2)},
        followers={"teacher": paceline.frozen(lambda: Blocks(depth=1))},
        data=numbers(48),
        batch=12,
        steps=4,
        precision="float64",
    )


def of_a_generator() -> paceline.Job:
    """The example of a step of one's own, whose `validate` draws from a generator of the CPU."""
    example = paceline.load(
        str(Path(__file__).parents[3] / "examples" / "06_own_step.py"), {"steps": 3}
    )
    return replace(example, precision="float64")


def refused_generator() -> paceline.Job:
    """Its step does so, which is refused on every device."""

    def step(ctx: paceline.StepContext, batch: Any) -> None:
        noise = torch.randn(len(batch), 8, generator=torch.Generator().manual_seed(1))
        ctx.backward("critic", noise, lambda output, batch: output.square().mean())
        ctx.update("critic")

    return paceline.Job(
        models={"critic": lambda: Blocks(depth=1)},
        training_step=step,
        data=numbers(48),
        batch=12,
        steps=2,
        optimizers={"critic": lambda named: torch.optim.SGD(named, lr=1e-2)},
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            attn_implementation="eager",
        )
    )  # before "sdpa" Transformers reads twice in a forward whether anything is padded


def padded(samples: list[list[int]]) -> dict[str, Tensor]:
    """Lists of tokens as long as the longest; padding has no label and is not looked at."""
    width = max(map(len, samples))
    filled = {
        fill: torch.tensor([sample + [fill] * (width - len(sample)) for sample in samples])
        for fill in (0, -100)
    }
    return {
        "input_ids": filled[0],
        "labels": filled[-100],
        "attention_mask": (filled[-100] >= 0).long(),
    }


def padded_llama() -> paceline.Job:
    """A model of Transformers on lists of tokens, with given weights, two optimizers, an average and callbacks."""

    def of_tokens(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        ahead = labels[:, 1:]
        return F.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), ahead.flatten(), reduction="sum"
        ), (ahead != -100).sum()

    def step(ctx: paceline.StepContext, batch: Any) -> None:
        ctx.backward("llama", batch, lambda output, batch: of_tokens(output, batch.input["labels"]))
        ctx.update("matrices")
        ctx.update("rest")

    def validate(ctx: paceline.StepContext, batch: Any) -> Any:
        return {"loss": of_tokens(ctx.run("llama", batch), batch.input["labels"])}

    draws = torch.Generator().manual_seed(1)
    tokens = [
        torch.randint(3, 32, (length,), generator=draws).tolist()
        for length in torch.randint(3, 9, (26,), generator=draws).tolist()
    ]

    def weights() -> dict[str, Tensor]:  # on the ranks: Transformers asks for GPUs
        draws = torch.Generator().manual_seed(2)
        return {
            name: torch.randn(value.shape, generator=draws) * 0.1
            for name, value in llama().state_dict().items()
        }

    return paceline.Job(
        models={"llama": llama},
        training_step=step,
        validation_step=validate,
        init={"llama": weights},
        optimizers={
            "matrices": paceline.Optimizer(
                lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
                parameters=lambda name, p: p.ndim == 2,
                clip=0.5,
            ),
            "rest": paceline.Optimizer(
                lambda named: torch.optim.AdamW(named, lr=1e-2),
                parameters=lambda name, p: p.ndim != 2,
            ),
        },
        followers={"average": paceline.ema("llama", 0.9)},
        data=tokens,
        validation=tokens[:7],
        collate=padded,
        batch=8,
        epochs=1,
        precision="float64",
        callbacks=[Watcher(), paceline.KeepBest("validation_loss")],
    )


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, factor=0.5, threshold=0.5
    )


class Watcher(paceline.Callback):
    """Is told of everything, and asks for what ranks wait for."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, run: Any, step: Any) -> None:
        self.steps.append(step.step)

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        assert all(value.device.type == "cpu" for value in run.state_dict().values())

    def on_end(self, run: Any, result: Any) -> None:
        assert self.steps == list(range(1, run.step + 1)), self.steps


class FailsOnOneGpu(Blocks):
    """On cuda:1 its fourth forward ends as with memory that can't be corrected."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        FailsOnOneGpu.calls += 1
        if FailsOnOneGpu.calls > 3 and str(x.device) == "cuda:1":
            raise RuntimeError(
                "CUDA error: uncorrectable ECC error encountered\nCompile with TORCH_USE_CUDA_DSA"
            )
        return super().forward(x)


JOBS: dict[str, Callable[[], paceline.Job]] = {
    "fails on one GPU": lambda: regression(FailsOnOneGpu),
    "gan": gan,
    "distillation": distillation,
    "of a generator": of_a_generator,
    "refused generator": refused_generator,
    "padded llama": padded_llama,
    "begun": lambda: regression(
        Blocks,
        init={
            name: torch.linspace(-0.2, 0.2, value.numel()).view_as(value)
            for name, value in Blocks().state_dict().items()
        },
    ),
    "phases": lambda: regression(
        Blocks,
        batch=paceline.by_step({0: 12, 2: 6}),
        steps=6,
        freeze=paceline.by_step({0: ("first.*", "blocks.0.*"), 3: ()}),
    ),
    "plateau": lambda: regression(
        Blocks, lr_schedule=plateau, validation=numbers(20), epochs=2, steps=None
    ),
    "watched": lambda: regression(
        Blocks,
        validation=numbers(20),
        epochs=3,
        steps=None,
        callbacks=[Watcher(), paceline.EarlyStopping("validation_loss", patience=1, min_delta=1e9)],
    ),
    "blocks": lambda: regression(Blocks),
    "few blocks": lambda: regression(lambda: Blocks(depth=2)),
    "few in float32": lambda: regression(lambda: Blocks(depth=2), precision="float32"),
    "wide": lambda: regression(lambda: Blocks(width=256, depth=2), precision="float32", steps=2),
    "clip and validation": lambda: regression(
        Blocks, clip=0.1, validation=numbers(20), metrics={"furthest": furthest}
    ),
    "augmented": lambda: regression(
        Blocks, data=Augmented(), optimizer=lambda named: Restless(named, lr=1e-2)
    ),
    "broken sample": lambda: regression(Blocks, data=Augmented(broken=7)),
    "stream": lambda: regression(
        Blocks, data=Stream(), optimizer=lambda named: Restless(named, lr=1e-2), steps=7
    ),
    "dropout": lambda: regression(lambda: Blocks(drop=0.2, depth=2)),
    "half": lambda: regression(Blocks, precision="bf16"),
    "float32 in bf16": lambda: regression(
        lambda: nn.Sequential(
            nn.Linear(8, 16), InFloat32(), InFloat32(), InFloat32(), nn.Linear(16, 4)
        ),
        precision="bf16",
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    ),
    "float32": lambda: regression(Blocks, precision="float32"),
    "statistics": lambda: regression(images),
    "attention": lambda: language(Attention),
    "attention in float32": lambda: language(Attention, precision="float32"),
    "attention with dropout": lambda: language(lambda: Attention(drop=0.2), precision="float32"),
    "branches": lambda: regression(Branches),
    "recurrent": lambda: language(Recurrent),
    "changing": lambda: regression(Changing, steps=8),
    "reused": lambda: regression(Reused),
    "parting": lambda: regression(Parting, steps=8),
    "on GPUs alone": lambda: regression(lambda: OnGpusAlone(depth=2)),
    "without a deterministic form": lambda: regression(lambda: Put(depth=2)),
    "wrong on the second GPU": lambda: regression(lambda: WrongOnOne(depth=2)),
    "recurrent in float32": lambda: language(Recurrent, precision="float32"),
    "images in float32": lambda: regression(images, precision="float32"),
    "hungry": lambda: regression(Hungry, precision="float32"),
    "huge on GPUs alone": lambda: regression(
        lambda: OnGpusAlone(width=768, depth=8),
        precision="float32",
        steps=2,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-2),
    ),
    "huge": lambda: regression(
        lambda: Blocks(width=768, depth=8),
        precision="float32",
        steps=2,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-2),
    ),
    "thick": lambda: regression(
        lambda: Blocks(width=184),
        precision="float32",
        steps=2,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-2),
    ),
    "large": lambda: regression(lambda: Blocks(width=128, depth=8), precision="float32", steps=2),
}
