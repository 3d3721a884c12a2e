"""Runs with parameter servers: exact without staleness, robust with it, and the same checkpoints as any plan."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conditions import PATIENCE_S, until
from jobs.classification import adamw, classification_job
from jobs.perceptrons import ListedPerceptron
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.base.errors import JobError, PacelineError, PlanError
from paceline.strategies.plan import Plan

TIMEOUT_S = 60


def _adam(**changes: Any) -> paceline.Job:
    """A job whose updates depend on all that a checkpoint holds."""
    schedule = lambda opt: torch.optim.lr_scheduler.StepLR(opt, 3)  # noqa: E731
    return classification_job(
        ListedPerceptron, **{"optimizer": adamw, "lr_schedule": schedule, "clip": 0.2, **changes}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plans", "steps"),
    [
        (["servers=2 workers=2 colocate=yes microbatches=2", "servers=1 workers=2 shares=3:1"], 3),
        *(
            pytest.param(plans, 4, marks=pytest.mark.slow)
            for plans in (
                ["servers=1 workers=2", "servers=2 workers=3 microbatches=2"],
                ["servers=2 workers=2 colocate=yes", "servers=1 workers=2 shares=3:1"],
            )
        ),
    ],
)
def test_without_staleness_it_is_one_device_s(plans: list[str], steps: int):
    """Clipping over all shards, a schedule, AdamW: in float32 and float64."""
    for certificate in paceline.verify(_adam(), plans, steps=steps, timeout_s=TIMEOUT_S):
        assert certificate.passed, certificate.describe()
        assert certificate.verdicts[1].max_param_diff < 1e-12


class Experts(nn.Module):
    """Layers of which each sample uses one, so that a worker may have no gradient of some."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 3) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, which = x.new_zeros(len(x), 3), (x.sum(1) * 50).long() % 6
        for number, expert in enumerate(self.experts):
            if (mask := which == number).any():
                out = out.index_add(0, mask.nonzero()[:, 0], expert(x[mask]))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("model", [ListedPerceptron, Experts])
def test_layers_are_updated_one_by_one(model: Any):
    """Without clipping each is updated when all its gradients are there; one that some worker lacks, at the end."""
    job = classification_job(model, optimizer=adamw, precision="float64")
    for certificate in paceline.verify(
        job,
        ["servers=2 workers=3", "servers=1 workers=2 colocate=yes"],
        steps=3,
        restore="no",
        timeout_s=TIMEOUT_S,
    ):
        assert certificate.passed, certificate.describe()


@pytest.mark.slow
def test_a_loss_of_sums_and_an_optimizer_of_whole_tensors():
    """The count of the whole window divides once; Adafactor gets tensors uncut."""
    job = classification_job(
        ListedPerceptron,
        loss=lambda output, target: (F.cross_entropy(output, target, reduction="sum"), len(target)),
        optimizer=lambda named: torch.optim.Adafactor([p for _, p in named], lr=0.05),
    )
    (certificate,) = paceline.verify(
        replace(job, precision="float64"), ["servers=2 workers=2"], steps=3, timeout_s=TIMEOUT_S
    )
    assert certificate.passed, certificate.describe()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("servers=2 workers=2", "data=2"),
        ("shard=2", "servers=2 workers=2"),
        ("servers=1 workers=2 staleness=inf", "servers=2 workers=2 staleness=1"),
    ],
)
def test_checkpoints_do_not_know_the_servers(tmp_path: Path, first: str, then: str):
    """A run goes on under any plan, with every sample once; an exact one as if nothing had happened."""
    job = _adam(validation=classification_job().data)
    paceline.train(job, first, run=tmp_path / "run", steps=6, save_every=4, timeout_s=TIMEOUT_S)
    summary = paceline.train(
        job, then, run=tmp_path / "run", steps=9, resume=True, timeout_s=TIMEOUT_S
    )

    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 10))
    assert summary["steps"] == 9 and summary["samples"] == 25 + 25 + 8
    if "staleness" not in first:
        paceline.train(job, "single", run=tmp_path / "single", steps=9)
        actual, expected = (
            load_file(tmp_path / name / "model.safetensors") for name in ("run", "single")
        )
        assert all(torch.allclose(actual[name], expected[name], atol=1e-6) for name in expected)


def _log_is(name: str) -> bool:
    """Whether this is the rank whose log has that name."""
    return Path("/proc/self/fd/2").resolve().name == name


def _killing(rank: int, number: int, mark: Path, *, at: int, epochs: int) -> paceline.Job:
    """A job in which one rank gets a signal in the middle of reading its samples. The others leave it some: they wait
    for the mark when they have read three times as many."""

    class Data(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.read = 0

        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            self.read += 1
            if self.read == at and _log_is(f"rank-{rank}.log"):
                mark.touch()
                os.kill(os.getpid(), number)
            elif self.read >= 3 * at:
                until(mark.exists)
            return torch.full((6,), index / 24), index % 3

    return classification_job(data=Data(), epochs=epochs)


@pytest.mark.sweep(1)
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("plan", "rank", "number"),
    [
        ("servers=1 workers=3 staleness=inf", 2, signal.SIGKILL),
        ("servers=2 workers=3 staleness=1", 3, signal.SIGSTOP),
        ("servers=1 workers=2 staleness=inf colocate=yes", 1, signal.SIGKILL),
    ],
)
def test_others_take_the_steps_of_a_worker_that_is_gone(
    tmp_path: Path, plan: str, rank: int, number: int
):
    """Killed or stopped: every step is made once, no sample is lost, and the run says who is missing."""
    job = _killing(rank, number, tmp_path / "mark", at=20, epochs=8)
    timeout_s = 8 if number == signal.SIGSTOP else PATIENCE_S
    summary = paceline.train(job, plan, run=tmp_path / "run", timeout_s=timeout_s, restarts=0)
    servers = 0 if "colocate" in plan else int(plan[8])
    assert summary["workers_lost"] == [rank - servers]
    assert summary["steps"] == 24 and summary["samples"] == 8 * 24
    assert sum(summary["staleness"].values()) == 24 * Plan.parse(plan).sync.workers  # updates


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_a_worker_that_is_gone_before_the_others_came(tmp_path: Path):
    """Those that are still building their model take over."""

    def slow() -> ListedPerceptron:
        if _log_is("rank-2.log"):
            time.sleep(2.0)
        return ListedPerceptron()

    job = replace(_killing(1, signal.SIGKILL, tmp_path / "mark", at=20, epochs=8), model=slow)
    summary = paceline.train(
        job,
        "servers=1 workers=2 staleness=inf",
        run=tmp_path / "run",
        timeout_s=TIMEOUT_S,
        restarts=0,
    )
    assert summary["workers_lost"] == [0]
    assert summary["steps"] == 24 and summary["samples"] == 8 * 24


@pytest.mark.sweep(1)
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("rank", "plan"), [(2, "servers=1 workers=2"), (1, "servers=2 workers=2 colocate=yes")]
)
def test_without_staleness_a_death_ends_the_run(tmp_path: Path, rank: int, plan: str):
    """The rank that was killed is named, whoever lost a connection to it."""
    job = _killing(rank, signal.SIGKILL, tmp_path / "mark", at=20, epochs=8)
    with pytest.raises(PacelineError, match=f"rank {rank} .*\n.*killed by SIGKILL") as raised:
        paceline.train(job, plan, run=tmp_path / "run", timeout_s=TIMEOUT_S, restarts=0)
    assert raised.value.exit_code == 4


def test_a_line_has_the_learning_rate_of_its_step(tmp_path: Path):
    """Exactly, where updates are made in order."""
    paceline.train(
        _adam(), "servers=2 workers=2", run=tmp_path / "run", steps=12, timeout_s=TIMEOUT_S
    )
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    rates = [line["lr"] for line in lines if "loss" in line]  # as it was after the step
    assert rates == pytest.approx([0.01 * 0.1 ** (step // 3) for step in range(1, 13)])


def test_damping_and_what_a_run_tells(tmp_path: Path):
    """Staleness, bytes and waiting are in the summary; a straggler's updates are damped."""
    summary = paceline.train(
        _adam(),
        "servers=2 workers=2 staleness=inf damping=inverse",
        run=tmp_path / "run",
        steps=12,
        timeout_s=TIMEOUT_S,
    )
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    rates = [line["lr"] for line in lines if "loss" in line]
    # The schedule goes by updates that were made, and a line by the window that is complete: a worker may be ahead.
    due = [0.01 * 0.1 ** (max(step, 0) // 3) for step in range(-2, 16)]
    assert len(rates) == 12
    for step, rate in enumerate(rates, start=1):
        assert any(rate == pytest.approx(near) for near in due[step : step + 5]), (step, rate)
    updates = 3 * (3 * 2 + 1)  # of three epochs, each with three windows of 8 samples and one of 1
    assert sum(summary["staleness"].values()) == updates
    num_bytes = sum(p.numel() for p in ListedPerceptron().parameters()) * 4
    pushed = sum(worker["pushed_bytes"] for worker in summary["workers"].values())
    assert updates * num_bytes <= pushed <= updates * (num_bytes + 40 * 20)
    assert all(worker["waited_for_step_s"] > 0 for worker in summary["workers"].values())
    # Or the report would blame the plan for what other work on the cores takes.
    assert (
        summary["core_wait_s"]
        >= max(worker["core_wait_s"] for worker in summary["workers"].values())
        >= 0
    )


class Weightless(nn.Module):
    """Its gradient does not depend on its weights, so that whatever misses whose updates changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(6, 4, dtype=torch.float64),
            nn.Linear(6, 4, dtype=torch.float64),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x.double()) + 2 * self.second(x.double())


@pytest.mark.slow
def test_clipping_with_staleness_is_of_each_steps_own_gradient(tmp_path: Path):
    """By its norm over all servers: an update is what one device makes of a worker's samples, by their part of the
    batch."""
    weights = {}
    for plan, batch, lr in (("single", 4, 0.1), ("servers=2 workers=2 staleness=inf", 8, 0.2)):
        job = classification_job(
            Weightless,
            loss=lambda output, target: (output.mean(1) * (target + 1)).mean(),
            clip=0.3,
            batch=batch,
            drop_last=True,
            optimizer=lambda named: torch.optim.SGD(named, lr=lr),  # noqa: B023
        )
        paceline.train(job, plan, run=tmp_path / plan, steps=48 // batch, timeout_s=TIMEOUT_S)
        lines = [
            json.loads(line)
            for line in (tmp_path / plan / "metrics.jsonl").read_text().splitlines()
        ]
        norms = [line["gradient_norm"] for line in lines if "gradient_norm" in line]
        assert len(norms) == 12 and min(norms) > 0.3  # each is clipped
        weights[plan] = load_file(tmp_path / plan / "model.safetensors")
    first_weights, second_weights = weights.values()
    assert all(
        torch.allclose(first_weights[name], second_weights[name], rtol=0, atol=1e-12)
        for name in first_weights
    )


def test_parts_of_a_loss_of_sums_are_a_step(tmp_path: Path):
    """With staleness each part is divided by its own count and weighed by its samples: together one device's step."""
    job = classification_job(
        Weightless, loss=lambda output, target: ((output.mean(1) * (target + 1)).sum(), len(target))
    )
    weights = {}
    for plan in ("single", "servers=2 workers=3 staleness=inf"):
        paceline.train(job, plan, run=tmp_path / plan, steps=8, timeout_s=TIMEOUT_S)
        weights[plan] = load_file(tmp_path / plan / "model.safetensors")
    first_weights, second_weights = weights.values()
    assert all(
        torch.allclose(first_weights[name], second_weights[name], rtol=0, atol=1e-12)
        for name in first_weights
    )


def test_an_update_is_damped_by_the_steps_it_misses(tmp_path: Path):
    """All parts have the same gradient here, so that the way that weights went is the sum of the rates."""
    data = torch.utils.data.TensorDataset(torch.ones(24, 6), torch.zeros(24, dtype=torch.long))
    job = classification_job(Weightless, data=data, loss=lambda output, target: output.mean())
    ways = {}
    for plan in ("single", "servers=1 workers=4 staleness=inf damping=inverse"):
        paceline.train(job, plan, run=tmp_path / plan, steps=9, timeout_s=TIMEOUT_S)
        ways[plan] = load_file(tmp_path / plan / "model.safetensors")["first.bias"]
    start = paceline.train(job, "single", run=tmp_path / "one", steps=1).run
    undamped, damped = ways.values()
    step = (undamped - load_file(start / "model.safetensors")["first.bias"]) / 8  # of whole batches
    lines = [
        json.loads(line) for line in (tmp_path / plan / "metrics.jsonl").read_text().splitlines()
    ]
    rates = [1 / max(1.0, line["staleness"] / 4) for line in lines if "staleness" in line]
    assert len(rates) == 36
    assert torch.allclose(damped, undamped + step * (sum(rates) / 4 - 9), rtol=0, atol=1e-12)


class Words(nn.Module):
    """Two tables, one of them looked into twice, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4, sparse=True, padding_idx=0)
        self.bags = nn.EmbeddingBag(31, 4, mode="mean", sparse=True, padding_idx=3)
        self.out = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(
            self.words(ids).sum(1)
            + self.bags(ids % 31)
            + self.words(input=(ids * 7 % 50)[:, :2]).mean(1)
        )


def _words(**changes: Any) -> paceline.Job:
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 50, (25, 6), generator=draw)
    data = torch.utils.data.TensorDataset(ids, ids.sum(1) % 3)
    sgd = lambda named: torch.optim.SGD(named, lr=0.3)  # noqa: E731
    return paceline.Job(
        data=data,
        loss=F.cross_entropy,
        batch=8,
        epochs=2,
        **{"model": Words, "optimizer": sgd, **changes},
    )


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # in torch's Adagrad
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_rows_of_tables_are_one_device_s(optimizer: str):
    """Only rows that were looked up travel, and the tables' gradients are sparse as on one device."""
    job = _words(
        optimizer=lambda named: getattr(torch.optim, optimizer)(named, lr=0.3), precision="float64"
    )
    for certificate in paceline.verify(
        job,
        ["servers=2 workers=3 microbatches=2", "servers=2 workers=2 colocate=yes"],
        steps=3,
        timeout_s=TIMEOUT_S,
    ):
        assert certificate.passed, certificate.describe()
        assert certificate.verdicts[0].max_param_diff < 1e-12


@pytest.mark.slow
def test_bytes_are_by_rows_and_not_by_tables(tmp_path: Path):
    """A table a hundred times as large costs nothing on the wire, and is whole in the model that comes out."""
    pushed = []
    for rows in (1_000, 100_000):

        class Large(Words):
            def __init__(self) -> None:
                super().__init__()
                self.words = nn.Embedding(rows, 4, sparse=True)  # noqa: B023

        run = tmp_path / str(rows)
        summary = paceline.train(
            _words(model=Large, validation=_words().data),
            "servers=2 workers=2 staleness=inf",
            run=run,
            timeout_s=TIMEOUT_S,
        )
        pushed.append(
            [
                worker["pushed_bytes"] + worker["pulled_bytes"]
                for worker in summary["workers"].values()
            ]
        )
        assert load_file(run / "model.safetensors")["words.weight"].shape == (rows, 4)
        assert summary["validation_loss"] < 2
    assert sum(pushed[1]) < 1.1 * sum(pushed[0]) < 1e6


@pytest.mark.slow
def test_the_example_of_lines(tmp_path: Path):
    """A small form of it learns: four modules, better than by chance."""
    make = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "04_stdlib_lines.py"))["job"]
    job = make(buckets=5_000, modules=4, per_module=300, epochs=15)
    summary = paceline.train(
        job, "servers=2 workers=2 staleness=inf", run=tmp_path / "run", timeout_s=TIMEOUT_S
    )
    assert summary["metrics"]["accuracy"] > 0.4


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("job", "plan", "kind", "why"),
    [
        (classification_job(Norm), "servers=1 workers=2", JobError, "changes 'norm.running_mean'"),
        (
            classification_job(Norm),
            "servers=1 workers=2 staleness=1",
            JobError,
            "changes 'norm.(.|\n)*GroupNorm or LayerNorm",
        ),
        (
            classification_job(
                ListedPerceptron, optimizer=lambda named: torch.optim.LBFGS([p for _, p in named])
            ),
            "servers=1 workers=1",
            PlanError,
            "LBFGS needs a closure that evaluates the loss several times a step(.|\n)*use a data=N",
        ),
        (
            classification_job(
                ListedPerceptron,
                optimizer=lambda named: torch.optim.Adafactor([p for _, p in named]),
            ),
            "servers=7 workers=1",
            PlanError,
            "servers=7 servers and 6 parameters(.|\n)*at most 6 servers",
        ),
        (
            classification_job(lambda: nn.Linear(6, 3, bias=False)),
            "servers=4 workers=1",
            PlanError,
            "at most 3 servers",
        ),
        (
            classification_job(
                lambda: nn.Sequential(
                    nn.Embedding(9, 3, sparse=True, max_norm=1.0), nn.Flatten(), nn.Linear(18, 3)
                )
            ),
            "servers=1 workers=1",
            JobError,
            "max_norm|in place, and servers",
        ),
    ],
)
def test_jobs_that_servers_can_not_train(
    tmp_path: Path, job: paceline.Job, plan: str, kind: type, why: str
):
    """Said before anything is lost."""
    with pytest.raises(PacelineError, match=why) as raised:
        paceline.train(job, plan, run=tmp_path / "run", timeout_s=TIMEOUT_S)
    assert raised.value.exit_code == 2


class Overflowing(torch.optim.SGD):
    """Fails in its third step."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        if self.count == 3:
            raise ArithmeticError("too large")
        super().step()


@pytest.mark.parametrize("staleness", ["0", "inf"])
def test_a_server_that_fails_beside_a_worker_ends_the_run(tmp_path: Path, staleness: str):
    """Its process lives on as a worker, and is not to wait for orders that never come."""
    job = classification_job(optimizer=lambda named: Overflowing(named, lr=0.1))
    with pytest.raises(PacelineError, match="ArithmeticError: too large"):
        paceline.train(
            job,
            f"servers=2 workers=2 colocate=yes staleness={staleness}",
            run=tmp_path / "run",
            timeout_s=600,
        )


def test_verify_is_about_exact_plans():
    """A stale plan is not meant to equal one device; the one to compare is named."""
    (certificate,) = paceline.verify(classification_job(), ["servers=1 workers=2 staleness=1"])
    assert (
        "miss updates" in certificate.describe()
        and "'servers=1 workers=2' can" in certificate.describe()
    )
