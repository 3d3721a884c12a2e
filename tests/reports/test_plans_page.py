"""The page of `paceline plan --html`: what was chosen, why, and every plan with its reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.base.errors import UsageError
from paceline.reports import plans

ROW = {
    "fits": True,
    "step_s": 0.010,
    "step_s_low": 0.008,
    "step_s_high": 0.012,
    "samples_per_s": 6000.0,
    "measured": True,
    "memory_bytes": 50 << 20,
    "missing_bytes": 0,
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
        {"plan": "single", **ROW, "breakdown": {}, "reason": "twice as slow"},
    ],
}


def text(tmp_path: Path, answer: dict[str, Any]) -> str:
    return plans.write(answer, tmp_path / "plans.html", command="paceline train job.py").read_text()


def test_the_chosen_plan_comes_first_and_the_others_have_reasons(tmp_path: Path):
    page = text(tmp_path, ANSWER)
    assert page.index("data=2: 0.01 s a step, 6,000 samples/s") < page.index("<h2>")
    for shown in (
        "paceline train job.py --plan &#39;data=2&#39;",
        "twice as slow",
        "links twice as fast",
        "no &lt;heads&gt;",
        "rough &amp; ready",
    ):
        assert shown in page
    inside = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL
    )
    assert inside is not None and json.loads(inside[1]) == ANSWER


def test_charts_have_the_chosen_plan_among_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Relaxed plans, which could not be chosen, may all be faster."""
    drawn: list[list[str]] = []
    monkeypatch.setattr(
        "paceline.reports.charts.stacked", lambda rows, x: drawn.append(list(rows)) or "<svg/>"
    )
    rows = [{"plan": f"data=2 local={steps}", **ROW, "relaxed": True} for steps in range(2, 20)]
    text(tmp_path, {**ANSWER, "plans": [*rows, {"plan": "shard=2", **ROW}, *ANSWER["plans"]]})
    assert (
        all(plans[:4] == ["data=2", "single", "shard=2", "data=2 local=2"] for plans in drawn)
        and len(drawn) == 2
    )


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
