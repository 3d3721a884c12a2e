"""What changes during a run: batches, lengths, frozen parameters and rates by plateau, under every plan and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import no_bug, verified
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline as pl
from paceline.base.errors import JobError
from paceline.checkpoint.read import open_checkpoint
from paceline.job.order import Order
from paceline.job.phases import patterns
from paceline.launch.process.failure import RankFailed
from paceline.proof.order import windows
from paceline.training.freezing import frozen_names

EXACT = {"rtol": 0, "atol": 1e-12}
PLANS = ("data=3", "shard=2", "tensor=2", "pipeline=2", "servers=2 workers=2")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = x + block(x)
        return self.head(x)


def make_job(**fields: Any) -> pl.Job:
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(23, 8, generator=draws)
    data = torch.utils.data.TensorDataset(x, x[:, :4].sin())
    return pl.Job(
        **{
            "model": Net,
            "data": data,
            "batch": 6,
            "steps": 9,
            "loss": nn.functional.mse_loss,
            "optimizer": lambda named: torch.optim.AdamW(named, lr=0.02, weight_decay=0.1),
            "precision": "float64",
            "clip": 0.05,
            **fields,
        }
    )


FREEZE = pl.by_step({0: "body.*", 2: ("body.0", "head.bias"), 5: (), 7: "head"})
BATCH = pl.by_step({0: 4, 2: 7, 6: 3})


def by_hand(
    job: pl.Job, *, frozen: Any = lambda step, epoch: (), sizes: Any = None
) -> Iterator[dict[str, Tensor]]:
    """The weights after each step of a loop without Paceline; the contract gives the samples of each step."""
    torch.manual_seed(0)
    from paceline.base.streams import seed_model

    seed_model(job.seed)
    model = Net().double()
    optimizer = job.optimizer(list(model.named_parameters()))
    plateau = job.lr_schedule(optimizer) if job.lr_schedule is not None else None
    steps = list(islice(windows(job), job.total_steps + 1))
    for step, (epoch, positions, indices) in enumerate(steps[:-1]):
        assert sizes is None or len(positions) == sizes[step]
        for name, p in model.named_parameters():
            p.requires_grad_(not any(name.startswith(prefix) for prefix in frozen(step, epoch)))
        optimizer.zero_grad()
        x, y = (tensor[indices].double() for tensor in job.data.tensors)
        job.loss(model(x), y).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], job.clip)
        optimizer.step()
        if plateau is not None and steps[step + 1][0] != epoch:
            with torch.no_grad():
                x, y = (tensor.double() for tensor in job.validation.tensors)
                plateau.step(job.loss(model(x), y))
        yield {name: p.detach().clone() for name, p in model.named_parameters()}


def train(job: pl.Job, plan: str, run: Path, **options: Any) -> dict[str, Tensor]:
    pl.train(job, plan, run=run, **options)
    return load_file(run / "model.safetensors")


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **EXACT)


def frozen_at(step: int, epoch: int) -> tuple[str, ...]:
    """What FREEZE says, by hand."""
    return (
        ("body.",),
        ("body.",),
        ("body.0.", "head.bias"),
        ("body.0.", "head.bias"),
        ("body.0.", "head.bias"),
        (),
        (),
        ("head.",),
        ("head.",),
    )[step]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", ["single", *PLANS, "data=2 microbatches=2", "shard=2 zero=1", "data=2 local=1"]
)
def test_frozen_parameters_and_batches_change_as_on_one_device(plan: str, tmp_path: Path) -> None:
    """Two schedules at once, over the ends of epochs, clipped: weights are those of a loop by hand under every plan."""
    job = make_job(freeze=FREEZE, batch=BATCH)
    *_, expected = by_hand(job, frozen=frozen_at, sizes=[4, 4, 7, 7, 1, 7, 3, 3, 3])
    assert_equal(train(job, plan, tmp_path / "run"), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "legs",
    [
        [("shard=2", 1), ("data=2", 6), ("single", 9)],
        pytest.param(
            [("shard=2", 1), ("single", 4), ("pipeline=2", 6), ("data=3", 8), ("tensor=2", 9)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_phases_go_on_under_other_plans(legs: list[tuple[str, int]], tmp_path: Path) -> None:
    """A run is stopped in the middle of phases and epochs, and goes on under another plan each time."""
    job, run = make_job(freeze=FREEZE, batch=BATCH), tmp_path / "run"
    *_, expected = by_hand(job, frozen=frozen_at)
    for number, (plan, steps) in enumerate(legs):
        weights = train(job, plan, run, steps=steps, resume=number > 0)
    assert_equal(weights, expected)
    with pytest.raises(
        (RankFailed, pl.PacelineError), match=r"its batch was by_step\(\{0: 4, 2: 7, 6: 3\}\)"
    ):
        train(make_job(freeze=FREEZE, batch=7), "single", run, steps=10, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["shard=2", pytest.param("single", marks=pytest.mark.slow)])
def test_a_frozen_parameter_has_no_optimizer_state(plan: str, tmp_path: Path) -> None:
    """Nothing is kept of it before it is trained, and what is kept then stays while it is frozen again."""
    job = make_job(freeze=pl.by_step({0: "body", 3: "head"}))
    train(job, plan, tmp_path / "run", steps=3, save_every=3)
    train(job, plan, tmp_path / "run", steps=5, resume=True)
    folder = tmp_path / "run" / "checkpoints"
    names = [
        {
            name.split("/")[1]
            for name in open_checkpoint(folder / f"step-{step}").tensors
            if name.startswith("optimizer/")
        }
        for step in (3, 5)
    ]
    assert names[0] == {"head.weight", "head.bias"}
    assert len(names[1]) == len(list(Net().parameters()))
    assert float(open_checkpoint(folder / "step-5").read("optimizer/head.bias/step")) == 3.0


def test_what_is_frozen_throughout_needs_no_gradient(tmp_path: Path) -> None:
    """Ranks make no gradient for it at all, and it stays."""
    from paceline.training.prepare import build_model

    job = make_job(freeze=["body.*.weight", "head.bias"])
    model = build_model(job, torch.device("cpu"))
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "body.0.0.bias",
        "body.0.2.bias",
        "body.1.0.bias",
        "body.1.2.bias",
        "head.weight",
    }
    frozen = lambda step, epoch: tuple(  # noqa: E731
        name for name, p in model.named_parameters() if not p.requires_grad
    )
    *_, expected = by_hand(job, frozen=frozen)
    assert_equal(train(job, "shard=2", tmp_path / "run"), expected)


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ("heads", "matches no parameter"),
        ("*", "leaves no parameter to train from step 0"),
        (pl.by_epoch({0: "head", 2: ["head", "body"]}), "from epoch 2 on"),
    ],
)
def test_patterns_that_can_not_be_meant(freeze: Any, message: str) -> None:
    """A pattern must stand for something, and something must be left to train."""
    with pytest.raises(JobError, match=message):
        frozen_names(make_job(freeze=freeze), Net())


def test_a_tied_weight_is_frozen_by_any_of_its_names() -> None:
    """It is one parameter, whatever it is called."""
    net = Net()
    net.head.weight = nn.Parameter(torch.ones(4, 8))
    net.other = nn.Linear(8, 4)
    net.other.weight = net.head.weight
    assert frozen_names(make_job(freeze="other"), net).values == (
        frozenset({"head.weight", "other.bias"}),
    )


@pytest.mark.slow
def test_verify_covers_phases() -> None:
    """A certificate passes, and a parameter that is trained though it is frozen fails it."""

    def trains_all(patch: pytest.MonkeyPatch) -> None:
        patch.setattr("paceline.training.freezing.Freezing.let_go", lambda *arguments: None)

    job = make_job(freeze=pl.by_step({0: "body.1", 2: ()}), batch=pl.by_epoch({0: 6, 1: 9}))
    certificates = verified(job, [("data=2", no_bug), ("data=2", trains_all)], steps=3)
    assert [certificate.passed for certificate in certificates] == [True, False]


@settings(max_examples=25)
@given(st.data())
def test_windows_of_changing_batches_are_those_of_the_contract(data: st.DataObject) -> None:
    """Every position once an epoch, in windows of the step's size; the last one of an epoch may be short."""
    starts = [0, *data.draw(st.lists(st.integers(1, 30), max_size=3))]
    values = {start: data.draw(st.integers(1, 12)) for start in starts}
    schedule = data.draw(st.sampled_from([pl.by_step, pl.by_epoch]))(values)
    drop_last, size, few = data.draw(st.booleans()), data.draw(st.integers(1, 20)), 40
    try:
        job = make_job(data=range(size), batch=schedule, steps=None, epochs=3, drop_last=drop_last)
    except JobError as error:
        assert drop_last and "leaves nothing" in str(error)
        return
    order, expected = Order.of(job), list(islice(windows(job), few))
    counts = [len(positions) for _, positions, _ in expected]
    for step, (epoch, positions, indices) in enumerate(expected):
        window = order.window(step)
        assert (window.epoch, list(window.positions)) == (epoch, positions)
        assert order.indices(epoch, window.positions) == indices
        assert order.fewest(step + 1) <= min(counts[: step + 1])
    for step in range(1, few):
        assert order.ends_epoch(step) == (expected[step][0] != expected[step - 1][0])
    assert job.total_steps == next(
        (step for step, (epoch, *_) in enumerate(expected) if epoch == 3), job.total_steps
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch", lambda: pl.by_step({0: 0}), "at least 1 in every phase"),
        ("batch", lambda: pl.by_step({5: 4}), "no value for step 0"),
        ("batch", lambda: pl.by_epoch({-1: 4}), "takes a mapping"),
        (
            "clip",
            lambda: pl.by_step({0: 1.0}),
            "clip can't have phases; batch, collate and freeze can",
        ),
        ("freeze", lambda: 3, "freeze must be patterns"),
    ],
)
def test_phases_that_make_no_sense(field: str, value: Any, message: str) -> None:
    """An error says which field, and what it takes."""
    with pytest.raises(JobError, match=message):
        make_job(**{field: value()})


def cropped(length: int) -> Any:
    def collate(samples: list[Any]) -> Any:
        tokens = torch.stack([sample[: length + 1] for sample in samples])
        return tokens[:, :-1], tokens[:, 1:]

    return collate


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + x.cumsum(1) / 8
        for block in self.blocks:
            x = x + block(x)
        return self.out(x) * 2.0


@pytest.mark.slow
def test_sequences_grow_during_a_run(tmp_path: Path) -> None:
    """collate in phases crops them; a plan computes what one device computes and goes on where another stopped."""
    tokens = torch.randint(11, (23, 13), generator=torch.Generator().manual_seed(2))
    job = make_job(
        model=Reader,
        data=list(tokens),
        clip=None,
        collate=pl.by_step({0: cropped(4), 3: cropped(12)}),
        loss=lambda output, target: nn.functional.cross_entropy(output.transpose(1, 2), target),
    )
    expected = train(job, "single", tmp_path / "single")
    for plan in ("data=2", "shard=2", "tensor=2", "pipeline=2"):
        assert_equal(train(job, plan, tmp_path / plan), expected)
    train(job, "shard=2", tmp_path / "run", steps=2)
    assert_equal(train(job, "data=3", tmp_path / "run", resume=True), expected)
    short = train(
        make_job(model=Reader, data=list(tokens), clip=None, collate=cropped(4), loss=job.loss),
        "single",
        tmp_path / "short",
    )
    assert not torch.equal(short["out.weight"], expected["out.weight"])


def rates(run: Path) -> list[float]:
    """The learning rate of each step of a run."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["lr"] for line in lines if "lr" in line]


def plateau_job(**fields: Any) -> pl.Job:
    x = torch.randn(10, 8, generator=torch.Generator().manual_seed(9))
    return make_job(
        **{
            "steps": None,
            "epochs": 5,
            "validation": torch.utils.data.TensorDataset(x, x[:, :4]),
            "clip": 1.0,
            "lr_schedule": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=0.24
            ),
            **fields,
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*reversed(PLANS[:4]), "servers=2 workers=2", "single"])
def test_the_rate_falls_by_plateau_alike_everywhere(plan: str, tmp_path: Path) -> None:
    """All ranks decide from one evaluated number."""
    job = plateau_job()
    *_, expected = by_hand(job)
    assert_equal(train(job, plan, tmp_path / "run"), expected)
    assert len(set(rates(tmp_path / "run"))) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "legs",
    [
        [("shard=2", 4), ("servers=1 workers=2", 10), ("single", 20)],
        pytest.param(
            [
                ("shard=2", 4),
                ("servers=1 workers=2", 8),
                ("data=2", 10),
                ("single", 12),
                ("pipeline=2", 20),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plateau_decides_as_before_in_a_run_that_goes_on(
    legs: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Whether it was stopped at the end of an epoch or in it, under another plan each time."""
    job = plateau_job()
    *_, expected = by_hand(job)
    for number, (plan, steps) in enumerate(legs):
        weights = train(job, plan, tmp_path / "run", steps=steps, resume=number > 0)
    assert_equal(weights, expected)


def test_a_plateau_needs_something_to_watch(tmp_path: Path) -> None:
    """It is refused before the first step if no evaluation gives its metric."""
    plateau = lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # noqa: E731
    for fields, message in (
        ({"validation": None}, "there is no validation data"),
        ({"lr_schedule": pl.monitored("accuracy", plateau)}, "monitors 'accuracy'"),
        (
            {
                "lr_schedule": pl.monitored(
                    "validation_loss",
                    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
                )
            },
            "takes no metric",
        ),
    ):
        with pytest.raises((JobError, RankFailed), match=message):
            train(plateau_job(**fields), "single", tmp_path / message[:8])


def test_a_plateau_follows_another_metric(tmp_path: Path) -> None:
    """pl.monitored names it; here one that only falls, though the schedule waits for it to rise."""
    job = plateau_job(
        metrics={"negative": lambda output, target: -(output - target).abs().mean().detach() - 1.0},
        lr_schedule=pl.monitored(
            "negative",
            lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, mode="max", patience=0, factor=0.1, threshold=1e9, threshold_mode="abs"
            ),
        ),
    )
    train(job, "single", tmp_path / "run")
    assert rates(tmp_path / "run")[-1] == pytest.approx(0.02 * 0.1**3)


@pytest.mark.slow
def test_what_was_left_out_of_a_gradient_can_not_come_back_frozen(tmp_path: Path) -> None:
    """A plan that keeps a part of a gradient for later is refused; one that rounds messages alone is not."""
    job = make_job(freeze=pl.by_step({0: "head", 2: ()}), steps=3)
    with pytest.raises((pl.PacelineError, RankFailed), match="leave out compress"):
        train(job, "data=2 compress=topk", tmp_path / "topk")
    train(job, "data=2 compress=bf16", tmp_path / "bf16")


def test_phases_in_half_precision(tmp_path: Path) -> None:
    """fp16 with loss scaling: a frozen parameter stays bit by bit, and ranks end near one device."""
    job = make_job(
        precision="fp16",
        optimizer=lambda named: torch.optim.SGD(named, lr=0.2),
        batch=BATCH,
        steps=6,
        freeze=pl.by_step({0: "body", 6: ()}),
    )
    single, data_parallel = (train(job, plan, tmp_path / plan) for plan in ("single", "data=2"))
    still = lambda named: torch.optim.SGD(named, lr=0.0)  # noqa: E731
    start = train(
        make_job(steps=1, optimizer=still, precision="float32"), "single", tmp_path / "start"
    )
    for name in single:
        assert torch.equal(single[name], start[name]) == name.startswith("body")
        torch.testing.assert_close(single[name], data_parallel[name], rtol=0, atol=2e-3)


def test_patterns_are_read_in_every_form() -> None:
    """A string, several, and phases of both."""
    assert patterns("a").values == (("a",),)
    assert patterns(("a", "b")).values == (("a", "b"),)
    assert patterns(pl.by_epoch({0: "a", 2: ["b"]})).values == (("a",), ("b",))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "data=2", "pipeline=2"])
def test_a_parameter_that_thaws_without_freeze_is_named(plan: str, tmp_path: Path):
    """The optimizer does not have it, so it would stay as it is, silently. What the job freezes may need gradients."""
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built[:] = [nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))]
        built[0][0].requires_grad_(False)
        return built[0]

    def thaw(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        layer = built[0][0]
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: float(bool(layer.requires_grad_(step == 2)))
        )

    job = pl.Job(
        model=build,
        data=(torch.ones(8, 2), torch.ones(8, 1)),
        loss=nn.functional.mse_loss,
        batch=4,
        steps=4,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        lr_schedule=thaw,
    )
    seen = r"requires_grad_\(True\) of '0\.weight' and others after .* seen in step 3: "
    with pytest.raises(RankFailed, match=seen) as by:
        pl.train(job, plan, run=tmp_path / "run")
    assert "Job(freeze=pl.by_step({0: '0.weight', 2: ()}))" in str(by.value)
    if plan == "single":
        pl.train(replace(job, freeze="0"), plan, run=tmp_path / "frozen")
