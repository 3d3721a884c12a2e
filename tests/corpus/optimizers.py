"""torch's optimizers with their options, and kinds that users write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import paceline

from .registry import BATCH, FEATURES, SAMPLES, Net, adamw, add, entry, integers, make_job, numbers

_OPTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sgd": ("SGD", {"lr": 0.1}, "SGD"),
    "sgd_momentum": (
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.1},
        "SGD with momentum and dampening",
    ),
    "sgd_nesterov": (
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        "SGD with Nesterov momentum and weight decay",
    ),
    "sgd_foreach": (
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "foreach": True},
        "SGD that takes all tensors at once",
    ),
    "sgd_fused": ("SGD", {"lr": 0.05, "momentum": 0.9, "fused": True}, "SGD in one kernel"),
    "adam": ("Adam", {"lr": 1e-2, "eps": 1e-3}, "Adam"),
    "adam_amsgrad": (
        "Adam",
        {"lr": 1e-2, "eps": 1e-3, "amsgrad": True},
        "Adam that keeps the greatest square",
    ),
    "adam_fused": ("Adam", {"lr": 1e-2, "eps": 1e-3, "fused": True}, "Adam in one kernel"),
    "adam_foreach": (
        "Adam",
        {"lr": 1e-2, "eps": 1e-3, "foreach": True},
        "Adam that takes all tensors at once",
    ),
    "adamw": ("AdamW", {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}, "AdamW"),
    "nadam": ("NAdam", {"lr": 1e-2, "eps": 1e-3}, "NAdam, whose state has a product of momenta"),
    "radam": ("RAdam", {"lr": 1e-2, "eps": 1e-3}, "RAdam, which changes its rule after five steps"),
    "adamax": ("Adamax", {"lr": 1e-2, "eps": 1e-3}, "Adamax"),
    "adadelta": ("Adadelta", {"lr": 0.5, "eps": 1e-3}, "Adadelta"),
    "adagrad": (
        "Adagrad",
        {"lr": 0.05, "lr_decay": 0.1, "eps": 1e-3},
        "Adagrad with a decay of its own",
    ),
    "rmsprop_centered": (
        "RMSprop",
        {"lr": 1e-2, "eps": 1e-3, "centered": True, "momentum": 0.9},
        "RMSprop around the mean gradient",
    ),
    "rprop": ("Rprop", {"lr": 1e-2}, "Rprop, which looks at signs alone"),
    "asgd": ("ASGD", {"lr": 0.05, "t0": 2}, "ASGD, which averages weights from a step on"),
    "adafactor": (
        "Adafactor",
        {"lr": 0.05},
        "Adafactor, whose state is rows and columns of a matrix",
    ),
}


def _named(class_name: str, options: dict[str, Any]) -> Callable[[], paceline.Job]:
    return lambda: make_job(
        optimizer=lambda named: getattr(torch.optim, class_name)(named, **options)
    )


for _name, (_class, _given, _idea) in _OPTIONS.items():
    add(_name, "optimizers", _idea, _named(_class, _given))


class Ascent(nn.Module):
    """A net that gives what is to be made large."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@entry("SGD that makes the loss large")
def sgd_maximize() -> paceline.Job:
    return make_job(
        Ascent,
        loss=lambda output, target: -(output - target).square().mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.5, maximize=True),
    )


def _by_kind(
    named: Iterable[tuple[str, nn.Parameter]],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    pairs = [p for _, p in named]
    return [p for p in pairs if p.ndim == 2], [p for p in pairs if p.ndim != 2]


@entry("parameter groups by kind: weights decay, biases don't")
def groups_by_kind() -> paceline.Job:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        matrices, others = _by_kind(named)
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}],
            lr=1e-2,
            eps=1e-3,
        )

    return make_job(optimizer=optimizer)


@entry("parameter groups with names and a learning rate a layer")
def groups_by_layer() -> paceline.Job:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        pairs = list(named)
        return torch.optim.SGD(
            [{"params": [pair], "lr": 0.1 / (1 + number)} for number, pair in enumerate(pairs)],
            momentum=0.9,
        )

    return make_job(optimizer=optimizer)


class Both(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, each with a state of its own."""

    def __init__(self, named: Any) -> None:
        matrices, others = _by_kind(named)
        self.parts = [
            torch.optim.Muon(matrices, lr=0.02),
            torch.optim.AdamW(others, lr=1e-2, eps=1e-3),
        ]
        super().__init__([*matrices, *others], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


@entry("a wrapper of two optimizers, Muon for matrices and AdamW for the rest")
def muon_and_adamw() -> paceline.Job:
    return make_job(optimizer=Both)


class Matrices(nn.Module):
    """A net without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4)])
        self.last = nn.Linear(FEATURES, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


@entry("torch's Muon, which orthogonalises whole matrices")
def muon() -> paceline.Job:
    return make_job(
        Matrices, optimizer=lambda named: torch.optim.Muon(named, lr=0.02, momentum=0.9)
    )


class WholeNorm(torch.optim.Optimizer):
    """SGD by the gradient's direction: one norm over all parameters."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


@entry("an optimizer that takes one norm over all parameters")
def whole_norm() -> paceline.Job:
    return make_job(optimizer=WholeNorm)


class Lamb(torch.optim.Optimizer):
    """A step for each tensor in proportion to its norm."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, {"lr": 0.05, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(p.grad)
                p.sub_(momentum * (p.norm() / (momentum.norm() + 1e-6)), alpha=group["lr"])


@entry("an optimizer that takes a norm of each tensor, as LAMB")
def norm_of_each_tensor() -> paceline.Job:
    return make_job(optimizer=Lamb)


class Lion(torch.optim.Optimizer):
    """Signs of a momentum."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.sub_(torch.sign(0.9 * momentum + 0.1 * p.grad), alpha=group["lr"])
                    momentum.lerp_(p.grad, 0.01)


@entry("a user's optimizer of signs, as Lion")
def lion() -> paceline.Job:
    return make_job(optimizer=Lion)


class Averaged(torch.optim.SGD):
    """SGD that keeps a moving average of weights beside its state."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("average", p.detach().clone()).lerp_(p, 0.1)


@entry("an optimizer that keeps a moving average of weights in its state")
def average_in_state() -> paceline.Job:
    return make_job(optimizer=Averaged)


class SparseNet(nn.Module):
    """Embeddings with sparse gradients alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(33, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).tanh().mean(1)


def _tokens() -> Any:
    return torch.utils.data.TensorDataset(integers(33, SAMPLES, 4), numbers(SAMPLES, 6, seed=5))


@entry("SparseAdam on an embedding with sparse gradients")
def sparse_adam() -> paceline.Job:
    return make_job(
        SparseNet,
        data=_tokens(),
        optimizer=lambda named: torch.optim.SparseAdam(named, lr=0.05, eps=1e-3),
    )


@entry("SGD on an embedding with sparse gradients")
def sparse_sgd() -> paceline.Job:
    return make_job(SparseNet, data=_tokens())


@entry("LBFGS on all samples at once, which evaluates the loss twenty times a step")
def lbfgs() -> paceline.Job:
    return make_job(
        batch=SAMPLES, optimizer=lambda named: torch.optim.LBFGS([p for _, p in named], lr=0.1)
    )


@entry("LBFGS with a line search and a short history, and clipping")
def lbfgs_line_search() -> paceline.Job:
    return make_job(
        clip=1.0,
        optimizer=lambda named: torch.optim.LBFGS(
            [p for _, p in named], lr=1.0, max_iter=4, history_size=5, line_search_fn="strong_wolfe"
        ),
    )


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: SGD by the gradients at the worst point nearby."""

    step_takes = "closure"

    def __init__(self, named: Any) -> None:
        super().__init__([p for _, p in named], {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM requires a closure"
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        before = [p.clone() for p in trained]
        for p in trained:
            p.data.add_(p.grad * (0.05 / norm))
        closure()
        for p, weight in zip(trained, before, strict=True):
            p.data.copy_(weight)
        self.base.step()


@entry("SAM, which evaluates the loss at two points a step")
def sam() -> paceline.Job:
    return make_job(optimizer=Sam)


@entry("a learning rate that is a tensor")
def tensor_learning_rate() -> paceline.Job:
    return make_job(
        optimizer=lambda named: torch.optim.Adam(
            named, lr=torch.tensor(1e-2), eps=1e-3, foreach=False
        )
    )


@entry("gradient norm clipped to a tiny number")
def clip_tiny() -> paceline.Job:
    return make_job(clip=1e-3, optimizer=adamw)


@entry("gradient norm clipped to a number that is never reached")
def clip_huge() -> paceline.Job:
    return make_job(clip=1e6, optimizer=adamw)


@entry("clipping that acts in some steps only, with momentum")
def clip_sometimes() -> paceline.Job:
    return make_job(clip=0.25, optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9))


@entry("float32, as most jobs run")
def float32() -> paceline.Job:
    return make_job(precision="float32", optimizer=adamw)


@entry("bf16 by autocast")
def bf16() -> paceline.Job:
    return make_job(precision="bf16")


@entry("one step alone")
def one_step() -> paceline.Job:
    return make_job(steps=1, optimizer=adamw)


@entry("a batch of the least size that three replicas can share")
def batch_of_three() -> paceline.Job:
    return make_job(batch=BATCH // 4, optimizer=adamw)


class WithModes(torch.optim.Optimizer):
    """SGD whose weights in `eval()` are the mean of all so far."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, {"lr": 0.1, "is_training": True, "count": 0})

    def train(self) -> None:
        self._put(True)

    def eval(self) -> None:
        self._put(False)

    @torch.no_grad()
    def _put(self, is_training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if group["is_training"] is not is_training and (state := self.state.get(p)):
                    other = state["other"].clone()
                    state["other"].copy_(p)
                    p.copy_(other)
            group["is_training"] = is_training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
                other = self.state[p].setdefault("other", torch.zeros_like(p))
                other.lerp_(p, 1 / group["count"])


@entry("an optimizer with train() and eval(), whose weights differ")
def optimizer_with_modes() -> paceline.Job:
    return make_job(optimizer=WithModes)
