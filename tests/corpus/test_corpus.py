"""No job of the corpus gives wrong numbers under a plan, hangs, or fails after its first update."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.training.replicas.buffers import ChangingBuffers

from .__main__ import known_cells, main
from .page import ROOT, cells_of_page, kind_of, page, table
from .plain import WHOLE, Cut, run_plainly
from .registry import Entry, entries
from .resumed import resume_check
from .sweep import COUPLED, EXACT, PLANS, REFUSED, WRONG, Cell, Sweep

pytestmark = pytest.mark.checked_runs
SHORT_JOBS = (
    "residual",
    "adam_fused",
    "groups_by_kind",
    "clip_sometimes",
    "schedule_one_cycle",
    "last_window_of_one",
    "stream",
    "nested_with_strings",
    "ignored_targets",
    "variational",
    "weight_norm",
    "thrice_shared",
    "forward_hook",
    "causal_attention",
    "unet",
    "idle_expert",
    "padded_tokens",
    "three_models",
    "gan_with_penalty",
    "actor_critic",
    "graph_labels",
    "q_learning",
)
SHORT_PLANS = {  # and whether they split the model
    "data=2 shares=3:1": False,
    "shard=2": False,
    "single recompute=full": False,
    "tensor=2": True,
    "pipeline=2 microbatches=1": True,
}
PARTS = {
    plan: SHORT_JOBS[first :: len(SHORT_PLANS)][: 1 if splits else 4]
    for first, (plan, splits) in enumerate(SHORT_PLANS.items())
}
PARTS["single recompute=full"] += tuple(
    job for job in SHORT_JOBS if job not in sum(PARTS.values(), ())
)
WHAT_WORKS = ROOT / "docs" / "what-works.md"
OWN_WEIGHTS = ("blocks_write_to_their_input", "skips_in_a_list", "inner_loop")


def _wrong(sweep: Sweep, jobs: str, *plans: str) -> list[str]:
    return [
        f"{cell.job} under {cell.plan}: {cell.reason}"
        for cell in sweep.run(entries(jobs), plans)
        if cell.verdict == WRONG
    ]


def test_names_and_ideas():
    """120 jobs at least; each says its idea in a line."""
    all_entries = entries()

    assert len(all_entries) >= 120
    assert all(0 < len(entry.idea) < 100 and "\n" not in entry.idea for entry in all_entries)


@pytest.fixture(scope="module")
def short_sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """One device runs each job once for all plans, in one process."""
    sweep = Sweep(tmp_path_factory.mktemp("corpus"))
    sweep.learn(
        [(entry, WHOLE) for entry in entries(",".join((*sum(PARTS.values(), ()), *OWN_WEIGHTS)))]
    )
    return sweep


def _parts() -> list[Any]:
    """Each plan with a part of the jobs, one where the model is split; every plan with all of them is slow."""
    parts = [pytest.param(plan, jobs, id=f"{plan}-some") for plan, jobs in PARTS.items()]
    return [
        *parts,
        *(
            pytest.param(plan, SHORT_JOBS, id=f"{plan}-all", marks=pytest.mark.slow)
            for plan in SHORT_PLANS
        ),
    ]


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module"
)  # torch tells users whose block returns a view of it
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plan", "jobs"), _parts())
def test_a_short_form_of_the_sweep(short_sweep: Sweep, plan: str, jobs: tuple[str, ...]):
    """Jobs under one of five plans each, or all 22 under all of them."""
    assert not _wrong(short_sweep, ",".join(jobs), plan)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("jobs", "plan"),
    [
        ("blocks_write_to_their_input,inner_loop", "shard=2"),
        (",".join(OWN_WEIGHTS), "single recompute=full"),
    ],
)
def test_blocks_that_do_not_run_as_they_are(short_sweep: Sweep, jobs: str, plan: str):
    """FSDP hands a unit views of its inputs and its own weights, and recompute runs a block twice on them. A block may
    change what it is given, or be run with other weights."""
    cells = short_sweep.run(entries(jobs), [plan])

    assert {cell.job: cell.reason for cell in cells if cell.verdict != EXACT} == {}


def test_a_plan_that_cuts_the_batch_equals_one_device_that_does(tmp_path: Path):
    """A coupled job is not exact, and its cell says so."""
    (cell,) = Sweep(tmp_path).run(entries("watched_inputs"), ["data=2"])

    assert cell.verdict == COUPLED, cell.reason


def test_a_bug_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replicas whose buffers never meet leave other buffers than one device."""
    monkeypatch.setattr(ChangingBuffers, "meet", lambda *_, **options: None)

    (cell,) = Sweep(tmp_path).run(entries("watched_inputs"), ["data=2"])

    assert cell.verdict == WRONG
    assert "'greatest'" in cell.reason


def test_a_failure_is_a_wrong_cell_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An error that is no refusal."""

    def fail(self: nn.Module, *args: object, **options: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(torch.optim.NAdam, "step", fail)
    sweep = Sweep(tmp_path)
    monkeypatch.setattr(sweep, "learn", lambda wanted: None)
    wrong, *_ = sweep._under(entries("nadam"), "single")

    assert wrong[1].verdict == WRONG and "broken" in wrong[1].reason


def test_the_plain_loop_cuts_as_it_is_told():
    """An exact job is the same however it is cut; a coupled one is not."""
    exact, coupled = entries("clip_sometimes")[0].make(), entries("batch_norm")[0].make()
    cut = Cut((2, 1), 2)

    assert torch.allclose(
        run_plainly(exact).state["last.weight"], run_plainly(exact, cut).state["last.weight"]
    )
    assert not torch.allclose(
        run_plainly(coupled).state["last.weight"], run_plainly(coupled, cut).state["last.weight"]
    )
    assert [sum(map(len, pieces)) for pieces in cut.pieces(12)] == [8, 4]
    assert WHOLE.pieces(5) == [[range(5)]]


@pytest.mark.slow
def test_an_output_comes_from_the_part_that_has_it(tmp_path: Path):
    """Of this job's two parts the first one has it: validation data waited for the last one's."""
    (cell,) = Sweep(tmp_path).run(entries("computed_consistency"), ["place=2"])
    assert cell.verdict == EXACT, cell.reason


@pytest.mark.slow
def test_rows_of_all_workers_are_gathered_by_servers(tmp_path: Path):
    """A step's own `ctx.gather` sums a matrix: server 0 took lists of numbers alone, and the worker was lost."""
    (cell,) = Sweep(tmp_path).run(entries("simclr"), ["servers=1 workers=2"])
    assert cell.verdict == EXACT, cell.reason


def test_the_page(tmp_path: Path):
    """Signs, shares and reasons."""
    jobs = entries("adamw,lbfgs")
    cells = Sweep(tmp_path).run(jobs, ["servers=1 workers=2"])

    assert cells[0].verdict == EXACT
    assert "50.0 %" in page(jobs, cells) and "LBFGS" in page(jobs, cells)
    assert table(jobs, cells).splitlines()[-2:][0].endswith("=")
    assert kind_of("'a.b' of 3") == kind_of("'c' of 44")


def test_a_page_gives_its_verdicts_back(tmp_path: Path):
    """A sweep can keep the cells of a page that it doesn't run again. A job that the corpus lost isn't kept."""
    jobs = entries("adamw,batch_norm,lbfgs")
    written = [
        Cell("adamw", "single", EXACT),
        Cell("batch_norm", "single", WRONG),
        Cell("adamw", "data=2", EXACT),
        Cell("batch_norm", "data=2", COUPLED),
        Cell("lbfgs", "data=2", REFUSED, "one has no closure"),
    ]
    text = page(jobs, written, kept=3)
    path = tmp_path / "page.md"
    path.write_text(text.replace("| adamw |", "| not_a_job |"))

    assert "3 of the 5 cells are from earlier runs" in text
    assert sorted((cell.job, cell.plan, cell.verdict) for cell in cells_of_page(text)) == sorted(
        (cell.job, cell.plan, cell.verdict) for cell in written
    )
    assert {cell.job for cell in known_cells(path)} == {"batch_norm", "lbfgs"}
    assert "earlier runs" not in page(jobs, written)


def test_a_retry_runs_what_a_page_refuses_or_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The page then has all cells, and says how many it had before."""
    asked: list[list[str]] = []

    def run(sweep: Sweep, jobs: Sequence[Entry], plans: Sequence[str]) -> list[Cell]:
        asked.append([entry.name for entry in jobs])
        return [Cell(entry.name, plan, EXACT) for entry in jobs for plan in plans]

    file = tmp_path / "page.md"
    file.write_text(
        page(
            entries("adamw,lbfgs"),
            [Cell("adamw", "single", EXACT), Cell("lbfgs", "single", REFUSED)],
        )
    )
    monkeypatch.setattr(Sweep, "run", run)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "corpus",
            "--jobs",
            "adamw,nadam,lbfgs",
            "--plans",
            "single",
            "--retry",
            str(file),
            "--write",
            str(file),
        ],
    )

    assert main() == 0
    assert asked == [["nadam", "lbfgs"]]
    assert "1 of the 3 cells are from earlier runs" in file.read_text()
    assert {cell.job: cell.verdict for cell in cells_of_page(file.read_text())} == dict.fromkeys(
        ("adamw", "nadam", "lbfgs"), EXACT
    )


def test_the_page_names_every_job():
    """A job without cells on the page is added by `python -m tests.corpus --retry PAGE --write PAGE`."""
    cells = cells_of_page(WHAT_WORKS.read_text())
    on_page = {cell.job for cell in cells}

    assert [entry.name for entry in entries() if entry.name not in on_page] == []
    assert list(dict.fromkeys(cell.plan for cell in cells)) == list(PLANS)
    assert len(cells) == len(on_page) * len(PLANS)


def test_pages_that_quote_the_number_of_jobs_agree():
    """The page of the corpus, and the sentences of others that lead there."""
    number_of_jobs = str(len({cell.job for cell in cells_of_page(WHAT_WORKS.read_text())}))
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    quoted = {
        path.name: numbers
        for path in pages
        if (numbers := re.findall(r"(\d+) small\s+jobs", path.read_text()))
    }

    assert {"what-works.md", "limits.md", "plans.md", "job.md"} <= set(quoted)
    assert {
        name: numbers for name, numbers in quoted.items() if set(numbers) != {number_of_jobs}
    } == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plan", PLANS)
def test_the_whole_sweep(tmp_path: Path, plan: str):
    """Every job."""
    assert not _wrong(Sweep(tmp_path), "*", plan)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_runs_go_on_under_other_plans(tmp_path: Path):
    """Stopped at an odd step under one plan, gone on under another."""
    cells = resume_check(Sweep(tmp_path))

    assert not [
        f"{cell.job}, {cell.plan}: {cell.reason}" for cell in cells if cell.verdict == WRONG
    ]


def test_mutants_fit():
    """Each planted bug of scripts/mutants.toml has one place in the sources."""
    mutants = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text())["mutant"]
    texts = {
        mutant["file"]: (ROOT / "src" / "paceline" / mutant["file"]).read_text()
        for mutant in mutants
    }

    assert len(mutants) >= 45
    assert not [
        mutant["name"] for mutant in mutants if texts[mutant["file"]].count(mutant["old"]) != 1
    ]
