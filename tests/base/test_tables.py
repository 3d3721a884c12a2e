"""Text for people at the width of their terminal."""

import pytest

from paceline.base.tables import aligned, in_mib, wrapped

PLAN, WHY = "data=2 shard=4 local=8 recompute=selective", "computing is 40 % of the step"


def test_a_long_plan_is_wrapped_with_an_indent(monkeypatch: pytest.MonkeyPatch):
    """Its further lines can't be read as plans, no word is cut, and figures stay in their columns."""
    monkeypatch.setenv("COLUMNS", "52")
    table = aligned(
        ["plan", "ms/step", "why not"], [[PLAN, "12.3", WHY], ["single", "7", "slower"]]
    )
    assert table.splitlines() == [
        "plan                   ms/step  why not",
        "data=2 shard=4            12.3  computing is 40 % of",
        "  local=8                       the step",
        "  recompute=selective",
        "single                       7  slower",
    ]


def test_piped_text_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch):
    """100 columns without it; words that are longer, such as paths, stay whole."""
    text = " ".join(["word"] * 30)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, wrapped(text).splitlines())) == 79
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, wrapped(text).splitlines())) == 99
    assert "/" * 120 in wrapped(f"{text} {'/' * 120}").split()


def test_small_memory_is_not_nothing():
    assert (in_mib(2**19), in_mib(0), in_mib(5 * 2**30)) == ("0.5 MiB", "0 MiB", "5,120 MiB")
