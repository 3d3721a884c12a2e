"""What a journal proves: of runs that go on under other plans, and of planted, missing or damaged lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import paceline as pl
from paceline.api.audit import Audit, audit
from paceline.job.order import Order, Window, digest
from paceline.runs.folder import JOURNAL, METRICS, ORIGIN
from paceline.runs.journal import Journal

SAMPLES, BATCH, STEPS = (
    50,
    12,
    12,
)  # two epochs of five windows, the last of each short, and two steps more


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(
            [(torch.ones(3, dtype=torch.float64), torch.ones(2, dtype=torch.float64))] * SAMPLES
        )


def job(**fields: Any) -> pl.Job:
    pairs = TensorDataset(torch.randn(SAMPLES, 3).double(), torch.randn(SAMPLES, 2).double())
    return pl.Job(
        **{
            "model": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
            "data": pairs,
            "loss": nn.functional.mse_loss,
            "optimizer": lambda named: torch.optim.SGD(named, lr=0.01),
            "batch": BATCH,
            "steps": STEPS,
            "seed": 3,
            "precision": "float64",
            **fields,
        }
    )


def written(folder: Path, steps: range, *, after: int | None = None, **fields: Any) -> Path:
    """A journal of a launch that took these steps, as one rank fetched their samples."""
    made = job(**fields)
    order = Order.of(made)
    journal = Journal(folder / JOURNAL)
    journal.begin(made, plan="data=2", world_size=2, after=steps.start if after is None else after)
    for step in steps:
        window = order.window(step)
        journal.note(step + 1, window)
        journal.settle(
            digest(window.epoch, window.positions, order.indices(window.epoch, window.positions))
        )
    journal.close()
    return folder


def edited(folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Audit:
    path = folder / JOURNAL
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return audit(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plans",
    [
        ["single", "data=2", "shard=2"],
        ["pipeline=2", "data=2 local=3", "tensor=2"],
        ["servers=1 workers=2 staleness=2", "servers=1 workers=2", "single"],
    ],
)
def test_each_sample_counts_once_over_launches_under_changing_plans(tmp_path, plans):
    for number, plan in enumerate(plans):
        pl.train(
            job(steps=4 * (number + 1)), plan, run=tmp_path / "run", resume=number > 0, check=False
        )
    result = audit(tmp_path / "run")
    assert result.passed, result.describe()
    assert (result.samples, result.whole_epochs, result.launches) == (124, 2, 3)
    assert result.updates == (
        16 if "staleness" in plans[0] else 12
    )  # there each worker's part is an update of its own


def test_streams_are_counted(tmp_path):
    pl.train(job(data=Stream(), epochs=2, steps=None), "data=2", run=tmp_path / "run", check=False)
    result = audit(tmp_path / "run")
    assert result.passed, result.describe()
    assert (result.updates, result.samples) == (10, 100)


def test_what_a_killed_launch_did_after_its_checkpoint_is_undone(tmp_path):
    written(tmp_path, range(7))
    written(tmp_path, range(4, 9))
    result = audit(tmp_path)
    assert result.passed, result.describe()
    assert (result.updates, result.recomputed_updates, result.launches) == (9, 3, 2)


def test_a_run_that_went_back_before_a_spike_goes_on(tmp_path):
    """Runs of 0.2.0 could: they are audited, resumed and reported, whatever options their record has."""
    run = tmp_path / "run"
    pl.train(job(), "single", run=run, save_every=4, on_spike="skip", check=False)
    document = json.loads((run / ORIGIN).read_text())
    document["command"] = "paceline train job.py --spares 1 --save-every 4 --on-spike rewind"
    (run / ORIGIN).write_text(json.dumps(document))
    with (run / METRICS).open("a") as file:
        file.write(json.dumps({"step": 7, "rewound_to": 4, "time": 0.0}) + "\n")

    def back_from_7_to_4(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        launch, *updates = [line for line in lines if "weights" not in line]
        before, later = updates[:7], updates[7:]
        undone = [update | {"skipped": True} for update in before[4:]]
        again = [launch | {"after": 4}, *undone, *later]
        return [launch, *before, *({**line, "launch": 2} for line in again)]

    result = edited(run, back_from_7_to_4)
    assert result.passed, result.describe()
    assert (result.updates, result.skipped_updates, result.launches) == (12, 3, 2)
    more = pl.train(job(steps=16), run=run, resume=True, on_spike="skip", check=False)
    assert more.figures["steps"] == 16 and audit(run).passed
    assert pl.report(run)


def test_a_line_that_is_cut_off_is_no_line(tmp_path):
    written(tmp_path, range(7))
    with open(tmp_path / JOURNAL, "ab") as file:
        file.write(b'{"launch":1,"step":8,"ep')
    assert audit(tmp_path).updates == 7
    written(tmp_path, range(7, 9))
    result = audit(tmp_path)
    assert result.passed and result.updates == 9, result.describe()


@pytest.mark.parametrize(
    ("kind", "change", "positions"),
    [
        ("repeated", lambda lines: [*lines[:3], lines[2], *lines[3:]], (12, 24)),
        ("lost", lambda lines: [*lines[:2], *lines[3:]], (12, 24)),
        ("lost", lambda lines: [lines[0], *lines[2:]], (0, 12)),
        ("lost", lambda lines: [*lines[:5], *lines[6:]], (48, 50)),  # the last of an epoch
        ("repeated", lambda lines: [*lines[:2], {**lines[2], "start": 10}, *lines[3:]], (10, 12)),
        (
            "other samples",
            lambda lines: [*lines[:2], {**lines[2], "digest": lines[3]["digest"]}, *lines[3:]],
            (12, 24),
        ),
    ],
)
def test_a_planted_fault_is_found_and_named(tmp_path, kind, change, positions):
    result = edited(written(tmp_path, range(12)), change)
    findings = {(finding.kind, finding.positions) for finding in result.findings}
    assert (kind, positions) in findings, result.describe()
    named = next(
        finding
        for finding in result.findings
        if (finding.kind, finding.positions) == (kind, positions)
    )
    assert (
        named.indices == tuple(Order.of(job()).indices(0, range(*positions))[:8])
        and "indices" in named.message
    )


def test_a_rank_that_fetches_another_sample_is_found(tmp_path, monkeypatch):
    from paceline.training import feed

    honest = feed.Order.indices
    monkeypatch.setattr(
        feed.Order,
        "indices",
        lambda order, epoch, positions: [
            7 if position == 30 else index
            for position, index in zip(positions, honest(order, epoch, positions), strict=True)
        ],
    )
    pl.train(job(), "data=2", run=tmp_path / "run", check=False)
    monkeypatch.undo()
    result = audit(tmp_path / "run")
    assert [(finding.kind, finding.epoch, finding.positions) for finding in result.findings] == [
        ("other samples", epoch, (24, 36)) for epoch in range(2)
    ]


def test_a_writer_of_an_earlier_launch_is_fenced_out(tmp_path):
    written(tmp_path, range(4))
    late = (tmp_path / JOURNAL).read_text().splitlines(keepends=True)[-1]
    written(tmp_path, range(4, 8))
    with open(tmp_path / JOURNAL, "a") as file:
        file.write(late)
    assert [finding.kind for finding in audit(tmp_path).findings] == ["outdated writer"]


@pytest.mark.parametrize(
    ("also", "kinds"), [([(3, 1)], []), ([(2, 0), (3, 1)], ["repeated"]), ([(4, 0)], ["lost"])]
)
def test_parts_of_later_steps_may_be_kept(tmp_path, also, kinds):
    """A launch that goes on from a copy says which parts of steps it has beside whole steps."""
    made = job()
    order = Order.of(made)

    def note(journal: Journal, step: int, part: int) -> None:
        whole = order.window(step - 1)
        half = replace(whole, start=whole.start + part * whole.count // 2, count=whole.count // 2)
        journal.note(step, half, part=part)
        journal.settle(
            digest(half.epoch, half.positions, order.indices(half.epoch, half.positions))
        )

    for after, kept, parts in (
        (0, [], [(1, 0), (1, 1), (2, 0), (3, 1), (2, 1)]),
        (1, also, [(2, 0), (2, 1), (3, 0)]),
    ):
        journal = Journal(tmp_path / JOURNAL)
        journal.begin(
            made, plan="servers=1 workers=2 staleness=2", world_size=3, after=after, also=kept
        )
        for step, part in parts:
            note(journal, step, part)
        journal.close()
    assert [finding.kind for finding in audit(tmp_path).findings] == kinds


def test_a_gap_between_launches_and_another_seed_are_found(tmp_path):
    written(tmp_path, range(4))
    written(tmp_path, range(6, 8), seed=4)
    kinds = {finding.kind for finding in audit(tmp_path).findings}
    assert {"lost", "changed job"} <= kinds


def test_checkpoints_and_the_summary_must_agree(tmp_path):
    pl.train(job(), "single", run=tmp_path / "run", check=False)
    (tmp_path / "run" / JOURNAL).write_text(
        "".join(
            line
            for line in (tmp_path / "run" / JOURNAL).read_text().splitlines(keepends=True)
            if '"step":12' not in line
        )
    )
    result = audit(tmp_path / "run")
    assert [finding.message.partition(" ")[0] for finding in result.findings] == [
        "step-12",
        "summary.json",
    ]


def test_what_drop_last_leaves_out_is_no_loss(tmp_path):
    result = audit(written(tmp_path, range(12), drop_last=True))
    assert result.passed and result.whole_epochs == 2, result.describe()


def test_a_folder_without_a_journal_is_refused(tmp_path):
    with pytest.raises(pl.PacelineError, match="has no journal"):
        audit(tmp_path)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, SAMPLES), max_size=6), epoch=st.integers(0, 3))
def test_digests_of_parts_add_up(cuts, epoch):
    order, places = Order.of(job()), sorted({0, SAMPLES, *cuts})
    whole = digest(epoch, range(SAMPLES), order.indices(epoch, range(SAMPLES)))
    parts = [
        digest(epoch, range(a, b), order.indices(epoch, range(a, b))) for a, b in pairwise(places)
    ]
    assert sum(parts) == whole == int(float(whole))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    data=st.binary(max_size=400)
    | st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        [
                            "launch",
                            "step",
                            "epoch",
                            "start",
                            "count",
                            "digest",
                            "after",
                            "plan",
                            "world_size",
                            "seed",
                            "order",
                            "num_samples",
                        ]
                    ),
                    inner,
                    max_size=8,
                )
            ),
            max_leaves=12,
        )
    ).map(lambda values: b"".join(json.dumps(value).encode() + b"\n" for value in values))
)
def test_no_bytes_crash_an_audit(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    written(folder, range(2))
    with open(folder / JOURNAL, "ab") as file:
        file.write(data)
    audit(folder).describe()


_ANY = st.integers(-2, 60) | st.sampled_from([2**24, 2**31, 2**62, 2**63, 2**64, 10**30])


@settings(max_examples=50, deadline=2000)
@given(
    lines=st.lists(
        st.fixed_dictionaries(
            dict.fromkeys(("launch", "step", "epoch", "start", "count", "digest"), _ANY)
        )
        | st.fixed_dictionaries(
            {
                "launch": _ANY,
                "after": _ANY,
                "plan": st.just("single"),
                "seed": _ANY,
                "world_size": _ANY,
                "order": st.sampled_from(["shuffle", "stream"]),
                "num_samples": _ANY | st.none(),
            }
        ),
        max_size=6,
    )
)
def test_no_numbers_hold_an_audit_up(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not lines or not audit(folder).passed or lines[0].get("after") == 0


def test_an_epoch_without_updates_is_found(tmp_path):
    result = edited(
        written(tmp_path, range(12)),
        lambda lines: [line for line in lines if line.get("epoch") != 1],
    )
    assert ("lost", 1) in {(finding.kind, finding.epoch) for finding in result.findings}, (
        result.describe()
    )


def test_a_window_is_noted_until_ranks_meet(tmp_path):
    journal = Journal(tmp_path / JOURNAL)
    journal.begin(job(), plan="data=2 local=2", world_size=2, after=0)
    journal.note(1, Window(0, 0, 12))
    assert len((tmp_path / JOURNAL).read_text().splitlines()) == 1
    journal.note(2, Window(0, 12, 12))
    journal.settle(5)
    assert len((tmp_path / JOURNAL).read_text().splitlines()) == 3
