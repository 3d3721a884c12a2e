"""The page of `benchmarks.trainers`, from results made up here, and what its jobs are said to be."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch

from benchmarks.trainers import ranks
from benchmarks.trainers.__main__ import PAGE, RESULTS
from benchmarks.trainers.contenders import CONTENDERS, RUNS
from benchmarks.trainers.jobs import BATCH, EXPERTS, IGNORED, JOBS, RANKS, mean_loss, total_loss
from benchmarks.trainers.measure import Result
from benchmarks.trainers.one_device import train
from benchmarks.trainers.page import EXACT, in_short, page, verdict
from benchmarks.trainers.ranks import first_error
from benchmarks.trainers.reasons import DESCRIPTIONS, NOTES, REASONS

ALIKE = {"weights": 3e-8, "loss": 0.0, "steps": 9, "expected_steps": 9}


def test_the_page_says_exact_off_mended_and_fails():
    rows = [
        Result("Paceline", "short", "", **ALIKE),
        Result("DDP", "short", "", **{**ALIKE, "weights": 0.0377}),
        Result("DDP", "short", "weighed", **ALIKE),
        Result("DDP", "idle", "", failure="RuntimeError: Expected to | finish. And more"),
    ]
    written = page(
        {
            "date": "2026-01-31",
            "versions": {"Paceline": "1", "DDP": "2"},
            "results": [asdict(row) for row in rows],
        }
    )

    assert "| short last batch | exact | off by 0.038; mended |" in written
    assert "| an idle expert | not run | fails |" in written
    assert f"| DDP | {CONTENDERS['DDP'].settings['short']['weighed']} | exact |" in written
    assert f"- **DDP**: {REASONS['DDP', 'short', '']}" in written.replace("\n  ", " ")
    assert (
        "`RuntimeError: Expected to / finish`" in written.replace("\n  ", " ")
        and "2026-01-31" in written
    )
    assert written.count("The reason is not known.") == 0


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({}, "exact"),
        ({"weights": 10 * EXACT}, "off by 2e-05"),
        ({"loss": 0.5}, "off by 0.5"),
        ({"buffers": 0.25}, "off by 0.25"),
        ({"steps": 10, "loss": None}, "10 steps for 9"),
    ],
)
def test_a_result_is_exact_if_every_figure_is(change: dict, outcome: str):
    assert in_short(Result("DDP", "short", "", **{**ALIKE, **change})) == outcome


def test_what_only_a_setting_makes_exact_is_mended():
    off, alike = {**ALIKE, "weights": 1.0}, Result("DDP", "short", "weighed", **ALIKE)

    assert verdict([Result("DDP", "short", "", **off), alike]) == "off by 1; mended"
    assert (
        verdict([Result("DDP", "short", "", **off), Result("DDP", "short", "drop_last", **off)])
        == "off by 1"
    )
    assert verdict([Result("DDP", "short", "", failure="x"), alike]) == "fails; mended"
    assert verdict([]) == "not run"


def test_another_model_does_not_mend_a_job():
    off = Result("DDP", "batchnorm", "", **{**ALIKE, "weights": 1.0})

    assert verdict([off, Result("DDP", "batchnorm", "group_norm", **ALIKE)]) == "off by 1"


def test_the_cause_is_told_from_what_follows_from_it():
    """The other rank's lost connection is often printed first."""
    output = (
        "[rank1]: RuntimeError: [gloo] Connection closed by peer [127.0.0.1]\n"
        "[rank0]: ValueError: SyncBatchNorm layers only work with GPU modules\n"
    )

    assert first_error(output) == "ValueError: SyncBatchNorm layers only work with GPU modules"
    assert first_error("Killed\n") == "a rank ended without an error"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_rank_that_fails_or_hangs_ends_the_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)

    def second_rank(act: Callable[[], None]) -> Callable[[], None]:
        return lambda: act() if os.environ["RANK"] == "1" else time.sleep(0.05)

    def fail() -> None:
        os.write(2, b"ValueError: too few samples\n")
        os._exit(1)

    assert ranks.run(second_rank(lambda: None), [], num_processes=2) is None
    assert ranks.run(second_rank(fail), [], num_processes=2) == "ValueError: too few samples"

    monkeypatch.setattr(ranks, "TIMEOUT_S", 0.5)
    assert (
        ranks.run(second_rank(lambda: time.sleep(60)), [], num_processes=2)
        == "it did not end in 0 s"
    )


def test_the_published_page_is_that_of_the_published_results():
    document = json.loads(RESULTS.read_text())

    assert PAGE.read_text() == page(document)
    assert [(row["trainer"], row["job"], row["setting"]) for row in document["results"]] == RUNS


def test_reasons_are_of_runs_that_are_made():
    assert set(DESCRIPTIONS) == set(JOBS) and set(REASONS) <= set(RUNS)
    assert {(*key, "") for key in NOTES} <= set(RUNS)


def test_every_job_trains_and_is_what_its_title_says():
    for job in JOBS.values():
        model = job.model()
        assert all(map(torch.equal, model.state_dict().values(), job.model().state_dict().values()))
        assert len(train(job, model)) == job.epochs * -(-len(job.data) // BATCH)

    assert len(JOBS["short"].data) % BATCH % RANKS != 0
    targets = JOBS["ignored"].data.tensors[1]
    for first in range(0, len(targets), BATCH):
        window = (targets[first : first + BATCH] != IGNORED).sum(dim=1)
        assert abs(window[::RANKS].sum() - window[1::RANKS].sum()) >= 3
        assert abs(window[: BATCH // RANKS].sum() - window[BATCH // RANKS :].sum()) >= 3
    routes = JOBS["idle"].data.tensors[0][:, 0].view(-1, BATCH)
    assert (routes == EXPERTS - 1).sum(dim=1).tolist() == [1, 0, 1]


def test_the_two_losses_agree():
    output, target = torch.randn(5, 6, 4), torch.randint(4, (5, 6))
    target[0] = IGNORED
    total, count = total_loss(output, target)

    torch.testing.assert_close(total / count, mean_loss(output, target))
    assert count == 24
