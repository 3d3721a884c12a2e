"""Replicas that take steps of their own come out as a loop written by hand says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from jobs.classification import classification_job
from jobs.perceptrons import Perceptron
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.base.streams import seed_streams
from paceline.job.order import split
from paceline.proof.order import whole_batches
from paceline.proof.reference_loop import PlainRun
from paceline.strategies.compress.size import all_reduce_bytes, sent_bytes
from paceline.strategies.local.schedule import assign, delay_steps, fragment_after

SAMPLES, BATCH = 25, 10  # the third step of an epoch has 5 samples: replicas count unlike numbers


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def make_job(model: Any = Perceptron, **changes: Any) -> paceline.Job:
    fields = {"optimizer": sgd, "batch": BATCH, "steps": 12, "precision": "float64", **changes}
    return classification_job(model, **fields)


def train(
    run: Path, plan: str, *, save_every: int | None = None, resume: bool = False, **changes: Any
) -> dict[str, Any]:
    devices = f"cpu:0-{paceline.Plan.parse(plan).world_size - 1}"
    return paceline.train(
        make_job(**changes), plan, devices=devices, run=run, save_every=save_every, resume=resume
    ).to_dict()


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def recorded(run: Path, figure: str = "loss") -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[figure] for line in lines if figure in line]


def same(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], off: float = 1e-12
) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name],
            tensor,
            rtol=0,
            atol=off,
            msg=lambda message, name=name: f"{name}: {message}",
        )


class ByHand:
    """DiLoCo and local SGD as in the papers, whole models on one device: `replicas` of them, one after the other."""

    def __init__(
        self, job: paceline.Job, *, replicas: int, local: int, outer: str, fragments: int = 1
    ) -> None:
        self.job, self.local, self.outer = job, local, outer
        seed_streams(job.seed, "model")
        first = job.model().double()
        self.shared = {name: p.detach().clone() for name, p in first.named_parameters()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.shared.items()}
        self.models, self.optimizers = [], []
        for _ in range(replicas):
            model = job.model().double()
            model.load_state_dict(first.state_dict())
            self.models.append(model)
            self.optimizers.append(job.optimizer(list(model.named_parameters())))
        self.losses: list[float] = []
        names = list(self.shared)
        self.fragments = [
            [names[i] for i in part]
            for part in assign([p.nbytes for p in self.shared.values()], fragments)
        ]
        self.delay = delay_steps(local=local, fragments=fragments)
        self.ways: dict[str, torch.Tensor] = {}
        self.arrives = 0

    def run(self, steps: int) -> dict[str, torch.Tensor]:
        counted = [[0] * len(self.models) for _ in self.fragments]
        for step, batch in enumerate(whole_batches(self.job, steps), 1):
            total = 0.0
            for number, share in enumerate(split(batch.samples, [1] * len(self.models))):
                if not len(share):
                    continue
                model, optimizer = self.models[number], self.optimizers[number]
                optimizer.zero_grad()
                loss = self.job.loss(
                    model(batch.input[share.start : share.stop]),
                    batch.target[share.start : share.stop],
                )
                loss.backward()
                if self.job.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), self.job.clip)
                optimizer.step()
                for counts in counted:
                    counts[number] += len(share)
                total += loss.item() * len(share)
            self.losses.append(total / batch.samples)
            if self.ways and self.arrives <= step:
                self.arrive(own_part=0.5)
            leaving = fragment_after(step, local=self.local, fragments=len(self.fragments))
            if leaving is not None:
                self.leave(leaving, counted[leaving], step + self.delay)
                if not self.delay:
                    self.arrive(own_part=0.0)
        if self.ways:
            self.arrive(own_part=0.5)
        for number, counts in enumerate(counted):
            if sum(counts):
                self.leave(number, counts, steps)
                self.arrive(own_part=0.0)
        return self.shared

    @torch.no_grad()
    def leave(self, fragment: int, counts: list[int], arrives: int) -> None:
        every, self.arrives = sum(counts), arrives
        for name in self.fragments[fragment]:
            self.ways[name] = sum(
                count / every * (self.shared[name] - dict(model.named_parameters())[name])
                for count, model in zip(counts, self.models, strict=True)
            )
        counts[:] = [0] * len(counts)

    @torch.no_grad()
    def arrive(self, *, own_part: float) -> None:
        for name, way in self.ways.items():
            shared = self.shared[name]
            if self.outer == "average":
                shared -= way
            else:
                self.momentum[name] = 0.9 * self.momentum[name] + way
                shared -= 0.7 * (way + 0.9 * self.momentum[name])
            for model in self.models:
                p = dict(model.named_parameters())[name]
                p.copy_(own_part * p + (1 - own_part) * shared)
        self.ways = {}


@pytest.mark.slow
@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 20))
def test_fragments_hold_every_parameter_once(sizes: list[int], fragments: int) -> None:
    """In the model's order, none empty, none above its fair part by more than one parameter."""
    fragments = min(fragments, len(sizes))
    groups = assign(sizes, fragments)

    assert len(groups) == fragments and all(groups)
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    assert all(
        sum(sizes[i] for i in group) <= sum(sizes) / fragments + 2 * max(sizes) for group in groups
    )


@given(st.integers(1, 60), st.data())
def test_every_fragment_leaves_once_a_round(local: int, data: st.DataObject) -> None:
    """The last one as the round ends; each has arrived before the next leaves."""
    fragments = data.draw(st.integers(1, local))
    leaving = [
        fragment_after(step, local=local, fragments=fragments) for step in range(1, local + 1)
    ]
    places = [place for place, number in enumerate(leaving, 1) if number is not None]
    delay = delay_steps(local=local, fragments=fragments)

    assert [number for number in leaving if number is not None] == list(
        range(fragments)
    ) and places[-1] == local
    assert all(
        later - earlier >= delay
        for earlier, later in zip(places, [*places[1:], places[0] + local], strict=True)
    )
    assert delay >= (fragments > 1)


def test_bytes_of_diloco_by_hand() -> None:
    """100 local steps and int8 send at least 380 times fewer bytes than data=N in float32, scales and figures counted:
    a byte GPT of 3.2 million parameters in 53 tensors on 8 replicas."""
    shapes, ranks, steps = [(3_200_000,)], 8, 100
    every_step = all_reduce_bytes(8 * (4 + 53), ranks) + sent_bytes("none", shapes, 4, ranks)
    outer_step = all_reduce_bytes(8 * (2 * steps + 2 + 53 + 1), ranks) + sent_bytes(
        "int8", shapes, 4, ranks
    )

    assert steps * every_step / outer_step >= 380


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.slow), "float64"])
def test_one_local_step_is_data_parallel(precision: str) -> None:
    """`local=1` with a plain outer step equals one device, with AdamW and clipping."""
    (certificate,) = paceline.verify(
        make_job(optimizer=adamw, clip=0.5, precision=precision), ["data=2 local=1"], steps=3
    )

    assert certificate.passed, certificate.describe()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "optimizer", "clip"),
    [
        ("data=2 local=4", sgd, None),
        ("data=2 local=4 outer=diloco", adamw, 0.1),
        ("data=3 local=4 fragments=4", sgd, None),
        *(
            pytest.param(plan, optimizer, None, marks=pytest.mark.slow)
            for plan, optimizer in (
                ("data=3 local=5 outer=diloco", sgd),
                ("data=2 local=5 outer=diloco fragments=2", adamw),
                ("data=2 local=1 outer=diloco", sgd),
            )
        ),
    ],
)
def test_a_loop_by_hand(tmp_path: Path, plan: str, optimizer: Any, clip: float | None) -> None:
    """Twelve steps over uneven batches, the last round cut short: losses and weights in float64."""
    parsed = paceline.Plan.parse(plan)
    assert parsed.outer_steps is not None
    hand = ByHand(
        make_job(optimizer=optimizer, clip=clip),
        replicas=parsed.axes.data,
        local=parsed.outer_steps.local,
        outer=parsed.outer_steps.outer,
        fragments=parsed.outer_steps.fragments,
    )
    expected = hand.run(12)

    figures = train(tmp_path / "run", plan, optimizer=optimizer, clip=clip)

    same(weights(tmp_path / "run"), expected)
    assert recorded(tmp_path / "run") == pytest.approx(hand.losses, abs=1e-12)
    assert recorded(tmp_path / "run", "step")[:12] == list(range(1, 13))
    assert figures["final_loss"] == pytest.approx(hand.losses[-1])


def token_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(output, target, ignore_index=2, reduction="sum"), (target != 2).sum()


def test_replicas_weigh_by_what_they_counted(tmp_path: Path) -> None:
    """A round of one step of plain SGD is one device's, though targets are ignored unevenly."""
    train(tmp_path, "data=2 local=2", loss=token_loss, batch=9, steps=1)

    (plain,) = PlainRun(make_job(loss=token_loss, batch=9, steps=1)).steps(1)
    same(weights(tmp_path), plain.weights)


@pytest.mark.parametrize(
    ("plan", "save_every"),
    [
        ("data=2 local=4 outer=diloco fragments=2 compress=bf16", 2),
        *(
            pytest.param(plan, save_every, marks=pytest.mark.slow)
            for plan, save_every in (
                ("data=2 local=4 outer=diloco", 3),
                ("data=3 local=4 compress=int8", 4),
                ("data=2 local=6 outer=diloco fragments=3", 4),
            )
        ),
    ],
)
def test_a_resumed_run_is_the_whole_one_bit_by_bit(
    tmp_path: Path, plan: str, save_every: int
) -> None:
    """Saved when a round ends, and with fragments when one leaves: in the middle of a round."""
    changes = {"optimizer": adamw, "precision": "float32", "steps": 14}
    cut = tmp_path / "cut"
    stopped = train(tmp_path / "whole", plan, save_every=save_every, **changes)
    shutil.copytree(tmp_path / "whole", cut)
    for checkpoint in cut.glob("checkpoints/step-*"):
        if int(checkpoint.name.removeprefix("step-")) > stopped["steps"] // 2:
            shutil.rmtree(checkpoint)
    left = sorted(path.name for path in cut.glob("checkpoints/step-*"))

    train(cut, plan, save_every=save_every, resume=True, **changes)

    assert left and left[-1] in ("step-4", "step-6")
    assert recorded(cut) == recorded(tmp_path / "whole")
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(cut)[name]), name


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "data=2 local=4 outer=diloco",
            "data=2",
            "the optimizer states of 2 replicas are averaged; the outer steps' momentum is dropped",
        ),
        pytest.param("data=2", "data=3 local=2", "resumed from step-8\n", marks=pytest.mark.slow),
        (
            "data=2 local=4 fragments=2",
            "data=3 local=4",
            "averaged; replicas start from the weights that they shared",
        ),
    ],
)
def test_a_run_goes_on_under_another_plan(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], before: str, after: str, message: str
) -> None:
    """And says what it could not take over."""
    run = tmp_path / "run"
    train(run, before, steps=8, optimizer=adamw)
    figures = train(run, after, resume=True, steps=14, optimizer=adamw)

    assert message in capfd.readouterr().err
    assert figures["steps"] == 14 and len(recorded(run)) == 14


def test_what_is_due_waits_for_the_round(tmp_path: Path) -> None:
    """Saving, comparing and evaluating come when replicas hold one model."""
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    train(
        tmp_path / "run",
        "data=2 local=4",
        save_every=3,
        validation=TensorDataset(x, torch.arange(9) % 3),
    )
    lines = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))

    assert [line["step"] for line in lines if "saved" in line] == [4, 8, 12]
    assert [line["step"] for line in lines if "validation_loss" in line] == [4, 8, 12]


def test_bytes_fall_with_the_local_steps(tmp_path: Path) -> None:
    """Counted in the summary as by hand; tests/strategies/test_compress.py counts those of data=2."""
    elements, tensors = (
        sum(p.numel() for p in Perceptron().parameters()),
        len(list(Perceptron().parameters())),
    )
    sent = train(tmp_path, "data=2 local=6", precision="float32")["bytes_sent"]

    assert sent == 2 * (4 * elements + 8 * (2 * 6 + 9 + tensors + 1))


def test_a_replica_without_samples_takes_no_step(tmp_path: Path) -> None:
    """AdamW would move weights by decay alone; its way counts nothing besides."""
    hand = ByHand(make_job(optimizer=adamw, batch=12), replicas=2, local=3, outer="average")

    train(
        tmp_path / "run", "data=2 local=3", optimizer=adamw, batch=12
    )  # the last window of an epoch has 1 sample

    same(weights(tmp_path / "run"), hand.run(12))


def test_more_fragments_than_parameters_are_refused(tmp_path: Path) -> None:
    """With how many there may be."""
    with pytest.raises(paceline.PacelineError, match=r"at most fragments=6"):
        train(tmp_path / "run", "data=2 local=9 fragments=7")


def test_buffers_are_met_when_replicas_meet(tmp_path: Path) -> None:
    """BatchNorm's statistics are the replicas' mean; the run's replicas agree in the end."""

    class Normed(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.layers.append(nn.BatchNorm1d(9))

    figures = train(tmp_path / "run", "data=2 local=4", model=Normed, data=make_job().data)

    assert weights(tmp_path / "run")["layers.4.running_mean"].abs().max() > 0
    assert figures["steps"] == 12


@pytest.fixture
def digits() -> paceline.Job:
    from paceline.job.file import JobFile

    example = Path(__file__).parents[3] / "examples" / "01_digits.py"
    return JobFile(example, settings={"epochs": 15}).load()


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["data=2 local=8", "data=2 local=8 outer=diloco fragments=2 compress=int8"]
)
def test_digits_reach_97_percent(tmp_path: Path, digits: paceline.Job, plan: str) -> None:
    """Fifteen epochs on two replicas."""
    figures = paceline.train(digits, plan, devices="cpu:0-1", run=tmp_path / "run")

    assert figures["metrics"]["accuracy"] >= 0.97
