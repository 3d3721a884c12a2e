"""Metrics are equal under every plan, or refused with the form that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(31, 6, generator=G), torch.randint(0, 3, (31,), generator=G)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).double().mean()


def top_2(output: Tensor, target: Tensor) -> float:
    return round(float((output.topk(2).indices == target[:, None]).any(1).float().mean()), 4)


def masked(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target != 1
    return F.cross_entropy(output[kept], target[kept], reduction="sum"), kept.sum()


def perplexity(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target).exp()


def f1(output: Tensor, target: Tensor) -> Tensor:
    is_found, is_there = output.argmax(-1) == 1, target == 1
    return 2 * (is_found & is_there).sum() / (is_found.sum() + is_there.sum()).clamp(min=1)


def r2(output: Tensor, target: Tensor) -> Tensor:
    target = target.to(output)
    return 1 - (output[:, 0] - target).square().sum() / (target - target.mean()).square().sum()


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=1)


def wrong_sums(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return f1(output, target), 1


class Running:
    """The accuracy of all samples that it has seen."""

    def __init__(self) -> None:
        self.seen, self.right = 0, torch.zeros(())

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.seen += len(target)
        self.right += (output.argmax(-1) == target).sum()
        return self.right / self.seen


class Batchwise(nn.Module):
    """As torchmetrics' classes: gives what these samples come to, and adds them up beside."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()), persistent=False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.total += len(target)
        return accuracy(output, target)


class Best:
    """The best F1 of all evaluations so far."""

    def __init__(self) -> None:
        self.best = 0.0

    def __call__(self, output: Tensor, target: Tensor) -> float:
        self.best = max(self.best, float(f1(output, target)))
        return self.best


class Zero(nn.Module):
    """Answers alike for all samples at the start, as a head of zeros does, and in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        nn.init.zeros_(self.layers[2].weight)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output = self.layers(x)
        return {"logits": output, "is_sure": output.max(-1).values > 0.4}


MEANS = {"accuracy": accuracy, "top_2": top_2, "masked": masked, "batchwise": Batchwise()}
WHOLES = {
    "perplexity": paceline.whole(perplexity),
    "f1": paceline.whole(f1),
    "r2": paceline.whole(r2),
}
PLANS = [
    "single",
    "single microbatches=2",
    "data=2",
    "data=3 microbatches=2",
    "shard=2",
    "tensor=2",
    "pipeline=2 microbatches=2",
    "servers=1 workers=2",
]


def make_job(metrics: dict[str, Any], **changes: Any) -> paceline.Job:
    return paceline.Job(
        **{
            "model": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
            "data": TensorDataset(X, Y),
            "loss": F.cross_entropy,
            "optimizer": lambda named: torch.optim.SGD(named, lr=0.5),
            "batch": 8,
            "steps": 2,
            "precision": "float64",
            "validation": TensorDataset(X, Y),
            "metrics": metrics,
            **changes,
        }
    )


def train(job: paceline.Job, plan: str, run: Path) -> paceline.api.result.Result:
    return paceline.train(
        job, plan, devices=f"cpu:0-{paceline.Plan.parse(plan).world_size - 1}", run=run
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", PLANS)
def test_figures_are_those_of_all_samples_at_once(plan: str, tmp_path: Path) -> None:
    job = make_job(MEANS | WHOLES)
    result = train(job, plan, tmp_path)
    output = result.model()(X.double()).detach()

    expected = {name: metric(output, Y) for name, metric in {**MEANS, **WHOLES}.items()}
    expected["masked"] = expected["masked"][0] / expected["masked"][1]
    figures = result.metrics
    assert {name: figures[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-9, abs=1e-4
    )
    assert {name: figures[name] for name in WHOLES} == pytest.approx(
        {name: float(expected[name]) for name in WHOLES}, rel=1e-12
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "metric",
    [perplexity, f1, r2, masked_mean, wrong_sums, Running()],
    ids=["perplexity", "f1", "r2", "masked", "sums", "running"],
)
def test_what_parts_do_not_add_up_to_is_refused(metric: Any, tmp_path: Path) -> None:
    """With the form that works, also where the model answers alike for all samples."""
    with pytest.raises(
        paceline.PacelineError, match=r"metric 'm' is no mean over samples: .* one after the other"
    ):
        train(make_job({"m": metric}), "single", tmp_path)
    with pytest.raises(paceline.PacelineError, match=r"no mean over samples"):
        train(
            make_job(
                {"m": lambda output, target: metric(output["logits"], target)},
                model=Zero,
                steps=1,
                loss=lambda output, target: F.cross_entropy(output["logits"], target),
            ),
            "single",
            tmp_path / "b",
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        *PLANS,
        "data=8",
        "shard=2 microbatches=2",
        "place=2",
        "tensor=2 pipeline=2 microbatches=2",
        "data=2 local=2",
    ],
)
def test_a_refusal_comes_before_the_first_step(plan: str, tmp_path: Path) -> None:
    """Also where each rank evaluates single samples; a metric of all samples is not called with a few."""
    with pytest.raises(paceline.PacelineError, match=r"metric 'm' is no mean over samples"):
        train(
            make_job({**MEANS, **WHOLES, "many": paceline.whole(of_all), "m": perplexity}),
            plan,
            tmp_path,
        )
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (
        train(make_job({**MEANS, "many": paceline.whole(of_all)}), plan, tmp_path / "b").metrics[
            "many"
        ]
        == 31
    )


def of_all(output: Tensor, target: Tensor) -> int:
    if len(target) != len(Y):
        raise ValueError("classes are missing")
    return len(output)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        "single",
        "data=2",
        "shard=2",
        "pipeline=2 microbatches=2",
        "servers=1 workers=2",
        "servers=2 workers=2 colocate=yes",
    ],
)
def test_a_later_refusal_leaves_a_checkpoint(plan: str, tmp_path: Path) -> None:
    """Of the last step, from which a run with the right metric goes on."""

    def late(output: Tensor, target: Tensor) -> Tensor:
        return output.mean() ** (2 if (target == 2).any() else 1)

    validation = TensorDataset(X, torch.arange(31) // 25 * 2)
    with pytest.raises(paceline.PacelineError, match=r"metric 'm' is no mean over samples"):
        train(make_job({"m": late}, validation=validation), plan, tmp_path)
    assert (tmp_path / "checkpoints" / "step-2").exists()
    job = make_job({"m": paceline.whole(late)}, validation=validation)
    result = paceline.train(
        job,
        plan,
        devices=f"cpu:0-{paceline.Plan.parse(plan).world_size - 1}",
        run=tmp_path,
        resume=True,
    )
    assert result.metrics["m"] == pytest.approx(
        float(result.model()(X.double()).mean().detach() ** 2)
    )


def test_what_is_no_number_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Not after an epoch."""
    with pytest.raises(paceline.PacelineError, match=r"metric 'm' "):
        train(make_job({"m": lambda output, target: output}), "single", tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


class Starting(nn.Module):
    """Makes in training what it reads in evaluation, and counts its evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.evaluations = nn.Linear(6, 3), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.bias = 1.0
            return self.layer(x)
        self.evaluations += 1
        self.seen += 1
        return self.layer(x) * self.bias * self.evaluations


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "shard=2"])
def test_looking_at_metrics_leaves_no_trace(plan: str, tmp_path: Path) -> None:
    """Nor does it need what training makes."""
    losses = []
    for name, metrics in (
        ("with", {"accuracy": accuracy, "batchwise": Batchwise()}),
        ("without", {}),
    ):
        result = train(
            make_job(metrics, model=Starting, validation=TensorDataset(X[:8], Y[:8])),
            plan,
            tmp_path / name,
        )
        losses.append((result.metrics["validation_loss"], float(result.model().seen)))
    assert losses[0] == losses[1]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "tensor=2", "data=3 microbatches=2"])
def test_outputs_may_be_mappings_and_samples_few(plan: str, tmp_path: Path) -> None:
    """Two samples on three ranks, with booleans among the outputs."""

    def sure(output: Any, target: Tensor) -> Tensor:
        assert output["is_sure"].dtype == torch.bool and len(target) == 2
        return f1(output["logits"], target) + output["is_sure"].sum() + target[0] / 7

    job = make_job(
        {"m": paceline.whole(sure)},
        model=Zero,
        validation=TensorDataset(X[:2], Y[:2]),
        loss=lambda output, target: F.cross_entropy(output["logits"], target),
    )
    result = train(job, plan, tmp_path)

    assert result.metrics["m"] == pytest.approx(float(sure(result.model()(X[:2].double()), Y[:2])))


def test_outputs_that_have_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(paceline.PacelineError, match=r"of 8 samples is a Tensor of shape \(1, 3\)"):
        train(
            make_job(
                {"m": paceline.whole(lambda output, target: 0.0)},
                collate=lone,
                loss=lambda output, target: F.cross_entropy(output, target["labels"]),
            ),
            "single",
            tmp_path,
        )


def lone(samples: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(samples)
    return x, {"labels": y, "all": y[None, :3]}


def test_verify_compares_them() -> None:
    assert all(
        each.passed for each in paceline.verify(make_job(WHOLES), ["data=2"], steps=2, restore="no")
    )
