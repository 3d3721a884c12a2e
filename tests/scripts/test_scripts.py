"""Ports of public scripts compute what their originals compute, and a proof finds the bugs of loops."""

from __future__ import annotations

from pathlib import Path

import pytest
from later import needed

from .bugs import BUGS, SOUND, Bug
from .lines import changed_lines
from .page import comparisons_of_page, found_of_page, page, row_of
from .ported import (
    EQUAL,
    PLANS,
    PROVEN,
    REFUSED,
    SCRIPTS,
    WRONG,
    Comparison,
    Port,
    compare,
    proven,
)

PAGE = Path(__file__).parents[2] / "docs" / "ported-scripts.md"
PORTS = [port for script in SCRIPTS for port in script.ports]
FEW_LINES, OF_FEW_LINES = 8, 8  # nine are wanted


def name_of(value: object) -> str | None:
    return f"{value.script.name}-{value.form}" if isinstance(value, Port) else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("port", PORTS, ids=name_of)
@pytest.mark.filterwarnings("ignore")  # of Accelerate and Transformers
def test_a_port_gives_the_losses_and_weights_of_its_original(port: Port, plan: str, folder: Path):
    """In float64, or the plan is refused, as the page says."""
    if port.script.name.startswith("accelerate"):
        needed("accelerate")
        needed("transformers")
        needed("tensorboard")
    said = {(each.port, each.plan): each.verdict for each in comparisons_of_page(PAGE.read_text())}
    comparison = compare(port, plan, folder)

    assert comparison.verdict == said[port, plan], comparison.reason


def test_the_page_has_each_port_with_its_changed_lines():
    text = PAGE.read_text(encoding="utf-8")
    comparisons = comparisons_of_page(text)

    assert [row_of(port) for port in PORTS if row_of(port) not in text] == []
    assert len(comparisons) == len(PORTS) * len(PLANS)
    assert [each.port.script.name for each in comparisons if each.verdict == WRONG] == []
    assert found_of_page(text) == dict.fromkeys((bug.name for bug in BUGS), True)


def test_a_page_keeps_what_is_not_run_again():
    comparisons = [
        Comparison(port, plan, *((EQUAL,) if plan != "tensor=2" else (REFUSED, "it | splits <a>")))
        for port in PORTS
        for plan in PLANS
    ]
    found = {bug.name: bug is not BUGS[1] for bug in BUGS}
    written = page(comparisons, found)

    assert page(comparisons_of_page(written), found_of_page(written)) == written
    assert found_of_page(written) == found


def test_few_lines_change():
    """At most eight in so many of the scripts, in the form that changes the fewest."""
    fewest = [min(len(port.changed) for port in script.ports) for script in SCRIPTS]

    assert len([lines for lines in fewest if lines <= FEW_LINES]) >= OF_FEW_LINES
    assert all(port.changed for port in PORTS)


def test_comments_and_what_is_left_out_are_no_changed_lines():
    before = '"""A script."""\n\na = 1  # one\nb = 2\nc = 3\n'
    after = '"""Another."""\n# two\na = 1\nc = 4\n'

    assert changed_lines(before, after) == ["c = 4"]


@pytest.mark.slow
def test_the_loop_without_a_bug_is_equal(tmp_path: Path):
    assert proven(SOUND, tmp_path) == list(PROVEN)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_proof_finds_a_bug_of_a_loop(bug: Bug, tmp_path: Path):
    """Under each plan, so that it is not found by chance."""
    assert proven(bug.script, tmp_path) == []
