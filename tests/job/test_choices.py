"""Choices inside a model: their default, what settings say, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.base.errors import JobError
from paceline.job.choices import choice, choosing, chosen
from paceline.job.file import load

JOB = """
import paceline as pl

def model():
    return pl.choice("block.op", ["conv", "pool"]), pl.choice("block.kernel", [3, 5], default=5)

def job(lr: float = 0.1):
    return pl.Job(model=model, data=[(0, 0)], loss=max, optimizer=list, batch=1, steps=1)
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(JOB)
    return str(path)


def test_outside_a_search_a_choice_is_its_default(source: str):
    """The first option, unless another is named."""
    assert load(source).model() == ("conv", 5)


def test_settings_choose(source: str):
    """A name with a dot is a choice of the model; text stands for the option that is written so."""
    assert load(source, {"block.op": "pool", "block.kernel": "3", "lr": "1"}).model() == ("pool", 3)
    assert load(source).model() == ("conv", 5)  # what one job was told is not left to the next


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blok.op": "pool"}, "makes no choice 'blok.op', did you mean 'block.op'"),
        ({"block.op": "dense"}, "block.op=dense must be conv or pool"),
    ],
)
def test_wrong_settings_are_refused(source: str, settings: dict[str, str], message: str):
    """When the model is built, as nobody knows its choices before."""
    with pytest.raises(JobError, match=message):
        load(source, settings).model()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("op", ["a"], "must have a dot"),
        ("block.op", [], "has no options"),
        ("block.op", [print], "texts, numbers, booleans or None"),
        ("block.op", [3, "3"], "an option twice"),
    ],
)
def test_choices_that_make_no_sense(name: str, options: list, message: str):
    """The message names the choice."""
    with pytest.raises(JobError, match=message):
        choice(name, options)
    with pytest.raises(JobError, match="default 'c' is not one of a or b"):
        choice("block.op", ["a", "b"], default="c")


def test_a_chooser_is_asked_and_then_forgotten():
    """It sees the default first."""
    with choosing(lambda name, options: options[0]):
        assert choice("block.op", ["a", "b"], default="b") == "b"
    with choosing(lambda name, options: options[1]):
        assert choice("block.op", ["a", "b"]) == "b"
        assert chosen(lambda: choice("block.op", ["a", "b"]), {})() == "a"
    assert choice("block.op", ["a", "b"]) == "a"
