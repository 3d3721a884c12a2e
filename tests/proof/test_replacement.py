"""Losses that are a mean, but not over samples: the code that the message shows, pasted, is a loss that passes."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.job import Job
from paceline.proof.problems import loss_problem

CLASSES, TOKENS, SAMPLES = 5, 4, 7
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0])
CRITERION = nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1, label_smoothing=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, TOKENS * CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(-1, TOKENS, CLASSES)


def job(loss: Any) -> Job:
    """Samples of some tokens, of which other numbers are ignored in each."""
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, CLASSES, (SAMPLES, TOKENS), generator=drawn)
    ignored = torch.arange(TOKENS)[None] > torch.arange(SAMPLES)[:, None] % TOKENS
    tokens[ignored] = -100
    return Job(
        model=Net,
        data=(torch.randn(SAMPLES, 3, generator=drawn), tokens),
        batch=SAMPLES,
        steps=1,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


def classes(target: Tensor) -> Tensor:
    """A class for each token, 0 where it is ignored."""
    return target.clamp(min=0)


def mask_of(target: Tensor) -> Tensor:
    return (target >= 0).float()


def flat(output: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens that are not ignored."""
    return F.cross_entropy(output.view(-1, CLASSES), target.view(-1))


def of_variables(output, target):  # type: ignore[no-untyped-def]
    logits = output.flatten(0, 1)
    loss = F.cross_entropy(logits, classes(target).flatten(), ignore_index=0, label_smoothing=0.2)
    return loss  # noqa: RET504


def masked_mse(output: Tensor, target: Tensor) -> Tensor:
    mask = mask_of(target)
    squares = (output.mean(-1) - 1) ** 2
    return (squares * mask).sum() / mask.sum().clamp(min=1)


def token_mean(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return each[target != -100].mean()


def per_length(output: Tensor, target: Tensor) -> Tensor:
    """CTC's losses over all targets' lengths, and not over samples."""
    lengths = 1 + mask_of(target).sum(1).long() // 2
    inputs = torch.full((len(output),), TOKENS)
    total = F.ctc_loss(
        output.log_softmax(-1).transpose(0, 1),
        classes(target) % 4 + 1,
        inputs,
        lengths,
        reduction="sum",
        zero_infinity=True,
    )
    return total / lengths.sum()


class Smoothed(nn.Module):
    """A loss of the user's own, as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.NLLLoss(ignore_index=-100, weight=WEIGHTS)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.criterion(output.flatten(0, 1).log_softmax(-1), target.flatten())


class PlanChoice(Net):
    """Its output is (samples, classes, tokens), as torch's losses take it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


LOSSES: dict[str, Any] = {
    "ignored index": flat,
    "variables, another index, smoothing": of_variables,
    "masked squares": masked_mse,
    "token mean": token_mean,
    "CTC over lengths": per_length,
    "a module": Smoothed(),
    "class weights": lambda o, t: F.cross_entropy(
        o.flatten(0, 1), classes(t).flatten(), weight=WEIGHTS
    ),
    "weights by position": lambda o, t: F.cross_entropy(
        o.flatten(0, 1), classes(t).flatten(), WEIGHTS, ignore_index=2
    ),
    "a criterion": lambda output, target: CRITERION(
        output.flatten(0, 1), classes(target).flatten()
    ),
    "masked rows": lambda o, t: F.mse_loss(o[t >= 0], torch.ones_like(o[t >= 0])),
    "binary, masked": lambda o, t: F.binary_cross_entropy_with_logits(
        o[t >= 0][:, 0], mask_of(t)[t >= 0]
    ),
    "a factor": lambda o, t: 0.5 * torch.mean((o[t >= 0] - 1).abs()),
    "a small number": lambda o, t: (o.mean(-1) * mask_of(t)).sum() / (mask_of(t).sum() + 1e-8),
    "torch.div": lambda o, t: torch.div((o.mean(-1) * mask_of(t)).sum(), max(mask_of(t).sum(), 1)),
}
# Given as they are, for an output of (samples, classes, tokens).
OF_TORCH: dict[str, Any] = {
    "cross_entropy": F.cross_entropy,
    "a part": partial(F.cross_entropy, label_smoothing=0.1),
    "CrossEntropyLoss": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
    "index": nn.CrossEntropyLoss(),
}


def pasted(shown: str) -> Any:
    """The function that the message shows, with the names of this file."""
    code = textwrap.dedent(
        re.findall(r"\n\n(    def loss.*?)\n(?=$|\S)", shown + "\n", re.DOTALL)[0]
    )
    names = {**globals(), "weight": WEIGHTS}
    exec(code, names)
    return names["loss"]


@pytest.mark.parametrize("name", [*LOSSES, *OF_TORCH])
def test_the_replacement_is_the_same_loss_and_passes(name: str):
    """It is found, it computes the loss that it replaces, and verify has no problem with it."""
    model, loss = (PlanChoice, OF_TORCH[name]) if name in OF_TORCH else (Net, LOSSES[name])
    given = replace(job(loss), model=model)
    problem = loss_problem(given, steps=1)
    assert problem is not None and problem.kind == "loss"
    made = pasted(problem.instead)
    assert ("# weight: what CrossEntropyLoss was given" in problem.instead) == (
        name == "CrossEntropyLoss"
    )
    if name == "a module":
        made = partial(made, loss)
    assert loss_problem(replace(given, loss=made), steps=1) is None
    output, target = model()(given.data.tensors[0]).detach(), given.data.tensors[1]
    total, count = made(output, target)
    assert float(total) / float(count) == pytest.approx(float(loss(output, target)), rel=1e-5)


def ctc_mean(output: Tensor, target: Tensor) -> Tensor:
    lengths = 1 + mask_of(target).sum(1).long() // 2
    return F.ctc_loss(
        output.log_softmax(-1).transpose(0, 1),
        classes(target) % 4 + 1,
        torch.full((len(output),), TOKENS),
        lengths,
        zero_infinity=True,
    )


@pytest.mark.parametrize(
    "loss", [ctc_mean, lambda o, t: ((o - 1) ** 2).mean(), lambda o, t: o.sum() / len(o)]
)
def test_means_over_samples_need_no_replacement(loss: Any):
    """CTC's own mean among them: it divides each sample by its own length."""
    assert loss_problem(job(loss), steps=1) is None


def two_terms(output: Tensor, target: Tensor) -> Tensor:
    return flat(output, target) + 0.1 * (output**2).mean()


def of_a_branch(output: Tensor, target: Tensor) -> Tensor:
    if len(output) > 2:
        return flat(output, target)
    return flat(output, target) * 1.0


def test_no_code_is_shown_that_is_another_loss():
    """Terms with counts of their own have no one count, and source that isn't there can't be read: words alone."""
    unseen = eval("lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten())", globals())
    by_a_number = lambda o, t: ((o.mean(-1) - 1) * mask_of(t)).sum() / 20.0  # noqa: E731  # counts of parts don't add up
    for loss in (two_terms, unseen, by_a_number):
        problem = loss_problem(job(loss), steps=1)
        assert problem is not None and problem.instead.endswith(
            "the number or weight of what it counts"
        )
