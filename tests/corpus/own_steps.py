"""Steps of a job's own: several models and optimizers, followers. Each stands beside its loop as written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline

from .plain import ByHand
from .registry import BATCH, FEATURES, SAMPLES, STEPS, Net, add, numbers

Models, Optimizers = ByHand, Mapping[str, torch.optim.Optimizer]


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=1e-2, eps=1e-3)


def small(
    inputs: int = FEATURES, outputs: int = 3, width: int = FEATURES
) -> Callable[[], nn.Module]:
    """Builds a network with blocks that FSDP shards one by one."""

    def build() -> nn.Module:
        net = Net(blocks=2, width=width, outputs=outputs)
        net.first = nn.Linear(inputs, width)
        return net

    return build


def fields(**more: Any) -> dict[str, Any]:
    x = numbers(SAMPLES, FEATURES)
    data = torch.utils.data.TensorDataset(x, torch.tanh(x @ numbers(FEATURES, 3, seed=3)))
    return {"data": data, "batch": BATCH, "steps": STEPS, "precision": "float64", **more}


def by_hand(
    idea: str, hand: Callable[[Models, Optimizers, Any, Any], Tensor]
) -> Callable[..., Any]:
    """Add a job beside the loop that does the same: it returns the step's losses, added up."""

    def added(make: Callable[[], paceline.Job]) -> Callable[[], paceline.Job]:
        theme = make.__module__.rpartition(".")[2]
        add(make.__name__, theme, idea, make, evaluates=False, by_hand=hand)
        return make

    return added


def penalty(critic: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return 10 * ((slope.norm(dim=1) - 1) ** 2).mean()


def _gan_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    generator, critic, average = models["generator"], models["critic"], models["average"]
    noise = torch.randn(len(x), 4, dtype=x.dtype)
    with torch.no_grad():
        fake = generator(noise)
    mix = torch.rand(len(x), 1, dtype=x.dtype)
    of_critic = critic(fake).mean() - critic(x).mean() + penalty(critic, x, fake, mix)
    optimizers["critic"].zero_grad()
    of_critic.backward()
    torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    optimizers["critic"].step()
    of_generator = -critic(generator(noise)).mean()
    optimizers["generator"].zero_grad()
    of_generator.backward()
    optimizers["generator"].step()
    with torch.no_grad():
        for a, p in zip(average.parameters(), generator.parameters(), strict=True):
            a.lerp_(p, 0.1)
    return of_critic.detach() + of_generator.detach()


@by_hand("a Wasserstein GAN with gradient penalty, and an average of its generator", _gan_by_hand)
def gan_with_penalty() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x, _ = batch
        noise = torch.randn(len(x), 4, dtype=x.dtype)
        fake = ctx.run("generator", noise)
        mix = torch.rand(len(x), 1, dtype=x.dtype)

        def of_critic(real: Tensor, batch: Any, fake: Tensor, mix: Tensor) -> Tensor:
            critic = lambda given: ctx.run("critic", given)  # noqa: E731
            return critic(fake).mean() - real.mean() + penalty(critic, batch.input, fake, mix)

        ctx.backward("critic", x, of_critic, fake, mix)
        ctx.update("critic")
        ctx.backward("generator", noise, lambda fake, batch: -ctx.run("critic", fake).mean())
        ctx.update("generator")

    return paceline.Job(
        models={"generator": small(4, FEATURES), "critic": small(outputs=1)},
        training_step=step,
        optimizers={"generator": adam, "critic": paceline.Optimizer(adam, clip=1.0)},
        followers={"average": paceline.ema("generator", 0.9)},
        **fields(),
    )


def distance_to(soft: Tensor, output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + F.kl_div(
        output.log_softmax(-1), soft.softmax(-1), reduction="batchmean"
    )


def _distillation_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        soft = models["teacher"](x)
    loss = distance_to(soft, models["student"](x), y)
    optimizers["student"].zero_grad()
    loss.backward()
    optimizers["student"].step()
    return loss.detach()


@by_hand("a student learns from targets and from a frozen teacher", _distillation_by_hand)
def distillation() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        soft = ctx.run("teacher", batch)
        ctx.backward(
            "student",
            batch,
            lambda output, batch, soft: distance_to(soft, output, batch.target),
            soft,
        )
        ctx.update("student")

    return paceline.Job(
        models={"student": small()},
        optimizers={"student": adam},
        training_step=step,
        followers={"teacher": paceline.frozen(small(width=16))},
        **fields(),
    )


def _self_distillation_by_hand(
    models: Models, optimizers: Optimizers, x: Tensor, y: Tensor
) -> Tensor:
    with torch.no_grad():
        target = models["target"](x + 0.1 * torch.randn_like(x))
    loss = -F.cosine_similarity(models["online"](x + 0.1 * torch.randn_like(x)), target).mean()
    optimizers["online"].zero_grad()
    loss.backward()
    optimizers["online"].step()
    with torch.no_grad():
        for a, p in zip(models["target"].parameters(), models["online"].parameters(), strict=True):
            a.mul_(0.9).add_(p, alpha=0.1)
    return loss.detach()


@by_hand("two views of a sample, one seen by an average of the weights", _self_distillation_by_hand)
def self_distillation() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x, _ = batch
        target = ctx.run("target", x + 0.1 * torch.randn_like(x))
        view = x + 0.1 * torch.randn_like(x)
        ctx.backward(
            "online",
            view,
            lambda out, batch, target: -F.cosine_similarity(out, target).mean(),
            target,
        )
        ctx.update("online")

    return paceline.Job(
        models={"online": small()},
        optimizers={"online": adam},
        training_step=step,
        followers={"target": paceline.ema("online", 0.9)},
        **fields(),
    )


def _muon_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(models["net"](x), y)
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return loss.detach()


@by_hand(
    "Muon for matrices and AdamW for the rest of one model, by the default step", _muon_by_hand
)
def muon_beside_adamw() -> paceline.Job:
    muon = paceline.Optimizer(
        lambda named: torch.optim.Muon(named, lr=0.02), parameters=lambda name, p: p.ndim == 2
    )
    rest = paceline.Optimizer(
        lambda named: torch.optim.AdamW(named, lr=1e-2), parameters=lambda name, p: p.ndim != 2
    )
    return paceline.Job(
        models={"net": small()},
        loss=F.mse_loss,
        optimizers={"matrices": muon, "rest": rest},
        **fields(),
    )


def _actor_critic_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    action = torch.multinomial(torch.ones(len(x), 3), 1)
    reward = y.gather(1, action)
    with torch.no_grad():
        value = models["critic"](x)
    of_actor = -(models["actor"](x).log_softmax(-1).gather(1, action) * (reward - value)).mean()
    of_critic = F.mse_loss(models["critic"](x), reward)
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    of_actor.backward()
    of_critic.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return of_actor.detach() + of_critic.detach()


@by_hand(
    "an actor and a critic with a loss each, one of them a sum and a count", _actor_critic_by_hand
)
def actor_critic() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x, y = batch
        action = torch.multinomial(torch.ones(len(x), 3), 1)
        reward, value = y.gather(1, action), ctx.run("critic", x)

        def of_actor(output: Tensor, batch: Any, action: Tensor, advantage: Tensor) -> Tensor:
            return -(output.log_softmax(-1).gather(1, action) * advantage).mean()

        def of_critic(value: Tensor, batch: Any, reward: Tensor) -> tuple[Tensor, int]:
            return F.mse_loss(value, reward, reduction="sum"), value.numel()

        ctx.backward("actor", x, of_actor, action, reward - value)
        ctx.backward("critic", x, of_critic, reward)
        ctx.update("actor")
        ctx.update("critic")

    return paceline.Job(
        models={"actor": small(), "critic": small(outputs=1)},
        optimizers={"actor": adam, "critic": adam},
        training_step=step,
        **fields(),
    )


class Encoder(nn.Module):
    """Predicts tokens from those around them; 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(8, 12)

    def forward(self, tokens: Tensor, is_padding: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=is_padding)
        return self.head(x)


def texts() -> list[dict[str, Tensor]]:
    """Of 3 to 8 tokens, padded to 8."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 9, (SAMPLES,), generator=generator).tolist()
    return [
        {"tokens": F.pad(torch.randint(2, 12, (length,), generator=generator), (0, 8 - length))}
        for length in lengths
    ]


def masked_loss(output: Tensor, tokens: Tensor, masked: Tensor) -> Tensor:
    return F.cross_entropy(output[masked], tokens[masked], reduction="sum")


def _masked_by_hand(models: Models, optimizers: Optimizers, given: Any, target: Any) -> Tensor:
    tokens = given["tokens"]
    masked = (torch.rand(tokens.shape) < 0.3) & (tokens != 0)
    loss = (
        masked_loss(models["encoder"](tokens.masked_fill(masked, 1), tokens == 0), tokens, masked)
        / masked.sum()
    )
    optimizers["encoder"].zero_grad()
    loss.backward()
    optimizers["encoder"].step()
    return loss.detach()


@by_hand("masked tokens of padded texts, counted over the whole batch", _masked_by_hand)
def masked_tokens() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        tokens = batch.input["tokens"]
        masked = (torch.rand(tokens.shape) < 0.3) & (tokens != 0)
        ctx.backward(
            "encoder",
            (tokens.masked_fill(masked, 1), tokens == 0),
            lambda output, batch, tokens, masked: (
                masked_loss(output, tokens, masked),
                masked.sum(),
            ),
            tokens,
            masked,
        )
        ctx.update("encoder")

    return paceline.Job(
        models={"encoder": Encoder},
        optimizers={"encoder": adam},
        training_step=step,
        **fields(data=texts()),
    )


def _three_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    code = models["encoder"](x)
    of_pair = F.mse_loss(models["decoder"](code), x)
    optimizers["pair"].zero_grad()
    of_pair.backward()
    optimizers["pair"].step()
    with torch.no_grad():
        code = models["encoder"](x)
    of_head = F.mse_loss(models["head"](code), y) + F.mse_loss(models["head"](code + 0.1), y)
    optimizers["head"].zero_grad()
    of_head.backward()
    optimizers["head"].step()
    return of_pair.detach() + of_head.detach()


@by_hand(
    "three models under accumulation: two by one loss, one by another after their update",
    _three_by_hand,
)
def three_models() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x, _ = batch
        ctx.backward(
            ("encoder", "decoder"),
            x,
            lambda code, batch: F.mse_loss(ctx.run("decoder", code), batch.input),
        )
        ctx.update("pair")
        code = ctx.run("encoder", x)
        ctx.backward("head", code, lambda output, batch: F.mse_loss(output, batch.target))
        ctx.backward("head", code + 0.1, lambda output, batch: F.mse_loss(output, batch.target))
        ctx.update("head")

    return paceline.Job(
        models={"encoder": small(outputs=4), "decoder": small(4, FEATURES), "head": small(4)},
        training_step=step,
        optimizers={
            "pair": paceline.Optimizer(adam, parameters=("encoder", "decoder")),
            "head": adam,
        },
        **fields(),
    )


class Queue(nn.Module):
    """The last 24 rows that it was given, oldest first; returns those that it held before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", numbers(24, 3, seed=9))

    def forward(self, more: Tensor) -> Tensor:
        rows_before = self.rows.clone()
        self.rows.copy_(torch.cat([self.rows, more])[-24:])
        return rows_before


def contrast(query: Tensor, key: Tensor, others: Tensor) -> Tensor:
    scores = torch.cat([(query * key).sum(1, keepdim=True), query @ others.T], 1)
    return F.cross_entropy(scores, torch.zeros(len(query), dtype=torch.long))


def _queue_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        key = models["key"](x + 0.1 * torch.randn_like(x))
        key = (key - key.mean(0)) / key.std(0)
        others = models["queue"](key)
    loss = contrast(models["query"](x + 0.1 * torch.randn_like(x)), key, others)
    optimizers["query"].zero_grad()
    loss.backward()
    optimizers["query"].step()
    with torch.no_grad():
        for a, p in zip(models["key"].parameters(), models["query"].parameters(), strict=True):
            a.mul_(0.9).add_(p, alpha=0.1)
    return loss.detach()


@by_hand("keys of all samples go into a queue, which later steps contrast with", _queue_by_hand)
def memory_queue() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x, _ = batch
        keys = ctx.gather(ctx.run("key", x + 0.1 * torch.randn_like(x)))
        keys = (keys - keys.mean(0)) / keys.std(0)
        others = ctx.run("queue", keys, cut=False)
        view = x + 0.1 * torch.randn_like(x)
        ctx.backward(
            "query", view, lambda query, batch, key: contrast(query, key, others), keys[ctx.places]
        )
        ctx.update("query")

    return paceline.Job(
        models={"query": small(), "queue": Queue},
        optimizers={"query": adam},
        training_step=step,
        followers={"key": paceline.ema("query", 0.9)},
        **fields(),
    )
