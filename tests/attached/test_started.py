"""However a script is started, its loop computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from commands import as_ranks, free_port

import paceline as pl
from paceline.base.errors import JobError
from tests.attached.scripts import ATTACHED, OWN, assert_alike, told


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return told(tmp_path_factory.mktemp("own"), OWN)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_script_that_python_or_torchrun_starts(tmp_path, own, num_ranks):
    script, text = tmp_path / "script.py", tmp_path / "told.json"
    script.write_text(ATTACHED)
    common = {**os.environ, "TOLD": str(text)}
    if num_ranks > 1:
        common |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        {"RANK": str(r), "LOCAL_RANK": str(r)} if num_ranks > 1 else {} for r in range(num_ranks)
    ]

    # A process of its own, not a fork: a fork has the state that earlier tests left in this one.
    started = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=common | own_place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for own_place in ranks
    ]

    told_by = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * num_ranks, "\n".join(told_by)
    assert_alike(json.loads(text.read_text())["weights"], own["weights"])


@pytest.mark.slow
def test_the_command_inside_of_torchrun(tmp_path, own, monkeypatch):
    script, text = tmp_path / "script.py", tmp_path / "told.json"
    script.write_text(ATTACHED)
    monkeypatch.setenv("TOLD", str(text))

    as_ranks(["run", str(script), "--plan", "shard=2", "--run", str(tmp_path / "run")], tmp_path)

    assert_alike(json.loads(text.read_text())["weights"], own["weights"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 8


def test_a_script_that_is_loaded_as_a_job_is_refused_before_it_runs(tmp_path, capfd):
    script = tmp_path / "loop.py"
    script.write_text("print('began')\nrun = pl.attach(model, optimizer, loader)\n")

    with pytest.raises(JobError, match="keeps its own loop") as caught:
        pl.load(str(script))

    assert "paceline run loop.py --plan data=2" in str(caught.value)
    assert capfd.readouterr().out == ""
