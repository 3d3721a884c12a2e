"""Jobs that verify has blamed for what it did itself: their plans are exact, coupled, or none for the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jobs.classification import classification_job
from jobs.perceptrons import ListedPerceptron
from torch import Tensor, nn

import paceline
from paceline.proof.order import whole_batches
from paceline.proof.reference_loop import WHOLE, BatchCut, PlainRun, Variation


def verdict(job: paceline.Job, plan: str, **options: Any) -> paceline.Certificate:
    (certificate,) = paceline.verify(
        replace(job, precision="float64"), [plan], **{"steps": 3, "restore": "no", **options}
    )
    return certificate


class Critic(nn.Module):
    """Takes a gradient in its forward, so that it can't be evaluated under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ListedPerceptron()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = self.net(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output + gradient.norm(dim=1, keepdim=True)


@pytest.mark.slow
def test_a_model_that_can_not_be_evaluated() -> None:
    """The job never does; the certificate says that verify did not either."""
    certificate = verdict(classification_job(Critic), "data=2")
    assert certificate.passed and certificate.note is not None, certificate.describe()
    assert "evaluations are not compared: the model fails in evaluation mode" in certificate.note


def test_a_model_that_can_not_be_evaluated_and_should_be() -> None:
    job = classification_job(Critic)
    with pytest.raises(paceline.PacelineError, match="does not require grad"):
        paceline.verify(classification_job(Critic, validation=job.data), ["data=2"], steps=2)


class Warming(ListedPerceptron):
    """Counts its training forwards, and lets more through the more there were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += int(self.training)
        return super().forward(x) * (1 - 0.5**self.calls)


def test_a_count_that_one_replica_missed() -> None:
    """The replica without samples in the last window has not counted it; it goes on from the other's."""
    certificate = verdict(classification_job(Warming), "data=2 shares=3:1", steps=4)
    assert certificate.passed, certificate.describe()


class Seen(ListedPerceptron):
    """Keeps the mean of its inputs, in evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return super().forward(x)


@pytest.mark.slow
def test_a_model_that_an_evaluation_changes() -> None:
    certificate = verdict(classification_job(Seen), "tensor=2")
    assert certificate.passed and "an evaluation changes 'mean'" in (certificate.note or ""), (
        certificate.describe()
    )


class CentreInAttribute(ListedPerceptron):
    """A centre that is no buffer, as the first code of DINO had it."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if self.training:
            self.centre = self.centre * 0.9 + output.detach().mean(0) * 0.1
        return output - self.centre


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "expected"), [("tensor=2", "passed"), ("pipeline=2", "coupled")])
def test_an_attribute_that_becomes_a_buffer(plan: str, expected: str) -> None:
    certificate = verdict(classification_job(CentreInAttribute), plan)
    assert certificate.verdict == expected, certificate.describe()


def test_an_attribute_that_replicas_keep_apart_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor in an attribute counts like a buffer."""
    from paceline.training.replicas.buffers import ChangingBuffers

    monkeypatch.setattr(
        ChangingBuffers, "meet", lambda self, weight, group, *, has_unsynced=None: None
    )
    certificate = verdict(
        classification_job(CentreInAttribute, precision="float64"), "data=2", steps=1
    )
    assert certificate.verdict == "failed" and "buffer of 'centre'" in str(certificate.reason), (
        certificate.describe()
    )


class Normalising(nn.Module):
    """Writes to its input: whole numbers leave the range of the table where they are counted up twice."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.kinds, self.net = (
            nn.Embedding(3, 6),
            nn.Sequential(nn.Linear(6, 9), *layers, nn.Linear(9, 3)),
        )

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.net(x.sub_(0.5).div_(2.0) + self.kinds(kind.add_(1)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("layers", "expected"), [((), "passed"), ((lambda: nn.BatchNorm1d(9),), "coupled")]
)
def test_a_model_that_writes_to_its_input(layers: tuple[Any, ...], expected: str) -> None:
    """verify runs it several times on one batch, also to name what couples samples."""
    items = [
        ({"x": x, "kind": torch.tensor(number % 2)}, y)
        for number, (x, y) in enumerate(classification_job().data)
    ]
    job = classification_job(lambda: Normalising(*(make() for make in layers)), data=items, batch=7)
    certificate = verdict(job, "data=2 microbatches=2", restore="no")
    assert certificate.verdict == expected and (
        not layers or "BatchNorm" in str(certificate.reason)
    ), certificate.describe()


class Halved(ListedPerceptron):
    """Halves a gradient where it is complete."""

    def __init__(self) -> None:
        super().__init__()

        def halve(p: Tensor) -> None:
            assert p.grad is not None
            p.grad.mul_(0.5)

        self.out.weight.register_post_accumulate_grad_hook(halve)


def test_a_hook_sees_the_gradient_of_one_replica() -> None:
    """In the plain loop that cuts as a plan does: else it halves the first replica's gradient twice."""
    job = classification_job(Halved, precision="float64")
    batch = next(whole_batches(job, 1))
    whole, cut = (PlainRun(job, Variation(cut=cut)) for cut in (WHOLE, BatchCut((3, 1))))
    gradients = whole.step(batch).gradients
    for name, gradient in cut.step(batch).gradients.items():
        torch.testing.assert_close(gradient, gradients[name])


def test_a_plan_that_was_named_and_is_none_for_the_model() -> None:
    """It is refused, which is no error of the plan; it does not pass."""
    job = classification_job(lambda: nn.Linear(6, 3), loss=F.cross_entropy)
    certificate = verdict(job, "pipeline=2")
    assert certificate.verdict == "refused" and not certificate.passed and certificate.asked_for
    assert (
        "pieces that can be cut apart" in certificate.describe()
        and "hint" in certificate.describe()
    )


def test_a_window_that_a_plan_cuts_into_single_samples() -> None:
    """A BatchNorm takes none: neither do one device that cuts alike and the plan."""
    job = classification_job(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        drop_last=True,
        batch=4,
    )
    certificate = verdict(job, "pipeline=2 microbatches=4")
    assert certificate.verdict == "refused" and "can't be trained on one sample" in str(
        certificate.refused
    ), certificate.describe()
