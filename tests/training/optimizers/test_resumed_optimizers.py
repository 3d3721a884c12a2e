"""Every optimizer and schedule of torch, and those that people write, go on exactly under other plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.optimizers import (
    ByPosition,
    Hidden,
    OwnAverages,
    Seldom,
    Unshared,
    furthest,
    optimizer_job,
    train,
    train_in_legs,
)
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as schedules

import paceline
from paceline.checkpoint.read import open_checkpoint
from paceline.launch.process.failure import RankFailed
from paceline.training.loop import train_rank
from paceline.training.settings import Settings

EXACT = 1e-12


def with_sgd(schedule: Callable[[Any], Any]) -> paceline.Job:
    return optimizer_job(lambda named: optim.SGD(named, lr=0.1, momentum=0.9), lr_schedule=schedule)


def by(kind: Callable[..., Any], **options: Any) -> paceline.Job:
    return optimizer_job(lambda named: kind(named, **options))


def two_groups(named: Any) -> optim.Optimizer:
    """Frozen in part, with decay for matrices alone."""
    named = list(named)
    return optim.AdamW(
        [
            {"params": [(n, p) for n, p in named if p.ndim == 2], "weight_decay": 0.5},
            {"params": [(n, p) for n, p in named if p.ndim < 2], "lr": 0.02},
        ],
        lr=0.01,
    )


JOBS: dict[str, paceline.Job] = {
    "OneCycleLR": with_sgd(lambda o: schedules.OneCycleLR(o, max_lr=0.2, total_steps=20)),
    "ChainedScheduler": with_sgd(
        lambda o: schedules.ChainedScheduler(
            [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)]
        )
    ),
    "SequentialLR": with_sgd(
        lambda o: schedules.SequentialLR(
            o, [schedules.ConstantLR(o, 0.3, 2), schedules.CosineAnnealingLR(o, 5)], [2]
        )
    ),
    "SWALR": with_sgd(lambda o: optim.swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=5)),
    "CosineAnnealingWarmRestarts": with_sgd(
        lambda o: schedules.CosineAnnealingWarmRestarts(o, 2, 2)
    ),
    "PolynomialLR": with_sgd(lambda o: schedules.PolynomialLR(o, 9, 2.0)),
    "MultiplicativeLR": with_sgd(lambda o: schedules.MultiplicativeLR(o, lambda _: 0.9)),
    "CyclicLR": with_sgd(lambda o: schedules.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x)),
    "NAdam": by(optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": by(optim.RAdam, lr=0.01),
    "ASGD": by(optim.ASGD, lr=0.05, t0=2, lambd=0.1),
    "Rprop": by(optim.Rprop, lr=0.01),
    "Adamax": by(optim.Adamax, lr=0.01),
    "Adadelta": by(optim.Adadelta, lr=1.0),
    "Adagrad": by(optim.Adagrad, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "RMSprop": by(optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "SGD nesterov": by(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD maximize": by(optim.SGD, lr=0.001, momentum=0.5, dampening=0.2, maximize=True),
    "Adam amsgrad": by(optim.Adam, lr=0.01, amsgrad=True),
    "AdamW fused": by(optim.AdamW, lr=0.01, fused=True),
    "AdamW tensor lr": optimizer_job(
        lambda named: optim.AdamW(named, lr=torch.tensor(0.01)),
        lr_schedule=lambda o: schedules.ExponentialLR(o, 0.9),
    ),
    "AdamW groups": optimizer_job(two_groups, clip=0.5),
    "Adafactor": by(optim.Adafactor, lr=0.05),
    "Unshared": by(Unshared),
    "OwnAverages": optimizer_job(
        OwnAverages, lr_schedule=lambda o: schedules.ExponentialLR(o, 0.8)
    ),
}
FEW = ("ChainedScheduler", "Adafactor", "OwnAverages")
ROUTES = [
    [("shard=2", 1), ("single", 3), ("tensor=2", 5), ("data=2", 7)],
    [("pipeline=2 microbatches=2", 3), ("shard=2", 7)],
    [("single", 3), ("pipeline=2 microbatches=2", 5), ("tensor=2", 7)],
]


def in_one_start(
    jobs: Iterable[str],
    plan: str,
    folder: Path,
    *,
    steps: int,
    resume: bool,
    run_ranks: Callable[..., list[Any]],
) -> None:
    """Train each job up to a step in a folder of its own, all by the same ranks."""
    parsed = paceline.Plan.parse(plan)
    names = list(jobs)

    def body(context: Any) -> None:
        for name in names:
            train_rank(
                context,
                replace(JOBS[name], steps=steps),
                parsed,
                Settings(folder / name, (1,) * parsed.replicas, resume=resume),
            )

    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
    run_ranks(body, parsed.world_size)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("jobs", "route"),
    [
        (FEW, [("shard=2", 3), ("data=2", 7)]),
        *(pytest.param(tuple(JOBS), route, marks=pytest.mark.slow) for route in ROUTES),
    ],
)
def test_it_goes_on_exactly(
    jobs: tuple[str, ...],
    route: list[tuple[str, int]],
    tmp_path: Path,
    run_ranks: Callable[..., list[Any]],
) -> None:
    """Stopped at odd steps and resumed under other plans, each ends where one device ends without a stop."""
    in_one_start(jobs, "single", tmp_path / "whole", steps=7, resume=False, run_ranks=run_ranks)
    for number, (plan, steps) in enumerate(route):
        in_one_start(
            jobs, plan, tmp_path / "legs", steps=steps, resume=number > 0, run_ranks=run_ranks
        )

    def weights(folder: str, name: str) -> dict[str, Tensor]:
        return load_file(tmp_path / folder / name / "model.safetensors")

    off = {name: furthest(weights("legs", name), weights("whole", name)) for name in jobs}
    assert not {name: distance for name, distance in off.items() if not distance[0] < EXACT}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("every", "late"), [(2, 99), (3, 6)])
def test_what_is_kept_between_updates_and_what_comes_late_go_on(
    every: int, late: int, tmp_path: Path
) -> None:
    """Dicts beside `state` that are empty after the trial's four steps, or come after them."""
    job = optimizer_job(lambda named: Seldom(named, every, late))
    whole = train(job, "single", tmp_path / "whole")

    resumed = train_in_legs(job, [("single", 5), ("shard=2", 6), ("single", 7)], tmp_path / "cut")
    assert furthest(resumed, whole)[0] <= EXACT


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, :2].abs() * 5).long().clamp(max=19)).mean(1)


def test_sparse_adam_goes_on(tmp_path: Path) -> None:
    """Its moments are dense, and saved whole."""
    job = optimizer_job(lambda named: optim.SparseAdam(list(named), lr=0.1), Sparse)

    whole = train(job, "single", tmp_path / "whole")

    resumed = train_in_legs(job, [("single", 3), ("single", 7)], tmp_path / "cut")
    assert furthest(resumed, whole) == (0.0, "table.weight")


@pytest.mark.slow
def test_what_state_dict_alone_knows_is_saved_where_a_rank_has_all(tmp_path: Path) -> None:
    """Through load_state_dict under data=N; refused by name where a rank has a part."""
    job = optimizer_job(ByPosition)
    whole = train(job, "single", tmp_path / "whole")

    assert furthest(train_in_legs(job, [("data=2", 3), ("single", 7)], tmp_path / "cut"), whole) < (
        EXACT,
        "",
    )
    with pytest.raises(RankFailed, match=r"ByPosition keeps tensors in its state_dict by position"):
        train(job, "shard=2", tmp_path / "refused")


def test_hidden_state_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """With what to do about it; nothing was trained."""
    with pytest.raises(
        RankFailed, match="Hidden keeps state where a checkpoint can't find it"
    ) as failed:
        train(optimizer_job(Hidden), "single", tmp_path / "run")

    assert (
        "self.state[parameter]" in str(failed.value)
        and not (tmp_path / "run" / "metrics.jsonl").exists()
    )


@pytest.mark.slow
def test_names_of_state_do_not_know_the_layout(tmp_path: Path) -> None:
    """A wrapped optimizer's state lies under its parameter's name, with the way to the optimizer; numbers beside it."""
    train(by(Unshared), "shard=2", tmp_path / "a", steps=1)
    train(by(OwnAverages), "pipeline=2", tmp_path / "b", steps=1)

    wrapped = open_checkpoint(tmp_path / "a" / "checkpoints" / "step-1")
    assert wrapped.tensors["optimizer/out.weight/self.parts.matrices/momentum_buffer"].shape == (
        3,
        16,
    )
    custom = open_checkpoint(tmp_path / "b" / "checkpoints" / "step-1")
    assert {
        name.split("/", 2)[2] for name in custom.tensors if name.startswith("optimizer/out.weight/")
    } == {"self.averages", "history.0", "history.1", ".values"}
    assert custom.document["optimizer"]["attributes"] == {"count": 1}
