"""A report holds the run's figures, escapes what it shows, and asks for nothing from the network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.api.summary_table import card
from paceline.base.errors import UsageError
from paceline.reports import charts
from paceline.reports.diagnosis import CORES, DATA, MESSAGES, SAVES, diagnose, step_parts
from paceline.reports.html import commands
from paceline.reports.page import write
from paceline.reports.record import RunRecord
from paceline.runs.provenance import origin

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


@pytest.mark.slow
def test_its_figures_are_those_of_the_summary(tmp_path: Path):
    text = write(written(tmp_path)).read_text()
    inside = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL
    )
    assert inside is not None and json.loads(inside[1]) == SUMMARY
    cells = re.findall(r"<td[^>]*>(.*?)</td>", text)
    assert [
        shown
        for shown in ("1,000", "10 ms", "0.25", "0.97", "50 MiB", "passed")
        if shown not in cells
    ] == []
    assert "limited by messages between ranks" in text


def test_six_figures_with_units_come_first(tmp_path: Path):
    """Beside what was predicted, before the charts; the table of all figures is folded, after them."""
    text = write(written(tmp_path)).read_text()
    tiles = re.findall(
        r'<div><span class="quiet">(.*?)</span><b>(.*?)</b><span class="quiet">(.*?)</span>', text
    )
    assert tiles == [
        ("validation loss", "0.3", "training 0.25"),
        ("accuracy", "0.97", "validation"),
        ("samples/s", "1,000", "400 samples"),
        ("step time", "10 ms", "predicted 5 to 20 ms"),
        ("peak memory", "50 MiB", "predicted 45 MiB"),
        ("wall time", "1 s", "40 steps"),
    ]
    assert text.index("<b>0.97</b>") < text.index("<figure>") < text.index("<details>")
    assert "<td>step_s</td>" not in text and ">peak_memory_bytes<" not in text


def test_a_title_tells_runs_apart(tmp_path: Path):
    text = write(written(tmp_path, origin={"began": "2026-11-28T01:02:03Z"})).read_text()
    assert f"<h1>{tmp_path.name}/run · data=2</h1>" in text
    assert "2 CPU ranks · 40 steps · 28 Nov 2026 · finished" in text


def test_a_source_is_one_line(tmp_path: Path):
    """The details, in which nothing is JSON, are folded."""
    git = {"commit": "28e8bc1" + 33 * "0", "branch": "main", "modified": 0}
    job = {"path": "/a/examples/01_digits.py", "function": "job", "settings": {}}
    text = write(written(tmp_path, origin={"git": git, "command": "x"}, job=job)).read_text()
    assert "<p>examples/01_digits.py:job at 28e8bc1 (clean)</p>" in text
    assert "{&#34;commit" not in text and 'row">git branch</th><td class="n">main' in text


def test_commands_are_code():
    """Each command and option in a sentence, with its values; one click selects it."""
    said = {
        "paceline plan JOB prices plans; --relaxed also": ["paceline plan JOB", "--relaxed"],
        "with --run 'a b' --resume goes on": ["--run 'a b' --resume"],
        "--trace 5 measures": ["--trace 5"],
        "--plan 'server=2 x=1': its step": ["--plan 'server=2 x=1'"],
        "paceline train a/b.py:job --set lr=0.1 --plan single": [
            "paceline train a/b.py:job --set lr=0.1 --plan single"
        ],
        "nothing to do": [],
    }
    assert {text: commands(text)[1::2] for text in said} == said


def test_one_part_has_one_colour_on_every_page(tmp_path: Path):
    """In charts, whatever else is there, and beside its row of the table, which is the legend."""
    alone = charts.stacked({"a": {MESSAGES: 1.0}}, title="", unit="ms").svg
    beside = charts.stacked({"a": {"computing": 1.0, MESSAGES: 1.0}}, title="", unit="ms").svg
    assert "var(--series-1)" in alone and "var(--series-0)" not in alone
    assert "var(--series-1)" in beside and "var(--series-0)" in beside
    text = write(written(tmp_path)).read_text()
    assert f'<i style="background:var(--series-1)"></i>{MESSAGES}</th>' in text
    assert '<i style="background:var(--series-3)"></i>parameters</th>' in text


def test_one_long_step_flattens_no_chart():
    """The axis ends where nearly all points are, and says how far the others go; a median is drawn over the line."""
    steps, took = list(range(100)), [350.0, *99 * [10.0]]
    clipped = charts.lines({"measured": (steps, took)}, title="ms", clipped=True).svg
    plain = charts.lines({"measured": (steps, took)}, title="ms").svg
    largest = [
        max(map(float, re.findall(r">([\d.]+)</text>", drawn))) for drawn in (clipped, plain)
    ]
    assert ">up to 350<" in clipped and largest[0] < 100 and largest[1] > 200
    short = charts.lines({"measured": (steps[:9], took[:9])}, title="ms").svg
    assert clipped.count("stroke: var(--series-0)") == 2 * short.count("stroke: var(--series-0)")


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
    text = write(path).read_text()
    assert attack not in text and "<b>run" not in text


def test_a_run_that_did_not_end_has_a_report(tmp_path: Path):
    """One that was killed leaves no summary, one that failed says why; both say what is kept."""
    text = write(written(tmp_path, summary=None)).read_text()
    assert (
        "this run did not end" in text and "recorded 40 steps" in text and "no checkpoint" in text
    )
    assert "step time</span><b>10 ms</b>" in text and "steps</span><b>40</b>" in text
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
        f"--run {path} --resume</code> goes on from step 15" in text
        and "<b>kept</b> <span>the checkpoint of step 15" in text
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

    assert "<b>why</b> <span>the callback Mine failed in on_step" in text


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
    assert re.findall(r"<td[^>]*>(.*?)</td>", row[1]) == [
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
    assert "gradients by updates that they missed" in text and ">500 ms</td>" in text
    assert "2 workers make a step of 2 updates" in text and ">12.5 %</td>" in text
    assert (
        '<th scope="row">worker lost</th><td class="n">1</td><td>2027-01-15 08:00:00 UTC</td>'
        in text
    )


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


def chosen_among(run: Path, plans: dict[str, float]) -> Path:
    """The run, whose plan was chosen among these, each with the seconds of its step."""
    considered = [
        {"plan": plan, "step_s": step_s, "peak_memory_bytes": 1 << 20}
        for plan, step_s in plans.items()
    ]
    predicted = {**PREDICTED, "step_s": 0.04, "considered": considered}
    (run / "predicted.json").write_text(json.dumps(predicted))
    return run


def test_a_faster_plan_is_the_next_thing_to_try(tmp_path: Path):
    run = chosen_among(written(tmp_path), {"data=2": 0.04, "shard=2": 0.032})
    text = write(run).read_text()
    assert "&#39;shard=2&#39;</code>: its step is predicted to take 0.80" in text
    assert "<b>gain</b> <span>1.25 times as fast, as predicted" in text
    text = write(chosen_among(run, {"data=2": 0.04, "shard=2": 0.039})).read_text()
    assert "its step is predicted to take" not in text


def test_plans_that_were_considered_are_listed(tmp_path: Path):
    """They are known where the run's plan was chosen, also of a job that was made in Python."""
    run = chosen_among(written(tmp_path), {"data=2": 0.04, "shard=2": 0.06})
    assert 'row">shard=2</th><td class="n">1.50 ×' in paceline.report(run).read_text()


@pytest.mark.parametrize("name", ["run/summary.json", "run", "job.py", "run/plan.json/page.html"])
def test_a_page_replaces_pages_alone(tmp_path: Path, name: str):
    run, job = written(tmp_path), tmp_path / "job.py"
    job.write_text("a job")
    for _ in range(2):
        paceline.report(run, output=tmp_path / "new" / "page.html")
    with pytest.raises(UsageError, match="can't write the page"):
        paceline.report(run, output=tmp_path / name)
    assert job.read_text() == "a job" and json.loads((run / "summary.json").read_text()) == SUMMARY


@pytest.mark.skipif(sys.platform != "linux", reason="a folder in which nobody can write")
def test_a_page_that_the_system_does_not_let_write_is_told(tmp_path: Path):
    run = written(tmp_path)
    for name in ("page.html", "folder/page.html"):
        with pytest.raises(UsageError, match=rf"can't write the page /proc/{name}: No such file"):
            paceline.report(run, output=f"/proc/{name}")


def test_what_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="a report needs a package that is not here: matplotlib"):
        paceline.report(written(tmp_path))


def study(folder: Path, *names: str, num_trials: int = 3, **fields: Any) -> str:
    """The page of a search."""
    trials: list[dict[str, Any]] = [
        {
            "number": n,
            "state": "complete",
            "params": {"lr": 0.1 * 10.0**-n, "act": "relu" if n else "tanh"},
            **(
                {"value": 1.0 / (n + 1)}
                if len(names) == 1
                else {"values": [1.0 / (n + 1), 110 + n]}
            ),
            "ended_s": 10.0 * n,
            "plan": "single",
        }
        for n in range(num_trials)
    ]
    document = {
        "study": "s",
        "objectives": [{"name": name, "direction": "minimize"} for name in names],
        "trials": trials,
        **({"pareto": trials} if len(names) > 1 else {}),
        **fields,
    }
    (folder / "study.json").write_text(json.dumps(document))
    return write(folder).read_text()


def test_a_study_has_a_report(tmp_path: Path):
    """The best value over time, each parameter against the value, and the way to Optuna's dashboard."""
    (tmp_path / "journal.log").touch()
    best = {"trial": 2, "value": 1 / 3, "params": {"lr": 0.2}, "command": "paceline train a.py"}
    text = study(
        tmp_path,
        "validation_loss",
        best=best,
        importances={"act": 0.4, "lr": 0.6},
        test={"trial": 2, "loss": 0.5},
    )
    assert "trial 2 is the best: validation_loss 0.3333" in text and "the best so far" in text
    assert "<code>paceline train a.py</code>" in text
    assert f"<code>optuna-dashboard {tmp_path}/journal.log</code> opens this study" in text
    titles = re.findall(r"<figcaption>([^<]*)", text)
    assert titles == [
        "validation_loss over time",
        "what validation_loss depends on, % of its spread (fANOVA)",
        "lr",
        "act",
    ]
    assert "they come from 3 trials" in text and '<th scope="row">2</th>' in text
    assert '<span class="quiet">test loss</span><b>0.5</b>' in text


def test_the_best_so_far_never_gets_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first trial has the largest of the values, which get smaller."""
    drawn: list[Any] = []

    def points(groups: Any, *, line: Any = None, **_: Any) -> charts.Chart:
        drawn.append(line)
        return charts.Chart("<svg/>", "")

    monkeypatch.setattr("paceline.reports.charts.points", points)
    largest = [{"name": "accuracy", "direction": "maximize"}]
    page = study(tmp_path, "accuracy", objectives=largest)
    assert drawn[0] == {"the best so far": ([0.0, 10.0, 20.0], [1.0, 1.0, 1.0])}
    assert '<span class="quiet">best accuracy</span><b>1</b><span class="quiet">trial 0' in page


def test_many_trials_need_no_warning(tmp_path: Path):
    text = study(tmp_path, "validation_loss", num_trials=20, importances={"lr": 1.0})
    assert "they come from" not in text and "no trial has a result" not in text


def test_two_objectives_have_a_front(tmp_path: Path):
    """As a line, and beside it as a table with a column for each objective."""
    text = study(tmp_path, "validation_loss", "parameters")
    assert "3 trials of 3 on the Pareto front" in text and "the front</span>" in text
    assert re.search(r'<th scope="row">2</th><td[^>]*>0.3333</td><td[^>]*>112</td>', text)
    assert "[0." not in text.partition('id="figures"')[0]
    assert "<code>optuna-dashboard URL</code> (that of <code>--storage</code>)" in text


def test_names_may_be_long_and_in_any_script(tmp_path: Path):
    """matplotlib has no word to say about them: it finds a place for each, and browsers have the letters."""
    names = ["日本語", *(f"{nth}{'x' * 300}" for nth in range(30))]
    svg = charts.points({"a trial": (names, [1.0] * len(names))}, title="", x="日本語").svg
    assert "日本語" in svg and "0xxxx…" in svg and "xxxxxx" not in svg


def test_a_bad_trial_squeezes_no_others(tmp_path: Path):
    """An axis that is wide is logarithmic, and so is that of a parameter."""
    plain = charts.points({"a": ([1, 2], [1.0, 9.0])}, title="", x="x").svg
    wide = charts.points({"a": ([1, 2], [0.01, 9.0])}, title="", x="x", log=(False, True)).svg
    assert charts.is_wide([0.01, 9.0]) and not charts.is_wide([1.0, 9.0])
    assert ">0.01<" in wide and ">0.01<" not in plain
    assert ">1.5<" not in plain  # numbers of trials are whole


def test_a_proof_is_a_card_and_a_table(tmp_path: Path):
    """The verdict comes first, in words; a proof that failed names the plans."""
    worst = {"name": "8.bias", "step": 1, "diff": 1e-9, "tolerance": 1e-8}
    precision = {
        "precision": "float32",
        "max_loss_diff": 4.8e-7,
        "max_gradient_diff": None,
        "max_param_diff": 1e-9,
        "worst": {"weight": worst},
    }
    plan = {
        "plan": "data=2",
        "passed": True,
        "refused": None,
        "reason": None,
        "precisions": [precision],
        "resumed_from": "single",
    }
    proof: dict[str, Any] = {
        "written": "2026-11-30T01:11:59Z",
        "passed": True,
        "job": {"path": "/a/examples/01_digits.py", "function": "job", "settings": {}},
        "model": {"class": "Net", "parameters": 5, "trainable": 5, "initial_weights_sha256": "0"},
        "run": {
            "steps": 4,
            "batch": 60,
            "seed": 0,
            "precision": "float32",
            "optimizer": "A",
            "clip": None,
        },
        "device": {"kind": "cpu", "machine": "x86_64", "capability": "AVX512"},
        "versions": {"torch": "2"},
        "randomness": {"switched_off": {}, "left_on": []},
        "yardstick": {
            "float32": {"weight": {"spread": 1e-9, "tolerance": 1e-8, "name": "w", "step": 4}}
        },
        "coupling": None,
        "note": None,
        "plans": [plan],
    }
    (tmp_path / "certificate.json").write_text(json.dumps(proof))
    text = write(tmp_path).read_text()
    assert 'class="verdict good"' in text and "passed: data=2 equals one device" in text
    assert "<h1>examples/01_digits.py:job · certificate</h1>" in text and "<pre>" not in text
    cells = re.search(r'<th scope="row">passed: data=2</th>(.*?)</tr>', text)
    assert cells is not None
    assert re.findall(r">([^<]+)</td>", cells[1]) == [
        "float32",
        "4.8e-07",
        "none",
        "1.0e-09",
        "10 %, 8.bias",
    ]
    assert "went on from a checkpoint of &#39;single&#39;" in text

    other = {**plan, "plan": "shard=2", "passed": False, "reason": "much"}
    proof |= {
        "passed": False,
        "plans": [plan, other, {**plan, "plan": "x", "passed": False, "refused": "no"}],
    }
    (tmp_path / "certificate.json").write_text(json.dumps(proof))
    text = write(tmp_path).read_text()
    assert 'class="verdict bad"' in text
    assert (
        "failed: shard=2 is not proven to equal one device" in text
        and "x: none for this model" in text
    )


def test_another_folder_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="not the folder of a run, a search or a proof"):
        write(tmp_path)


def test_a_run_says_which_code_it_comes_from():
    """That which runs, and not a copy of another version that is installed."""
    assert origin(None)["paceline"] == paceline.__version__


def test_an_axis_over_powers_of_ten_has_plain_numbers():
    line = ([1, 2, 3], [100.0, 1.0, 0.01])
    text = charts.lines({"loss": line}, title="loss", log=True).svg
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
    several = replace(record(**changes), saves=({"step": 20, "saved": True},) * 2)
    diagnosis = diagnose(several)
    assert diagnosis.limit == limit and diagnosis.gain == pytest.approx(gain)


def test_the_one_checkpoint_at_the_end_can_not_be_avoided():
    """It may take longest, and then no option changes that."""
    last = ({"step": 40, "saved": True},)
    assert diagnose(replace(record(save_blocked_s=0.2), saves=last)).limit == MESSAGES
    longest = diagnose(replace(record(save_blocked_s=20.0), saves=last))
    assert longest.limit == SAVES and "--save-every" not in longest.next


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
