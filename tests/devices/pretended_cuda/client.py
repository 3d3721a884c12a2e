"""The tests' side of the workshop."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from pretended_cuda.build import build


@dataclass(frozen=True)
class Trained:
    """A run that ended well.

    losses: of each step. weights: by the model's names. measured: of each rank, what it asked of its device.
    first_use: who used CUDA's driver in the process that forks ranks; None if nobody did. on_cpu: who did in each rank
    that computes on the CPU.
    """

    summary: dict[str, Any]
    losses: list[float]
    weights: dict[str, Tensor]
    measured: list[dict[str, Any]]
    first_use: str | None
    on_cpu: dict[int, str | None]
    run: Path


class Workshop:
    """A process that trains with pretended CUDA devices. One request at a time."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder, self._count, self._known = process, folder, 0, {}

    def ask(self, job: str, plan: str, devices: str, *, timeout_s: float = 240.0, run: Path | None = None,
            **options: Any) -> dict[str, Any]:
        """What came of a request; see `workshop.py`."""
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir()
        request = {"job": job, "plan": plan, "devices": devices, "run": str(run or folder / "run"), "options": options}
        return {**self._answer(request, timeout_s), "folder": folder, "run": Path(request["run"])}

    def verify(self, job: str, *plans: str, devices: str | None, timeout_s: float = 300.0,
               **options: Any) -> dict[str, Any]:
        """What `paceline verify` says, or its error; see `workshop.py`."""
        self._count += 1
        request = {"job": job, "plans": plans, "devices": devices, "run": str(self.folder / str(self._count)),
                   "options": options}
        return self._answer(request, timeout_s)

    def check(self, name: str) -> Any:
        """What a check of `checks.py` returns, in a process that may use CUDA."""
        answer = self._answer({"check": name}, 240.0)
        assert "error" not in answer, f"{answer['error']} {self.printed()[-3000:]}"
        return answer["found"]

    def _answer(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            if not waiting.select(timeout_s):
                self.process.kill()
                raise TimeoutError(f"{request} has no answer after {timeout_s:g} s")
        if not (line := self.process.stdout.readline()):
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"the workshop ended with {self.process.wait()} and printed: {self.printed()[-2000:]}")

    def train(self, job: str, plan: str, devices: str, **options: Any) -> Trained:
        """Train, which must go well; runs of the same job, plan and devices without options are done once."""
        key = job, plan, devices
        if not options and key in self._known:
            return self._known[key]
        answer = self.ask(job, plan, devices, **options)
        assert "error" not in answer, f"{job} under {plan} on {devices}: {answer['error']}\n{self.printed()[-1500:]}"
        run = answer["run"]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        trained = Trained(
            answer["summary"], [row["loss"] for row in rows if "loss" in row], load_file(run / "model.safetensors"),
            [json.loads(file.read_text()) for file in sorted(run.parent.glob("measured-*.json"))],
            answer["first_use"], {int(file.stem.rpartition("-")[2]): json.loads(file.read_text())
                                  for file in run.parent.glob("on-cpu-*.json")}, run)
        if not options:
            self._known[key] = trained
        return trained

    def printed(self) -> str:
        return (self.folder / "printed.txt").read_text()


@contextmanager
def workshop(folder: Path, *, devices: int = 4, memory_bytes: int = 80 << 30,
             taken_bytes: int = 0) -> Iterator[Workshop]:
    """A workshop for tests. taken_bytes: of each device, that others are said to hold.

    Raises:
        CannotBuild: there is no compiler here.
    """
    here, library = Path(__file__).parent.parent, build()
    environment = {**os.environ, "PRETENDED_CUDA_DEVICES": str(devices), "OMP_NUM_THREADS": "1",
                   "PRETENDED_CUDA_MEMORY_BYTES": str(memory_bytes),
                   "PRETENDED_CUDA_TAKEN_BYTES": str(taken_bytes), "XDG_CACHE_HOME": str(folder / "cache"),
                   "PYTHONPATH": os.pathsep.join([str(here), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "pretended_cuda.pretend", str(library), "-m", "pretended_cuda.workshop"]
    with open(folder / "printed.txt", "w") as printed:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=printed, text=True, start_new_session=True)
        with process:
            try:
                yield Workshop(process, folder)
            finally:
                with suppress(ProcessLookupError):  # it has ended
                    os.killpg(process.pid, signal.SIGKILL)
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # a request that it did not live to read
                    process.stdin.close()
