"""`ctx.backward(..., gather=True)`: a loss that compares samples is taken over all of the step, wherever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from planted import no_bug, verified
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.base.errors import PacelineError
from paceline.training.own_step.recorded import recorded
from paceline.training.own_step.verbs import Verbs
from tests.corpus import training_loops
from tests.corpus.own_steps import adam, fields, small
from tests.corpus.registry import FEATURES, SAMPLES, integers, numbers


def hardest(z: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sample, the farthest of its kind against the nearest of another; a mean with weights by kind."""
    apart = ((z[:, None] - z[None]) ** 2).sum(-1)
    same = kinds[:, None] == kinds[None]
    worst = (apart * same).amax(1) - apart.masked_fill(same, 1e9).amin(1)
    weights = 1.0 + kinds
    return (weights * F.softplus(worst)).sum(), weights.sum()


def job(net: Any, **more: Any) -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        ctx.backward(
            "net", batch, lambda z, batch, kinds: hardest(z, kinds), batch.target, gather=True
        )
        ctx.update("net")

    given = {
        "training_step": step,
        "models": {"net": net},
        "optimizers": {"net": adam},
        **fields(data=TensorDataset(numbers(SAMPLES, FEATURES), integers(3, SAMPLES))),
        **more,
    }
    return paceline.Job(**given)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 4))


class Counts(nn.Module):
    """Keeps in Python what its next output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = nn.Linear(FEATURES, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * self.calls


def without_other_ranks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("paceline.strategies.mesh.Mesh.is_first_of_same_samples", False)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", pytest.param("data=3", marks=pytest.mark.slow)])
def test_verify_certifies_it_and_catches_rows_that_are_left_out(plan: str) -> None:
    """Two views of each sample; the last of three replicas has a short window."""
    right, wrong = verified(training_loops.simclr(), [(plan, no_bug), (plan, without_other_ranks)])
    assert right.verdict == "passed", right.reason
    assert wrong.verdict == "failed"


def test_a_loss_with_a_count_of_its_own_in_micro_batches_and_shards() -> None:
    """(sum, count) of all samples."""
    (certificate,) = paceline.verify(
        job(small(outputs=4)), ["data=2 shares=3:1 microbatches=2"], steps=2, restore="no"
    )
    assert certificate.verdict == "passed", certificate.reason


@pytest.mark.slow
def test_a_batch_norm_under_such_a_loss() -> None:
    """Its statistics move once a step and not once a forward."""
    even = TensorDataset(
        numbers(48, FEATURES), integers(3, 48)
    )  # a BatchNorm can't take one sample
    (coupled,) = paceline.verify(
        job(with_batch_norm, data=even), ["data=2 microbatches=2"], steps=2, restore="no"
    )
    assert coupled.verdict == "coupled", coupled.reason


@pytest.mark.slow
def test_both_forwards_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other masks the gradients would be of another loss, which verify can't see: it switches dropout off."""
    assert paceline.train(job(with_dropout), "data=2", steps=2, check=False)["steps"] == 2
    with pytest.raises(PacelineError, match="'net' gives another output when it is run again"):
        paceline.train(job(Counts), "data=2", steps=2, check=False)

    first = Verbs._run_first

    def with_other_draws(self: Verbs, *args: Any) -> Any:
        output = first(self, *args)
        self.number += 1
        return output

    monkeypatch.setattr(Verbs, "_run_first", with_other_draws)
    with pytest.raises(PacelineError, match="'net' gives another output when it is run again"):
        paceline.train(job(with_dropout), "data=2", steps=2, check=False)


def test_what_it_does_not_take() -> None:
    """Before anything is trained."""

    def of_two(ctx: paceline.StepContext, batch: Any) -> None:
        ctx.backward(("net", "other"), batch, lambda z, batch: z.mean(), gather=True)

    def runs_another(ctx: paceline.StepContext, batch: Any) -> None:
        ctx.backward("net", batch, lambda z, batch: ctx.run("other", z).mean(), gather=True)

    two = {
        "models": {"net": small(), "other": small(3)},
        "optimizers": {"net": adam, "other": adam},
    }
    with pytest.raises(PacelineError, match="trains one model"):
        recorded(job(small, training_step=of_two, **two), 4)
    with pytest.raises(
        PacelineError, match=r"a loss over all samples \(gather=True\) runs 'other'"
    ):
        recorded(job(small, training_step=runs_another, **two), 4)
    with pytest.raises(PacelineError, match="as one over all samples does"):
        paceline.train(job(small()), "tensor=2", steps=1)
