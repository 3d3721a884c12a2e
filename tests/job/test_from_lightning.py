"""Jobs of a LightningModule, beside a loop that does what Lightning's Trainer does, and beside that Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from later import needed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.base.errors import JobError, PacelineError
from paceline.base.streams import seed_model

EPOCHS = 3


def digits(base: type) -> Any:
    """A class of modules with two groups of parameters, and a schedule that follows epochs."""

    class Digits(base):  # type: ignore[misc]
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.lr = lr
            self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            output = self.net(x)
            self.log("size", output.square().mean(), prog_bar=True)
            return {"loss": F.cross_entropy(output, y)}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            output = self.net(x)
            self.log("val_loss", F.cross_entropy(output, y))
            self.log("right", (output.argmax(1) == y).double().mean())

        def configure_optimizers(self) -> Any:
            decayed = [p for name, p in self.named_parameters() if name.endswith("weight")]
            others = [p for name, p in self.named_parameters() if not name.endswith("weight")]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
            optimizer = torch.optim.SGD(groups, self.lr, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    return Digits


def data(samples: int) -> TensorDataset:
    draws = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 6, generator=draws, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


def job_of(build: Callable[[], Any], **fields: Any) -> pl.Job:
    loader = DataLoader(data(22), 8)  # the last of three batches is short
    given = {"validation": data(9), "epochs": EPOCHS, "clip": 0.5, "precision": "float64"}
    return pl.from_lightning(build, data=loader, **(given | fields))


def trained(module: Any) -> Any:
    """The module, trained by the loop that Lightning's Trainer amounts to."""
    module.double().log = lambda *_, **__: None
    (optimizer,), (schedule,) = module.configure_optimizers()
    for _ in range(EPOCHS):
        for batch in DataLoader(data(22), 8):
            optimizer.zero_grad()
            module.training_step(batch, 0)["loss"].backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
        schedule.step()
    return module


def assert_alike(run: Any, module: Any) -> None:
    """The weights, the figures of the first step, and those of the evaluation."""
    for name, weight in run.model().state_dict().items():
        torch.testing.assert_close(weight, module.state_dict()[name], rtol=1e-9, atol=1e-11)
    x, y = data(9).tensors
    with torch.no_grad():
        output = module.net(x)
    expected = {
        "validation_loss": F.cross_entropy(output, y),
        "right": (output.argmax(1) == y).double().mean(),
    }
    for name, value in (expected | {"val_loss": expected["validation_loss"]}).items():
        assert run.metrics[name] == pytest.approx(float(value), rel=1e-9)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "data=3", "shard=2", "tensor=2", "pipeline=2"])
def test_a_module_is_trained_as_by_its_loop(plan: str, tmp_path: Path):
    """Its weights, groups, schedule and figures are those of one device."""
    build = digits(nn.Module)
    run = pl.train(job_of(build), plan, run=tmp_path / "run", table=False)

    seed_model(0)
    assert_alike(run, trained(build()))
    seed_model(0)
    with torch.no_grad():
        size = build().double().net(data(22).tensors[0][:8]).square().mean()
    assert run.history[0]["metrics"]["size"] == pytest.approx(float(size), rel=1e-9)


@pytest.mark.filterwarnings("ignore")  # of Lightning
@pytest.mark.parametrize("plan", ["single", "data=2", "shard=2", "tensor=2", "pipeline=2"])
def test_a_module_is_trained_as_by_lightning(plan: str, tmp_path: Path):
    """Its own Trainer takes the same steps."""
    lightning = needed("lightning")
    build = digits(lightning.LightningModule)
    run = pl.train(job_of(build), plan, run=tmp_path / "run", table=False)

    seed_model(0)
    module = build()
    lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=0.5,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    ).fit(module, DataLoader(data(22), 8), DataLoader(data(9), 4))
    assert_alike(run, module)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_schedule_moves_by_steps_or_epochs(interval: str, tmp_path: Path):
    """It may ask the Trainer for the number of steps; a resumed run goes on with it."""

    class Ours(digits(nn.Module)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), self.lr)
            total = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda number: (number + 1) / total
            )
            planned = {"scheduler": schedule, "interval": interval}
            return {"optimizer": optimizer, "lr_scheduler": planned}

    pl.train(job_of(Ours), "single", run=tmp_path / "run", steps=5, table=False)
    run = pl.train(job_of(Ours), "data=2", run=tmp_path / "run", resume=True, table=False)

    places = [place if interval == "step" else place // 3 for place in range(1, 10)]
    rates = [row["lr"] for row in run.history if "loss" in row]  # after each step
    assert rates == pytest.approx([0.1 * (place + 1) / 9 for place in places])


@pytest.mark.parametrize("fails", ["batch_idx", "trainer.current_epoch"])
def test_what_a_plan_has_not_is_refused_where_it_is_used(fails: str, tmp_path: Path):
    """The number of a batch would differ between plans."""

    class Ours(digits(nn.Module)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            used = batch_idx == 0 if fails == "batch_idx" else self.trainer.current_epoch
            return super().training_step(batch, used)

    with pytest.raises(PacelineError, match=f"the module uses {fails}, which no plan has"):
        pl.train(job_of(Ours), "single", run=tmp_path, table=False)


def test_hooks_and_optimizers_that_a_job_has_not_are_refused():
    """The message names them."""
    kind = type(
        "LightningModule",
        (nn.Module,),
        {"on_train_epoch_end": None, "__module__": "lightning.pytorch"},
    )

    class Hooked(digits(kind)):  # type: ignore[misc]
        automatic_optimization = False

        def on_train_epoch_end(self) -> None: ...

    with pytest.raises(
        JobError, match=r"automatic_optimization(?s:.*)Hooked.on_train_epoch_end is not"
    ):
        job_of(Hooked)

    class Several(digits(nn.Module)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.parameters(), 0.1),
                torch.optim.SGD(self.parameters(), 0.2),
            ]

    with pytest.raises(JobError, match="returns 2 optimizers and 0 schedules"):
        job_of(Several)


def plateau(**more: Any) -> Any:
    class Monitored(digits(nn.Module)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("val_loss", loss)
            return {"val_loss": loss}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": schedule, **more}

    return Monitored


def test_a_schedule_of_a_figure_and_a_loss_in_a_mapping(tmp_path: Path):
    """The forms that Lightning takes beside the usual ones."""
    run = pl.train(
        job_of(plateau(monitor="val_loss"), epochs=1), "single", run=tmp_path / "run", table=False
    )
    assert run.metrics["val_loss"] > 0


def test_fields_that_the_module_decides_are_refused():
    with pytest.raises(JobError, match="monitor=None"):
        job_of(plateau())
    with pytest.raises(JobError, match="takes validation_step from the module"):
        job_of(digits(nn.Module), validation_step=lambda model, batch: 0.0)

    class Fed(digits(nn.Module)):  # type: ignore[misc]
        def val_dataloader(self) -> Any: ...

    with pytest.raises(JobError, match=r"Fed\.val_dataloader is not called"):
        job_of(Fed, validation=None)
