"""A run holds its first update against one device before it trains; a wrong one is never trained."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.api import checks
from paceline.base.errors import PlanRefused
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.job.file import JobFile
from paceline.launch.process.failure import RankFailed
from paceline.model.randomness import WithoutRandomness
from paceline.planner.resolve import Resolved, resolve
from paceline.proof import first_update
from paceline.proof.first_update import FirstUpdate, check_first_update
from paceline.proof.reference import write_first_step, write_reference
from paceline.proof.tolerances import ALL_KINDS
from paceline.strategies.data.run import GradientBuckets
from paceline.strategies.plan import Plan
from paceline.training.window import WindowWork
from tests.commands import as_ranks

pytestmark = pytest.mark.checked_runs


def make_job(model: Any = None, **changes: Any) -> paceline.Job:
    x = torch.randn(25, 6, generator=torch.Generator().manual_seed(1))
    fields: dict[str, Any] = {
        "model": model
        or (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))),
        "data": TensorDataset(x, (x[:, 0] > 0).long()),
        "loss": F.cross_entropy,
        "batch": 8,
        "steps": 3,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
    }
    return paceline.Job(**{**fields, **changes})


FILE = """
import torch, torch.nn.functional as F, paceline as pl
def job(width: int = 8):
    return pl.Job(model=lambda: torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Linear(width, 3)), batch=8,
                  data=[(torch.full((6,), i / 9), i % 3) for i in range(20)], steps=2, loss=F.cross_entropy,
                  optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
"""


def checked(job: paceline.Job, plan: str) -> FirstUpdate:
    """What a run would say of its first update, before it trains."""
    resolved = resolve(
        job, Plan.read(plan), devices=None, procs=None, memory=None, environment=None
    )
    return check_first_update(job, resolved, timeout_s=60)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", ["data=2", "tensor=2", "pipeline=2", "shard=2 zero=2", "single recompute=full"]
)
def test_a_plan_that_is_exact_trains(plan: str, tmp_path: Path) -> None:
    """The summary says that it was checked, and the run is as one that was not."""
    checked = paceline.train(make_job(), plan, run=tmp_path / "checked")
    unchecked = paceline.train(make_job(), plan, run=tmp_path / "unchecked", check=False)

    assert checked["check"]["verdict"] == "passed" and checked["check"]["seconds"] > 0
    assert unchecked["check"] is None and checked["final_loss"] == unchecked["final_loss"]
    assert (tmp_path / "checked" / "model.safetensors").read_bytes() == (
        tmp_path / "unchecked" / "model.safetensors"
    ).read_bytes()


def test_what_looks_at_evaluations_is_left_out(tmp_path: Path) -> None:
    """The check evaluates nothing, and callbacks that look at a metric are no reason to refuse the run."""
    watched = make_job(
        validation=make_job().data,
        metrics={"mean": lambda output, target: output.mean()},
        callbacks=[paceline.EarlyStopping("mean"), paceline.KeepBest("validation_loss")],
    )
    result = paceline.train(watched, "data=2", run=tmp_path / "run")
    assert result["check"]["verdict"] == "passed" and result.best.monitor == "validation_loss"
    assert len(repr(result.best)) < 300 and len(repr(watched)) < 2000  # no data


class Warming:
    """A loss that grows from call to call."""

    calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) * min(1.0, self.calls / 10)


def flipping(output: Tensor, target: Tensor) -> Tensor:
    """A loss that writes to its target: a second call with the same one takes the write back."""
    return F.cross_entropy(output, target.bitwise_xor_(1))


class Numbered:
    """A loss that keeps what changes nothing."""

    def __init__(self) -> None:
        self.calls, self.names = 0, {}

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.names[self.calls] = output.detach()
        return F.cross_entropy(output, target)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2 shares=3:1", "single microbatches=2", "pipeline=2"])
def test_a_loss_that_keeps_a_state_is_refused_where_the_batch_is_cut(
    plan: str, tmp_path: Path
) -> None:
    """Each rank, or each micro-batch, would move it on by itself."""
    with pytest.raises(PlanRefused, match="the loss keeps a state of its own"):
        paceline.train(make_job(loss=Warming()), plan, run=tmp_path / "run")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("loss", "plan"), [(Warming, "tensor=2"), (Numbered, "data=2"), (lambda: flipping, "data=2")]
)
def test_losses_whose_state_does_no_harm(loss: Any, plan: str) -> None:
    assert checked(make_job(loss=loss()), plan).verdict == "passed"


class GoesOn(torch.nn.Module):
    """Adds what it made of the batch before; or keeps that to be looked at alone."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.net, self.state, self.reads = torch.nn.Linear(6, 3), None, reads

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        if self.reads and self.state is not None:
            out = out + self.state.mean(0, keepdim=True)
        self.state = out.detach()
        return out


def test_a_state_with_a_row_for_each_sample_is_refused_where_the_batch_is_cut(
    tmp_path: Path,
) -> None:
    """The first update would show nothing of it; an activation that is only kept does no harm."""
    with pytest.raises(PlanRefused, match=r"keeps 'state' of shape \(8, 3\) from one batch"):
        paceline.train(make_job(lambda: GoesOn(reads=True)), "data=2", run=tmp_path / "reads")
    assert checked(make_job(lambda: GoesOn(reads=False)), "data=2").verdict == "passed"


def test_a_wrong_gradient_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousandth of one weight's gradient is enough, and no step of the run is taken."""
    finish = GradientBuckets.finish

    def bent(self: GradientBuckets) -> None:
        finish(self)
        self.buckets[0][1].grad *= 1.001

    monkeypatch.setattr(GradientBuckets, "finish", bent)

    with pytest.raises(PlanRefused, match=r"first update under 'data=2'.*gradient of '3\.weight'"):
        paceline.train(make_job(), "data=2", run=tmp_path / "run")

    assert (
        not (tmp_path / "run" / "metrics.jsonl").exists()
        and not (tmp_path / "run" / "checkpoints").exists()
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "factors", [(1.0, 0.0), (1.001, 1.001)], ids=["dropped", "wrongly divided"]
)
def test_a_wrong_window_is_not_trained_on(
    factors: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch that is left out, and a sum that is divided by another count."""
    loss = WindowWork.loss
    monkeypatch.setattr(
        WindowWork,
        "loss",
        lambda self, microbatch, output: loss(self, microbatch, output) * factors[microbatch],
    )

    with pytest.raises(
        PlanRefused, match=r"first update under 'data=2 microbatches=2'.*gradient of"
    ):
        paceline.train(make_job(), "data=2 microbatches=2", run=tmp_path / "run")


class Counted(nn.Module):
    """Leaves a file for every forward in training on one device."""

    def __init__(self, folder: Path, *, coupled: bool) -> None:
        super().__init__()
        self.folder, self.linear = folder, nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(3) if coupled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if not dist.is_initialized():
            (self.folder / f"forward-{len(list(self.folder.iterdir()))}").touch()
        output: Tensor = self.norm(self.linear(x))
        return output


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("coupled", "forwards"), [(False, 1 + 3), (True, 12 + 2)])
def test_a_yardstick_is_measured_only_where_it_matters(
    coupled: bool, forwards: int, tmp_path: Path
) -> None:
    """One forward of one device is enough for a plan that agrees to a few roundings. A coupled one needs eleven more:
    the same again, with nudged weights, for each micro-batch with the weights as they are and with nudged ones, and to
    look at the loss by itself. Three take four samples, at once and in parts; a BatchNorm refuses the part of one."""
    job = make_job(lambda: Counted(tmp_path, coupled=coupled), steps=1)

    update_check = checked(job, "data=2 microbatches=2")

    assert update_check.verdict == ("coupled" if coupled else "passed")
    assert len(list(tmp_path.iterdir())) == forwards


class Priced(nn.Linear):
    """Notes its samples in each forward on one device, and twice as many in each backward."""

    def __init__(self, file: Path) -> None:
        super().__init__(6, 3)
        self.file = file

    def note(self, samples: int) -> None:
        with self.file.open("a") as file:
            file.write(f"{samples}\n")

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if not dist.is_initialized():
            self.note(len(x))
            if output.requires_grad:
                output.register_hook(lambda gradient: self.note(2 * len(x)))
        return output


@pytest.mark.parametrize(("has_own_step", "steps_of_ranks"), [(False, 1), (True, 0)])
def test_a_check_that_passes_costs_three_steps_at_most(
    has_own_step: bool, steps_of_ranks: int, tmp_path: Path
) -> None:
    """Of one device with the whole batch: its own, other samples', and but for a step of one's own that of ranks."""

    def step(ctx: Any, batch: Any) -> None:
        ctx.backward("net", batch.input, lambda y, piece: F.cross_entropy(y, piece.target))
        ctx.update("net")

    def model() -> nn.Module:
        return Priced(tmp_path / "samples")

    job = make_job(model)
    if has_own_step:
        optimizers = {"net": lambda named: torch.optim.AdamW(named, lr=1e-2)}
        fields = {"models": {"net": model}, "optimizers": optimizers, "training_step": step}
        job = paceline.Job(data=job.data, batch=job.batch, steps=3, **fields)

    assert checked(job, "data=2").verdict == "passed"
    samples = sum(map(int, (tmp_path / "samples").read_text().split()))
    assert 1 <= samples / (3 * job.batch) <= 3 - steps_of_ranks


def test_the_note_of_a_loss_that_is_no_mean_says_what_to_return() -> None:
    """A run that is not what one device computes says which loss to write, before it trains."""
    job = make_job(
        loss=lambda output, target: F.cross_entropy(output, target, ignore_index=0), steps=1
    )

    update_check = checked(job, "data=3")

    assert update_check.verdict == "coupled"
    assert "(sum, count) instead of a scalar: the sum of the loss" in update_check.reason


def check_with_memory(
    job: paceline.Job, plan: str, available: int, monkeypatch: pytest.MonkeyPatch
) -> FirstUpdate:
    """available: free bytes that the check finds."""
    resolved = resolve(
        job, Plan.read(plan), devices=None, procs=None, memory=None, environment=None
    )
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    return check_first_update(job, resolved, timeout_s=60)


def test_one_device_has_all_memory_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended before the ranks take their step."""
    monkeypatch.setattr(
        resource, "setrlimit", lambda kind, most: (tmp_path / "limit").write_text(str(most[0]))
    )

    assert check_with_memory(make_job(), "data=2", 600, monkeypatch).verdict == "passed"
    assert (tmp_path / "limit").read_text() == "600"


def test_a_model_that_takes_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run trains, and says that it was not checked."""
    update_check = check_with_memory(
        make_job(lambda: nn.Linear(6, 2**20)), "data=2", 3 * 2**20, monkeypatch
    )

    assert (
        update_check.verdict == "unchecked"
        and "one device could not take the first step" in update_check.reason
    )


def test_an_error_of_the_job_itself_is_told_by_the_run_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One device and the ranks fail alike: the check says nothing before the error."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise KeyError("a mistake in the loss")

    with pytest.raises(RankFailed, match="a mistake in the loss"):
        paceline.train(make_job(loss=loss), plan="data=2", run=tmp_path / "run")
    assert "not checked" not in capfd.readouterr().err


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", ["servers=1 workers=2", "servers=1 workers=2 colocate=yes", "shard=2"]
)
def test_one_device_that_fails_ends_no_run(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is told; ranks that wait for it, and servers that wait for these, end with the check."""

    def fail(*args: Any, **options: Any) -> None:
        raise ValueError("no such number")

    monkeypatch.setattr(first_update, "write_first_step", fail)
    summary = paceline.train(make_job(), plan, run=tmp_path / "run")

    assert (
        summary["check"]["verdict"] == "unchecked"
        and "ValueError: no such number" in summary["check"]["reason"]
    )
    assert summary["steps"] == 3


class NormOfEachTensor(torch.optim.Optimizer):
    """Looks at a whole tensor for the update of each element."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / (p.grad.norm() + 1e-3)


@pytest.mark.slow
def test_an_optimizer_is_tried_though_random_layers_are_off(tmp_path: Path) -> None:
    """Its stand-ins are drawn in the check as in the run: both learn that it needs whole tensors."""
    summary = paceline.train(make_job(optimizer=NormOfEachTensor), "shard=2", run=tmp_path)

    assert summary["check"]["verdict"] == "passed"


@pytest.mark.parametrize(
    "schedule", [None, lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3)]
)
def test_the_first_limits_are_never_wider_than_the_measured_ones(
    schedule: Any, tmp_path: Path
) -> None:
    """What they let pass would pass anyway."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3), nn.BatchNorm1d(3)
        )

    job = make_job(model, steps=1, lr_schedule=schedule, clip=0.1)
    first, _ = write_first_step(job, tmp_path / "first", random=WithoutRandomness())
    measured = write_reference(job, tmp_path / "measured", steps=1, random=WithoutRandomness())

    assert (
        first["losses"] == measured["losses"]
        and first["loss_limit"][0] <= measured["loss_limit"][0]
    )
    for kind in ALL_KINDS:
        limits, wider = first[f"{kind}_limit"][0], measured[f"{kind}_limit"][0]
        assert limits.keys() == wider.keys()
        assert all(limit <= wider[name] for name, limit in limits.items()), kind


def test_a_model_that_knows_its_rank_is_refused(tmp_path: Path) -> None:
    """Weights built otherwise on another rank are named."""

    def model() -> nn.Module:
        net = nn.Linear(6, 3)
        if dist.is_initialized() and dist.get_rank():
            net.weight.data += 1e-3
        return net

    with pytest.raises(Exception, match="weight"):
        paceline.train(make_job(model), "data=2", run=tmp_path)


@pytest.mark.slow
def test_coupled_samples_are_told_and_trained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A BatchNorm over micro-batches is the job's own doing."""
    job = make_job(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))

    summary = paceline.train(job, "data=2 microbatches=2", run=tmp_path)

    assert summary["check"]["verdict"] == "coupled" and summary["steps"] == 3
    assert "cutting a batch changes what this job computes" in capfd.readouterr().err


def first_update_of(source: JobFile) -> FirstUpdate | None:
    """What a run of the file under 'data=2' would do before it trains."""
    job = source.load()
    resolved = resolve(
        job, Plan.read("data=2"), devices=None, procs=None, memory=None, environment=None
    )
    return checks.first_update(job, source, resolved, environment=None, timeout_s=60)


@pytest.mark.slow
def test_what_is_known_is_not_checked_again(tmp_path: Path) -> None:
    """A second run of the same file, plan and settings goes straight on; another setting does not."""
    path = tmp_path / "job.py"
    path.write_text(FILE)

    def check(**settings: Any) -> FirstUpdate | None:
        return first_update_of(JobFile(path, settings=settings))

    first, second, other = check(), check(), check(width=4)
    path.write_text(path.read_text().replace("lr=0.1", "lr=0.2"))
    edited = check()

    assert second == FirstUpdate("passed")
    assert all(
        check_record and check_record.verdict == "passed" and check_record.seconds > 0
        for check_record in (first, other, edited)
    )


@pytest.mark.slow
def test_a_certificate_makes_the_check_unnecessary(tmp_path: Path) -> None:
    """`verify` of the same file has said it already."""
    path = tmp_path / "job.py"
    path.write_text(FILE)
    assert all(
        certificate.passed for certificate in paceline.verify(JobFile(path), ["data=2"], steps=2)
    )

    assert paceline.train(JobFile(path), "data=2", run=tmp_path / "run")["check"]["seconds"] == 0


@pytest.mark.slow
def test_a_certificate_is_about_the_devices_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on GPUs knows what `verify` said of such GPUs, and not what it said of CPUs."""
    checked_devices = []

    def check(job: Any, resolved: Resolved, *, timeout_s: float) -> FirstUpdate:
        checked_devices.append(resolved.cluster.devices[0].name)
        return FirstUpdate("passed", seconds=1.0)

    monkeypatch.setattr(first_update, "check_first_update", check)
    (tmp_path / "job.py").write_text(FILE)
    source = JobFile(tmp_path / "job.py")
    job, plan = source.load(), Plan.parse("data=2")

    def on(kind: Any, name: str) -> Resolved:
        return Resolved(
            plan,
            Cluster(tuple(Device(kind, index, 2**30, name=name) for index in range(2))),
            (1, 1),
        )

    def known(resolved: Resolved) -> FirstUpdate | None:
        return checks.first_update(job, source, resolved, environment=None, timeout_s=60)

    checks.remember(source, on("cpu", "CPU"), verdict="passed", reason="")
    checks.remember(source, on("cuda", "H200"), verdict="coupled", reason="a BatchNorm")

    assert known(on("cpu", "CPU")) == FirstUpdate("passed")
    assert known(on("cuda", "H200")) == FirstUpdate("coupled", "a BatchNorm")
    assert known(on("cuda", "A100")) == FirstUpdate("passed", seconds=1.0)
    assert known(on("cuda", "A100")) == FirstUpdate("passed")
    assert checked_devices == ["A100"]


@pytest.mark.parametrize(
    ("bytes_there", "has_room"), [(4 * 83 * 4 + 100, True), (4 * 83 * 4 - 1, False)]
)
def test_a_gpu_that_is_too_small_is_left_alone(
    bytes_there: int, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW needs four copies of 83 numbers, and counts of steps. No process that uses the GPU is started."""
    tried = []

    def alone(work: Any, device: Device, *, timeout_s: float) -> Any:
        tried.append(str(device))
        raise KeyboardInterrupt

    monkeypatch.setattr(first_update, "alone", alone)
    gpus = Cluster(tuple(Device("cuda", index, bytes_there) for index in range(2)))
    resolved = Resolved(Plan.parse("data=2"), gpus, (1, 1))
    if has_room:
        with pytest.raises(KeyboardInterrupt):
            check_first_update(make_job(), resolved, timeout_s=60)
        assert tried == ["cuda:0"]
    else:
        update = check_first_update(make_job(), resolved, timeout_s=60)
        assert update.verdict == "unchecked" and "cuda:0 has no room" in update.reason


class Noisy(nn.Module):
    """Its own state, in the process that builds it, must be as if nothing had happened."""

    built = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).built += 1
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * type(self).built


@pytest.mark.slow
def test_the_check_leaves_the_job_alone(tmp_path: Path) -> None:
    """It runs in processes of its own: what user code counts there is not counted in the run."""
    losses = []
    for check in (True, False):
        Noisy.built = 0  # a run's prediction builds one in this process
        losses.append(
            paceline.train(make_job(Noisy), "data=2", run=tmp_path / str(check), check=check)[
                "final_loss"
            ]
        )

    assert losses[0] == losses[1]


RANK_AWARE = FILE.replace(
    "def job",
    """import torch.distributed as dist
class Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.001 if dist.is_initialized() and dist.get_rank() else 1.0)
def job""",
).replace("torch.nn.Linear(width, 3)", "Scaled(width, 3)")


def test_ranks_of_a_launcher_are_checked(tmp_path: Path) -> None:
    """Rank 0 checks for all of them."""
    (tmp_path / "job.py").write_text(FILE)
    first, _ = as_ranks(
        ["train", str(tmp_path / "job.py"), "--plan", "data=2", "--run", str(tmp_path / "run")],
        tmp_path,
    )

    assert "one device's" in first.stdout.read_text() + first.stderr.read_text()
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"), [(FILE, "one device's"), (RANK_AWARE, "is not what one device computes")]
)
def test_ranks_of_torchrun_are_checked(text: str, message: str, tmp_path: Path) -> None:
    """Rank 0 checks for all of them; no rank trains what it refuses."""
    (tmp_path / "job.py").write_text(text)
    torchrun = str(Path(sys.executable).parent / "torchrun")
    ran = subprocess.run(
        [
            torchrun,
            "--nproc-per-node",
            "2",
            "--no-python",
            "--",
            str(Path(sys.executable).parent / "paceline"),
            "train",
            str(tmp_path / "job.py"),
            "--plan",
            "data=2",
            "--run",
            str(tmp_path / "run"),
        ],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert message in ran.stdout + ran.stderr
    assert (
        (ran.returncode == 0) == (text == FILE) == (tmp_path / "run" / "model.safetensors").exists()
    )


# --- What the first batch cut in equal parts does not show -----------------------------------------------------------

TOKENS = torch.randint(9, (24, 6), generator=torch.Generator().manual_seed(2))


def tokens(lengths: list[int]) -> Any:
    """Sequences whose targets count up to these lengths, in order; the rest of the targets is ignored."""
    counted = torch.arange(6) < torch.tensor(lengths)[:, None]
    return TensorDataset(TOKENS, torch.where(counted, TOKENS.roll(1, 1), -100))


def token_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def masked_mean(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(output, target["y"], reduction="none") * target["mask"]
    return losses.sum() / target["mask"].sum()


def centred(items: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(items)
    return x - x.mean(0), y


def with_longest(items: list[Any]) -> Any:
    x, _ = torch.utils.data.default_collate(items)
    return {"x": x, "longest": max(1 + int(row[0]) % 6 for row in x)}, x[:, 0]


class Longest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, x: Tensor, longest: int) -> Tensor:
        return self.head(self.embedding(x[:, :longest]).mean(1))


class OwnLoss(nn.Module):
    """A mean over tokens inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tagger()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = self.layers(x)
        return {"loss": token_mean(output, y), "output": output}


def tagger() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))


def token_step(ctx: Any, batch: Any) -> None:
    ctx.backward("net", batch.input, lambda output, piece: token_mean(output, piece.target))
    ctx.update("net")


EVEN = [
    6,
    3,
    5,
    4,
    3,
    6,
    4,
    5,
    *(1 + step * step % 6 for step in range(16)),
]  # both halves of the first eight: 18
LATER = [6] * 8 + EVEN[8:]
CLASSES = torch.tensor([0, 1] * 4 + [0, 0, 0, 1] * 4)
MASKED = [
    ({"input": row}, {"y": row[0] % 3, "mask": torch.tensor(float(number < 8 or number % 3 > 0))})
    for number, row in enumerate(TOKENS)
]
UNEQUAL: dict[str, dict[str, Any]] = {
    "as many tokens in both halves": {"model": tagger, "loss": token_mean, "data": tokens(EVEN)},
    "nothing ignored in the first batch": {
        "model": tagger,
        "loss": token_mean,
        "data": tokens(LATER),
    },
    "in bf16": {"model": tagger, "loss": token_mean, "data": tokens(LATER), "precision": "bf16"},
    "inside the model": {
        "model": OwnLoss,
        "loss": None,
        "data": [{"x": x, "y": y} for x, y in tokens(LATER)],
    },
    "class weights": {
        "model": lambda: nn.Linear(6, 2),
        "data": TensorDataset(TOKENS.float(), CLASSES),
        "loss": lambda output, target: F.cross_entropy(
            output, target, weight=torch.tensor([1.0, 3.0]).to(output)
        ),
    },
    "a mask in the batch": {
        "model": lambda: nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(18, 3)),
        "loss": masked_mean,
        "data": MASKED,
    },
    "a mean that collate takes": {
        "model": lambda: nn.Linear(6, 2),
        "loss": F.cross_entropy,
        "collate": centred,
        "data": TensorDataset(TOKENS[:4].repeat(6, 1).float(), CLASSES),
    },
    "the longest of the batch": {
        "model": Longest,
        "loss": F.cross_entropy,
        "collate": with_longest,
        "data": [(row, 0) for row in torch.cat([TOKENS[:4], TOKENS[:20]])],
    },
    "a step of one's own": {
        "model": None,
        "models": {"net": tagger},
        "training_step": token_step,
        "data": tokens(EVEN),
        "optimizer": None,
        "optimizers": {"net": lambda named: torch.optim.SGD(named, lr=0.1)},
    },
}


def in_order(case: dict[str, Any]) -> paceline.Job:
    fields: dict[str, Any] = {
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "precision": "float32",
        "batch": 8,
        "steps": 3,
        "sampler": torch.utils.data.SequentialSampler(case["data"]),
    }
    return paceline.Job(
        **{
            name: value
            for name, value in {**fields, **case}.items()
            if value is not None or name == "loss"
        }
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("case", UNEQUAL)
def test_a_first_batch_whose_halves_are_alike(case: str) -> None:
    """Other samples, cut unevenly, show that later updates under the plan are not one device's."""
    update = checked(in_order(UNEQUAL[case]), "data=2")

    assert update.verdict == "coupled"


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), (
        target != -100
    ).sum()


class Counting(nn.Module):
    """Goes on from a state that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tagger()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.layers(x) * (1 + self.forwards / 10)


def short_of_one(items: list[Any]) -> Any:
    """Pads to the longest; the loss leaves out what was added."""
    longest = max(int((y != -100).sum()) for _, y in items)
    return torch.stack([x[:longest] for x, _ in items]), torch.stack(
        [y[:longest] for _, y in items]
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "case",
    [
        {"model": tagger, "loss": summed, "data": tokens(LATER)},
        {"model": Counting, "loss": summed, "data": tokens(EVEN)},
        {
            "model": tagger,
            "loss": summed,
            "data": tokens(EVEN),
            "collate": short_of_one,
            "precision": "bf16",
        },
        {
            "model": tagger,
            "loss": lambda output, target: token_mean(output, target.clamp(min=0)),
            "data": tokens(EVEN),
        },
    ],
)
def test_jobs_that_are_exact_pass(case: dict[str, Any]) -> None:
    """Losses that are normalised once, padding that does not count, and state of a forward couple no samples."""
    assert checked(in_order(case), "data=2") == FirstUpdate("passed", seconds=ANY)
