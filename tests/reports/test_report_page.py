"""A report holds the run's figures, escapes what it shows, and asks for nothing from the network."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline.api.summary_table import card
from paceline.base.errors import UsageError
from paceline.cluster.devices import Device
from paceline.planner.estimate import Estimate
from paceline.planner.rank_kinds import MemoryNeed
from paceline.planner.search import Candidate, RankedPlans
from paceline.reports import charts
from paceline.reports.diagnosis import CORES, DATA, MESSAGES, SAVES, diagnose, step_parts
from paceline.reports.page import Alternatives, write
from paceline.reports.record import RunRecord
from paceline.runs.provenance import origin
from paceline.strategies.plan import Plan

pytestmark = pytest.mark.usefixtures("charts_drawn_once")

SUMMARY: dict[str, Any] = {
    "plan": "data=2",
    "world_size": 2,
    "steps": 40,
    "samples": 400,
    "samples_per_s": 1000.5,
    "step_s": 0.010,
    "input_s": 0.0002,
    "final_loss": 0.25,
    "validation_loss": 0.3,
    "metrics": {"accuracy": 0.97},
    "peak_memory_bytes": 50 << 20,
    "save_blocked_s": 0.004,
    "wall_s": 1.0,
    "check": {"verdict": "passed", "reason": "", "seconds": 0.1},
}
PREDICTED = {
    "step_s": 0.009,
    "step_s_low": 0.005,
    "step_s_high": 0.02,
    "peak_memory_bytes": 45 << 20,
    "breakdown": {"compute": 0.003, "optimizer": 0.001, "communication": 0.005},
    "ranks": [{"rank": "each rank", "ledger": {"parameters": 1 << 20, "runtime": 40 << 20}}],
}


def written(
    folder: Path, *, name: str = "run", summary: dict[str, Any] | None = SUMMARY, **files: Any
) -> Path:
    """A run folder."""
    path = folder / name
    path.mkdir()
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "time": 1.0 * step,
            "epoch": 0,
            "samples": 10 * step,
            "lr": 1 / step,
            "step_s": 0.01,
            "loss": 1 / step,
        }
        for step in range(1, 41)
    ]
    rows += [
        {"step": 40, "validation_loss": 0.3, "metrics": {"accuracy": 0.97}},
        {"step": 40, "saved": True},
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    documents = {
        "plan": {"plan": "data=2", "world_size": 2, "devices": "cpu:0,cpu:1"},
        "predicted": PREDICTED,
        **files,
    }
    for stem, document in documents.items():
        (path / f"{stem}.json").write_text(json.dumps(document))
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_its_figures_are_those_of_the_summary(tmp_path: Path):
    text = write(written(tmp_path)).read_text()
    inside = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL
    )
    assert inside is not None and json.loads(inside[1]) == SUMMARY
    for shown in ("1000.5", "0.25", "0.97", "52,428,800", "passed"):
        assert f"<td>{shown}</td>" in text
    assert "limited by messages between ranks" in text


def test_it_is_one_file_without_network(tmp_path: Path):
    """Nothing is loaded: no address but names of XML."""
    text = write(written(tmp_path)).read_text()
    addresses = set(re.findall(r'https?://[^"\s<)]+', text))
    assert all(address.startswith("http://www.w3.org/") for address in addresses)
    assert not re.search(r"<(script|img|iframe|link)[^>]*(src|href)=[\"'](?!data:|#)", text)


def test_what_a_run_holds_is_escaped(tmp_path: Path):
    """A name or a message with markup is shown and does nothing."""
    attack = "<script>alert(1)</script>"
    path = written(
        tmp_path,
        name="<b>run<b>",
        summary={**SUMMARY, "devices": attack, "metrics": {attack: 1.0}},
        origin={"command": attack},
    )
    text = write(path, alternatives=Alternatives(note=attack)).read_text()
    assert attack not in text and "<b>run" not in text


def test_a_run_that_did_not_end_has_a_report(tmp_path: Path):
    """One that was killed leaves no summary, one that failed says why; both say what is kept."""
    text = write(written(tmp_path, summary=None)).read_text()
    assert (
        "this run did not end" in text and "recorded 40 steps" in text and "no checkpoint" in text
    )
    failure = {
        "reason": "peer_lost",
        "message": "it was killed by <b>SIGKILL</b>\nmore",
        "rank": 1,
        "step": 17,
    }
    path = written(tmp_path, name="failed", summary={"plan": "data=2", "failure": failure})
    (path / "checkpoints" / "step-15").mkdir(parents=True)
    (path / "checkpoints" / "step-15" / "COMMIT").write_text("{}")
    text = write(path).read_text()
    assert "rank 1 failed in step 17 (peer_lost)" in text and "killed by &lt;b&gt;SIGKILL" in text
    assert (
        f"--run {path} --resume goes on from step 15" in text
        and "<b>kept</b> the checkpoint of step 15" in text
    )


def test_the_cause_of_a_failure_is_no_line_of_its_traceback(tmp_path: Path):
    trace = 'Traceback (most recent call last):\n  File "job.py", line 7, in on_step\n    raise\n'
    failure = {
        "reason": "callback_error",
        "message": trace + "the callback Mine failed in on_step",
        "rank": 0,
        "step": 3,
    }
    text = write(written(tmp_path, summary={"plan": "single", "failure": failure})).read_text()

    assert "<b>why</b> the callback Mine failed in on_step" in text


def test_starts_and_what_they_undid_are_shown(tmp_path: Path):
    """A start goes on from step 5, after the one before it reached step 7."""
    path = written(tmp_path)
    start = {
        "plan": "data=2",
        "world_size": 2,
        "seed": 0,
        "order": "shuffle",
        "num_samples": 100,
        "time": 1.8e9,
    }
    lines = [
        {"launch": 1, "after": 0, **start},
        *(
            {"launch": 1, "step": step, "epoch": 0, "start": 10 * step, "count": 10}
            for step in range(1, 8)
        ),
        {"launch": 2, "after": 5, **start},
    ]
    (path / "journal.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + "{damaged\n"
    )
    text = write(path).read_text()
    row = re.search(r'<tr><th scope="row">2</th>(.*?)</tr>', text)
    assert row is not None
    assert re.findall(r"<td>(.*?)</td>", row[1]) == [
        "2027-01-15 08:00:00 UTC",
        "data=2",
        "2",
        "5",
        "2",
    ]


def test_staleness_and_workers_are_shown(tmp_path: Path):
    summary = {
        **SUMMARY,
        "staleness": {"0": 3, "10": 1, "2": 4},
        "workers": {"0": {"waited_for_step_s": 0.5}, "1": {"waited_for_step_s": None}},
    }
    path = written(tmp_path, summary=summary)
    (path / "events.jsonl").write_text(
        '{"event": "worker lost", "worker": 1, "time": 1.8e9}\n{"event": "x"}\n'
    )
    text = write(path).read_text()
    assert "gradients by updates missed" in text and "<td>0.5</td>" in text
    assert '<th scope="row">worker lost</th><td>1</td><td>2027-01-15 08:00:00 UTC</td>' in text


def test_a_rank_that_is_slower_is_named(tmp_path: Path):
    """Of a traced run: rank 1 computes twice as long as the others."""
    events = [
        {
            "ph": "X",
            "pid": rank,
            "cat": "forward",
            "ts": 0.0,
            "dur": 2000.0 if rank == 1 else 1000.0,
        }
        for rank in range(3)
    ]
    text = write(written(tmp_path, trace={"traceEvents": events})).read_text()
    assert "Rank 1 computed for 2.00 times as long as the others." in text


def test_a_picture_of_the_folder_runs_nothing(tmp_path: Path):
    """It is an image, in which browsers run no script."""
    path = written(tmp_path)
    (path / "schedule.svg").write_text("<svg><script>alert(1)</script></svg>")
    assert "alert" not in write(path).read_text()


def test_a_metric_may_have_any_name(tmp_path: Path):
    names = [r"$\frac$", "a$b$", "_hidden", "genau ± 1", "x" * 300]
    path = written(tmp_path)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 41, "validation_loss": 0.2, "metrics": dict.fromkeys(names, 0.5)})
            + "\n"
        )
    text = write(path).read_text()
    assert [name for name in names if f"<figcaption>{name}</figcaption>" not in text] == []


def test_a_faster_plan_is_the_next_thing_to_try(tmp_path: Path):
    plans = Alternatives([("data=2", 1.0, 1 << 20), ("shard=2", 0.8, 1 << 20)])
    text = write(written(tmp_path), alternatives=plans).read_text()
    assert "&#39;shard=2&#39;: its step is predicted to take 0.80" in text
    assert "<b>gain</b> 1.25 times as fast, as predicted" in text
    none = write(
        written(tmp_path, name="other"), alternatives=Alternatives(list(plans.plans)[:1])
    ).read_text()
    assert "of the plans priced for these devices, none is predicted to be 5 % faster" in none


def test_plans_that_were_considered_are_listed(tmp_path: Path):
    """They are known where the run's plan was chosen, also of a job that was made in Python."""
    run = written(tmp_path)
    considered = [
        {"plan": plan, "step_s": step_s, "peak_memory_bytes": 1 << 20}
        for plan, step_s in [("data=2", 0.04), ("shard=2", 0.06)]
    ]
    predicted = {"step_s": 0.04, "considered": considered}
    (run / "predicted.json").write_text(json.dumps(predicted))
    text = paceline.report(run, other_plans=False).read_text()
    assert 'row">shard=2</th><td>1.50 of' in text


def test_other_exact_plans_are_priced_by_what_the_run_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run's own plan is compared whether or not the search has it; relaxed plans, of which any number may be
    faster, are left out."""

    def estimate(step_s: float) -> Estimate:
        need = MemoryNeed("each rank", Device("cpu", 0, 1 << 30), {"parameters": 1 << 20})
        return Estimate(
            step_s, 1 << 20, need.ledger, {"compute": step_s}, (), (need,), step_s / 2, 2 * step_s
        )

    def candidate(text: str, step_s: float) -> Candidate:
        return Candidate(Plan.parse(text), estimate(step_s))

    ranked = [
        *(candidate(f"data=2 local={steps}", 0.001 * steps) for steps in range(2, 20)),
        candidate("shard=2", 0.02),
    ]
    problem = SimpleNamespace(
        search=lambda cluster: RankedPlans(list(ranked)),
        price=lambda plan, cluster: estimate(0.04),
        profile=None,
        job=SimpleNamespace(batch=8, precision="float32"),
    )
    monkeypatch.setattr(
        "paceline.api.report.PlanningProblem", SimpleNamespace(of=lambda *args, **options: problem)
    )
    monkeypatch.setattr("paceline.api.report.open_job", lambda file: (file, None))
    monkeypatch.setattr("paceline.api.report.with_links", lambda cluster: cluster)
    run = written(
        tmp_path,
        job={"path": "job.py", "function": "job", "settings": {}},
        origin={"host": platform.node()},
    )
    text = paceline.report(run).read_text()
    assert 'row">data=2</th><td>1.00 of' in text
    assert 'row">shard=2</th><td>0.5' in text and "local=" not in text


@pytest.mark.parametrize("name", ["run/summary.json", "run", "job.py", "run/plan.json/page.html"])
def test_a_page_replaces_pages_alone(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    """It is refused before anything is priced."""
    run, job = written(tmp_path), tmp_path / "job.py"
    job.write_text("a job")
    monkeypatch.setattr("paceline.api.report._alternatives", None)
    for _ in range(2):
        paceline.report(run, output=tmp_path / "new" / "page.html", other_plans=False)
    with pytest.raises(UsageError, match="can't write the page"):
        paceline.report(run, output=tmp_path / name)
    assert job.read_text() == "a job" and json.loads((run / "summary.json").read_text()) == SUMMARY


def test_a_study_has_a_report(tmp_path: Path):
    trials = [
        {
            "number": n,
            "state": "complete",
            "params": {"lr": 0.1 * n},
            "value": 1.0 / (n + 1),
            "plan": "single",
        }
        for n in range(3)
    ]
    (tmp_path / "study.json").write_text(
        json.dumps(
            {
                "study": "s",
                "objectives": [{"name": "validation_loss", "direction": "minimize"}],
                "trials": trials,
                "best": {
                    "trial": 2,
                    "value": 1 / 3,
                    "params": {"lr": 0.2},
                    "command": "paceline train",
                },
                "importances": {"lr": 1.0},
            }
        )
    )
    text = write(tmp_path).read_text()
    assert "trial 2 is the best: validation_loss 0.333333" in text and "the best so far" in text


def test_another_folder_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="not the folder of a run, a search or a proof"):
        write(tmp_path)


def test_a_run_says_which_code_it_comes_from():
    """That which runs, and not a copy of another version that is installed."""
    assert origin(None)["paceline"] == paceline.__version__


def test_an_axis_over_powers_of_ten_has_plain_numbers():
    text = charts.lines({"loss": ([1, 2, 3], [100.0, 1.0, 0.01])}, x="step", y="loss", log=True)
    assert ">0.01<" in text and "math" not in text


# --- What limits a run ------------------------------------------------------------------------------------------


def record(**changes: Any) -> RunRecord:
    steps = tuple({"step": step, "loss": 1.0, "step_s": 0.01} for step in range(1, 41))
    return RunRecord(
        Path("run"), {"plan": "data=2", "world_size": 2}, {**SUMMARY, **changes}, PREDICTED, steps
    )


def test_the_longest_part_limits():
    diagnosis = diagnose(record())
    assert diagnosis.limit == MESSAGES and diagnosis.gain == pytest.approx(
        1 / (1 - diagnosis.share)
    )
    assert diagnosis.share == pytest.approx((0.010 - 0.0002) * 5 / 9 / (0.010 + 0.0001))


@pytest.mark.parametrize(
    ("changes", "limit", "gain"),
    [
        ({"input_s": 0.002}, DATA, 10.1 / 8.1),
        ({"save_blocked_s": 0.2}, SAVES, 15 / 10),
        ({"core_wait_s": 0.5}, CORES, 10.1 / 5.2),
    ],
)
def test_what_can_be_avoided_is_named_first(changes: dict[str, Any], limit: str, gain: float):
    """Although messages take longer. The gain is what steps are faster without it."""
    diagnosis = diagnose(record(**changes))
    assert diagnosis.limit == limit and diagnosis.gain == pytest.approx(gain)


def test_a_trace_measures_what_a_prediction_divides():
    def event(rank: int, kind: str, start: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "pid": rank, "cat": kind, "ts": start, "dur": length}

    traced = (
        event(0, "forward", 0, 60),
        event(0, "reduce", 60, 40),
        event(1, "forward", 0, 30),
        event(1, "reduce", 50, 50),
    )
    parts = {
        part.name: part
        for part in step_parts(
            RunRecord(
                Path("run"),
                {},
                {**SUMMARY, "input_s": 0.0, "save_blocked_s": 0.0},
                PREDICTED,
                traced=traced,
            )
        )
    }
    assert {name: part.seconds for name, part in parts.items()} == pytest.approx(
        {"computing": 0.0045, MESSAGES: 0.0045, "waiting for other ranks": 0.001}
    )
    assert all(part.is_measured for part in parts.values())


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("compute", "computing"),
        ("optimizer", "the optimizer"),
        ("communication", "messages between ranks"),
        ("bubble", "waiting for other ranks"),
        ("unexplained", "time that no part explains"),
    ],
)
def test_each_part_of_a_prediction_may_be_the_limit(tmp_path: Path, part: str, name: str):
    """A pipeline's bubble, and what calibrations found beyond all parts, too."""
    predicted = {**PREDICTED, "breakdown": {"compute": 0.001, part: 0.008}}
    diagnosis = diagnose(replace(record(), predicted=predicted))
    page = write(written(tmp_path, predicted=predicted)).read_text()

    assert diagnosis.verdict == f"this run is limited by {name}" and diagnosis.next
    assert name in page and f">{part}<" not in page


def test_a_few_steps_say_nothing():
    assert diagnose(record(steps=5)).limit is None


@pytest.mark.parametrize("changes", [{}, {"steps": 5}, {"input_s": 0.002}])
def test_a_card_has_five_lines(tmp_path: Path, changes: dict[str, Any]):
    """Whatever is said; so has that of a run that did not end."""
    for name, summary in (("ended", {**SUMMARY, **changes}), ("killed", None)):
        words = [
            line.split()[0]
            for line in card(written(tmp_path, name=name, summary=summary)).splitlines()
            if not line.startswith(" ")
        ]
        assert words == ["verdict", "why", "next", "kept" if summary is None else "gain", "report"]


def test_small_parts_are_not_named(tmp_path: Path):
    """Parts below 2 % of a step are left out; the page's table has them."""
    predicted = {
        **PREDICTED,
        "breakdown": {"compute": 0.008, "optimizer": 0.0016, "bubble": 0.0001},
    }
    why = diagnose(replace(record(), predicted=predicted)).why
    assert "the optimizer" in why and "waiting" not in why


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1400])
def test_a_browser_shows_it_without_errors(tmp_path: Path, width: int):
    """No message in the console, and a picture that is not blank."""
    if (browser := shutil.which("chromium")) is None:
        pytest.skip("chromium is not installed: apt install chromium")
    page, picture = write(written(tmp_path)), tmp_path / "page.png"
    shown = subprocess.run(
        [
            browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--window-size={width},2000",
            f"--screenshot={picture}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert picture.stat().st_size > 20_000 and "CONSOLE" not in shown.stderr
