"""The space of a search is the signature of the job's function, with what the command line fixes and varies."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest

import paceline as pl
from paceline.base.errors import JobError, UsageError
from paceline.job.file import JobFunction
from paceline.searches.space import Numbers, Options, Space, parse, read


def job(
    lr: Annotated[float, pl.Log(1e-5, 1e-1)] = 1e-3,
    layers: Annotated[int, pl.Range(2, 8)] = 2,
    width: Annotated[int, pl.Range(32, 256, step=32)] = 64,
    act: Literal["relu", "gelu"] = "relu",
    norm: Literal[False, True] = False,
    bf16: bool = False,
    decay: float = 0.1,
    name: str = "a",
    depth: int = 3,
    dropout=True,
    heads=4,
) -> Any:  # type: ignore[no-untyped-def]
    """A job of every kind of parameter; nothing calls it."""


def space(**options: Any) -> Space:
    return read(JobFunction(job, Path("net.py")), **options)


def refusal(function: Any = job, **options: Any) -> str:
    with pytest.raises((JobError, UsageError)) as caught:
        read(JobFunction(function, Path("net.py")), **options)
    return str(caught.value)


def test_annotated_parameters_are_varied_and_others_are_not():
    """Ranges, logarithmic ranges and literals; a plain number or boolean keeps its default."""
    search_space = space()
    assert dict(search_space.domains) == {
        "lr": Numbers(1e-5, 0.1, None, True, whole=False),
        "layers": Numbers(2, 8, None, False, whole=True),
        "width": Numbers(32, 256, 32, False, whole=True),
        "act": Options(("relu", "gelu")),
        "norm": Options((False, True)),
    }
    assert search_space.example() == {
        "lr": 1e-3,
        "layers": 2,
        "width": 64,
        "act": "relu",
        "norm": False,
    }


class Act(Enum):
    RELU, TANH = "relu", "tanh"


def test_types_that_list_their_values_are_varied_and_others_are_named():
    """Also with None, as a sum of several, and as an Enum; the trial's function gets what its type says."""

    def listed(
        a: Literal["x", "y"] | None = None,
        b: Optional[Literal[1, 2]] = 2,  # noqa: UP045
        c: Act = Act.TANH,
        d: Act | None = None,
        e: Literal["x"] | Literal["y"] = "y",
        f: Annotated[Literal["x", "y"] | None, "a note"] = "x",
        g: Literal["x", "y"] = None,  # type: ignore[assignment]  # noqa: RUF013
        h: bool = True,
        i: float | None = 0.5,
        j: Literal["x"] | int = 3,
        k: Literal[Act.RELU] = Act.RELU,
        m="text",
    ) -> Any:  # type: ignore[no-untyped-def]
        given.append((a, c, d))
        return None

    given: list[Any] = []
    function = JobFunction(listed, Path("net.py"))
    search_space = read(function)
    assert dict(search_space.domains) == {
        "a": Options(("x", "y", None)),
        "b": Options((1, 2, None)),
        "c": Options(("relu", "tanh")),
        "d": Options(("relu", "tanh", None)),
        "e": Options(("x", "y")),
        "f": Options(("x", "y", None)),
        "g": Options(("x", "y", None)),
    }
    assert search_space.kept == {"h": True, "i": 0.5, "j": 3, "k": "relu", "m": "text"}
    with pytest.raises(JobError, match="returned None"):
        function.job({**search_space.example(), "d": "relu"})
    assert given == [(None, Act.TANH, Act.RELU)]


def test_settings_fix_and_vary_widens():
    """What is set is not varied; what is varied need not be annotated, nor hold the default."""
    search_space = space(
        settings={"lr": "0.01", "block.op": "conv"},
        vary={"decay": "1e-5..1e-1:log", "layers": "8..16", "name": "b,c", "bf16": "false,true"},
    )
    assert "lr" not in search_space.domains and search_space.fixed == {
        "lr": "0.01",
        "block.op": "conv",
    }
    assert search_space.domains["decay"] == Numbers(1e-5, 0.1, None, True, whole=False)
    assert search_space.domains["layers"] == Numbers(8, 16, None, False, whole=True)
    assert search_space.domains["name"] == Options(("b", "c"))
    assert search_space.domains["bf16"] == Options((False, True))
    assert search_space.example() == {
        "lr": "0.01",
        "block.op": "conv",
        "decay": 0.1,
        "layers": 8,
        "name": "b",
        "width": 64,
        "act": "relu",
        "norm": False,
        "bf16": False,
    }


@pytest.mark.parametrize(
    ("text", "kind", "domain"),
    [
        ("2..8", int, Numbers(2, 8, None, False, whole=True)),
        ("0..1:0.25", float, Numbers(0.0, 1.0, 0.25, False, whole=False)),
        ("1..1024:log", int, Numbers(1, 1024, None, True, whole=True)),
        ("-1..1", float, Numbers(-1.0, 1.0, None, False, whole=False)),
        ("true,false", bool, Options((True, False))),
        ("3,5", int, Options((3, 5))),
        ("1e-3", Annotated[float, pl.Log(1e-5, 1e-1)], Options((1e-3,))),
    ],
)
def test_domains_are_read_from_text(text: str, kind: Any, domain: Any):
    """As on the command line; the parameter's type decides what they hold."""
    assert parse(text, kind) == domain


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("8..2", int, "low is above high"),
        ("0..1:log", float, "must begin above 0"),
        ("a..b", float, "must be LOW..HIGH"),
        ("1..2:0.5", int, "whole numbers"),
        ("1..2:-1", int, "step above 0"),
        ("1..2", str, "not for str"),
        ("fast", float, "'fast' is not a value"),
        ("1,1", int, "given twice"),
        ("1..inf", float, "finite"),
    ],
)
def test_texts_that_are_no_domain(text: str, kind: Any, message: str):
    """Each says what is wrong with it."""
    with pytest.raises(ValueError, match=message):
        parse(text, kind)


def test_all_that_is_wrong_with_a_request_is_said_at_once():
    """With the parameter that was meant."""
    message = refusal(
        settings={"lr": 1.0, "widht": 3},
        vary={"lr": "1..2", "laiers": "1..2", "block.op": "a", "act": "1..2"},
    )
    for part in (
        "unknown hyperparameter 'widht', did you mean 'width'?",
        "'lr' is both set and varied",
        "unknown hyperparameter 'laiers', did you mean 'layers'?",
        "'block.op' is a choice inside the model",
        "--vary act=1..2",
        "hint: --vary NAME=LOW..HIGH",
    ):
        assert part in message


def test_signatures_that_contradict_themselves():
    """Empty ranges, defaults outside of them, and annotations where they would have no effect."""

    def wrong(
        a: Annotated[int, pl.Range(8, 2)] = 4,
        b: Annotated[float, pl.Log(1e-5, 0.1)] = 1.0,
        c: Annotated[str, pl.Range(1, 2)] = "x",
        d: Annotated[int, pl.Range(1, 2), pl.Log(1, 2)] = 1,
        e: Annotated[int, pl.Range(1, 2)] | None = None,
        f: Literal["x", "y"] = "z",  # type: ignore[arg-type]
        g: Annotated[int, pl.Range(0.5, 2)] = 1,
    ) -> Any: ...

    message = refusal(wrong)
    for part in (
        "wrong() in net.py",
        "'a': Range(low=8, high=2, step=None) is empty",
        "'b': its default 1.0 is not in",
        "'c': Range(low=1, high=2, step=None) is for whole numbers",
        "'d': it has two ranges",
        "'e': Range(low=1, high=2, step=None) must stand around",
        "'f': its default 'z' is not in x or y",
        "'g': Range(low=0.5, high=2, step=None) must have whole numbers",
    ):
        assert part in message


def test_a_range_without_a_default_has_an_example():
    """The job can be built before the first trial is sampled."""

    def bare(lr: Annotated[float, pl.Log(1e-5, 0.1)]) -> Any: ...

    assert read(JobFunction(bare, Path("net.py"))).example() == {"lr": 1e-5}
