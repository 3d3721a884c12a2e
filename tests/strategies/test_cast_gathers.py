"""Sharding gathers what autocast casts in autocast's precision, and computes the same bits as with float32 gathers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from benchmarks.models.decoder import Decoder
from benchmarks.models.sizes import DecoderSize
from paceline.model.cost.trace import cast_parameters, cast_parameters_of_rank, profile_job
from paceline.strategies.shard import strategy
from paceline.strategies.shard.exchange import InPlaceGather

SIZE = DecoderSize(layers=1, hidden=32, heads=2, ffn=64, vocab=50, sequence=12)


class Uses(nn.Module):
    """A parameter of each way to be used."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.once, self.twice, self.frozen, self.read, self.outside, self.evaluated = (
            nn.Linear(16, 16) for _ in range(6)
        )
        self.frozen.requires_grad_(False)
        self.product, self.summed = nn.Parameter(torch.eye(16)), nn.Parameter(torch.ones(4, 4))
        self.convolution, self.head = nn.Conv1d(16, 16, 1), nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.once(self.tokens(tokens)))
        x = self.frozen(self.twice(self.twice(x))) @ self.product
        x = self.read(x.to(self.read.weight.dtype)) + self.summed.sum()
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            x = self.outside(x.float())
        x = self.evaluated(x) if self.training else F.linear(x, 2 * self.evaluated.weight)
        return torch.tanh(self.head(x))


_positions: dict[int, torch.Tensor] = {}


class Cached(Uses):
    """Keeps a tensor outside of the model, for all forwards."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        if length not in _positions:
            _positions[length] = torch.ones(length, 1)
        return super().forward(tokens) * _positions[length]


class Branches(nn.Module):
    """Blocks with a layer that one rank's samples use and the other's don't."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.blocks = nn.ModuleList(_Branch() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block(x, is_even=self.training is False or self._is_even(tokens))
        return torch.tanh(self.head(x))

    def _is_even(self, tokens: torch.Tensor) -> bool:
        from torch._subclasses.fake_tensor import FakeTensor

        return isinstance(tokens, FakeTensor) or int(tokens[0, 0]) % 2 == 0


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.always, self.at_times = (
            nn.LayerNorm(16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
        )

    def forward(self, x: torch.Tensor, is_even: bool) -> torch.Tensor:
        x = self.always(self.norm(x))
        return torch.tanh(self.at_times(x) if is_even else x)


def job(model: Callable[[], nn.Module] = lambda: Decoder(SIZE), **changes: Any) -> paceline.Job:
    draws = torch.Generator().manual_seed(3)
    tokens = torch.randint(50, (24, 13), generator=draws)
    fields: dict[str, Any] = {
        "model": model,
        "data": TensorDataset(tokens[:, :-1], tokens[:, 1:]),
        "batch": 8,
        "steps": 2,
        "loss": lambda output, target: F.cross_entropy(
            output.flatten(0, 1).float(), target.flatten()
        ),
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
        "precision": "bf16",
        "validation": TensorDataset(tokens[:6, :-1], tokens[:6, 1:]),
    }
    return paceline.Job(**{**fields, **changes})


def trained(
    made: paceline.Job, plan: str, run: Path
) -> tuple[list[float], dict[str, torch.Tensor]]:
    paceline.train(made, plan, run=run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return (
        [line[key] for line in lines for key in ("loss", "validation_loss") if key in line],
        load_file(run / "model.safetensors"),
    )


@pytest.mark.slow
def test_only_what_autocast_casts_once_is_cast():
    names = cast_parameters(job(Uses))
    assert names == {
        "once.weight",
        "once.bias",
        "frozen.weight",
        "frozen.bias",
        "read.bias",
        "product",
        "convolution.weight",
        "convolution.bias",
        "evaluated.bias",
        "head.weight",
        "head.bias",
    }


@pytest.mark.slow
def test_a_rank_is_left_without_fake_tensors():
    assert cast_parameters_of_rank(job(Uses), torch.device("cpu")) == cast_parameters(job(Uses))
    assert not cast_parameters_of_rank(job(Cached), torch.device("cpu")) and not _positions


@pytest.mark.parametrize(
    ("precision", "cast"), [("bf16", True), ("fp16", True), ("fp8", False), ("float32", False)]
)
def test_precisions(precision: str, cast: bool):
    assert bool(cast_parameters(job(precision=precision))) == cast


def test_a_tied_head_is_left_in_float32():
    tied = DecoderSize(layers=1, hidden=32, heads=2, ffn=64, vocab=50, sequence=12, tied=True)
    names = cast_parameters(job(lambda: Decoder(tied)))
    assert "tokens.weight" not in names and any(name.startswith("blocks.0.") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan", "precision"),
    [
        (lambda: Decoder(SIZE), "shard=2 zero=1 microbatches=2", "fp16"),
        (Branches, "shard=2", "bf16"),
        pytest.param(lambda: Decoder(SIZE), "shard=2", "bf16", marks=pytest.mark.slow),
        *(
            pytest.param(model, plan, "bf16", marks=pytest.mark.slow)
            for model in (lambda: Decoder(SIZE), Uses)
            for plan in (
                "shard=3 microbatches=2",
                "shard=2 zero=2",
                "data=2 shard=2",
                "shard=2 recompute=full",
            )
        ),
    ],
)
def test_bits_are_those_of_float32_gathers(
    model: Callable[[], nn.Module],
    plan: str,
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    made = job(model, precision=precision)
    gathered = _count_gathers(tmp_path / "bytes", monkeypatch)
    losses, weights = trained(made, plan, tmp_path / "cast")
    cast_bytes = gathered()
    monkeypatch.setattr(strategy, "gathers_cast", lambda plan: False)
    expected_losses, expected = trained(made, plan, tmp_path / "float32")

    assert losses == expected_losses
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert 0 < cast_bytes < gathered() - cast_bytes


@pytest.mark.slow
def test_gathers_of_a_small_gpt_have_little_more_than_half_of_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Embeddings and norms stay in float32. The planner counts the bytes that are sent."""
    made = job(
        lambda: Decoder(DecoderSize(layers=2, hidden=128, heads=4, ffn=512, vocab=50, sequence=12)),
        steps=1,
        validation=None,
    )
    gathered = _count_gathers(tmp_path / "bytes", monkeypatch)
    paceline.train(made, "shard=2 zero=2", run=tmp_path / "run", check=False)  # it gathers, too
    parameters = profile_job(made).parameters
    whole = sum(p.num_bytes for p in parameters)
    assert gathered() == pytest.approx(
        sum(p.num_bytes * p.gathered_part for p in parameters), rel=1e-3
    )
    assert 0.5 * whole < gathered() < 0.53 * whole


def _count_gathers(file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Bytes that ranks which are forked from now on give FSDP2's gatherings, over all of them."""
    gather = InPlaceGather.__call__

    def counted(
        self: Any,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> Any:
        with file.open("a") as lines:
            lines.write(f"{input_tensor.nbytes}\n")
        return gather(self, output_tensor, input_tensor, *args, **options)

    monkeypatch.setattr(InPlaceGather, "__call__", counted)
    return lambda: sum(map(int, file.read_text().splitlines()))
