"""Optimizers that people write, and a small float64 job that the tests of optimizers and of resuming share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

SAMPLES, BATCH, STEPS = 50, 12, 7  # an epoch has a short last batch, after step 4

Named = Iterable[tuple[str, nn.Parameter]]


class Net(nn.Module):
    """Layers of odd sizes that two ranks can split, and a scalar that nobody can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.out = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.out(x) * self.scale


def optimizer_job(
    optimizer: Callable[[Named], torch.optim.Optimizer],
    model: Callable[[], nn.Module] = Net,
    **changes: Any,
) -> paceline.Job:
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    fields = {
        "model": model,
        "data": TensorDataset(x, x[:, :3].sin()),
        "loss": F.mse_loss,
        "optimizer": optimizer,
        "batch": BATCH,
        "steps": STEPS,
        "precision": "float64",
    }
    return paceline.Job(**{**fields, **changes})


def train(job: paceline.Job, plan: str, run: Path, **options: Any) -> dict[str, Tensor]:
    """The weights after training."""
    world_size = paceline.Plan.parse(plan).world_size
    paceline.train(job, plan, devices=f"cpu:0-{world_size - 1}", run=run, **options)
    return load_file(run / "model.safetensors")


def train_in_legs(
    job: paceline.Job, legs: Iterable[tuple[str, int]], run: Path
) -> dict[str, Tensor]:
    """The weights after legs under different plans, each up to a step, each resumed from the one before."""
    weights: dict[str, Tensor] = {}
    for number, (plan, steps) in enumerate(legs):
        weights = train(job, plan, run, steps=steps, resume=number > 0)
    return weights


def furthest(weights: dict[str, Tensor], others: dict[str, Tensor]) -> tuple[float, str]:
    """How far two models are apart at most, and where."""
    return max((float((weights[name] - others[name]).abs().max()), name) for name in weights)


class Wrapped(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, each an optimizer of its own."""

    def __init__(self, named: Named) -> None:
        named = list(named)
        super().__init__([p for _, p in named], {})
        self.muon = torch.optim.Muon([p for _, p in named if p.ndim == 2], lr=0.02)
        self.others = [torch.optim.AdamW([p for _, p in named if p.ndim != 2], lr=0.01)]
        self.param_groups = [
            group for part in (self.muon, *self.others) for group in part.param_groups
        ]

    def step(self, closure: Any = None) -> None:
        for part in (self.muon, *self.others):
            part.step()


class Unshared(torch.optim.Optimizer):
    """Two optimizers behind one, whose groups are not its own."""

    def __init__(self, named: Named) -> None:
        named = list(named)
        super().__init__([p for _, p in named], {})  # no rate of its own
        self.parts = {
            "matrices": torch.optim.SGD([p for _, p in named if p.ndim == 2], lr=0.1, momentum=0.9),
            "rest": torch.optim.Adam([p for _, p in named if p.ndim != 2], lr=0.01),
        }

    def step(self, closure: Any = None) -> None:
        for part in self.parts.values():
            part.step()


class OwnAverages(torch.optim.Optimizer):
    """Keeps its averages in a mapping beside `state`, a count of steps, and a list in `state`."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.05})
        self.averages: dict[nn.Parameter, Tensor] = {}
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.averages.setdefault(p, torch.zeros_like(p)).lerp_(p.grad, 0.1)
                history = self.state[p].setdefault(
                    "history", [torch.zeros_like(p), torch.zeros_like(p), 0.5]
                )
                history[0].add_(p.grad)
                history[1].add_(history[0])
                history[2] *= 0.9
                p.sub_(
                    self.averages[p] / self.count + 0.01 * history[1] * history[2],
                    alpha=group["lr"],
                )


class Seldom(torch.optim.Optimizer):
    """Sums gradients beside `state`, by parameter, and updates with them every few steps. From step `late` on it also
    keeps an average, which a trial of fewer steps does not see."""

    def __init__(self, named: Named, every: int, late: int) -> None:
        super().__init__([p for _, p in named], {"lr": 0.05})
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.averages: dict[nn.Parameter, Tensor] = {}
        self.every, self.late, self.count = every, late, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                self.sums.setdefault(p, torch.zeros_like(p)).add_(p.grad)
                if self.count >= self.late:
                    self.averages.setdefault(p, torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    p.sub_(self.averages[p], alpha=group["lr"])
                if not self.count % self.every:
                    p.sub_(self.sums[p], alpha=group["lr"])
        if not self.count % self.every:
            self.sums.clear()


class GlobalNorm(torch.optim.SGD):
    """Divides every gradient by the norm over all of them."""

    def step(self, closure: Any = None) -> None:
        gradients = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = sum(float(g.square().sum()) for g in gradients) ** 0.5
        for g in gradients:
            g.div_(norm)
        super().step()


class StackedNorm(torch.optim.SGD):
    """The same, as torch writes it, for tensors of one kind."""

    def step(self, closure: Any = None) -> None:
        gradients = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for g in gradients:
            g.div_(norm)
        super().step()


class Lamb(torch.optim.Optimizer):
    """A step as long as the tensor's own norm."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * p.norm() / (p.grad.norm() + 1e-3), alpha=group["lr"])


class Shampoo(torch.optim.Optimizer):
    """Roots of sums of products of gradients on both sides of a matrix, in a list in `state`."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.ndim != 2:
                    p.sub_(p.grad, alpha=group["lr"])
                    continue
                sides = self.state[p].setdefault(
                    "sides", [torch.eye(n, dtype=p.dtype) * 1e-2 for n in p.shape]
                )
                sides[0].add_(p.grad @ p.grad.T)
                sides[1].add_(p.grad.T @ p.grad)
                roots = []
                for side in sides:
                    values, vectors = torch.linalg.eigh(side)
                    roots.append(vectors @ (values.clamp(min=1e-6) ** -0.25).diag() @ vectors.T)
                p.sub_(roots[0] @ p.grad @ roots[1], alpha=group["lr"])


class Hidden(torch.optim.Optimizer):
    """Counts steps where nobody can see it."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.1})
        numbers = iter(range(1, 10**9))
        self.next = lambda: next(numbers)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        count = self.next()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / count)


class ByPosition(torch.optim.Optimizer):
    """Keeps state by the parameters' addresses, which `state_dict` puts in order."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.1})
        self.averages: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self._all():
            if p.grad is not None:
                self.averages.setdefault(id(p), torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.sub_(self.averages[id(p)], alpha=0.1)

    def _all(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "averages": [self.averages.get(id(p)) for p in self._all()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        averages = rest.pop("averages")
        super().load_state_dict(rest)
        self.averages = {
            id(p): average
            for p, average in zip(self._all(), averages, strict=True)
            if average is not None
        }


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation as its authors' code does it: it starts from gradients that are there, and asks for
    those at the worst point nearby."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"rho": 0.05, "lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, (
            "Sharpness Aware Minimization requires closure, but it was not provided"
        )
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        for p in trained:
            self.state[p]["old_p"] = p.data.clone()
            p.data.add_(p.grad * (0.05 / (norm + 1e-12)))
            p.grad = None
        torch.enable_grad()(closure)()
        for p in trained:
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()


class Extragradient(torch.optim.Optimizer):
    """Looks at the gradients of two points, the second of which the first ones lead to, and at the fall of the loss.

    It keeps the first gradients as the closure left them.
    """

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.1})
        self.evaluations = 0

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        trained = self.param_groups[0]["params"]
        first = closure()
        gradients, weights = [p.grad for p in trained], [p.clone() for p in trained]
        for p in trained:
            p.sub_(p.grad, alpha=0.1)
        second = closure()
        self.evaluations += 2
        rate = 0.1 if second < first else 0.05
        for p, before, gradient in zip(trained, weights, gradients, strict=True):
            p.copy_(before - rate * (p.grad + 0.5 * gradient))
        return first
