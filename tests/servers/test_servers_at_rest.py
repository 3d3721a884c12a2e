"""Memory of servers and workers that flips a bit: its own rank finds it, before it is in an update or a checkpoint."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.checkpoint import newest_checkpoint
from paceline.launch.process.failure import RankFailed
from paceline.launch.process.faults import Fault, FaultInjector
from paceline.strategies.compose import load
from paceline.strategies.plan import Plan
from paceline.training.drivers import fault_policy, train_rank
from paceline.training.loop import Settings
from paceline.training.parts.memory_checkpoint import Copier
from paceline.training.stepper import Stepper

LEAST = "server=1 workers=1 colocate=yes"


def make_job(
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None, **more: Any
) -> pl.Job:
    source = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(32, 6, generator=source), torch.randint(3, (32,), generator=source)
    )
    return pl.Job(
        **{
            "model": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
            "data": data,
            "loss": nn.functional.cross_entropy,
            "batch": 12,
            "steps": 8,
            "optimizer": optimizer or (lambda named: torch.optim.AdamW(named, lr=0.05)),
            **more,
        }
    )


def train(
    run_ranks: Callable[..., Any],
    plan: str,
    run_dir: Path,
    *,
    job: pl.Job | None = None,
    every: int = 1,
    flip: str | None = None,
    save_every: int | None = None,
    **options: Any,
) -> None:
    parsed, given = Plan.parse(plan), job or make_job()

    def body(context: Any) -> None:
        if flip is not None:
            context.faults = FaultInjector(
                [Fault.parse("flip", flip)], rank=context.rank, run_dir=run_dir, launcher_pid=0
            )
        train_rank(
            context,
            given,
            parsed,
            Settings(run_dir, (1,) * parsed.replicas, save_every=save_every, recheck_every=every),
        )

    run_dir.mkdir()
    load(parsed)
    run_ranks(body, parsed.world_size, fault_policy=fault_policy(parsed), **options)


def newest_step(run_dir: Path) -> int | None:
    checkpoint = newest_checkpoint(run_dir, accept=lambda saved: None, warn=print)
    return checkpoint.step if checkpoint is not None else None


@pytest.mark.parametrize(
    ("plan", "flip", "says", "saved"),
    [
        ("server=2 workers=1", "1@5", "'.*' changed after the update of step 5", 4),
        (LEAST, "0@1:optimizer", "'.*' changed after the update of step 1", None),
        (LEAST, "0@4:optimizer", "'.*' changed after the update of step 4", 2),
        ("server=1 workers=1 staleness=2", "0@5", "'.*' changed after the update of step 5", 4),
        (
            "server=1 workers=1",
            "1@5",
            r"'0\.weight' changed after it had the weights for step 7",
            6,
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("server=1 workers=2", "0@5", "'.*' changed after the update of step 5", 4),
                (
                    "server=2 workers=2 colocate=yes",
                    "1@5:optimizer",
                    "'.*' changed after the update of step 5",
                    4,
                ),
                (
                    "server=1 workers=2 colocate=yes",
                    "1@5",
                    r"'0\.weight' changed after it had the weights for step 7",
                    6,
                ),
                (
                    "server=1 workers=2 staleness=inf colocate=yes",
                    "0@5:optimizer",
                    "'.*' changed after the update of step 5",
                    4,
                ),
                (
                    "server=1 workers=2 compress=bf16",
                    "0@5",
                    "'.*' changed after the update of step 5",
                    4,
                ),
            )
        ),
    ],
)
def test_a_weight_that_flips_at_rest_is_found(
    run_ranks: Any, tmp_path: Path, plan: str, flip: str, says: str, saved: int | None
):
    """Before the next update, whether it is made slice by slice or at once, and before the checkpoint of step 4."""
    rank = int(flip[0])
    with pytest.raises(
        RankFailed, match=rf"on rank {rank}, {says}, and nothing was seen"
    ) as failed:
        train(run_ranks, plan, tmp_path / "run", flip=flip, save_every=2)
    assert failed.value.failure.rank == rank and newest_step(tmp_path / "run") == saved


def test_whole_updates_are_looked_at_too(run_ranks: Any, tmp_path: Path):
    """Clipping needs the whole gradient before any of it is applied."""
    with pytest.raises(RankFailed, match="changed after the update of step 3"):
        train(run_ranks, LEAST, tmp_path / "run", job=make_job(clip=0.5), flip="0@3:optimizer")


@pytest.mark.parametrize(
    ("plan", "every"),
    [
        (LEAST, 1),
        (LEAST, 3),
        ("server=1 workers=1", 2),
        *(
            pytest.param(plan, 1, marks=pytest.mark.slow)
            for plan in (
                "server=2 workers=2",
                "server=2 workers=2 colocate=yes",
                "server=1 workers=2 staleness=2",
            )
        ),
    ],
)
def test_a_right_run_stays_as_it_is(run_ranks: Any, tmp_path: Path, plan: str, every: int):
    """Also where torch does not count what an optimizer writes."""

    class Unseen(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
                p.data.add_(p.grad, alpha=-0.05)

    for each in (0, every):
        train(
            run_ranks,
            plan,
            tmp_path / str(each),
            job=make_job(lambda named: Unseen(named, lr=0.05)),
            every=each,
        )
    plain, checked = (load_file(tmp_path / str(each) / "model.safetensors") for each in (0, every))
    assert "staleness" in plan or all(torch.equal(plain[name], checked[name]) for name in plain)


class Flipping(torch.optim.AdamW):
    """The last bit of its state flips a while after its update of step 4."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        state = self.state[self.param_groups[0]["params"][0]]
        if state["step"] == 4:
            Timer(
                0.1, lambda: state["exp_avg"].data.view(torch.int32).view(-1)[:1].bitwise_xor_(1)
            ).start()


class Pausing(nn.Linear):
    """Calls that begin a while after the one before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return super().forward(x)


def own_job(flips: str = "", optimizer: Any = torch.optim.AdamW, model: Any = nn.Linear) -> pl.Job:
    """A step with two updates. flips: after which of them a bit of a worker's weights flips, in step 5."""

    def step(ctx: Any, batch: Any) -> None:
        for name in ("first", "second"):
            ctx.backward(
                name,
                batch.input,
                lambda output, batch: nn.functional.cross_entropy(output, batch.target),
            )
            ctx.update(name)
            if (name, ctx.step) == (flips, 4):
                for stepper in [
                    each for each in gc.get_objects() if issubclass(type(each), Stepper)
                ]:
                    if (
                        "second.bias" in stepper.parameters
                    ):  # this rank's, and no other that a test left behind
                        stepper.parameters["second.bias"].data.view(torch.int32)[0] ^= 1

    names = ("first", "second")
    return pl.Job(
        models={name: lambda: model(6, 3) for name in names},
        step=step,
        optimizers={
            "first": lambda named: torch.optim.AdamW(named, lr=0.05),
            "second": lambda named: optimizer(named, lr=0.05),
        },
        followers={"average": pl.ema("first", 0.9)},
        data=make_job().data,
        batch=12,
        steps=8,
    )


@pytest.mark.parametrize(
    "job",
    [
        make_job(lambda named: Flipping(named, lr=0.05), model=lambda: Pausing(6, 3)),
        own_job(optimizer=Flipping, model=Pausing),
    ],
)
def test_optimizer_state_that_flips_is_found(run_ranks: Any, tmp_path: Path, job: pl.Job):
    with pytest.raises(
        RankFailed, match=r"the optimizer's exp_avg of '\S+' changed after the update of step 4"
    ):
        train(run_ranks, LEAST, tmp_path / "run", job=job)


@pytest.mark.parametrize(
    ("plan", "flip", "flips", "says"),
    [
        (LEAST, "0@5:optimizer", "", "changed after the update of step 5"),
        (LEAST, "0@5:input", "", "changed after the update of step 5"),
        ("server=1 workers=1", "1@5", "", "changed after it had the weights for step 7"),
        (LEAST, None, "first", "changed after it had the weights for step 5"),
        (LEAST, None, "second", "changed after it had the weights for step 5"),
    ],
)
def test_what_flips_between_updates_of_one_step_is_found(
    run_ranks: Any, tmp_path: Path, plan: str, flip: str | None, flips: str, says: str
):
    """Before the second update, before followers move, and on a worker."""
    with pytest.raises(RankFailed, match=rf"on rank \d, '\S+' {says}"):
        train(run_ranks, plan, tmp_path / "run", job=own_job(flips), flip=flip)


def test_no_copy_has_a_flipped_bit(run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From which all ranks would go on if one was lost."""
    copy = Copier.copy

    def noting(self: Copier, version: int, *args: Any, **options: Any) -> None:
        (tmp_path / f"copy-{version}").touch()
        copy(self, version, *args, **options)

    monkeypatch.setattr(Copier, "copy", noting)
    monkeypatch.setattr(Copier, "affordable_every", lambda self, step_s, **share: 1)
    with pytest.raises(RankFailed, match="changed after the update of step 5"):
        train(run_ranks, LEAST, tmp_path / "run", flip="0@5:optimizer", restarts=3)
    assert (tmp_path / "copy-4").exists() and not (tmp_path / "copy-5").exists()
