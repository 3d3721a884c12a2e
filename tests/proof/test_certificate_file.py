"""A certificate is written where it is asked for, and says all that it stands on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.classification import classification_job
from torch import nn

import paceline
from paceline.base.errors import UsageError
from paceline.proof.certificate import WIDTH, table
from paceline.proof.problems import Problem
from paceline.proof.subject import subject


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.slow
def test_a_certificate_says_what_was_compared(tmp_path: Path) -> None:
    """Model, versions, seed, yardstick, worst differences and what was switched off, for programs and for people."""
    run = tmp_path / "new" / "folder"
    job = classification_job(with_dropout, seed=5, clip=0.5)

    returned = paceline.verify(job, ["data=2", "pipeline=3"], steps=2, run=run)

    assert sorted(path.name for path in run.iterdir()) == ["certificate.json", "certificate.txt"]
    document = json.loads((run / "certificate.json").read_text())
    assert document["plans"] == [certificate.to_dict() for certificate in returned]
    assert document["passed"] is False  # three stages of a model that has two pieces with weights
    assert document["model"]["parameters"] == 6 * 8 + 8 + 8 * 3 + 3
    assert (
        document["versions"]["torch"] == torch.__version__
        and document["versions"]["paceline"] == paceline.__version__
    )
    assert document["run"] == {
        "steps": 2,
        "batch": 8,
        "seed": 5,
        "precision": "float32",
        "clip": 0.5,
        "optimizer": "SGD",
        "samples": 25,
    }
    assert (
        document["randomness"]["switched_off"] == {"1": ["bernoulli_"]}
        and document["coupling"] is None
    )
    for precision in document["plans"][0]["precisions"]:
        worst = precision["worst"]["weight"]
        spread = document["yardstick"][precision["precision"]]["weight"]
        assert worst["name"] == precision["worst_param"] and worst["diff"] <= worst["tolerance"]
        assert 0 < spread["spread"] * 10 <= spread["tolerance"] and spread["step"] in (1, 2)
    assert max(map(len, returned[0].describe().splitlines())) <= 100  # columns of the suite
    text = (run / "certificate.txt").read_text()
    assert max(map(len, text.splitlines())) <= WIDTH
    for words in (
        "1 plans passed, 0 failed, 1 are none",
        "switched off, in 1",
        "passed  data=2",
        "no plan pipeline=3",
        document["model"]["initial_weights_sha256"],
        "pieces that can be cut apart",
    ):
        assert words in text


def test_the_table_keeps_its_width() -> None:
    """Long names, plans and reasons are broken or cut; figures beyond all bounds are shown."""
    worst = {
        "name": "model.layers.11.attention.self.query_projection.weight",
        "step": 1,
        "diff": None,
        "tolerance": 1e-7,
    }
    verdict = {
        "precision": "float64",
        "max_loss_diff": None,
        "max_gradient_diff": 1.0,
        "max_param_diff": 1.0,
        "worst": {"loss": worst, "gradient": worst, "weight": worst},
    }
    plan: dict[str, Any] = {
        "plan": "pipeline=2 data=2 tensor=2 schedule=zero-bubble microbatches=16 shares=3:1",
        "passed": False,
        "refused": None,
        "reason": "much is wrong " * 30,
        "precisions": [verdict],
    }
    measured = {"spread": 1.0, "tolerance": 2.0, "name": worst["name"], "step": 1}

    text = table(
        {
            "written": "now",
            "job": {"path": "/a/b.py", "function": "job", "settings": {"width": 3}},
            **subject(classification_job(with_dropout)),
            "note": "words " * 50,
            "coupling": Problem(
                "samples", ("norm",), "its statistics are of the batch", "SyncBatchNorm"
            ).to_dict(),
            "run": {
                "steps": 1,
                "batch": 2,
                "seed": 0,
                "precision": "bf16",
                "clip": None,
                "optimizer": "AdamW",
            },
            "yardstick": {"bf16": {"weight": measured}},
            "plans": [plan, {**plan, "refused": "too few pieces"}],
        }
    )

    assert max(map(len, text.splitlines())) <= WIDTH
    for words in (
        "1 failed, 1 are none",
        "width=3",
        "query_projection.weight",
        "no plan",
        "too few",
        "more ..._proj",
        "of the batch. Instead: SyncBatchNorm",
    ):
        assert words in text


def test_weights_have_a_digest_of_their_own() -> None:
    """The same seed gives the same digest, another one another."""
    digests = [
        subject(classification_job(seed=seed))["model"]["initial_weights_sha256"]
        for seed in (1, 1, 2)
    ]

    assert digests[0] == digests[1] != digests[2]


def test_a_folder_that_can_not_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """A file in its place, here."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't write the run folder"):
        paceline.verify(classification_job(), ["data=2"], run=tmp_path / "file" / "folder")
