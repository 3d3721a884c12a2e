"""A test that is skipped says what is missing; one that is expected to fail names the defect, and fails."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SKIPPING = r"pytest\.(importorskip|skip|mark\.(skip|skipif|xfail))"


def without_reason(text: str) -> list[int]:
    """Lines that skip a test, or expect it to fail, without a reason: the word `reason`, or the text of a `skip`."""
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute | ast.Call)
    ]
    skipping = {
        node
        for node in nodes
        if isinstance(node, ast.Attribute) and re.fullmatch(SKIPPING, ast.unparse(node))
    }
    explained = {
        node.func
        for node in nodes
        if isinstance(node, ast.Call)
        and node.func in skipping
        and (
            any(keyword.arg == "reason" for keyword in node.keywords)
            or (node.func.attr == "skip" and node.args)
        )
    }
    return sorted(node.lineno for node in skipping - explained)


def test_what_counts_as_a_reason():
    """Of an import it is not the name of the module, and a condition is none either."""
    assert without_reason(
        "pytest.importorskip('a')\npytest.skip()\npytest.mark.skipif(b)\n"
        "@pytest.mark.xfail\ndef c(): model.skip()"
    ) == [1, 2, 3, 4]
    assert (
        without_reason(
            "pytest.importorskip('a', reason=b)\npytest.skip('a')\n"
            "pytest.mark.skipif(b, reason='c')"
        )
        == []
    )


def test_each_skip_has_a_reason():
    texts = {path.relative_to(TESTS): path.read_text() for path in TESTS.rglob("*.py")}
    found = {
        str(path): lines
        for path, text in texts.items()
        if re.search(SKIPPING, text) and (lines := without_reason(text))
    }
    assert found == {}


def test_a_test_that_passes_though_it_is_expected_to_fail_is_an_error(
    request: pytest.FixtureRequest,
):
    assert request.config.getini("xfail_strict")
