"""What a step of a job's own learns of its losses and does after updates, beside a loop by hand in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline as pl
from paceline.base.errors import JobError, PacelineError
from paceline.base.streams import seed_model
from paceline.launch.process.failure import RankFailed
from paceline.proof.order import windows
from paceline.training.own_step.recorded import recorded

EXACT = {"rtol": 0, "atol": 1e-12}
SAMPLES, BATCH, STEPS = 23, 6, 8  # the fourth window has five samples
PLANS = ["single microbatches=2", "data=2 microbatches=2", "data=3", "shard=2", "pipeline=2"]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def judge() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], 0.05, momentum=0.5)


@torch.no_grad()
def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.clamp_(-0.3, 0.3)


def clamped(named: Any) -> torch.optim.Optimizer:
    optimizer = sgd(named)
    optimizer.register_step_post_hook(clamp)
    return optimizer


def made(step: Callable[[Any, Any], None], **fields: Any) -> pl.Job:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return pl.Job(
        **{
            "models": {"net": net, "judge": judge},
            "optimizers": {"net": sgd, "judge": sgd},
            "training_step": step,
            "data": torch.utils.data.TensorDataset(x, 3 * x[:, :2].sin()),
            "batch": BATCH,
            "steps": STEPS,
            "precision": "float64",
            **fields,
        }
    )


def by_hand(job: pl.Job, step: Callable[..., None]) -> dict[str, Tensor]:
    """The weights that a loop without Paceline trains from the job's first ones."""
    models = {name: job.model().get_submodule(name).double() for name in job.models}
    optimizers = {
        name: build(models[name].named_parameters()) for name, build in job.optimizers.items()
    }
    x, y = (tensor.double() for tensor in job.data.tensors)
    for number, (_, _, indices) in enumerate(islice(windows(job), job.total_steps)):
        step(number, models, optimizers, x[indices], y[indices])
    return {
        f"{name}.{key}": p
        for name, model in models.items()
        for key, p in model.state_dict().items()
    }


def train(job: pl.Job, plan: str, run: Path, **options: Any) -> dict[str, Tensor]:
    pl.train(job, plan, run=run, check=False, table=False, **options)
    return load_file(run / "model.safetensors")


# --- The loss and the outputs ----------------------------------------------------------------------------------------


def learns(ctx: Any, batch: Any) -> None:
    """The judge is trained on the outputs of the net before its update, by a weight that the net's loss gives."""
    out = ctx.backward("net", batch, lambda output, batch: F.mse_loss(output, batch.target))
    weight = out.loss.sigmoid() if ctx.step % 2 else 1.0
    ctx.update("net")
    assert out.loss.dtype is torch.float64 and not out.outputs.requires_grad
    ctx.backward("judge", out.outputs, lambda judged, batch: weight * judged.square().mean())
    ctx.update("judge")


def learns_by_hand(number: int, models: Any, optimizers: Any, x: Tensor, y: Tensor) -> None:
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    output = models["net"](x)
    loss = F.mse_loss(output, y)
    loss.backward()
    optimizers["net"].step()
    weight = loss.detach().sigmoid() if number % 2 else 1.0
    (weight * models["judge"](output.detach()).square().mean()).backward()
    optimizers["judge"].step()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_goes_on_with_its_loss_and_outputs(plan: str, tmp_path: Path) -> None:
    job = made(learns)
    torch.testing.assert_close(train(job, plan, tmp_path), by_hand(job, learns_by_hand), **EXACT)


@pytest.mark.slow
def test_verify_and_the_trial_give_a_step_the_same() -> None:
    (certificate,) = pl.verify(made(learns), ["data=2"], steps=2, restore="no")
    assert certificate.verdict == "passed", certificate.reason
    assert recorded(made(learns), 4).inputs["judge"].shape == (4, 2)


def test_ranks_without_samples_have_a_row_that_counts_nothing(tmp_path: Path) -> None:
    """As `ctx.run` gives them. The last window has two samples."""
    job = made(learns, batch=3)
    torch.testing.assert_close(
        train(job, "data=3", tmp_path), by_hand(job, learns_by_hand), **EXACT
    )


# --- Figures ---------------------------------------------------------------------------------------------------------


def logs(ctx: Any, batch: Any) -> None:
    """Inside and outside of a loss, before and after the update, in some steps and on one rank alone."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        off = F.mse_loss(output, batch.target)
        ctx.log("inside", off)
        ctx.log("size", (output.abs().sum(), output.numel()))
        return off

    out = ctx.backward("net", batch, loss)
    ctx.log("before", (out.outputs - batch.target).abs().mean())
    if ctx.step == 3:
        ctx.log("total", pl.total(out.outputs.sum()))
    ctx.update("net")
    if ctx.step % 2:
        ctx.log("after", ctx.run("net", batch).square().mean())
    if ctx.places[0] == 0:
        ctx.log("of the first rank", 2)
    ctx.log("nothing", (0.0, 0))
    ctx.log("no number", float("inf"))


def logged_by_hand(job: pl.Job) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []

    def step(number: int, models: Any, optimizers: Any, x: Tensor, y: Tensor) -> None:
        net, output = models["net"], models["net"](x)
        loss = F.mse_loss(output, y)
        optimizers["net"].zero_grad()
        loss.backward()
        optimizers["net"].step()
        rows.append(
            {
                "inside": loss.item(),
                "size": output.abs().mean().item(),
                "before": (output - y).abs().mean().item(),
                "of the first rank": 2.0,
                **({"total": output.sum().item()} if number == 3 else {}),
                **({"after": net(x).square().mean().item()} if number % 2 else {}),
            }
        )

    by_hand(job, step)
    return rows


def rows_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


class Hears(pl.Callback):
    def __init__(self) -> None:
        self.figures: list[tuple[int, Any]] = []

    def on_figures(self, run: Any, step: int, figures: Any) -> None:
        self.figures.append((step, figures))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", [*PLANS, "data=3 shares=3:2:1 microbatches=2", "tensor=2"])
def test_figures_are_those_of_all_samples(plan: str, tmp_path: Path) -> None:
    job, hears = made(logs, models={"net": net}, optimizers={"net": sgd}), Hears()
    train(replace(job, callbacks=[hears]), plan, tmp_path)
    rows = [row["metrics"] for row in rows_of(tmp_path)]
    assert hears.figures == [*enumerate(rows, 1)]
    assert all(row.pop("no number") is None for row in rows)
    assert rows == [pytest.approx(row, rel=1e-12) for row in logged_by_hand(job)]
    assert "  inside " in (tmp_path / "logs" / "rank-0.log").read_text()
    if plan == PLANS[0]:
        assert "of the first rank" in pl.report(tmp_path).read_text()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "name", "words"),
    [
        ("data=2 local=2", "mine", "replicas take steps of their own"),
        ("servers=1 workers=2", "mine", "servers don't record"),
        ("single", "loss", "every run has a figure of that name"),
    ],
)
def test_figures_that_are_refused(plan: str, name: str, words: str, tmp_path: Path) -> None:
    def step(ctx: Any, batch: Any) -> None:
        ctx.backward("net", batch, lambda output, batch: F.mse_loss(output, batch.target))
        ctx.update("net")
        ctx.log(name, 1.0)

    job = made(step, models={"net": net}, optimizers={"net": sgd})
    with pytest.raises((PacelineError, RankFailed), match=words):
        train(job, plan, tmp_path)


# --- Totals ----------------------------------------------------------------------------------------------------------


def squares(output: Tensor, target: Tensor) -> Any:
    return pl.total(F.mse_loss(output, target, reduction="sum"))


def sums(ctx: Any, batch: Any) -> None:
    out = ctx.backward("net", batch, lambda output, batch: squares(output, batch.target))
    ctx.update("net")
    ctx.backward(
        "judge", out.outputs, lambda judged, batch: pl.total(judged.square().sum()), gather=True
    )
    ctx.update("judge")


def sums_by_hand(number: int, models: Any, optimizers: Any, x: Tensor, y: Tensor) -> None:
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    output = models["net"](x)
    F.mse_loss(output, y, reduction="sum").backward()
    optimizers["net"].step()
    models["judge"](output.detach()).square().sum().backward()
    optimizers["judge"].step()


def slow(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], 0.005)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", PLANS[:4])
def test_a_total_keeps_its_scale_in_a_step_of_ones_own(plan: str, tmp_path: Path) -> None:
    job = made(sums, optimizers={"net": slow, "judge": slow})
    torch.testing.assert_close(train(job, plan, tmp_path), by_hand(job, sums_by_hand), **EXACT)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", [*PLANS, "servers=1 workers=2"])
def test_a_total_keeps_its_scale_as_the_loss_of_a_job(plan: str, tmp_path: Path) -> None:
    """The losses of steps and of the evaluation are totals too."""
    data = made(sums).data
    job = pl.Job(
        model=net,
        loss=squares,
        optimizer=slow,
        data=data,
        validation=data,
        metrics={"positive": lambda output, target: pl.total((output > 0).sum())},
        batch=BATCH,
        steps=STEPS,
        precision="float64",
    )
    weights = train(job, plan, tmp_path)
    seed_model(job.seed)
    model, losses = job.model().double(), []
    optimizer = slow(model.named_parameters())
    x, y = (tensor.double() for tensor in data.tensors)
    for _, _, indices in islice(windows(job), STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[indices]), y[indices], reduction="sum")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(weights, dict(model.state_dict()), **EXACT)
    assert [row["loss"] for row in rows_of(tmp_path)] == pytest.approx(losses, rel=1e-12)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    *_, last = [row for row in map(json.loads, lines) if "validation_loss" in row]
    with torch.no_grad():
        whole = F.mse_loss(model(x), y, reduction="sum").item()
        positive = int((model(x) > 0).sum())
    assert last["validation_loss"] == pytest.approx(whole, rel=1e-12)
    assert last["metrics"] == {"positive": pytest.approx(positive)}


def test_verify_takes_a_total() -> None:
    """By one device that is told of it, too."""
    job = made(sums, optimizers={"net": slow, "judge": slow})
    (certificate,) = pl.verify(job, ["data=2"], steps=2, restore="no")
    assert certificate.verdict == "passed", certificate.reason


# --- After an update -------------------------------------------------------------------------------------------------


def one(ctx: Any, batch: Any) -> None:
    ctx.backward("net", batch, lambda output, batch: F.mse_loss(output, batch.target))
    ctx.update("net")
    ctx.backward("judge", batch.target, lambda judged, batch: -judged.mean())
    ctx.update("judge")


def one_by_hand(number: int, models: Any, optimizers: Any, x: Tensor, y: Tensor) -> None:
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    F.mse_loss(models["net"](x), y).backward()
    optimizers["net"].step()
    (-models["judge"](y).mean()).backward()
    optimizers["judge"].step()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", [*PLANS, "tensor=2", "servers=1 workers=2"])
def test_a_hook_of_the_optimizer_clamps_weights_after_its_updates(
    plan: str, tmp_path: Path
) -> None:
    job = made(one, optimizers={"net": sgd, "judge": clamped})
    expected = by_hand(job, one_by_hand)
    assert any((p.abs() == 0.3).any() for p in expected.values())
    torch.testing.assert_close(train(job, plan, tmp_path), expected, **EXACT)


# --- A model whose turn comes late -----------------------------------------------------------------------------------


def late(ctx: Any, batch: Any) -> None:
    ctx.backward("net", batch, lambda output, batch: F.mse_loss(output, batch.target))
    ctx.update("net")
    if ctx.step >= 2000:
        ctx.backward("judge", batch.target, lambda judged, batch: -judged.mean())
        ctx.update("judge")


def late_by_hand(number: int, models: Any, optimizers: Any, x: Tensor, y: Tensor) -> None:
    optimizers["net"].zero_grad()
    F.mse_loss(models["net"](x), y).backward()
    optimizers["net"].step()


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["pipeline=2", "tensor=2", "data=2"])
def test_three_steps_of_a_job_whose_later_phase_has_another_model(
    plan: str, tmp_path: Path
) -> None:
    job = made(late, steps=5000)
    weights = train(job, plan, tmp_path, steps=3)
    torch.testing.assert_close(weights, by_hand(made(late, steps=3), late_by_hand), **EXACT)


def test_a_model_that_no_step_runs_is_still_refused() -> None:
    def never(ctx: Any, batch: Any) -> None:
        if ctx.step >= 0:
            late_alone(ctx, batch)

    def late_alone(ctx: Any, batch: Any) -> None:
        ctx.backward("net", batch, lambda output, batch: F.mse_loss(output, batch.target))

    with pytest.raises(JobError, match="never runs 'judge'"):
        recorded(made(never), 3)
