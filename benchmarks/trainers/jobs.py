"""The six jobs as plain PyTorch: a model, samples, a loss, an optimizer, a global batch and a number of epochs.

Every job is the same small perceptron with one thing changed. Weights and samples are drawn from fixed seeds, so that
every trainer starts from the same numbers. A loss is a cross entropy; a target of -100 is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

RANKS = 2
BATCH = 16  # samples an optimizer step, over all ranks
FEATURES, WIDTH, CLASSES = 8, 16, 4
POSITIONS = 6  # targets a sample in the job with ignored labels
EXPERTS = 4
IGNORED = -100
STOP_AFTER = 4  # steps; the second epoch of three steps has begun

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean over the targets that count. output: (..., CLASSES), target: (...)."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


def total_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the targets that count, and their number."""
    total = F.cross_entropy(
        output.flatten(0, -2), target.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (target != IGNORED).sum()


def plain_step(model: nn.Module, input: Tensor, target: Tensor) -> Tensor:
    return mean_loss(model(input), target)


def penalised_step(model: nn.Module, input: Tensor, target: Tensor) -> Tensor:
    """A training step of one's own: two forward passes, and a penalty on the slope of the first by its input."""
    input = input.detach().requires_grad_()
    output, shifted = model(input), model(input + 0.1)
    (slope,) = torch.autograd.grad(output.sum(), input, create_graph=True)
    return penalised_loss((output, shifted, slope), target)


def penalised_loss(outputs: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    """The mean over samples of a cross entropy, a distance between both outputs, and a squared slope."""
    output, shifted, slope = outputs
    return (
        mean_loss(output, target)
        + F.mse_loss(shifted, output)
        + 0.1 * slope.square().sum(dim=1).mean()
    )


class Experts(nn.Module):
    """The first feature of a sample says which expert it goes to; an expert without samples is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, WIDTH) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input: Tensor) -> Tensor:
        route, hidden = input[:, 0].long(), input.new_zeros(len(input), WIDTH)
        for number, expert in enumerate(self.experts):
            chosen = (route == number).nonzero().flatten()
            if len(chosen):
                hidden = hidden.index_add(0, chosen, torch.tanh(expert(input[chosen])))
        return self.head(hidden)


def perceptron(norm: type[nn.Module] | None = None, *arguments: int) -> Callable[[], nn.Module]:
    """Two linear layers, with a normalisation after the first if one is given."""

    def build() -> nn.Module:
        norms = [norm(*arguments)] if norm else []
        return nn.Sequential(
            nn.Linear(FEATURES, WIDTH), *norms, nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )

    return build


@dataclass(frozen=True)
class TrainerJob:
    """What is trained. `loss` is a training step's forward: it calls the model and returns the mean loss."""

    title: str
    build: Callable[[], nn.Module]
    data: TensorDataset
    epochs: int = 3
    loss: Loss = plain_step
    adaptive: bool = False
    shuffle: bool = False

    def model(self) -> nn.Module:
        """With the same initial weights in every process."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.build()

    def optimizer(
        self, parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]]
    ) -> torch.optim.Optimizer:
        if self.adaptive:
            # The default eps, 1e-8, turns the rounding of a gradient near zero into steps of up to the learning rate.
            return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-3)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _samples(count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.randn(count, FEATURES, generator=draw),
        torch.randint(CLASSES, (count,), generator=draw),
    )


def _with_ignored_labels(count: int) -> TensorDataset:
    """Odd samples, and odd runs of eight samples, count fewer of their labels: both ways to deal out a batch of 16
    over two ranks give the ranks unequal numbers of them."""
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, POSITIONS, FEATURES, generator=draw)
    targets = torch.randint(CLASSES, (count, POSITIONS), generator=draw)
    numbers = torch.arange(count)
    share = torch.tensor([0.95, 0.5, 0.05])[numbers % 2 + numbers // (BATCH // RANKS) % 2]
    ignored = torch.rand(count, POSITIONS, generator=draw) > share[:, None]
    return TensorDataset(inputs, targets.masked_fill(ignored, IGNORED))


def _routed(count: int) -> TensorDataset:
    """The last expert gets one sample of the batches 0, 2, 4 and so on, so one rank or none has a gradient for it."""
    inputs, targets = _samples(count).tensors
    numbers = torch.arange(count)
    inputs[:, 0] = torch.where(
        numbers % (2 * BATCH) == 5, EXPERTS - 1, numbers % (EXPERTS - 1)
    ).float()
    return TensorDataset(inputs, targets)


JOBS = {
    "short": TrainerJob("short last batch", perceptron(), _samples(45)),
    "ignored": TrainerJob(
        "ignored labels, unevenly spread", perceptron(), _with_ignored_labels(48)
    ),
    "custom": TrainerJob(
        "a training step of one's own", perceptron(), _samples(48), loss=penalised_step
    ),
    "idle": TrainerJob("an idle expert", Experts, _routed(48), adaptive=True),
    "batchnorm": TrainerJob("BatchNorm", perceptron(nn.BatchNorm1d, WIDTH), _samples(48)),
    "resume": TrainerJob(
        "resume in mid-epoch", perceptron(), _samples(48), adaptive=True, shuffle=True
    ),
}
WITH_GROUP_NORM = TrainerJob("GroupNorm", perceptron(nn.GroupNorm, 4, WIDTH), _samples(48))


def job_of(name: str, setting: str) -> TrainerJob:
    """The job by name; the setting `group_norm` puts a GroupNorm where the BatchNorm was."""
    return WITH_GROUP_NORM if setting == "group_norm" else JOBS[name]
