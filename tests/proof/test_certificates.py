"""Plans that are right get a certificate; a bug planted in any of them is found and named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jobs.classification import classification_job
from jobs.perceptrons import Perceptron
from later import needed
from planted import verified
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.api.verify import _plans_that_fit
from paceline.base.errors import Preempted, UsageError
from paceline.strategies.data.run import GradientBuckets
from paceline.strategies.step_sync import SyncEveryStep
from paceline.training.feed import DataShard

SAMPLES, BATCH = 25, 10  # the third step of an epoch has 5 samples: uneven over 2, 3 and 4 replicas


def make_job(model: Any = Perceptron, **changes: Any) -> paceline.Job:
    fields = {"optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2), "batch": BATCH}
    return classification_job(model, **{**fields, **changes})


def in_float64(**changes: Any) -> paceline.Job:
    """For what one precision shows as well as two."""
    return make_job(**changes, precision="float64")


def only(certificates: list[Any]) -> Any:
    assert len(certificates) == 1
    return certificates[0]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        "data=2",
        "data=3",
        "shard=2 zero=1",
        "shard=2 zero=2",
        "shard=2",
        "data=2 shard=2",
        "single microbatches=4",
        "data=2 shares=3:1",
        "data=2 microbatches=3 recompute=full",
    ],
)
def test_exact_plans_equal_one_device(plan: str) -> None:
    """Uneven batches, AdamW: losses, gradients and weights are one device's in float32 and in float64."""
    certificate = only(paceline.verify(make_job(clip=0.5), [plan], steps=4))

    assert certificate.passed, certificate.describe()
    assert [verdict.precision for verdict in certificate.verdicts] == ["float32", "float64"]
    assert certificate.verdicts[1].max_param_diff < 1e-12


def token_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets of class 2 are ignored; they are spread unevenly over the samples."""
    return F.cross_entropy(output, target, ignore_index=2, reduction="sum"), (target != 2).sum()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=3 microbatches=2", "shard=2"])
def test_sum_and_count_are_normalised_once(plan: str) -> None:
    """Ignored targets, spread unevenly over ranks and micro-batches, leave one device's gradients."""
    certificate = only(paceline.verify(in_float64(loss=token_loss), [plan], steps=3, restore="no"))

    assert certificate.passed, certificate.describe()


def test_a_scalar_loss_that_is_no_mean_is_named() -> None:
    """The mean over targets that are not ignored is no mean over samples."""
    job = in_float64(loss=lambda output, target: F.cross_entropy(output, target, ignore_index=2))

    certificate = only(paceline.verify(job, ["data=2"], steps=3, restore="no"))

    assert not certificate.passed
    assert (
        "not the mean over its samples" in certificate.describe()
        and "(sum, count)" in certificate.describe()
    )
    assert "the sum of the loss (reduction='sum' in torch's losses)" in str(certificate.reason)


def test_a_batch_norm_is_named() -> None:
    """Replicas join its statistics, and micro-batches can't: it is named with the plans that are exact."""
    job = in_float64(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    )

    joined, certificate = paceline.verify(
        job, ["data=2", "single microbatches=2"], steps=2, restore="no"
    )

    assert joined.passed, joined.describe()
    assert certificate.verdict == "coupled" and "one micro-batch a rank" in certificate.describe()
    assert "couples the samples" in certificate.describe() and "BatchNorm" in certificate.describe()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    ["shard=2 zero=1", "shard=2 zero=2", "data=2 shard=2 zero=1", "pipeline=2 shard=2 zero=1"],
)
def test_an_evaluation_leaves_no_old_weights_behind(plan: str, tmp_path: Path) -> None:
    """Weights that were gathered to evaluate, between two epochs, are not those of the steps after it."""
    job = make_job(precision="float64", epochs=2, validation=make_job().data)

    single, planned = (
        paceline.train(job, each, run=tmp_path / each.split()[0]).to_dict()
        for each in ("single", plan)
    )

    assert planned["final_loss"] == pytest.approx(single["final_loss"], rel=1e-12)
    assert planned["validation_loss"] == pytest.approx(single["validation_loss"], rel=1e-12)


def test_dropout_is_compared_switched_off() -> None:
    """Random layers differ between layouts by design; what is left is compared."""
    job = in_float64(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    )

    assert only(paceline.verify(job, ["data=2"], steps=3, restore="no")).passed


def scaled_gradients(patch: pytest.MonkeyPatch) -> None:
    finish = GradientBuckets.finish

    def scaled(self: GradientBuckets) -> None:
        finish(self)
        for bucket in self.buckets:
            for parameter in bucket:
                parameter.grad *= dist.get_world_size()

    patch.setattr(GradientBuckets, "finish", scaled)


def skipped_reduction(patch: pytest.MonkeyPatch) -> None:
    finish = GradientBuckets.finish

    def partial(self: GradientBuckets) -> None:
        kept = self.buckets[0][0].grad.clone()
        finish(self)
        self.buckets[0][0].grad = kept

    patch.setattr(GradientBuckets, "finish", partial)


def wrong_samples(patch: pytest.MonkeyPatch) -> None:
    cuts = DataShard.cuts
    patch.setattr(DataShard, "cuts", lambda self, count: cuts(replace(self, index=0), count))


def local_normalisation(patch: pytest.MonkeyPatch) -> None:
    summed = SyncEveryStep.all_reduce_figures

    def alone(self: SyncEveryStep, figures: torch.Tensor) -> torch.Tensor:
        sums = summed(self, figures)
        sums[1] /= self.world_size
        return sums

    patch.setattr(SyncEveryStep, "all_reduce_figures", alone)


def bent_gradient(patch: pytest.MonkeyPatch) -> None:
    """The yardstick is not so wide that a relative error of 1e-3 in one weight's gradient passes."""
    finish = GradientBuckets.finish

    def bent(self: GradientBuckets) -> None:
        finish(self)
        self.buckets[0][1].grad *= 1.001

    patch.setattr(GradientBuckets, "finish", bent)


PLANTED = (
    (scaled_gradients, "gradient of '"),
    (skipped_reduction, "out.bias"),
    (bent_gradient, "'out.weight'"),
    (wrong_samples, "rank 1 was fed other samples"),
    (local_normalisation, "loss of step 1"),
)


def test_planted_bugs_are_found_and_named() -> None:
    """In replicas."""
    certificates = verified(
        in_float64(loss=token_loss), [("data=2", plant) for plant, _ in PLANTED]
    )

    for (plant, named), certificate in zip(PLANTED, certificates, strict=True):
        assert not certificate.passed, plant.__name__
        assert named in certificate.describe(), certificate.describe()


def test_weights_that_depend_on_the_rank_are_found_and_named() -> None:
    """Replicas are compared before the first step."""

    def model() -> nn.Module:
        net = Perceptron()
        if dist.is_initialized():
            with torch.no_grad():
                net.layers[2].weight[0, 0] += dist.get_rank()
        return net

    certificate = only(paceline.verify(in_float64(model=model), ["data=2"], steps=2, restore="no"))

    assert not certificate.passed
    assert "'layers.2.weight'" in certificate.describe() and "rank 1" in certificate.describe()


def test_a_stop_ends_the_verification(start_child: Callable[..., Any]) -> None:
    """A signal is no verdict on the plan that happens to be tried."""
    child = start_child(lambda: paceline.verify(make_job(), ["data=2"] * 9))
    child.ranks(2)
    os.kill(child.pid, signal.SIGTERM)

    assert child.exit_code() == Preempted.exit_code


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_transformers_model_from_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 with its tied embedding, untouched, under replicas and shards."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = needed("transformers")

    def model() -> nn.Module:
        config = transformers.GPT2Config(
            vocab_size=61,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        return transformers.GPT2LMHeadModel(config)

    tokens = torch.randint(0, 61, (16, 13), generator=torch.Generator().manual_seed(2))
    job = make_job(
        model=model,
        data=TensorDataset(tokens[:, :-1], tokens[:, 1:]),
        batch=7,
        loss=lambda output, target: F.cross_entropy(output.logits.flatten(0, 1), target.flatten()),
    )

    for certificate in paceline.verify(job, ["data=2", "shard=2 recompute=full"], steps=2):
        assert certificate.passed, certificate.describe()


def test_default_plans_are_limited_by_devices_that_are_named() -> None:
    """Of CPUs, too; without names there are as many as a plan asks for."""
    assert {plan.world_size for plan in _plans_that_fit(make_job(), ("cpu:0", "cpu:1"))} == {1, 2}
    assert max(plan.world_size for plan in _plans_that_fit(make_job(), None)) == 8


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            "cpu:0-1",
            r"plan 'data=3' has 3 ranks, and --devices names 2 devices: cpu:0, cpu:1\n\nhint: plans of at most 2",
        ),
        ("cuda:0-3", "there is no cuda:0: this machine has 0 GPUs"),
        ("gpu:0", "both called cuda"),
    ],
)
def test_devices_that_are_not_there_are_refused_before_anything_runs(
    devices: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is, and what fits it, is said."""
    monkeypatch.setattr("paceline.cluster.cluster.gpus", list)
    with pytest.raises(UsageError, match=message):
        paceline.verify(make_job(model=lambda: 1 / 0), ["data=2", "data=3"], devices=devices)
