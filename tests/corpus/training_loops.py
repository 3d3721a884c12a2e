"""Training loops as people have them, each beside the step that it became."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import Sampler, SequentialSampler, TensorDataset

import paceline

from .own_steps import Models, Optimizers, adam, by_hand, fields, small
from .registry import BATCH, FEATURES, SAMPLES, integers, numbers

# --- A variational autoencoder whose divergence counts more from step to step -----------------------------------------


class Autoencoder(nn.Module):
    """Noise is given, so that a loop and a job can share it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = small(outputs=6)(), small(3, FEATURES)()

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def elbo(output: tuple[Tensor, Tensor, Tensor], x: Tensor, weight: float) -> Tensor:
    again, mean, log_variance = output
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    return (F.mse_loss(again, x, reduction="none").sum(1) + weight * divergence).mean()


def _vae_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    loss = elbo(models["vae"](x, torch.randn(len(x), 3)), x, min(1.0, models.step / 4))
    optimizers["vae"].zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(models["vae"].parameters(), 1.0)
    optimizers["vae"].step()
    return loss.detach()


@by_hand("a variational autoencoder whose divergence is weighted by the step", _vae_by_hand)
def vae_with_warm_up() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x, _ = batch
        weight = min(1.0, ctx.step / 4)
        ctx.backward(
            "vae",
            (x, torch.randn(len(x), 3)),
            lambda output, batch: elbo(output, batch.input, weight),
        )
        ctx.update("vae")

    return paceline.Job(
        models={"vae": Autoencoder},
        optimizers={"vae": paceline.Optimizer(adam, clip=1.0)},
        training_step=step,
        **fields(),
    )


# --- Two views, and all other samples as negatives --------------------------------------------------------------------


def views(x: Tensor) -> Tensor:
    """Two noisy views of each sample: (samples, 2, features)."""
    return x[:, None] + 0.1 * torch.randn(len(x), 2, FEATURES)


class Views(nn.Module):
    """Encodes both views of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()()

    def forward(self, pair: Tensor) -> Tensor:
        return F.normalize(self.net(pair.flatten(0, 1)), dim=1).unflatten(0, pair.shape[:2])


def nt_xent(pairs: Tensor) -> Tensor:
    """Of (samples, 2, features)."""
    z = pairs.transpose(0, 1).flatten(0, 1)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -math.inf)
    half = len(pairs)
    return F.cross_entropy(scores, torch.cat([torch.arange(half) + half, torch.arange(half)]))


def _simclr_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    loss = nt_xent(models["net"](views(x)))
    optimizers["net"].zero_grad()
    loss.backward()
    optimizers["net"].step()
    return loss.detach()


@by_hand("two views of each sample, and all others of the batch as negatives", _simclr_by_hand)
def simclr() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        ctx.backward("net", views(batch.input), lambda output, batch: nt_xent(output), gather=True)
        ctx.update("net")

    return paceline.Job(
        models={"net": Views}, optimizers={"net": adam}, training_step=step, **fields()
    )


def surrogate(output: Tensor, slope: Tensor, value: Tensor) -> Tensor:
    """A mean over samples with the gradients `slope`, whose value is the loss."""
    product = (output * slope).flatten(1).sum(1).mean()
    return product - product.detach() + value


# --- Two towers and a learned temperature -----------------------------------------------------------------------------


class Temperature(nn.Module):
    """A learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, like: Tensor) -> Tensor:
        return self.log_scale.exp().expand(len(like), 1)


def clip_rows(a: Tensor, b: Tensor, scale: Tensor, places: Tensor) -> Tensor:
    """Of rows of this process, both directions; a and b are of all samples."""
    return 0.5 * (
        F.cross_entropy(scale * a[places] @ b.T, places)
        + F.cross_entropy(scale * b[places] @ a.T, places)
    )


def _clip_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    a, b = F.normalize(models["image"](x), dim=1), F.normalize(models["text"](y), dim=1)
    scale = models["temperature"].log_scale.exp()
    target = torch.arange(len(x))
    loss = 0.5 * (
        F.cross_entropy(scale * a @ b.T, target) + F.cross_entropy(scale * b @ a.T, target)
    )
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return 3 * loss.detach()


class Tower(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.net = small(inputs, 4)()

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=1)


@by_hand("two towers and a learned temperature, with the batch as negatives", _clip_by_hand)
def clip_with_temperature() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x, y = batch
        with torch.enable_grad():
            a = ctx.gather(ctx.run("image", x)).requires_grad_()
            b = ctx.gather(ctx.run("text", y)).requires_grad_()
            scale = ctx.run("temperature", torch.ones(1, 1), cut=False)
            loss = clip_rows(a, b, scale, torch.arange(len(a)))
            of_a, of_b = torch.autograd.grad(loss, (a, b))
        a, b, value, all_rows = a.detach(), b.detach(), loss.detach(), len(a)
        ctx.backward(
            "image",
            x,
            lambda out, batch, slope: surrogate(out, slope, value),
            of_a[ctx.places] * all_rows,
        )
        ctx.backward(
            "text",
            y,
            lambda out, batch, slope: surrogate(out, slope, value),
            of_b[ctx.places] * all_rows,
        )
        ctx.backward(
            "temperature",
            ctx.places,
            lambda scale, batch, places: clip_rows(a, b, scale, places),
            ctx.places,
        )
        for name in ("image", "text", "temperature"):
            ctx.update(name)

    return paceline.Job(
        models={
            "image": lambda: Tower(FEATURES),
            "text": lambda: Tower(3),
            "temperature": Temperature,
        },
        optimizers={"image": adam, "text": adam, "temperature": adam},
        training_step=step,
        **fields(),
    )


# --- A critic that is trained five times as often, with weights kept in a box -----------------------------------------


class Boxed(torch.optim.RMSprop):
    """Keeps weights within a box after each step, as the first Wasserstein GAN."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-0.3, 0.3)


def _wgan_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    generator, critic = models["generator"], models["critic"]
    noise = torch.randn(len(x), 4)
    of_critic = critic(generator(noise).detach()).mean() - critic(x).mean()
    optimizers["critic"].zero_grad()
    of_critic.backward()
    optimizers["critic"].step()
    total = of_critic.detach()
    if models.step % 3 == 2:
        of_generator = -critic(generator(torch.randn(len(x), 4))).mean()
        optimizers["generator"].zero_grad()
        of_generator.backward()
        optimizers["generator"].step()
        total = total + of_generator.detach()
    return total


@by_hand(
    "a Wasserstein GAN with weights in a box, whose generator is trained every third step",
    _wgan_by_hand,
)
def wgan_every_third_step() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x, _ = batch
        fake = ctx.run("generator", torch.randn(len(x), 4))
        ctx.backward("critic", fake, lambda out, batch: out.mean())
        ctx.backward("critic", x, lambda out, batch: -out.mean())
        ctx.update("critic")
        if ctx.step % 3 == 2:
            ctx.backward(
                "generator",
                torch.randn(len(x), 4),
                lambda fake, batch: -ctx.run("critic", fake).mean(),
            )
            ctx.update("generator")

    return paceline.Job(
        models={"generator": small(4, FEATURES), "critic": small(outputs=1)},
        training_step=step,
        optimizers={"generator": adam, "critic": lambda named: Boxed(named, lr=1e-2, eps=1e-3)},
        **fields(),
    )


# --- Q-learning in an environment, with a replay buffer and a target network ------------------------------------------


class World(nn.Module):
    """Four walkers on a line, and the last 32 of their steps. Given actions, it moves them and notes what came."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.zeros(4, 2))
        self.register_buffer("memory", torch.zeros(32, 6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, actions: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        before = self.places.clone()
        if actions is None:
            return before
        self.places[:, 0] += self.places[:, 1] + 0.1 * noise
        self.places[:, 1] = 0.9 * self.places[:, 1] + (actions.to(before.dtype) - 1) * 0.1
        reward = -self.places[:, 0].abs()
        rows = torch.cat(
            [before, actions[:, None].to(before.dtype), reward[:, None], self.places], 1
        )
        self.memory.copy_(torch.cat([self.memory[4:], rows]))
        self.count += 4
        return self.memory.clone()


def td_loss(q: Tensor, rows: Tensor, after: Tensor) -> Tensor:
    taken = q.gather(1, rows[:, 2:3].long()).squeeze(1)
    return F.smooth_l1_loss(taken, rows[:, 3] + 0.9 * after.amax(1))


def _dqn_by_hand(models: Models, optimizers: Optimizers, given: Tensor, target: Tensor) -> Tensor:
    q, frozen, world = models["q"], models["target"], models["world"]
    with torch.no_grad():
        greedy = q(world.places).argmax(1)
        actions = torch.where(torch.rand(4) < 0.3, torch.randint(3, (4,)), greedy)
        memory = world(actions, torch.randn(4))
    rows = memory[torch.randint(32, (len(given),))]
    with torch.no_grad():
        after = frozen(rows[:, 4:])
    loss = td_loss(q(rows[:, :2]), rows, after)
    optimizers["q"].zero_grad()
    loss.backward()
    optimizers["q"].step()
    if (models.step + 1) % 3 == 0:
        frozen.load_state_dict(q.state_dict())
    return loss.detach()


@by_hand("Q-learning with an environment, a replay buffer and a target network", _dqn_by_hand)
def q_learning() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        greedy = ctx.run("q", ctx.run("world", (), cut=False), cut=False).argmax(1)
        with ctx.alike():
            actions = torch.where(torch.rand(4) < 0.3, torch.randint(3, (4,)), greedy)
            noise = torch.randn(4)
        memory = ctx.run("world", (actions, noise), cut=False)
        rows = memory[torch.randint(32, (len(batch),))]
        after = ctx.run("target", rows[:, 4:])
        ctx.backward(
            "q", rows[:, :2], lambda q, batch, rows, after: td_loss(q, rows, after), rows, after
        )
        ctx.update("q")

    return paceline.Job(
        models={"q": small(2), "world": World},
        optimizers={"q": adam},
        training_step=step,
        followers={"target": paceline.copy_every("q", 3)},
        **fields(),
    )


# --- Distillation of features that hooks catch ------------------------------------------------------------------------


class Watched(nn.Module):
    """Returns its output and what hooks caught in its blocks."""

    def __init__(self, width: int = FEATURES) -> None:
        super().__init__()
        self.net = small(width=width)()
        self.caught: dict[str, Tensor] = {}
        for name in ("blocks.0", "blocks.1"):
            self.net.get_submodule(name).register_forward_hook(self._catch(name))

    def _catch(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.caught[name] = output

        return hook

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.net(x), dict(self.caught)


class Matching(nn.Module):
    """From a student's features to a teacher's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, 16) for _ in range(2)])

    def forward(self, features: dict[str, Tensor]) -> list[Tensor]:
        return [layer(each) for layer, each in zip(self.layers, features.values(), strict=True)]


def knowledge(
    output: Tensor,
    target: Tensor,
    teacher: Tensor,
    matched: list[Tensor],
    features: dict[str, Tensor],
) -> Tensor:
    soft = (
        F.kl_div(
            (output / 4).log_softmax(-1),
            (teacher / 4).log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        )
        * 16
    )
    hints = sum(
        F.mse_loss(feature, expected)
        for feature, expected in zip(matched, features.values(), strict=True)
    )
    return 0.3 * F.mse_loss(output, target) + 0.7 * soft + 0.1 * hints


def _hints_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        teacher, features = models["teacher"].eval()(x)
    output, mine = models["student"](x)
    loss = knowledge(output, y, teacher, models["matching"](mine), features)
    optimizers["both"].zero_grad()
    loss.backward()
    optimizers["both"].step()
    return loss.detach()


@by_hand("a student learns a teacher's outputs and the features that hooks catch", _hints_by_hand)
def features_by_hooks() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        teacher, features = ctx.run("teacher", batch)

        def loss(output: Any, batch: Any, teacher: Tensor, features: dict[str, Tensor]) -> Tensor:
            logits, mine = output
            return knowledge(logits, batch.target, teacher, ctx.run("matching", (mine,)), features)

        ctx.backward(("student", "matching"), batch, loss, teacher, features)
        ctx.update("both")

    return paceline.Job(
        models={"student": Watched, "matching": Matching},
        optimizers={"both": paceline.Optimizer(adam, parameters=("student", "matching"))},
        training_step=step,
        followers={"teacher": paceline.frozen(lambda: Watched(16))},
        **fields(),
    )


# --- A loss with weights of its own -----------------------------------------------------------------------------------


class Uncertainty(nn.Module):
    """Weights of tasks, learned as log-variances."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(3))

    def forward(self, losses: Tensor) -> Tensor:
        """losses: (samples, tasks); the loss of each sample."""
        return (losses * (-self.log_variances).exp() + self.log_variances).sum(1)


def _tasks_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    losses = ((models["net"](x) - y) ** 2).mean(0)
    log_variances = models["weights"].log_variances
    loss = (losses * (-log_variances).exp() + log_variances).sum()
    optimizers["all"].zero_grad()
    loss.backward()
    optimizers["all"].step()
    return loss.detach()


@by_hand("three tasks whose weights are learned beside the model", _tasks_by_hand)
def uncertain_tasks() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        ctx.backward(
            ("net", "weights"),
            batch,
            lambda output, batch: ctx.run("weights", (output - batch.target) ** 2).mean(),
        )
        ctx.update("all")

    return paceline.Job(
        models={"net": small(), "weights": Uncertainty},
        training_step=step,
        optimizers={"all": paceline.Optimizer(adam, parameters=("net", "weights"))},
        **fields(),
    )


# --- A field that obeys a differential equation -----------------------------------------------------------------------


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)
        )

    def forward(self, place: Tensor, time: Tensor) -> Tensor:
        return self.net(torch.cat([place, time], 1))


def burgers(u: Any, place: Tensor, time: Tensor) -> Tensor:
    """The residual of Burgers' equation at each point."""
    place, time = place.detach().requires_grad_(), time.detach().requires_grad_()
    value = u((place, time))
    by_place, by_time = torch.autograd.grad(value.sum(), (place, time), create_graph=True)
    (twice,) = torch.autograd.grad(by_place.sum(), place, create_graph=True)
    return by_time + value * by_place - 0.01 * twice


def _burgers_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    u = models["u"]
    residual = (burgers(lambda given: u(*given), x[:, :1], x[:, 1:2]) ** 2).mean()
    start = F.mse_loss(u(x[:, :1], torch.zeros_like(x[:, :1])), -torch.sin(math.pi * x[:, :1]))
    optimizers["u"].zero_grad()
    (residual + start).backward()
    optimizers["u"].step()
    return (residual + start).detach()


@by_hand(
    "a field that obeys Burgers' equation, by second derivatives of its inputs", _burgers_by_hand
)
def physics_informed() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x = batch.input
        place, time = x[:, :1], x[:, 1:2]
        ctx.backward(
            "u",
            (place, torch.zeros_like(place)),
            lambda value, batch, place: F.mse_loss(value, -torch.sin(math.pi * place)),
            place,
        )
        ctx.backward(
            "u",
            (place, time),
            lambda value, batch, place, time: (
                burgers(lambda given: ctx.run("u", given), place, time) ** 2
            ).mean(),
            place,
            time,
        )
        ctx.update("u")

    return paceline.Job(models={"u": Field}, optimizers={"u": adam}, training_step=step, **fields())


# --- Proximal policy optimization -------------------------------------------------------------------------------------


class Policy(nn.Module):
    """A trunk, actions and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actions, self.value = (
            nn.Linear(FEATURES, 8),
            nn.Linear(8, 3),
            nn.Linear(8, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).tanh()
        return self.actions(x).log_softmax(-1), self.value(x).squeeze(1)


def ppo_loss(
    output: tuple[Tensor, Tensor], action: Tensor, before: Tensor, advantage: Tensor, goal: Tensor
) -> Tensor:
    chances, value = output
    ratio = (chances.gather(1, action).squeeze(1) - before).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    entropy = -(chances.exp() * chances).sum(1).mean()
    return -gain + 0.5 * F.mse_loss(value, goal) - 0.01 * entropy


def _ppo_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    policy = models["policy"]
    with torch.no_grad():
        chances, value = policy(x)
    action = torch.multinomial(chances.exp(), 1)
    before, goal = chances.gather(1, action).squeeze(1), y.gather(1, action).squeeze(1)
    advantage = goal - value
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    total = torch.zeros((), dtype=x.dtype)
    for _ in range(3):
        loss = ppo_loss(policy(x), action, before, advantage, goal)
        optimizers["policy"].zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizers["policy"].step()
        total += loss.detach()
    return total


@by_hand(
    "three clipped updates of a policy for each batch, with advantages normalised over it",
    _ppo_by_hand,
)
def proximal_policy() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        chances, value = ctx.run("policy", batch)
        action = torch.multinomial(chances.exp(), 1)
        before, goal = (
            chances.gather(1, action).squeeze(1),
            batch.target.gather(1, action).squeeze(1),
        )
        advantage = goal - value
        everyone = ctx.gather(advantage)
        advantage = (advantage - everyone.mean()) / (everyone.std() + 1e-8)
        for _ in range(3):
            ctx.backward(
                "policy",
                batch,
                lambda output, batch, *more: ppo_loss(output, *more),
                action,
                before,
                advantage,
                goal,
            )
            ctx.update("policy")

    return paceline.Job(
        models={"policy": Policy},
        optimizers={"policy": paceline.Optimizer(adam, clip=0.5)},
        training_step=step,
        **fields(),
    )


# --- Images of two kinds, each turned into the other ------------------------------------------------------------------


def _cycle_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    there, back, of_a, of_b = (models[name] for name in ("there", "back", "of_a", "of_b"))
    b, a = there(x), back(y)
    loss = (
        ((of_b(b) - 1) ** 2).mean()
        + ((of_a(a) - 1) ** 2).mean()
        + 10 * ((back(b) - x).abs().mean() + (there(a) - y).abs().mean())
        + 5 * ((there(y) - y).abs().mean() + (back(x) - x).abs().mean())
    )
    optimizers["generators"].zero_grad()
    loss.backward()
    optimizers["generators"].step()
    a, b = a.detach(), b.detach()
    old_a, old_b = models["pool"](torch.stack([a, b]))
    critics = 0.5 * (
        ((of_a(x) - 1) ** 2).mean()
        + (of_a(old_a) ** 2).mean()
        + ((of_b(y) - 1) ** 2).mean()
        + (of_b(old_b) ** 2).mean()
    )
    optimizers["critics"].zero_grad()
    critics.backward()
    optimizers["critics"].step()
    return loss.detach() + critics.detach()


class Pool(nn.Module):
    """Fakes of earlier steps, as many as it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", numbers(2, BATCH, FEATURES, seed=12))

    def forward(self, fakes: Tensor) -> Tensor:
        """Of (2, samples, features), the half of earlier fakes and the half of new ones."""
        count = fakes.shape[1]
        mixed = torch.where(torch.arange(count)[:, None] % 2 == 0, self.held[:, :count], fakes)
        self.held[:, :count] = fakes
        return mixed


@by_hand("two generators, two critics, cycles, and a pool of earlier fakes", _cycle_by_hand)
def cycles() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x, y = batch
        run = ctx.run
        b, a = run("there", x), run("back", y)

        def of_generators(b: Tensor, batch: Any) -> Tensor:
            x, y = batch.input, batch.target
            a = run("back", y)
            return (
                ((run("of_b", b) - 1) ** 2).mean()
                + ((run("of_a", a) - 1) ** 2).mean()
                + 10 * ((run("back", b) - x).abs().mean() + (run("there", a) - y).abs().mean())
                + 5 * ((run("there", y) - y).abs().mean() + (run("back", x) - x).abs().mean())
            )

        ctx.backward(("there", "back"), x, of_generators)
        ctx.update("generators")
        old = ctx.run("pool", torch.stack([ctx.gather(a), ctx.gather(b)]), cut=False)
        old_a, old_b = old[0][ctx.places], old[1][ctx.places]
        for name, real, fake in (("of_a", x, old_a), ("of_b", y, old_b)):
            ctx.backward(name, real, lambda out, batch: 0.5 * ((out - 1) ** 2).mean())
            ctx.backward(name, fake, lambda out, batch: 0.5 * (out**2).mean())
        ctx.update("critics")

    eight = TensorDataset(numbers(SAMPLES, FEATURES), numbers(SAMPLES, FEATURES, seed=3))
    return paceline.Job(
        models={
            "there": small(outputs=FEATURES),
            "back": small(outputs=FEATURES),
            "of_a": small(outputs=1),
            "of_b": small(outputs=1),
            "pool": Pool,
        },
        optimizers={
            "generators": paceline.Optimizer(adam, parameters=("there", "back")),
            "critics": paceline.Optimizer(adam, parameters=("of_a", "of_b")),
        },
        training_step=step,
        **fields(data=eight),
    )


# --- A diffusion model that is guided by classes ----------------------------------------------------------------------


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.times = nn.Embedding(4, FEATURES), nn.Embedding(10, FEATURES)
        self.net = small(outputs=FEATURES)()

    def forward(self, noisy: Tensor, time: Tensor, kind: Tensor) -> Tensor:
        return self.net(noisy + self.times(time) + self.kinds(kind))


def noised(x: Tensor, time: Tensor, noise: Tensor) -> Tensor:
    kept = torch.cos(time.to(x.dtype) / 10 * math.pi / 2)[:, None] ** 2
    return kept.sqrt() * x + (1 - kept).sqrt() * noise


def _diffusion_by_hand(models: Models, optimizers: Optimizers, x: Tensor, kind: Tensor) -> Tensor:
    time, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
    kind = torch.where(torch.rand(len(x)) < 0.1, 3, kind)
    loss = F.mse_loss(models["unet"](noised(x, time, noise), time, kind), noise)
    optimizers["unet"].zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(models["unet"].parameters(), 1.0)
    optimizers["unet"].step()
    with torch.no_grad():
        for a, p in zip(models["shadow"].parameters(), models["unet"].parameters(), strict=True):
            a.mul_(0.9).add_(p, alpha=0.1)
    return loss.detach()


@by_hand(
    "a diffusion model with times, classes that are left out at random, and an average",
    _diffusion_by_hand,
)
def guided_diffusion() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x, kind = batch
        time, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
        kind = torch.where(torch.rand(len(x)) < 0.1, 3, kind)
        ctx.backward(
            "unet",
            (noised(x, time, noise), time, kind),
            lambda output, batch, noise: F.mse_loss(output, noise),
            noise,
        )
        ctx.update("unet")

    return paceline.Job(
        models={"unet": Denoiser},
        optimizers={"unet": paceline.Optimizer(adam, clip=1.0)},
        training_step=step,
        followers={"shadow": paceline.ema("unet", 0.9)},
        **fields(data=TensorDataset(numbers(SAMPLES, FEATURES), integers(3, SAMPLES))),
    )


# --- A batch that is mixed with itself --------------------------------------------------------------------------------


def _mixup_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    part = torch.distributions.Beta(0.4, 0.4).sample()
    order = torch.randperm(len(x))
    output = models["net"](part * x + (1 - part) * x[order])
    loss = part * F.mse_loss(output, y) + (1 - part) * F.mse_loss(output, y[order])
    optimizers["net"].zero_grad()
    loss.backward()
    optimizers["net"].step()
    return loss.detach()


@by_hand("samples that are mixed with others of the batch, by one number a step", _mixup_by_hand)
def mixup() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        x, y = batch
        all_x, all_y = ctx.gather((x, y))
        with ctx.alike():
            part = torch.distributions.Beta(0.4, 0.4).sample()
            order = torch.randperm(len(all_x))[ctx.places]
        ctx.backward(
            "net",
            part * x + (1 - part) * all_x[order],
            lambda output, batch, other: (
                part * F.mse_loss(output, batch.target) + (1 - part) * F.mse_loss(output, other)
            ),
            all_y[order],
        )
        ctx.update("net")

    return paceline.Job(
        models={"net": small()}, optimizers={"net": adam}, training_step=step, **fields()
    )


# --- The mean of the last weights -------------------------------------------------------------------------------------


def _mean_by_hand(models: Models, optimizers: Optimizers, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(models["net"](x), y)
    optimizers["net"].zero_grad()
    loss.backward()
    optimizers["net"].step()
    with torch.no_grad():
        for a, p in zip(models["mean"].parameters(), models["net"].parameters(), strict=True):
            a.copy_(p) if models.step < 2 else a.add_((p - a) / (models.step - 1))
    return loss.detach()


@by_hand("the mean of the weights from the third step on", _mean_by_hand)
def mean_of_weights() -> paceline.Job:
    return paceline.Job(
        models={"net": small()},
        optimizers={"net": adam},
        loss=F.mse_loss,
        followers={"mean": paceline.ema("net", lambda step: max(0, step - 2) / max(1, step - 1))},
        **fields(),
    )


# --- A language model whose hidden state goes on from batch to batch --------------------------------------------------

COLUMNS, LENGTH = BATCH, 4


class Reads(nn.Module):
    """Continues each column of text from a hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.recurrent, self.next = (
            nn.Embedding(11, 6),
            nn.GRU(6, 6, batch_first=True),
            nn.Linear(6, 11),
        )

    def forward(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        read, hidden = self.recurrent(self.words(tokens), hidden.transpose(0, 1).contiguous())
        return self.next(read), hidden.transpose(0, 1)


class Hidden(nn.Module):
    """The hidden state of each column, (columns, 1, features); returns it and keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(COLUMNS, 1, 6))

    def forward(self, new: Tensor | None = None) -> Tensor:
        if new is not None:
            self.state.copy_(new)
        return self.state.clone()


def _truncated_by_hand(
    models: Models, optimizers: Optimizers, tokens: Tensor, target: Tensor
) -> Tensor:
    hidden = models["hidden"]
    if models.step % 5 == 0:
        hidden.state.zero_()
    output, new = models["rnn"](tokens, hidden.state.clone())
    hidden.state.copy_(new.detach())
    loss = F.cross_entropy(output.flatten(0, 1), target.flatten())
    optimizers["rnn"].zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(models["rnn"].parameters(), 0.25)
    optimizers["rnn"].step()
    return loss.detach()


@by_hand(
    "a language model whose hidden state goes on from batch to batch, through which no gradient goes",
    _truncated_by_hand,
)
def truncated_backpropagation() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        if ctx.step % 5 == 0:
            ctx.run("hidden", torch.zeros(COLUMNS, 1, 6), cut=False)
        hidden = ctx.run("hidden", (), cut=False)[ctx.places]
        _, new = ctx.run("rnn", (batch.input, hidden))
        ctx.run("hidden", ctx.gather(new), cut=False)
        ctx.backward(
            "rnn",
            (batch.input, hidden),
            lambda output, batch: F.cross_entropy(output[0].flatten(0, 1), batch.target.flatten()),
        )
        ctx.update("rnn")

    text = integers(11, COLUMNS, 5 * LENGTH + 1)
    chunks = [
        (text[column, start : start + LENGTH], text[column, start + 1 : start + LENGTH + 1])
        for start in range(0, 5 * LENGTH, LENGTH)
        for column in range(COLUMNS)
    ]
    return paceline.Job(
        models={"rnn": Reads, "hidden": Hidden},
        training_step=step,
        sampler=SequentialSampler(chunks),
        optimizers={"rnn": paceline.Optimizer(adam, clip=0.25)},
        **fields(data=chunks),
    )


# --- Metric learning: groups of P classes with K samples each, and the hardest triplets of a batch --------------------


class Balanced(Sampler[list[int]]):
    """Three classes a step, three samples of each; the last step of an epoch has two classes."""

    def __init__(self, kinds: Tensor) -> None:
        self.of_kind = {
            kind: [i for i, each in enumerate(kinds.tolist()) if each == kind] for kind in range(4)
        }

    def __iter__(self) -> Iterator[list[int]]:
        for classes in (3, 3, 3, 2):
            yield [
                index
                for kind in random.sample(sorted(self.of_kind), classes)
                for index in random.sample(self.of_kind[kind], 3)
            ]

    def __len__(self) -> int:
        return 4


def hardest(z: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number of the triplets that count."""
    apart = ((z[:, None] - z[None]) ** 2).sum(-1)
    same = kinds[:, None] == kinds[None]
    losses = (apart * same).amax(1) - apart.masked_fill(same, 1e9).amin(1) + 0.3
    return losses.relu().sum(), (losses > 0).sum()


def _triplets_by_hand(models: Models, optimizers: Optimizers, x: Tensor, kinds: Tensor) -> Tensor:
    total, count = hardest(models["net"](x), kinds)
    optimizers["net"].zero_grad()
    (total / count).backward()
    optimizers["net"].step()
    return (total / count).detach()


@by_hand(
    "metric learning by the hardest triplets of a batch, with classes drawn in balance",
    _triplets_by_hand,
)
def hard_triplets() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        ctx.backward("net", batch, lambda z, batch: hardest(z, batch.target), gather=True)
        ctx.update("net")

    kinds = integers(4, SAMPLES)
    return paceline.Job(
        models={"net": lambda: Tower(FEATURES)},
        optimizers={"net": adam},
        training_step=step,
        sampler=Balanced(kinds),
        **fields(data=TensorDataset(numbers(SAMPLES, FEATURES), kinds), batch=None),
    )


# --- Translation with scheduled sampling: the decoder is given what it said, more and more often ----------------------

PAD, BEGIN, WORDS, LONGEST = 0, 1, 9, 5


class Translator(nn.Module):
    """taught: (samples, words), whether the decoder is given the target's word there, or its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.said = (
            nn.Embedding(WORDS, 6, padding_idx=PAD),
            nn.Embedding(WORDS, 6, padding_idx=PAD),
        )
        self.encoder, self.cell, self.out = (
            nn.GRU(6, 6, batch_first=True),
            nn.GRUCell(6, 6),
            nn.Linear(6, WORDS),
        )

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor, taught: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.words(source), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        hidden = self.encoder(packed)[1][0]
        word, logits = torch.full_like(lengths, BEGIN), []
        for place in range(target.shape[1]):
            hidden = self.cell(self.said(word), hidden)
            logits.append(self.out(hidden))
            word = torch.where(taught[:, place], target[:, place], logits[-1].argmax(1))
        return torch.stack(logits, 1)


def pad_pairs(samples: list[tuple[Tensor, Tensor]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """To one length: the step takes a batch apart, of which micro-batches would have other lengths."""
    words = torch.stack(
        [torch.stack([F.pad(each, (0, LONGEST - len(each))) for each in pair]) for pair in samples]
    )
    return (words[:, 0], torch.tensor([len(source) for source, _ in samples])), words[:, 1]


def of_words(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum"
    ), (target != PAD).sum()


def _sampling_by_hand(models: Models, optimizers: Optimizers, given: Any, target: Tensor) -> Tensor:
    taught = torch.rand(len(target), LONGEST) < max(0.2, 1 - models.step / 4)
    total, count = of_words(models["net"](*given, target, taught), target)
    optimizers["net"].zero_grad()
    (total / count).backward()
    torch.nn.utils.clip_grad_norm_(models["net"].parameters(), 1.0)
    optimizers["net"].step()
    return (total / count).detach()


@by_hand(
    "translation of padded sentences, in which a decoder is taught less and less often",
    _sampling_by_hand,
)
def scheduled_sampling() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        taught = torch.rand(len(batch), LONGEST) < max(0.2, 1 - ctx.step / 4)
        source, lengths = batch.input
        ctx.backward(
            "net",
            (source, lengths, batch.target, taught),
            lambda out, batch: of_words(out, batch.target),
        )
        ctx.update("net")

    sentences = [
        integers(WORDS - 2, int(length), seed=index) + 2
        for index, length in enumerate(integers(LONGEST - 1, SAMPLES, seed=4) + 2)
    ]
    return paceline.Job(
        models={"net": Translator},
        optimizers={"net": paceline.Optimizer(adam, clip=1.0)},
        training_step=step,
        collate=pad_pairs,
        **fields(data=[(each, each.flip(0)) for each in sentences]),
    )
