"""Pretrained weights, freezing and rates by plateau in a step of a job's own, beside a loop by hand in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import paceline as pl
from paceline.base.errors import JobError
from paceline.launch.process.failure import RankFailed
from paceline.proof.order import windows
from paceline.training.own_step.recorded import recorded

EXACT = {"rtol": 0, "atol": 1e-12}
FREEZE = pl.by_step({0: ("student.0", "head"), 2: "student.0.bias", 5: "head.1.bias"})


def student() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(seed: int, build: Any = student) -> dict[str, Tensor]:
    return {
        name: numbers(seed + number, *p.shape)
        for number, (name, p) in enumerate(build().state_dict().items())
    }


def plateau(optimizer: Any, threshold: float = 0.5) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=threshold)


def of_error(optimizer: Any) -> Any:
    """The error falls by less than this in an epoch, the loss by more."""
    return plateau(optimizer, 0.1)


def soft_loss(output: Tensor, batch: Any, soft: Tensor) -> Tensor:
    return F.mse_loss(output, soft)


def make_job(teacher: Path, **fields: Any) -> pl.Job:
    def step(ctx: Any, batch: Any) -> None:
        x = batch.input
        soft = ctx.run("teacher", x)
        ctx.backward("student", x, soft_loss, soft)
        code = ctx.run("average", x)
        ctx.backward("head", code, lambda output, batch: F.mse_loss(output, batch.target))
        ctx.update("student")
        ctx.update("head")

    def validate(ctx: Any, batch: Any) -> dict[str, Tensor]:
        output = ctx.run("head", ctx.run("student", batch.input))
        return {
            "loss": F.mse_loss(output, batch.target),
            "error": (output - batch.target).abs().mean(),
        }

    adamw = lambda named: torch.optim.AdamW(named, lr=0.05, weight_decay=0.1)  # noqa: E731
    x = numbers(3, 23, 6)
    data = torch.utils.data.TensorDataset(x, x[:, :2].sin())
    return pl.Job(
        **{
            "models": {
                "student": student,
                "head": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
            },
            "optimizers": {
                "student": pl.Optimizer(adamw, clip=0.5, lr_schedule=plateau),
                "head": pl.Optimizer(adamw, lr_schedule=pl.monitored("error", of_error)),
            },
            "followers": {
                "teacher": pl.frozen(student),
                "average": pl.ema("student", 0.9),
                "first": pl.frozen("student"),
            },
            "init": {
                "student": lambda: weights(40),
                "teacher": pl.pretrained(teacher, rename=lambda name: name[2:]),
            },
            "freeze": FREEZE,
            "training_step": step,
            "validation_step": validate,
            "data": data,
            "validation": data,
            "batch": 6,
            "steps": 9,
            "precision": "float64",
            **fields,
        }
    )


def by_hand(job: pl.Job) -> Iterator[dict[str, Tensor]]:
    """The weights after each step of a loop without Paceline; the contract gives the head and the order of samples."""
    head = job.model().head
    models = {
        "student": student(),
        "head": head,
        "teacher": student(),
        "average": student(),
        "first": student(),
    }
    for name, seed in (("student", 40), ("teacher", 70), ("average", 40), ("first", 40)):
        models[name].load_state_dict(weights(seed))
    for model in models.values():
        model.double()
    optimizers = {
        name: torch.optim.AdamW(models[name].parameters(), lr=0.05, weight_decay=0.1)
        for name in ("student", "head")
    }
    plateaus = {"student": plateau(optimizers["student"]), "head": of_error(optimizers["head"])}
    all_x, all_y = (tensor.double() for tensor in job.data.tensors)
    steps = list(islice(windows(job), job.total_steps + 1))
    for step, (epoch, _, indices) in enumerate(steps[:-1]):
        frozen = (
            ("student.0", "head")
            if step < 2
            else ("student.0.bias",)
            if step < 5
            else ("head.1.bias",)
        )
        for name, model in models.items():
            for key, p in model.named_parameters():
                p.requires_grad_(name in optimizers and not f"{name}.{key}".startswith(frozen))
        x, y = all_x[indices], all_y[indices]
        F.mse_loss(models["student"](x), models["teacher"](x).detach()).backward()
        of_head = F.mse_loss(head(models["average"](x).detach()), y)
        if of_head.requires_grad:
            of_head.backward()
        nn.utils.clip_grad_norm_(models["student"].parameters(), 0.5)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for a, p in zip(
                models["average"].parameters(), models["student"].parameters(), strict=True
            ):
                a.mul_(0.9).add_(p, alpha=0.1)
            if steps[step + 1][0] != epoch:
                output = head(models["student"](all_x))
                plateaus["student"].step(F.mse_loss(output, all_y))
                plateaus["head"].step((output - all_y).abs().mean())
        yield {
            f"{name}.{key}": p.detach().clone()
            for name, model in models.items()
            for key, p in model.state_dict().items()
        }
    assert all(
        optimizer.param_groups[0]["lr"] < 0.05 for optimizer in optimizers.values()
    )  # they were reduced


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    path = tmp_path / "teacher.safetensors"
    save_file({f"m.{name}": tensor for name, tensor in weights(70).items()}, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "plans", [("data=3",), ("shard=2", "data=2"), ("tensor=2",), ("pipeline=2",), ("shard=2",)]
)
def test_every_plan_computes_what_a_loop_by_hand_does(
    teacher: Path, plans: tuple[str, ...], tmp_path: Path
) -> None:
    """And a run goes on under another plan, in the middle of a phase and of an epoch."""
    job = make_job(teacher)
    *_, expected = by_hand(job)
    for plan, steps in zip(plans, (3, 9) if len(plans) > 1 else (9,), strict=True):
        pl.train(job, plan, run=tmp_path / "run", steps=steps, resume=steps == 9 and len(plans) > 1)
    torch.testing.assert_close(load_file(tmp_path / "run" / "model.safetensors"), expected, **EXACT)


@pytest.mark.slow
def test_verify_certifies_it(teacher: Path) -> None:
    (certificate,) = pl.verify(make_job(teacher), ["data=2"], steps=3, restore="no")
    assert certificate.verdict == "passed"


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"init": {"studnet": {}}}, "init has weights for 'studnet'"),
        ({"init": "file.safetensors"}, "by the names of models"),
        ({"init": {"student": 3}}, "student: init must be"),
        ({"init": {"student": lambda: weights(1, lambda: nn.Linear(2, 2))}}, "'student': init"),
        ({"freeze": "haed"}, "matches no parameter"),
        ({"freeze": ("head.*",)}, "leaves nothing of 'head' to train"),
        (
            {
                "optimizers": {
                    "student": pl.Optimizer(
                        torch.optim.SGD, lr_schedule=pl.monitored("eror", plateau)
                    ),
                    "head": torch.optim.SGD,
                }
            },
            "monitors 'eror'.*'error'",
        ),
        ({"validation": None, "validation_step": None}, "waits for a figure"),
        (
            {
                "validation_step": lambda ctx, batch: {"error": batch.target.mean()},
                "optimizers": {"student": torch.optim.SGD, "head": torch.optim.SGD},
            },
            'no "loss"',
        ),
        (
            {
                "training_step": lambda ctx, batch: (
                    ctx.backward("student", batch, soft_loss, batch.input[:, :4])
                    or ctx.update("student")
                    or 1.0
                )
            },
            "the step returned float",
        ),
        (
            {
                "optimizers": {
                    "student": lambda named: torch.optim.LBFGS(p for _, p in named),
                    "head": torch.optim.SGD,
                }
            },
            "LBFGS, which evaluates the loss itself",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], words: str, teacher: Path, tmp_path: Path
) -> None:
    with pytest.raises((JobError, RankFailed), match=words):
        pl.train(make_job(teacher, **changes), "single", run=tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or not metrics.read_text()


def every_second(ctx: Any, batch: Any) -> None:
    """A critic is trained in each step, what it judges in each second one."""
    fake = ctx.run("student", batch.input)
    ctx.backward("head", fake, lambda judged, batch: judged.square().mean())
    ctx.update("head")
    if ctx.step % 2:
        ctx.backward("student", batch.input, lambda fake, batch: -ctx.run("head", fake).mean())
        ctx.update("student")


def test_a_model_may_be_trained_in_some_steps_alone(tmp_path: Path) -> None:
    adam = lambda named: torch.optim.Adam(named, lr=0.1)  # noqa: E731
    job = make_job(
        tmp_path,
        training_step=every_second,
        init=None,
        freeze=(),
        followers={},
        validation=None,
        validation_step=None,
        optimizers={"student": adam, "head": adam},
    )
    (certificate,) = pl.verify(job, ["data=2"], steps=2, restore="no")
    assert certificate.verdict == "passed"
    assert recorded(job, 2).in_losses == {"head"}  # in no loss of the first step
    with pytest.raises(RankFailed, match="a loss runs 'head'"):
        pl.train(job, "tensor=2", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
