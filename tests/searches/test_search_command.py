"""The command `paceline search`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from called import call

FIXED = ["--set", "fails=no", "--procs", "2"]


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    ran = call(*words)
    return ran.exit_code, ran.stdout, ran.stderr


@pytest.mark.slow
def test_json_is_the_study_alone_and_the_winners_command_trains_it(job: str, tmp_path: Path):
    """With the value that the search found."""
    code, out, _ = run(
        "search",
        job,
        "--trials",
        3,
        *FIXED,
        "--run",
        tmp_path / "run",
        "--vary",
        "width=2..4",
        "--objective",
        "worst",
        "--sampler",
        "random",
        "--pruner",
        "none",
        "--json",
    )
    study = json.loads(out)
    assert (code, len(study["trials"]), study["run"]) == (0, 3, str(tmp_path / "run"))
    assert study["trials"] == json.loads((tmp_path / "run" / "study.json").read_text())["trials"]
    program, *words = shlex.split(study["best"]["command"])
    assert program == "paceline"
    code, out, _ = run(*words, "--run", tmp_path / "again", "--json")
    assert (code, json.loads(out)["metrics"]["worst"]) == (0, study["best"]["value"])


@pytest.mark.slow
def test_people_see_the_winner(job: str, tmp_path: Path):
    """With its parameters, its test figures and how to train it."""
    code, out, _ = run("search", job, "--trials", 2, *FIXED, "--run", tmp_path / "run")
    assert code == 0
    for part in (
        "trials           2 complete",
        "validation loss",
        "test loss",
        "net.act",
        "--set fails=no",
    ):
        assert part in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vary", "lr"], "--vary lr is not NAME=VALUE"),
        (["--limit", "step_ms<2"], "NAME<=NUMBER"),
        (["--objective", "accurcy"], "reports no 'accurcy'"),
        (["--plan", "data=3"], "needs 3 devices"),
        (["--resume"], "needs the run folder"),
    ],
)
def test_requests_that_make_no_sense_end_with_code_2(job: str, words: list[str], message: str):
    """And a message on stderr."""
    code, out, err = run("search", job, "--trials", 2, *FIXED, *words)
    assert (code, out) == (2, "") and message in err
