"""Saves of processes that are killed, or that exit as a user's script does: with Python's own end of a process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from saved import names, newest_step

from paceline.checkpoint import Writer, pieces_of

TIMEOUT_S = 200.0

# Imports torch and what saves checkpoints, and nothing else. Each line that it reads is a script for a fork, which
# ends as Python does where a script ends.
STARTER = """
import json, os, sys, threading, time, torch
from pathlib import Path
from paceline.checkpoint import Writer, pieces_of, write

for line in sys.stdin:
    code, folder = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(os.open(os.devnull if name == "stdin" else os.path.join(folder, name), os.O_CREAT | os.O_RDWR),
                    descriptor)
        exec(code)
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@dataclass
class Starter:
    """Starts scripts one after the other, in a process that has imported little: it takes two seconds."""

    process: subprocess.Popen[str]

    def _next_number(self) -> int:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], TIMEOUT_S)[0]
        return int(self.process.stdout.readline())

    def start(self, code: str, folder: Path) -> int:
        """The process of a script. What it prints lies in two files of the folder."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([code, str(folder)]) + "\n")
        self.process.stdin.flush()
        return self._next_number()

    def exit_code(self) -> int:
        return self._next_number()


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        yield Starter(process)
        process.kill()


SAVES_TWICE = """
how, run_dir = {how!r}, Path({run_dir!r})
writer = Writer(run_dir, rank=0, world_size=1, attempt="first")
writer.save(1, pieces_of("w", torch.ones(4)))
writer.wait()

def half(path, sources, *wrote):
    path.write_bytes(b"half a file")
    print("writing", flush=True)
    threading.Event().wait(60 if how == "stuck" else 0.2)
    return write_tensors(path, sources, *wrote)

if how != "lonely":
    write_tensors, write.write_tensors = write.write_tensors, half
    write.EXIT_WAIT_S = 0.5 if how == "stuck" else 30.0
else:
    writer = Writer(run_dir, rank=0, world_size=2, attempt="first")
writer.save(2, pieces_of("w", torch.ones(4)))
"""


def test_kill_in_the_middle_of_a_save(starter: Starter, tmp_path: Path, wait_for) -> None:
    """SIGKILL while a file is half written leaves the older checkpoint valid; the next launch clears the rest."""
    code = SAVES_TWICE.format(how="stuck", run_dir=str(tmp_path))
    pid = starter.start(f"{code}\nthreading.Event().wait(60)", tmp_path)
    wait_for(
        lambda: (tmp_path / "stdout").exists() and (tmp_path / "stdout").read_text() == "writing\n"
    )
    os.kill(pid, signal.SIGKILL)
    assert starter.exit_code() == -signal.SIGKILL
    assert len(names(tmp_path)) == 2

    assert newest_step(tmp_path) == 1
    Writer(tmp_path, rank=0, world_size=1, attempt="second")
    assert names(tmp_path) == ["step-1"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("how", ["lonely", "writing", "stuck"])
def test_exit_without_wait(starter: Starter, tmp_path: Path, how: str) -> None:
    """A process that exits while it waits for peers, while it writes, or while a disk hangs, ends quietly and soon;
    its save is not there."""
    starter.start(SAVES_TWICE.format(how=how, run_dir=str(tmp_path)), tmp_path)
    assert (starter.exit_code(), (tmp_path / "stderr").read_text()) == (0, "")
    assert newest_step(tmp_path) == 1
    assert "step-2" not in names(tmp_path)
    if how == "lonely":
        report = json.loads((tmp_path / "checkpoints" / ".step-2.first-1.failed").read_text())
        assert report["message"] == "rank 0 exited before its save of step 2 was done"


@pytest.mark.slow
def test_a_rank_that_exits_after_its_part_does_not_stop_the_commit(
    starter: Starter, tmp_path: Path
) -> None:
    """Rank 1 needs not stay for the commit once its part is on the disk."""
    starter.start(
        f"run_dir = Path({str(tmp_path)!r})\n"
        "Writer(run_dir, rank=1, world_size=2, attempt='first').save(1, [])\n"
        "while not list(run_dir.glob('checkpoints/.step-1.*/rank-00001.json')): time.sleep(0.01)\n",
        tmp_path,
    )
    assert starter.exit_code() == 0
    first = Writer(tmp_path, rank=0, world_size=2, attempt="first", timeout_s=10)
    first.save(1, pieces_of("w", torch.ones(4)))
    first.wait()
    assert newest_step(tmp_path) == 1


@pytest.mark.slow
def test_plain_tensors_need_no_dtensor_import(starter: Starter, tmp_path: Path) -> None:
    """A run without DTensors doesn't pay for importing them."""
    starter.start(
        "assert pieces_of('w', torch.ones(2))\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n",
        tmp_path,
    )
    assert (starter.exit_code(), (tmp_path / "stderr").read_text()) == (0, "")
