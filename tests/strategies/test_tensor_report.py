"""What stays whole under tensor=N is told, with its share and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.split_layers import Attention, Mlp, laid_out, points_job
from torch import nn

import paceline
from paceline.strategies.tensor.report import groups, report


def test_shares_of_what_stays_whole() -> None:
    """Repeated modules are one group; shares are of all parameters, the largest group first."""
    sizes = {
        "layers.0.norm.weight": 10,
        "layers.1.norm.weight": 10,
        "rnn.weight": 60,
        "out.weight": 120,
    }
    norm = "layer_norm takes it whole"
    whole = {
        "layers.0.norm.weight": norm,
        "layers.1.norm.weight": norm,
        "rnn.weight": "lstm takes it whole",
    }

    whole_groups = groups(sizes, whole)

    assert [(group.names, group.parameters, group.share) for group in whole_groups] == [
        ("rnn.weight", 60, 0.3),
        ("layers.*.norm.weight", 20, 0.1),
    ]


def test_the_lines_that_are_shown() -> None:
    """Groups under half a percent are summed up, and the file has them all."""
    tensors = {
        "rnn.weight": nn.Parameter(torch.zeros(300)),
        "norm.weight": nn.Parameter(torch.zeros(1)),
        "out.weight": nn.Parameter(torch.zeros(699)),
    }

    split_report = report(
        tensors, {"rnn.weight": "lstm takes it whole", "norm.weight": "why"}, ("a note",), ranks=4
    )

    assert split_report.lines == (
        "tensor=4 splits 69.9 % of 1,000 parameters; whole on every rank: "
        "rnn.weight 30 % (lstm takes it whole), others 0.1 %",
        "a note",
    )
    assert [group["names"] for group in split_report.document["whole"]] == [
        "rnn.weight",
        "norm.weight",
    ]
    assert split_report.document["split_share"] == pytest.approx(0.699)


WHOLE = [
    (lambda: Mlp(hidden=5), "first.weight 56.6 % (its dim of 5 doesn't divide by 2)"),
    (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(24, 3)
        ),
        "1.weight 13.2 % (conv1d takes it whole)",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "ranks"),
    [
        (
            [
                *WHOLE,
                (
                    lambda: Attention(heads=3),
                    "blocks.0: 3 heads don't divide by tensor=2, so every rank computes all of "
                    "them (tensor=3 would share them)",
                ),
            ],
            2,
        ),
        pytest.param(
            [
                (
                    lambda: Attention(heads=2, width=24),
                    "blocks.0: 2 heads don't divide by tensor=4, so every rank "
                    "computes all of them (tensor=2 would share them)",
                )
            ],
            4,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_split_is_said(
    cases: list[tuple[Callable[[], nn.Module], str]], ranks: int, run_ranks: Callable[..., Any]
) -> None:
    """Heads and sizes that don't divide, operators without a rule: each with the module and what would do."""
    lines_by_rank = run_ranks(
        lambda context: [
            laid_out(points_job(model), f"tensor={ranks}", context).layout.report.lines
            for model, _ in cases
        ],
        ranks,
    )

    for (_, words), lines in zip(cases, lines_by_rank[0], strict=True):
        assert words in "\n".join(lines)


def test_a_run_keeps_it(tmp_path: Path) -> None:
    """`split.json` lies beside `plan.json`, and not where nothing is split."""
    job = points_job(lambda: Mlp(hidden=5), steps=1)

    paceline.train(job, "tensor=2", devices="cpu:0,cpu:1", run=tmp_path / "split")
    paceline.train(job, "single", devices="cpu:0", run=tmp_path / "whole")

    document = json.loads((tmp_path / "split" / "split.json").read_text())
    assert document["ranks"] == 2
    assert document["parameters"] == sum(p.numel() for p in Mlp(hidden=5).parameters())
    assert document["whole"][0]["names"] == "first.weight"
    assert not (tmp_path / "whole" / "split.json").exists()
