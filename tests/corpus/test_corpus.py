"""No job of the corpus gives wrong numbers under a plan, hangs, or fails after its first update."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.runtime.buffers import ChangingBuffers

from .page import kind_of, page, table
from .plain import WHOLE, Cut, run_plainly
from .registry import entries
from .resumed import resume_check
from .sweep import COUPLED, EXACT, PLANS, WRONG, Sweep

pytestmark = pytest.mark.checked_runs
SHORT_JOBS = ("residual", "adam_fused", "groups_by_kind", "clip_sometimes", "schedule_one_cycle", "last_window_of_one",
              "stream", "nested_with_strings", "ignored_targets", "variational", "weight_norm", "thrice_shared",
              "forward_hook", "causal_attention", "unet", "idle_expert", "padded_tokens", "three_models",
              "gan_with_penalty", "actor_critic", "graph_labels", "q_learning")
SHORT_PLANS = {  # and whether they split the model
    "data=2 shares=3:1": False, "shard=2": False, "single recompute=full": False, "tensor=2": True,
    "pipeline=2 microbatches=1": True}
PARTS = {plan: SHORT_JOBS[first::len(SHORT_PLANS)][:1 if splits else 4]
         for first, (plan, splits) in enumerate(SHORT_PLANS.items())}
PARTS["single recompute=full"] += tuple(job for job in SHORT_JOBS if job not in sum(PARTS.values(), ()))
OWN_WEIGHTS = ("blocks_write_to_their_input", "skips_in_a_list", "inner_loop")


def _wrong(sweep: Sweep, jobs: str, *plans: str) -> list[str]:
    return [f"{cell.job} under {cell.plan}: {cell.reason}" for cell in sweep.run(entries(jobs), plans)
            if cell.verdict == WRONG]


def test_names_and_ideas():
    """120 jobs at least; each says its idea in a line."""
    all_entries = entries()

    assert len(all_entries) >= 120
    assert all(0 < len(entry.idea) < 100 and "\n" not in entry.idea for entry in all_entries)


@pytest.fixture(scope="module")
def short_sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """One device runs each job once for all plans, in one process."""
    sweep = Sweep(tmp_path_factory.mktemp("corpus"))
    sweep.learn([(entry, WHOLE) for entry in entries(",".join((*sum(PARTS.values(), ()), *OWN_WEIGHTS)))])
    return sweep


def _parts() -> list[Any]:
    """Each plan with a part of the jobs, one where the model is split; every plan with all of them is slow."""
    parts = [pytest.param(plan, jobs, id=f"{plan}-some") for plan, jobs in PARTS.items()]
    return [*parts, *(pytest.param(plan, SHORT_JOBS, id=f"{plan}-all", marks=pytest.mark.slow) for plan in SHORT_PLANS)]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch tells users whose block returns a view of it
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plan", "jobs"), _parts())
def test_a_short_form_of_the_sweep(short_sweep: Sweep, plan: str, jobs: tuple[str, ...]):
    """Jobs under one of five plans each, or all 22 under all of them."""
    assert not _wrong(short_sweep, ",".join(jobs), plan)


@pytest.mark.parametrize(("jobs", "plan"), [("blocks_write_to_their_input,inner_loop", "shard=2"),
                                            (",".join(OWN_WEIGHTS), "single recompute=full")])
def test_blocks_that_do_not_run_as_they_are(short_sweep: Sweep, jobs: str, plan: str):
    """FSDP hands a unit views of its inputs and its own weights, and recompute runs a block twice on them. A block may
    change what it is given, or be run with other weights."""
    cells = short_sweep.run(entries(jobs), [plan])

    assert {cell.job: cell.reason for cell in cells if cell.verdict != EXACT} == {}


def test_a_plan_that_cuts_the_batch_equals_one_device_that_does(tmp_path: Path):
    """A coupled job is not exact, and its cell says so."""
    cell, = Sweep(tmp_path).run(entries("watched_inputs"), ["data=2"])

    assert cell.verdict == COUPLED, cell.reason


def test_a_bug_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replicas whose buffers never meet leave other buffers than one device."""
    monkeypatch.setattr(ChangingBuffers, "meet", lambda *_, **options: None)

    cell, = Sweep(tmp_path).run(entries("watched_inputs"), ["data=2"])

    assert cell.verdict == WRONG
    assert "'greatest'" in cell.reason


def test_a_failure_is_a_wrong_cell_and_the_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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

    assert torch.allclose(run_plainly(exact).state["last.weight"], run_plainly(exact, cut).state["last.weight"])
    assert not torch.allclose(run_plainly(coupled).state["last.weight"], run_plainly(coupled, cut).state["last.weight"])
    assert [sum(map(len, own)) for own in cut.pieces(12)] == [8, 4]
    assert WHOLE.pieces(5) == [[range(5)]]


def test_the_page(tmp_path: Path):
    """Signs, shares and reasons."""
    jobs = entries("adamw,lbfgs")
    cells = Sweep(tmp_path).run(jobs, ["server=1 workers=2"])

    assert cells[0].verdict == EXACT
    assert "50.0 %" in page(jobs, cells) and "LBFGS" in page(jobs, cells)
    assert table(jobs, cells).splitlines()[-2:][0].endswith("=")
    assert kind_of("'a.b' of 3") == kind_of("'c' of 44")


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

    assert not [f"{cell.job}, {cell.plan}: {cell.reason}" for cell in cells if cell.verdict == WRONG]


def test_mutants_fit():
    """Each planted bug of scripts/mutants.toml has one place in the sources."""
    root = Path(__file__).parents[2]
    mutants = tomllib.loads((root / "scripts" / "mutants.toml").read_text())["mutant"]
    texts = {mutant["file"]: (root / "src" / "paceline" / mutant["file"]).read_text() for mutant in mutants}

    assert len(mutants) >= 45
    assert not [mutant["name"] for mutant in mutants if texts[mutant["file"]].count(mutant["old"]) != 1]
