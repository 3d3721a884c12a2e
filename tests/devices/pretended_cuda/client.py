"""The tests' side of the workshop."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from safetensors.torch import load_file
from torch import Tensor

from pretended_cuda.build import build

SITE = """
import os
from pathlib import Path
from pretended_cuda.pretend import pretend
pretend(Path(os.environ["PRETENDED_CUDA_LIBRARY"]))
"""  # what gives any Python the devices that has it as sitecustomize.py


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
    """A process that trains with pretended CUDA devices. One request at a time.

    end: ends it, once for all, and returns its exit code.
    """

    def __init__(
        self, connection: socket.socket, answers: TextIO, folder: Path, end: Callable[[], int]
    ) -> None:
        self.folder, self.end, self._count, self._known = folder, end, 0, {}
        self._connection, self._answers = connection, answers

    def ask(
        self,
        job: str,
        plan: str,
        devices: str,
        *,
        timeout_s: float = 240.0,
        run: Path | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """What came of a request; see `workshop.py`."""
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir()
        request = {
            "job": job,
            "plan": plan,
            "devices": devices,
            "run": str(run or folder / "run"),
            "options": options,
        }
        return {**self._answer(request, timeout_s), "folder": folder, "run": Path(request["run"])}

    def verify(
        self, job: str, *plans: str, devices: str | None, timeout_s: float = 300.0, **options: Any
    ) -> dict[str, Any]:
        """What `paceline verify` says, or its error; see `workshop.py`."""
        self._count += 1
        request = {
            "job": job,
            "plans": plans,
            "devices": devices,
            "run": str(self.folder / str(self._count)),
            "options": options,
        }
        return self._answer(request, timeout_s)

    def check(self, name: str) -> Any:
        """What a check of `checks.py` returns, in a process that may use CUDA."""
        return self._result({"check": name})

    def script(self, path: Path, *words: str) -> str:
        """What a script prints, in such a process."""
        return str(self._result({"script": str(path), "words": words}))

    def _result(self, request: dict[str, Any]) -> Any:
        answer = self._answer(request, 240.0)
        assert "error" not in answer, f"{answer['error']} {self.printed()[-3000:]}"
        return answer["found"]

    def _answer(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        with suppress(ConnectionError):
            self._connection.sendall(f"{json.dumps(request)}\n".encode())
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._connection, selectors.EVENT_READ)
            if not waiting.select(timeout_s):
                self.end()
                raise TimeoutError(f"{request} has no answer after {timeout_s:g} s")
        try:
            line = self._answers.readline()
        except ConnectionError:  # it did not live to read the request
            line = ""
        if not line:
            raise RuntimeError(
                f"the workshop ended with {self.end()} and printed: {self.printed()[-2000:]}"
            )
        return json.loads(line)

    def train(self, job: str, plan: str, devices: str, **options: Any) -> Trained:
        """Train, which must go well; runs of the same job, plan and devices without options are done once."""
        key = job, plan, devices
        if not options and key in self._known:
            return self._known[key]
        answer = self.ask(job, plan, devices, **options)
        assert "error" not in answer, (
            f"{job} under {plan} on {devices}: {answer['error']}\n{self.printed()[-1500:]}"
        )
        run = answer["run"]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        trained = Trained(
            answer["summary"],
            [row["loss"] for row in rows if "loss" in row],
            load_file(run / "model.safetensors"),
            [json.loads(file.read_text()) for file in sorted(run.parent.glob("measured-*.json"))],
            answer["first_use"],
            {
                int(file.stem.rpartition("-")[2]): json.loads(file.read_text())
                for file in run.parent.glob("on-cpu-*.json")
            },
            run,
        )
        if not options:
            self._known[key] = trained
        return trained

    def printed(self) -> str:
        return (self.folder / "printed.txt").read_text()


class Workshops:
    """A process whose forks are workshops."""

    def __init__(
        self, process: subprocess.Popen[str], control: socket.socket, printed: Path
    ) -> None:
        self.process, self.printed, self._control = process, printed, control

    @contextmanager
    def open(
        self, folder: Path, *, devices: int = 4, memory_bytes: int = 80 << 30, taken_bytes: int = 0
    ) -> Iterator[Workshop]:
        """A workshop for tests. taken_bytes: of each device, that others are said to hold."""
        environment = {
            "PRETENDED_CUDA_DEVICES": str(devices),
            "PRETENDED_CUDA_MEMORY_BYTES": str(memory_bytes),
            "PRETENDED_CUDA_TAKEN_BYTES": str(taken_bytes),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        client, server = socket.socketpair()
        with (
            client,
            server,
            client.makefile("r") as answers,
            open(folder / "printed.txt", "w") as printed,
        ):
            pid = self._ask({"environment": environment}, [server.fileno(), printed.fileno()])
            server.close()
            end = cache(lambda: self._ask({"end": pid}))
            try:
                yield Workshop(client, answers, folder, end)
            finally:
                end()

    def _ask(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> int:
        answer = b""
        with suppress(ConnectionError):
            socket.send_fds(self._control, [f"{json.dumps(order)}\n".encode()], descriptors)
            answer = self._control.recv(64)
        if not answer:
            raise RuntimeError(
                f"the process that opens workshops ended with {self.process.wait()} and printed: "
                f"{self.printed.read_text()[-2000:]}"
            )
        return json.loads(answer)


@contextmanager
def workshops(folder: Path) -> Iterator[Workshops]:
    """What opens workshops, until it is left.

    Raises:
        CannotBuild: there is no compiler here.
    """
    here, library, site = Path(__file__).parent.parent, build(), folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    others = {
        name: value for name, value in os.environ.items() if name != "KERAS_TORCH_DEVICE"
    }  # of a job's file
    environment = {
        **others,
        "OMP_NUM_THREADS": "1",
        "PRETENDED_CUDA_SITE": str(site),
        "PRETENDED_CUDA_LIBRARY": str(library),
        "PYTHONPATH": os.pathsep.join([str(here), *filter(None, sys.path)]),
    }
    command = [
        sys.executable,
        "-m",
        "pretended_cuda.pretend",
        str(library),
        "-m",
        "pretended_cuda.workshop",
    ]
    client, server = socket.socketpair()
    with (
        client,
        open(folder / "printed.txt", "w") as printed,
        subprocess.Popen(
            command,
            env=environment,
            stdin=server,
            stdout=printed,
            stderr=printed,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        server.close()
        try:
            yield Workshops(process, client, folder / "printed.txt")
        finally:
            client.close()  # which ends it
