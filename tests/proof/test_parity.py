"""Jobs of many kinds come out under every plan as on one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jobs.classification import (
    ConvNet,
    MixtureOfExperts,
    Pair,
    Scaled,
    Series,
    adamw,
    classification_job,
    passes,
    tagging_job,
)
from jobs.perceptrons import ListedPerceptron
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import paceline
from paceline.proof.compare import _loss_off

SOME_KINDS = (
    "data=3",
    "data=2 shares=3:1",
    "shard=2 zero=1",
    "shard=3 zero=2 microbatches=2",
    "shard=2 shares=1:2 recompute=full",
)
EVERY_KIND = (
    *SOME_KINDS,
    "single microbatches=4",
    "data=2",
    "shard=2 zero=2",
    "shard=2",
    "data=2 shard=2",
    "data=2 shard=2 zero=1 microbatches=3",
    "data=2 microbatches=2 recompute=full",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plans"),
    [
        (ListedPerceptron, SOME_KINDS[1:3]),
        *(
            pytest.param(model, EVERY_KIND, marks=pytest.mark.slow)
            for model in (ListedPerceptron, ConvNet)
        ),
    ],
)
def test_sgd_over_twenty_steps_is_one_device_s(model: Any, plans: tuple[str, ...]) -> None:
    """Over uneven batches, the last of an epoch smaller than the ranks: 1e-5 in float32 and 1e-10 in float64."""
    for certificate in paceline.verify(classification_job(model), plans, steps=20):
        assert certificate.passed, certificate.describe()
        assert [verdict.steps for verdict in certificate.verdicts] == [20, 20]
        float32, float64 = certificate.verdicts
        assert float32.max_param_diff <= 1e-5 and float64.max_param_diff <= 1e-10, (
            certificate.describe()
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            classification_job(
                ListedPerceptron,
                optimizer=adamw,
                clip=0.1,
                lr_schedule=lambda opt: lr_scheduler.OneCycleLR(opt, 0.02, total_steps=9),
            ),
            id="clip-and-schedule",
        ),
        pytest.param(tagging_job(optimizer=adamw, clip=0.5), id="tokens-tied-dropout-dict"),
        pytest.param(
            classification_job(Scaled, optimizer=adamw, clip=0.05), id="scalars-dtypes-empty"
        ),
        pytest.param(
            classification_job(MixtureOfExperts, optimizer=adamw, clip=0.5, batch=5), id="experts"
        ),
        pytest.param(classification_job(Series), id="lstm"),
    ],
)
def test_jobs_of_many_kinds(job: paceline.Job) -> None:
    """Replicas, shards of both kinds with recomputation, and both axes."""
    passes(job, "data=2", "shard=2", "data=2 shard=2 zero=2 microbatches=2 recompute=full", steps=3)


@pytest.mark.slow
def test_tuple_inputs_and_frozen_parameters() -> None:
    """A tuple input is passed as *args; a frozen part stays as it was."""
    data = [((torch.full((6,), i / 5.0), torch.arange(6) / 3.0 - i % 3), i % 3) for i in range(13)]
    loss = lambda output, target: F.cross_entropy(output[0], target) + output[1].square().mean()  # noqa: E731

    passes(classification_job(Pair, data=data, loss=loss), "data=3", "shard=2")


@pytest.mark.slow
def test_bf16_by_the_yardstick() -> None:
    """Autocast rounds coarsely: the yardstick is as wide as that, and float64 is as narrow as ever."""
    float64 = [
        certificate.verdicts[1]
        for certificate in paceline.verify(
            classification_job(precision="bf16", optimizer=adamw),
            ["data=2", "shard=2"],
            steps=3,
        )
        if certificate.passed
    ]

    assert len(float64) == 2 and all(verdict.max_param_diff < 1e-13 for verdict in float64)


@pytest.mark.filterwarnings("ignore:the optimizer leaves out 4 trainable parameters")
def test_groups_of_parameters_and_left_out_ones() -> None:
    """Groups by name keep their options; the gradient of a parameter that is left out doesn't pile up."""

    def optimizer(named: Any) -> torch.optim.Optimizer:
        named = dict(named)
        return torch.optim.SGD(
            [
                {"params": [("out.weight", named["out.weight"])], "weight_decay": 0.1},
                {"params": [("out.bias", named["out.bias"])], "lr": 0.5},
            ],
            lr=0.1,
            momentum=0.9,
        )

    passes(
        classification_job(optimizer=optimizer, clip=0.1),
        "data=2",
        "shard=2",
        steps=3,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Adam"]
)
def test_optimizers_of_torch(optimizer: str) -> None:
    """Those that treat every element alike do so on shards."""
    make = getattr(torch.optim, optimizer)

    passes(
        classification_job(Scaled, optimizer=lambda named: make(named, lr=0.01)),
        "data=2",
        "shard=2",
        "data=2 shard=2",
        steps=4,
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_fused_and_foreach_kernels(options: dict[str, bool]) -> None:
    """They walk through weights and gradients in memory order, whatever the memory format."""
    job = classification_job(
        ConvNet, optimizer=lambda named: torch.optim.AdamW(named, lr=0.01, **options)
    )

    passes(job, "shard=2")


@pytest.mark.slow
def test_a_gradient_that_is_zero_but_for_rounding() -> None:
    """Adam turns its noise into steps of the learning rate; the yardstick knows how far that goes."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.out = torch.nn.Linear(2, 1), torch.nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.unflatten(1, (3, 2))
            return self.out((torch.softmax(self.score(rows), dim=1) * rows).sum(1))

    job = classification_job(
        Attention,
        loss=lambda output, target: 1e4 * F.cross_entropy(output, target),
        optimizer=lambda named: torch.optim.Adam(named, lr=0.01),
    )
    certificates = paceline.verify(job, ["single microbatches=3", "shard=2"], steps=3, restore="no")

    assert all(certificate.passed for certificate in certificates), "\n".join(
        c.describe() for c in certificates
    )


def test_short_data() -> None:
    """Fewer samples than a batch, and fewer steps than asked for."""
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    job = classification_job(
        ListedPerceptron, data=TensorDataset(x, torch.tensor([0, 1, 2])), epochs=1
    )

    (certificate,) = paceline.verify(job, ["data=3"], steps=9)

    assert certificate.passed and certificate.verdicts[0].steps == 1


def test_a_loss_that_one_rank_alone_has_as_nan_is_off() -> None:
    ranks = [{"losses": [loss], "first_step": 0} for loss in (1.0, math.nan)]
    assert _loss_off({"losses": [1.0]}, ranks, 0) == math.inf
