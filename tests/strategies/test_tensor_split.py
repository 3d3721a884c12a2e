"""Fused and stacked weights are cut so that what follows stays cut, and layers that hold parts draw for themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_models import Fused, Stack, StackedExperts, job_of, laid_out
from torch import nn

import paceline
from paceline.runtime.feed import example_batch
from paceline.strategies.tensor.cut import Cut
from paceline.strategies.tensor.draws import apart


def cuts(stepper: Any) -> dict[str, tuple[int, int]]:
    """Dim and blocks of every weight of the blocks that is cut."""
    from paceline.strategies.tensor.cut import cut_of

    found = {name: cut_of(p) for name, p in stepper.held.items() if name.startswith("blocks.0") and p.ndim > 1}
    return {name.removeprefix("blocks.0."): (cut.dim, cut.blocks) for name, cut in found.items() if cut}


@pytest.mark.parametrize(("model", "expected"), [
    (lambda: Stack(Fused()), {"qkv.weight": [0, 3], "o.weight": [1, 1], "gated.weight": [0, 2], "down.weight": [1, 1]}),
    (lambda: Stack(Fused(view=True)),
     {"qkv.weight": [0, 3], "o.weight": [1, 1], "gated.weight": [0, 2], "down.weight": [1, 1]}),
    (lambda: Stack(StackedExperts()), {"up": [2, 2], "down": [2, 1]}),
])
def test_fused_and_stacked_weights(model: Callable[[], nn.Module], expected: dict[str, list[int]],
                                   run_ranks: Callable[..., Any]) -> None:
    """q, k and v of one product, gates, and experts in one tensor: columns block by block, then rows."""
    found = run_ranks(lambda context: cuts(laid_out(job_of(model), "tensor=2", context)), 2)

    assert found[0] == expected


@pytest.mark.parametrize("model", [lambda: Stack(Fused()), lambda: Stack(Fused(view=True)),
                                   lambda: Stack(StackedExperts())])
def test_they_compute_what_one_device_computes(model: Callable[[], nn.Module]) -> None:
    """Alone, in replicas and in shards."""
    for certificate in paceline.verify(job_of(model, clip=0.5), ["tensor=2", "data=2 tensor=2", "shard=2 tensor=2"],
                                       steps=2):
        assert certificate.passed, certificate.describe()


def test_a_run_with_blocks_goes_on_elsewhere(tmp_path: Path) -> None:
    """Weights and moments that are cut block by block are saved under their places in the whole."""
    def job(steps: int) -> paceline.Job:
        return job_of(lambda: Stack(Fused()), steps=steps)

    paceline.train(job(4), "single", devices="cpu:0", run=tmp_path / "whole")
    paceline.train(job(2), "tensor=2", devices="cpu:0,cpu:1", run=tmp_path / "moved")
    paceline.train(job(3), "single", devices="cpu:0", run=tmp_path / "moved", resume=True)
    paceline.train(job(4), "tensor=2", devices="cpu:0,cpu:1", run=tmp_path / "moved", resume=True)

    from safetensors.torch import load_file
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "moved" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


def test_a_rank_has_its_part_of_every_block() -> None:
    """The first of two ranks has the first half of each."""
    class Mesh:
        def size(self) -> int:
            return 2

        def get_local_rank(self) -> int:
            return 1

    whole = torch.arange(12)

    assert Cut(0, 3).own(whole, Mesh()).tolist() == [2, 3, 6, 7, 10, 11]  # type: ignore[arg-type]
    assert Cut(0).own(whole, Mesh()).tolist() == [6, 7, 8, 9, 10, 11]  # type: ignore[arg-type]


def test_draws_apart_and_together() -> None:
    """Ranks differ inside, agree outside, and repeat themselves."""
    def drawn(rank: int) -> tuple[list[float], list[float]]:
        torch.manual_seed(5)
        with apart(rank, torch.device("cpu")):
            inside = torch.rand(3)
        return inside.tolist(), torch.rand(3).tolist()

    assert drawn(0)[0] != drawn(1)[0]
    assert drawn(0)[1] == drawn(1)[1]
    assert drawn(1) == drawn(1)


class Dropped(nn.Module):
    """Dropout on the hidden features, which are cut, and on the result, which is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 64),
                                                   nn.Dropout(0.5))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.blocks[0](x)
        return found


def test_dropout_masks(run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks drop other ones of the features that they share out, and the same ones of what each of them has."""
    from paceline.strategies.tensor import piece

    def body(context: Any) -> list[Any]:
        seen: list[Any] = []

        def dropout(run: Any, node: Any, args: Any, kwargs: Any) -> Any:
            made = right(run, node, args, kwargs)
            seen.append((made.to_local() == 0).int().tolist())
            return made

        right = piece._LOCAL[torch.ops.aten.dropout.default]
        stepper = laid_out(job_of(Dropped, loss=lambda output, target: output.square().mean()), "tensor=2", context)
        monkeypatch.setitem(piece._LOCAL, torch.ops.aten.dropout.default, dropout)
        torch.manual_seed(1)
        stepper.layout.forward(example_batch(stepper.job.data, 2))
        return seen

    first, second = run_ranks(body, 2)
    assert first[0] != second[0]
    assert first[1] == second[1]
