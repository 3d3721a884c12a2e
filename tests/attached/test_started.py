"""However a script is started, its loop computes the same."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import traceback

import pytest
from commands import as_ranks, free_port

import paceline as pl
from paceline.base.errors import JobError
from tests.attached.scripts import ATTACHED, OWN, assert_alike, told


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return told(tmp_path_factory.mktemp("own"), OWN)


def process_of(script, environment, log):
    """A process in which Python runs a script from its first line to what it does at its end."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(log, os.O_CREAT | os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(environment)
        sys.argv = [str(script)]
        atexit._clear()
        runpy.run_path(str(script), run_name="__main__")
        atexit._run_exitfuncs()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_script_that_python_or_torchrun_starts(tmp_path, own, num_ranks):
    script, text = tmp_path / "script.py", tmp_path / "told.json"
    script.write_text(ATTACHED)
    common = {"TOLD": str(text)}
    if num_ranks > 1:
        common |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        {"RANK": str(r), "LOCAL_RANK": str(r)} if num_ranks > 1 else {} for r in range(num_ranks)
    ]
    logs = [tmp_path / f"log-{rank}" for rank in range(num_ranks)]

    started = [
        process_of(script, common | own_place, log)
        for own_place, log in zip(ranks, logs, strict=True)
    ]

    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    assert codes == [0] * num_ranks, "\n".join(log.read_text() for log in logs)
    assert_alike(json.loads(text.read_text())["weights"], own["weights"])


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
