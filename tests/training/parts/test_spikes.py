"""Steps whose loss is far above those before: recognised, left out, and alike on all ranks."""

import errno
import json
import math
import os
import random
import signal
import statistics
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paceline as pl
from paceline.api.audit import audit
from paceline.base.errors import JobError, PlanRefused, UsageError
from paceline.checkpoint.dtypes import load_tensors
from paceline.job.order import Order
from paceline.launch.process.failure import RankFailed
from paceline.training.parts import spike_steps
from paceline.training.parts.spikes import LATEST_STEPS, MOST_IN_A_ROW, SIGMAS, Spike, Spikes

BATCH, STEPS, BAD_STEP, EVERY = (
    6,
    18,
    14,
    5,
)  # BAD_STEP counts from 1, and is behind half of FEW_STEPS
FEW_STEPS = 16  # that runs are judged by, in the place of LATEST_STEPS
SIZE = BATCH * 20


# --- The rule ----------------------------------------------------------------------------------------------------


def filled(action="skip", num=LATEST_STEPS, mean=2.0, spread=0.1):
    spikes, draws = Spikes(action), random.Random(0)
    for _ in range(num):
        assert not spikes.judge(draws.gauss(mean, spread), None)
    return spikes


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_spike_from_the_first_step(value):
    """It needs no steps before it, be it the loss or the norm."""
    assert "loss" in Spikes("skip").judge(value, None)
    assert "norm" in Spikes("skip").judge(1.0, value)


def test_a_spike_is_far_above_the_latest_steps():
    """At SIGMAS standard deviations, above and not below, of the loss and of the norm."""
    spikes = filled()
    mean, spread = statistics.fmean(spikes.losses), statistics.stdev(spikes.losses)

    assert not filled().judge(mean + 0.99 * SIGMAS * spread, None)
    assert not filled().judge(mean - 100 * spread, None)
    assert "2.6" in spikes.judge(mean + 1.01 * SIGMAS * spread, None)
    assert spikes.num_spikes == spikes.in_a_row == 1


def test_few_steps_say_nothing():
    """The first half of the latest steps is only looked at; a loss often falls fast there."""
    assert not filled(num=LATEST_STEPS // 2 - 1).judge(1e9, None)
    assert filled(num=LATEST_STEPS // 2).judge(1e9, None)


def test_spikes_do_not_count_among_the_steps_before():
    """Else the second of two would be none."""
    spikes = filled()
    assert spikes.judge(50.0, None)
    assert spikes.judge(50.0, None)
    assert 50.0 not in spikes.losses


def test_a_run_at_rest_is_not_disturbed():
    """Losses that hardly differ: a small change is no spike."""
    spikes = filled(spread=0.0)
    assert not spikes.judge(2.05, None)
    assert spikes.judge(2.5, None)


def test_many_in_a_row_end_the_run():
    """A run that only skips does not train."""
    spikes = filled()
    for number in range(MOST_IN_A_ROW - 1):
        spikes.refuse_more(spikes.judge(50.0, None), number + 1)
    with pytest.raises(Spike, match="steps 1 to 10 are spikes, all in a row"):
        spikes.refuse_more(spikes.judge(50.0, None), MOST_IN_A_ROW)


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=300), st.integers(0, 300))
def test_a_restored_watch_judges_alike(losses, cut):
    """Its state goes through JSON in a checkpoint."""
    whole, first = Spikes("skip"), Spikes("skip")
    verdicts = [whole.judge(loss, loss) for loss in losses]
    before = [first.judge(loss, loss) for loss in losses[:cut]]
    then = Spikes("skip")
    then.restore(json.loads(json.dumps(first.to_dict())))

    assert before + [then.judge(loss, loss) for loss in losses[cut:]] == verdicts


# --- Runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def judged_by_few(monkeypatch):
    """Ranks are forks, so that they too wait for fewer steps before the first spike."""
    monkeypatch.setattr("paceline.training.parts.spikes.LATEST_STEPS", FEW_STEPS)


def make(*, value=1e4, **fields):
    """A job, and which of its samples is far off: one of the step BAD_STEP."""
    draws = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(SIZE, size, dtype=torch.float64, generator=draws) for size in (8, 1))
    y = x.sum(1, keepdim=True) / 8 + noise
    options = {
        "model": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
        "loss": nn.functional.mse_loss,
        "precision": "float64",
        "batch": BATCH,
        "steps": STEPS,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
        "lr_schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9),
    }
    job = pl.Job(data=torch.utils.data.TensorDataset(x, y), **options | fields)
    order = Order.of(job)
    window = order.window(BAD_STEP - 1)
    (bad,) = order.indices(window.epoch, window.positions[3:4])
    y[bad] = value
    weights = {name: tensor.clone() for name, tensor in job.model().state_dict().items()}
    return replace(job, init=weights), bad


class Lethal(torch.utils.data.Dataset):
    """The first rank that fetches a certain sample is killed, once a checkpoint is there."""

    def __init__(self, data, index, mark, checkpoint):
        self.data, self.index, self.mark, self.checkpoint = data, index, mark, checkpoint

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if index == self.index and not self.mark.exists():
            while not self.checkpoint.exists():
                time.sleep(0.01)
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.data[index]


class Pairs(torch.utils.data.Dataset):
    """Samples as mappings, without a target of their own."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return dict(zip("xy", self.data[index], strict=True))


class Scored(nn.Module):
    """A model with a loss of its own, one of whose modules returns what is not a number."""

    def __init__(self):
        super().__init__()
        self.body, self.score = nn.Linear(8, 1).double(), nn.MSELoss()

    def forward(self, x, y):
        return {"loss": self.score(self.body(x), y)}


def by_hand(job, *, bad_step):
    """The weights of a plain loop that makes no update in one step.

    And under other names their average, which each update moves.
    """
    model, average = job.model(), job.model()
    for each in (model, average):
        each.load_state_dict(job.init)
    optimizer = job.optimizer(model.named_parameters())
    schedule = job.lr_schedule(optimizer)
    order = Order.of(job)
    for step in range(STEPS):
        if step + 1 == bad_step:
            continue
        window = order.window(step)
        indices = order.indices(window.epoch, range(window.start, window.start + window.count))
        x, y = (
            torch.stack(column)
            for column in zip(*(job.data[index] for index in indices), strict=True)
        )
        optimizer.zero_grad()
        job.loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.mul_(0.9).add_(p, alpha=0.1)
    return model.state_dict() | {
        f"average.{name}": tensor for name, tensor in average.state_dict().items()
    }


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_weights(run, expected):
    trained = {
        name.removeprefix("net."): tensor
        for name, tensor in load_tensors(run / "model.safetensors").items()
    }
    assert {name for name in expected if not name.startswith("average.")} <= trained.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)


def kept_of(run, step=BAD_STEP):
    return [
        json.loads(path.read_text())
        for path in sorted((run / "spikes" / f"step-{step}").glob("*.json"))
    ]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        "data=2",
        "shard=2",
        "pipeline=2 microbatches=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in ("single", "single microbatches=3")
        ),
    ],
)
def test_a_spike_is_skipped_under_every_plan(tmp_path, plan, judged_by_few):
    """The weights are those of a plain loop that leaves the step out. The run folder says which samples it had."""
    job, bad = make()
    result = pl.train(job, plan, run=tmp_path, on_spike="skip", check=False, table=False)

    assert_weights(tmp_path, by_hand(job, bad_step=BAD_STEP))
    assert result.figures["spikes"] == 1
    (row,) = [row for row in rows_of(tmp_path) if row["step"] == BAD_STEP and "step_s" in row]
    assert row["skipped"] and row["spike"].startswith("the loss is")
    report = audit(tmp_path)
    assert report.passed and report.skipped_updates == 1
    assert any(bad in samples for document in kept_of(tmp_path) for samples in document["samples"])
    tensors = [
        load_tensors(path)
        for path in (tmp_path / "spikes" / f"step-{BAD_STEP}").glob("*.safetensors")
    ]
    assert (
        sum(len(tensor) for file in tensors for name, tensor in file.items() if "target" in name)
        == BATCH
    )
    assert max(float(tensor.max()) for file in tensors for tensor in file.values()) == 1e4


@pytest.mark.slow
@pytest.mark.usefixtures("judged_by_few")
def test_a_rank_that_is_lost_changes_no_decision(tmp_path):
    """The ranks that replace it go on from a copy or a checkpoint, and judge the next steps alike."""
    job, _ = make()
    order = Order.of(job)
    window = order.window(BAD_STEP - 3)
    lethal = Lethal(
        job.data,
        order.indices(window.epoch, window.positions[:1])[0],
        tmp_path / "killed",
        tmp_path / "checkpoints" / f"step-{BAD_STEP // EVERY * EVERY}",
    )
    pl.train(
        replace(job, data=lethal),
        "data=2",
        run=tmp_path,
        on_spike="skip",
        save_every=EVERY,
        check=False,
        table=False,
    )

    assert (tmp_path / "killed").exists() and audit(tmp_path).launches >= 2
    assert_weights(tmp_path, by_hand(job, bad_step=BAD_STEP))
    assert audit(tmp_path).passed


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["shard=2", "single"])
def test_a_stopped_run_names_the_module_and_keeps_the_samples(tmp_path, plan):
    """Also without --on-spike, where the loss is not finite."""
    job, bad = make(value=math.nan)
    with pytest.raises(RankFailed) as caught:
        pl.train(
            replace(job, data=Pairs(job.data), loss=None, model=Scored, init=None),
            plan,
            run=tmp_path,
            check=False,
            table=False,
        )

    assert f"not a number (NaN) in step {BAD_STEP}" in str(caught.value)
    assert "the first module that returns such numbers is 'score'" in str(caught.value)
    assert any(bad in samples for document in kept_of(tmp_path) for samples in document["samples"])


def test_a_full_disk_hides_no_spike(tmp_path, monkeypatch):
    """The samples can't be kept then, and the message still says what ended the run."""

    def refuse(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spike_steps, "keep", refuse)
    job, _ = make(value=math.nan)
    with pytest.raises(RankFailed, match=rf"not a number \(NaN\) in step {BAD_STEP}"):
        pl.train(job, "single", run=tmp_path, check=False, table=False)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"plan": "data=2 local=4"}, PlanRefused, "local=H"),
        ({"plan": "servers=1 workers=2"}, PlanRefused, "server"),
        (
            {"on_spike": "rewind"},
            UsageError,
            "on_spike='rewind': unknown\n\nhint: on_spike is stop",
        ),
    ],
)
def test_what_cannot_be_watched_is_refused(tmp_path, options, error, says):
    """Before anything is written."""
    job, _ = make()
    with pytest.raises(error, match=says):
        pl.train(
            job,
            **{"plan": "single", "on_spike": "skip", "run": tmp_path / "run", "table": False}
            | options,
        )
    assert not (tmp_path / "run").exists()


def test_an_optimizer_with_a_closure_is_refused(tmp_path):
    """It makes its update while it evaluates the loss."""
    job, _ = make(
        optimizer=lambda named: torch.optim.LBFGS([p for _, p in named]), lr_schedule=None
    )
    with pytest.raises(RankFailed, match="LBFGS evaluates the loss itself"):
        pl.train(job, "single", run=tmp_path, on_spike="skip", check=False, table=False)


def own_step(ctx, batch):
    ctx.backward("net", batch, lambda output, batch: nn.functional.mse_loss(output, batch.target))
    ctx.update("net")


def of_its_own(job, step=own_step, clip=None):
    """The job with a step of its own, and an average of its weights."""
    optimizer = pl.Optimizer(job.optimizer, lr_schedule=job.lr_schedule, clip=clip)
    fields = {name: getattr(job, name) for name in ("data", "batch", "steps", "precision")}
    return pl.Job(
        models={"net": job.model},
        optimizers={"net": optimizer},
        followers={"average": pl.ema("net", 0.9)},
        init={"net": job.init},
        training_step=step,
        **fields,
    )


def looks_around(ctx, batch):
    """Ranks decide about the update before it, whatever the step does meanwhile."""
    out = ctx.backward(
        "net", batch, lambda output, batch: nn.functional.mse_loss(output, batch.target)
    )
    if ctx.step % 2:
        assert out.loss.numel() == 1
    else:
        ctx.run("average", batch)
    ctx.update("net")
    ctx.run("net", batch)


@pytest.mark.usefixtures("judged_by_few")
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "step"),
    [
        ("data=2", own_step),
        ("shard=2", looks_around),
        ("single microbatches=3", looks_around),
        ("data=3", looks_around),
        ("pipeline=2", own_step),
    ],
)
def test_a_spike_of_a_step_of_ones_own_changes_nothing(tmp_path, plan, step):
    """No weight and no follower moves."""
    job, bad = make()
    result = pl.train(
        of_its_own(job, step), plan, run=tmp_path, on_spike="skip", check=False, table=False
    )

    assert_weights(tmp_path, by_hand(job, bad_step=BAD_STEP))
    assert result.figures["spikes"] == 1
    assert any(bad in samples for document in kept_of(tmp_path) for samples in document["samples"])
    assert audit(tmp_path).passed


@pytest.mark.parametrize("turn", [0, 11])
def test_a_step_with_several_backwards_is_not_watched(tmp_path, turn):
    """Before the run, or before the first step that has several."""

    def step(ctx, batch):
        own_step(ctx, batch)
        if ctx.step >= turn and ctx.step != STEPS - 1:
            own_step(ctx, batch)

    job, _ = make()
    with pytest.raises((JobError, RankFailed), match=r"ctx\.backward 2 times"):
        pl.train(
            of_its_own(job, step), "data=2", run=tmp_path / "run", on_spike="skip", table=False
        )
    assert (tmp_path / "run").exists() == bool(turn)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "pipeline=2"])
def test_a_step_of_ones_own_ends_with_its_samples(tmp_path, plan):
    """A loss of it that is not finite ends all ranks at once, and leaves the samples."""
    job, bad = make(value=math.nan)
    own_step_job = pl.Job(
        models={"net": job.model},
        training_step=own_step,
        data=job.data,
        batch=BATCH,
        steps=STEPS,
        precision="float64",
        optimizers={"net": lambda named: torch.optim.SGD(named, lr=1e-2)},
    )
    with pytest.raises(RankFailed, match="not a number") as caught:
        pl.train(own_step_job, plan, run=tmp_path, check=False, table=False, timeout_s=60)

    assert "no sign of life" not in str(caught.value) and "first module" not in str(caught.value)
    assert any(bad in samples for document in kept_of(tmp_path) for samples in document["samples"])
