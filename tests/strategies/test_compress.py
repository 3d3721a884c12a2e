"""Compressed sums: what they round, what they leave out for later, and how many bytes they send."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from jobs.classification import classification_job
from jobs.perceptrons import Perceptron
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.strategies.compress.codec import decode, encode
from paceline.strategies.compress.run import Compressed
from paceline.strategies.compress.size import (
    BLOCK,
    POWERSGD_RANK,
    coded_bytes,
    sent_bytes,
    topk_elements,
)
from paceline.strategies.data.run import GradientBuckets

FORMS = ("bf16", "int8", "topk", "powersgd")
# Buckets of one matrix that is factored and a bias, of less than a block, of nothing.
SHAPES = (((40, 60), (40,)), ((5,),), ((0,),))
DTYPES = (torch.float32, torch.float64, torch.float32)


def vector(exponents: list[int], seed: int) -> torch.Tensor:
    """Blocks of any magnitude."""
    drawn = torch.randn(len(exponents), BLOCK, generator=torch.Generator().manual_seed(seed))
    return (drawn * torch.tensor([2.0**e for e in exponents]).unsqueeze(1)).flatten()


@pytest.mark.slow
@given(st.lists(st.integers(-40, 40), min_size=1, max_size=4), st.integers(0, 1000))
def test_what_is_encoded_is_off_by_its_bound(exponents: list[int], seed: int) -> None:
    """bf16: half a unit in the last place of 8 bits; int8: 1/254 of the block's largest."""
    values = vector(exponents, seed)
    largest = values.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).flatten()

    off = {
        form: (decode(form, encode(form, values), torch.float64) - values.double()).abs()
        for form in ("bf16", "int8")
    }

    assert (off["bf16"] <= values.abs() * 2**-8).all()
    assert (off["int8"] <= largest.double() / 254 * (1 + 1e-5)).all()


@given(st.sampled_from(["bf16", "int8"]), st.integers(1, 5), st.integers(0, 1000))
def test_a_decoded_vector_is_encoded_as_before(form: str, blocks: int, seed: int) -> None:
    """Rounding twice is rounding once, and the number of bytes is as counted."""
    coded = encode(form, vector([0] * blocks, seed))
    again = decode(form, encode(form, decode(form, coded, torch.float32)), torch.float32)

    assert len(coded) == coded_bytes(form, blocks * BLOCK)
    torch.testing.assert_close(again, decode(form, coded, torch.float32), rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(form: str, value: float) -> None:
    """A gradient that overflowed is not hidden; zeros stay zeros."""
    values = torch.zeros(2 * BLOCK)
    values[3] = value
    decoded = decode(form, encode(form, values), torch.float32)

    assert not decoded[3].isfinite() and (decoded[BLOCK:] == 0).all()


def test_bytes_by_hand() -> None:
    """A million elements on 4 ranks: each sends 3/4 of a million there and back."""
    million = [(1_024_000,)]
    ring = sent_bytes("none", million, 4, 4)

    assert ring == 2 * 3 * 256_000 * 4
    assert sent_bytes("bf16", million, 4, 4) == ring / 2
    assert sent_bytes("int8", million, 4, 4) == 2 * 3 * (256_000 + 4 * 1000)
    assert sent_bytes("topk", million, 4, 4) == 3 * 10_240 * 8
    assert sent_bytes("powersgd", [(1000, 1024)], 4, 4) == 2 * 3 / 4 * 4 * POWERSGD_RANK * 2024


@given(st.sampled_from(FORMS), st.integers(1, 9), st.integers(1, 10**7))
def test_no_form_sends_more_than_none_but_for_a_block(form: str, ranks: int, elements: int) -> None:
    """Small buckets are padded to a block a rank."""
    assert sent_bytes(form, [(elements,)], 4, ranks) <= (
        sent_bytes("none", [(elements,)], 4, ranks) * max(1, ranks / 8) + 2 * ranks * 2 * BLOCK
    )


def gradient(number: int, rank: int, step: int) -> torch.Tensor:
    size = sum(math.prod(shape) for shape in SHAPES[number])
    return torch.randn(
        size,
        generator=torch.Generator().manual_seed(100 * step + 10 * rank + number),
        dtype=DTYPES[number],
    )


def sums(form: str, rank: int, steps: int) -> tuple[list[list[torch.Tensor]], Compressed]:
    made = Compressed(
        form, [torch.zeros(0, dtype=dtype) for dtype in DTYPES], SHAPES, dist.group.WORLD
    )
    sums_by_step = []
    for step in range(steps):
        for number, memory in enumerate(made.memory):
            memory.copy_(gradient(number, rank, step))
            made.start(number)
        made.finish()
        sums_by_step.append([memory.clone() for memory in made.memory])
    return sums_by_step, made


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_alike_on_all_ranks_and_near_the_exact_ones(
    run_ranks: Callable[..., list[Any]], ranks: int
) -> None:
    """Rounded sums at once; the others together with what every rank has left for later. Bytes are as counted."""

    def body(context: Any, form: str) -> list[float]:
        sums_by_step, made = sums(form, context.rank, steps=3)
        expected_bytes = 3 * sum(
            sent_bytes(form, shapes, dtype.itemsize, ranks)
            for shapes, dtype in zip(SHAPES, DTYPES, strict=True)
        )
        assert made.sent_bytes == pytest.approx(expected_bytes)
        off = []
        for number in range(len(SHAPES)):
            sent = torch.stack([step[number] for step in sums_by_step])
            everyone = [torch.empty_like(sent) for _ in range(ranks)]
            dist.all_gather(everyone, sent)
            assert all(torch.equal(other, sent) for other in everyone)
            given_up = torch.zeros_like(made.memory[number])
            if number in made.method.residuals:
                given_up += made.method.residuals[number]
                dist.all_reduce(given_up)
            exact = sum(gradient(number, rank, step) for rank in range(ranks) for step in range(3))
            off.append(float((sent.sum(0) + given_up - exact).abs().max()) if len(exact) else 0.0)
        return off

    for of_rank in run_ranks(lambda context: {form: body(context, form) for form in FORMS}, ranks):
        for form, off in of_rank.items():
            assert max(off) <= {"bf16": 0.1, "int8": 0.2}.get(form, 1e-4), form
            assert form in ("bf16", "int8") or off[1] < 1e-12, form  # float64


def test_topk_sends_the_largest(run_ranks: Callable[..., list[Any]]) -> None:
    """One element in a hundred, of each rank its own; the rest comes when it has grown."""

    def body(context: Any) -> list[int]:
        made = Compressed("topk", [torch.zeros(0)], [[(200,)]], dist.group.WORLD)
        seen = []
        for _ in range(4):
            made.memory[0].fill_(1.0)
            made.memory[0][context.rank] = 3.5
            made.start(0)
            made.finish()
            seen.append(int((made.memory[0] != 0).sum()))
        return seen

    assert topk_elements(200) == 2
    assert run_ranks(body, 2)[0][0] in (2, 3, 4)


def make_job(**changes: Any) -> paceline.Job:
    optimizer = {"optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2)}
    fields = {**optimizer, "batch": 16, "steps": 12, **changes}
    return classification_job(lambda: Perceptron(48, 40), samples=64, **fields)


def train(run: Path, plan: str, *, resume: bool = False, **changes: Any) -> dict[str, Any]:
    devices = f"cpu:0-{paceline.Plan.parse(plan).world_size - 1}"
    return paceline.train(
        make_job(**changes), plan, devices=devices, run=run, resume=resume, save_every=4
    ).to_dict()


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 compress=bf16",
        "data=3 compress=int8",
        "data=2 compress=topk",
        "data=3 compress=powersgd",
        "data=2 shard=2 compress=topk",
    ],
)
def test_a_resumed_run_is_the_whole_one_bit_by_bit(tmp_path: Path, plan: str) -> None:
    """What was left out, and the factors, go on from the checkpoint."""
    train(tmp_path / "whole", plan)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-12")
    train(tmp_path / "cut", plan, resume=True)

    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "cut")[name]), name


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "data=3 compress=topk",
            "data=2 compress=topk",
            "3 replicas had not sent yet of their gradients is shared by 2",
        ),
        ("data=2 compress=powersgd", "shard=2", "is dropped: this plan leaves nothing out"),
        ("data=2", "data=2 compress=topk", "resumed from step-4\n"),
    ],
)
def test_a_resume_under_another_plan_says_what_becomes_of_the_rest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], before: str, after: str, message: str
) -> None:
    """It is shared by the new replicas, or dropped with a word."""
    train(tmp_path / "run", before, steps=4)
    train(tmp_path / "run", after, resume=True, steps=8)

    assert message in capfd.readouterr().err


class Remembered(dict[str, torch.Tensor]):
    """A checkpoint of three replicas that still owe 1, 2 and 3."""

    def replicas(self, kind: str) -> int:
        return 3

    def read(self, name: str, like: str = "") -> torch.Tensor:
        return self[name]


def test_what_is_owed_is_kept_when_replicas_change(run_ranks: Callable[..., list[Any]]) -> None:
    """The residuals of two replicas add up to those of three."""

    def body(context: Any) -> list[float]:
        made = GradientBuckets(
            {"w": nn.Parameter(torch.zeros(5))},
            dist.group.WORLD,
            compress="topk",
            replica=context.rank,
        )
        made.restore(
            Remembered(
                {f"residuals/{number}/w": torch.full((5,), number + 1.0) for number in range(3)}
            )
        )
        return [float(kept.tensor.sum()) for kept in made.kept()]

    assert run_ranks(body, 2) == [[15.0], [15.0]]


@pytest.mark.slow
def test_the_summary_counts_bytes(tmp_path: Path) -> None:
    """The same for a sum in shared memory as for one over the network; a quarter for int8, but for small buckets."""
    sent = {
        plan: train(tmp_path / plan, plan)["bytes_sent"]
        for plan in ("data=2", "data=2 compress=int8")
    }
    elements = sum(p.numel() for p in Perceptron(48, 40).parameters())
    figures = (
        8 * (11 + 6)
    )  # loss, count, the end, stop, its kind, news of state, edits and names, digest, which parameters were used

    assert sent["data=2"] == 12 * (4 * elements + figures)
    assert sent["data=2 compress=int8"] == 12 * (
        2 * coded_bytes("int8", -(-elements // 512) * 256) + figures
    )
    assert (
        json.loads((tmp_path / "data=2" / "summary.json").read_text())["bytes_sent"]
        == sent["data=2"]
    )


@pytest.mark.slow
def test_a_float64_job_is_summed_in_float64(tmp_path: Path) -> None:
    """Its residuals are float64, and it learns."""
    figures = train(tmp_path / "run", "data=2 compress=topk", precision="float64", steps=30)

    assert figures["final_loss"] < 1.0


def test_verify_refuses_to_certify_a_relaxed_plan() -> None:
    """It says what is relaxed, and which plan can be verified."""
    (certificate,) = paceline.verify(replace(make_job()), ["data=2 compress=int8"], steps=1)

    assert not certificate.passed
    assert (
        "is relaxed (what replicas send each other is compressed to int8)" in certificate.describe()
    )
    assert "'data=2' can" in certificate.describe()
