"""The page of `paceline plan --html`: what was chosen, why, and every plan with its reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.base.errors import UsageError
from paceline.reports import charts, plans

ROW: dict[str, Any] = {
    "kind": "data",
    "fits": True,
    "step_s": 0.010,
    "step_s_low": 0.008,
    "step_s_high": 0.012,
    "samples_per_s": 6000.0,
    "measured": True,
    "memory_bytes": 50 << 20,
    "missing_bytes": 0,
    "ledger": {"parameters": 10 << 20, "runtime": 40 << 20},
    "breakdown": {"compute": 0.01},
    "relaxed": False,
    "reason": "the fastest that fits",
}
ANSWER: dict[str, Any] = {
    "cluster": "local",
    "chosen": "data=2",
    "tried": 7,
    "notes": ["rough & ready"],
    "refused": {"tensor": "no <heads>"},
    "flips": [{"change": "links twice as fast", "plan": "shard=2"}],
    "precision": None,
    "failures": None,
    "compiling": None,
    "plans": [
        {"plan": "data=2", **ROW},
        {**ROW, "plan": "single", "kind": "single", "breakdown": {}, "reason": "twice as slow"},
    ],
}


def text(tmp_path: Path, answer: dict[str, Any]) -> str:
    return plans.write(answer, tmp_path / "plans.html", command="paceline train job.py").read_text()


def test_the_chosen_plan_comes_first_and_the_others_have_reasons(tmp_path: Path):
    page = text(tmp_path, ANSWER)
    assert page.index("data=2: 10 ms a step, 6,000 samples/s") < page.index("<h2>")
    for shown in (
        "<code>paceline train job.py --plan &#39;data=2&#39;</code>",
        "twice as slow",
        "links twice as fast",
        "no &lt;heads&gt;",
        "rough &amp; ready",
        "1.00 times one device",
        '<i style="background:var(--series-3)"></i>parameters</span>',
    ):
        assert shown in page
    inside = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL
    )
    assert inside is not None and json.loads(inside[1]) == ANSWER


def test_charts_have_the_chosen_plan_one_device_replicas_and_the_best_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Relaxed plans, which could not be chosen, may all be faster: they are grey, and come last."""
    drawn: list[tuple[list[str], Any, Any]] = []

    def stacked(rows: Any, *, intervals: Any = None, grey: Any = (), **_: Any) -> charts.Chart:
        drawn.append((list(rows), intervals, grey))
        return charts.Chart("<svg/>", "")

    monkeypatch.setattr("paceline.reports.charts.stacked", stacked)
    others = [
        {**ROW, "plan": f"data=2 local={steps}", "kind": "local", "relaxed": True}
        for steps in range(2, 20)
    ]
    others += [
        {**ROW, "plan": plan, "kind": kind}
        for plan, kind in [("shard=2", "shard"), ("shard=2 zero=1", "shard"), ("data=4", "data")]
    ]
    text(tmp_path, {**ANSWER, "plans": [*others, *ANSWER["plans"]]})
    expected = ["data=2", "single", "data=4", "shard=2", "~data=2 local=2"]
    assert [names for names, _, _ in drawn] == [expected] * 2
    assert drawn[0][1]["single"] == (8.0, 12.0) and drawn[1][1] is None
    assert all(grey == {"~data=2 local=2"} for _, _, grey in drawn)


def test_relaxed_plans_are_grey_and_intervals_are_drawn():
    bars = {"single": {"compute": 2.0}, "data=2 local=9": {"compute": 1.0}}
    plain = charts.stacked(bars, title="a step").svg
    drawn = charts.stacked(
        bars, title="a step", intervals={"single": (1.0, 3.0)}, grey={"data=2 local=9"}
    ).svg
    assert "var(--quiet)" in drawn and "var(--quiet)" not in plain
    line = "stroke: var(--ink); stroke-linecap"
    assert line in drawn and line not in plain


def test_a_bar_ends_at_its_sum():
    """Also if a part is negative: a trial needed less memory than was priced. Large sums have no power of ten."""
    bars = {"a": {"runtime": 4000.0, "unaccounted": -1000.0}}
    drawn = charts.stacked(bars, title="MiB", unit="MiB")
    assert ">3,000 MiB<" in drawn.svg and ">4000<" not in drawn.svg and drawn.keys == {}


def test_where_nothing_fits_the_least_change_is_the_next_thing(tmp_path: Path):
    page = text(
        tmp_path, {**ANSWER, "chosen": None, "remedies": [{"change": "bf16", "plan": "shard=4"}]}
    )
    assert (
        "nothing fits on local; &#39;data=2&#39; is nearest" in page
        and "bf16: &#39;shard=4&#39;" in page
    )


def test_without_the_packages_the_way_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(UsageError, match=r"\[report\]"):
        text(tmp_path, ANSWER)
