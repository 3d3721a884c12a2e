"""Hosts that come and go: the run goes on with those that are there, and each sample counts once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from conditions import until
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import paceline as pl
from paceline.base.sockets import closed_in_forks
from paceline.checkpoint.dtypes import load_tensors
from paceline.job.file import JobFile
from paceline.launch.hosts import elastic
from paceline.training.parts.memory_checkpoint import Copier
from tests import namespaces
from tests.commands import Command, free_port
from tests.namespaces import NetworkHost, NoNamespaces, network_hosts

JOB = """
import os, signal, time, torch, paceline as pl
from pathlib import Path
from torch.utils.data import TensorDataset

def job(mark: str = "", pause_s: float = 0.0):
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(50, 8, generator=source).double()
    calls = []

    def loss(output, target):
        calls.append(None)
        time.sleep(pause_s)
        if mark and len(calls) == 8 and os.environ["RANK"] == "1" and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.mse_loss(output, target)

    return pl.Job(model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)),
                  data=TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh()), loss=loss, batch=12, steps=12,
                  optimizer=lambda named: torch.optim.AdamW(named, lr=0.01), precision="float64")
"""
PACELINE = [sys.executable, "-m", "paceline", "train"]
CHECKED = pytest.mark.checked_runs
SECRET = "known to hosts alone"


@pytest.fixture(autouse=True)
def quick_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks up the source of its own frames in all modules at each step of a rendezvous, for its log. In forks of
    this process, which has thousands, that takes seconds."""
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda depth=2: "")


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


def environ(index: int, num_hosts: int, address: str, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "PET_NNODES": str(num_hosts),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def starts(run: Path) -> list[tuple[int, str]]:
    """After which step each launch went on, and under which plan."""
    lines = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return [(line["after"], line["plan"]) for line in lines if "after" in line]


def difference(run: Path, other: Path) -> float:
    weights, other_weights = (load_tensors(path / "model.safetensors") for path in (run, other))
    return max(float((weights[name] - other_weights[name]).abs().max()) for name in weights)


def train_on_two_hosts(tmp_path: Path, job_file: Path, plan: str) -> list[str]:
    """Rank 1 is killed in its eighth step; what both hosts said. There is no checkpoint."""
    port = free_port()
    words = [
        "train",
        str(job_file),
        "--run",
        str(tmp_path / "run"),
        "--plan",
        plan,
        "--hosts",
        "2:2",
        "--timeout",
        "60",
        "--set",
        f"mark={tmp_path / 'killed'}",
        "--set",
        "pause_s=0.05",
    ]
    hosts = [
        Command(
            words,
            environ(index, 2, "127.0.0.1", port) | {"PACELINE_SECRET": SECRET},
            tmp_path / f"host-{index}",
        )
        for index in range(2)
    ]
    seen: dict[str, bytes] = {}
    stranger = threading.Thread(target=read_store, args=(port, seen))
    stranger.start()
    codes = [host.wait() for host in hosts]
    stranger.join()
    stderr_texts = [host.stderr.read_text() for host in hosts]
    assert codes == [0, 0], stderr_texts
    assert all(
        "rank 1 on" in text and "killed by SIGKILL; all ranks start again" in text
        for text in stderr_texts
    ), stderr_texts
    assert pl.audit(tmp_path / "run").passed
    pl.train(
        JobFile.parse(str(job_file), {}), plan, run=tmp_path / "whole", check=False, table=False
    )
    assert difference(tmp_path / "run", tmp_path / "whole") == 0.0
    assert seen and not [key for key, value in seen.items() if SECRET.encode() in value]
    return stderr_texts


@pytest.mark.slow
def test_a_rank_that_works_for_longer_than_the_patience_is_no_hang(tmp_path: Path):
    """Its host says so to the one whose ranks wait. Each of its micro-batches is a sign of life."""
    (tmp_path / "job.py").write_text(
        JOB.replace("time.sleep(pause_s)", 'time.sleep(pause_s * (os.environ["RANK"] == "1"))')
    )
    port = free_port()
    words = [
        *("train", str(tmp_path / "job.py"), "--run", str(tmp_path / "run"), "--hosts", "2:2"),
        *("--plan", "data=2 microbatches=6", "--timeout", "3", "--restarts", "0"),
        *("--set", "pause_s=1.0", "--steps", "1"),
    ]
    hosts = [
        Command(words, environ(index, 2, "127.0.0.1", port), tmp_path / f"host-{index}")
        for index in range(2)
    ]
    codes = [host.wait() for host in hosts]
    assert codes == [0, 0], [host.stderr.read_text() for host in hosts]


def read_store(port: int, seen: dict[str, bytes]) -> None:
    """Read all that is in the store, as anybody can who reaches its port, until it is gone."""
    store = None
    for _ in range(1000):
        try:
            store = store or dist.TCPStore(
                "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1)
            )
            seen |= {
                key: store.get(key)
                for key in store.list_keys()
                if key not in seen and store.check([key])
            }
        except (RuntimeError, dist.DistError):
            if seen:
                return
        time.sleep(0.05)


@pytest.mark.parametrize(
    "plan", ["shard=2", pytest.param("data=2", marks=(pytest.mark.slow, CHECKED))]
)
def test_a_rank_that_is_killed_on_one_of_two_hosts(
    tmp_path: Path, job_file: Path, plan: str, monkeypatch: pytest.MonkeyPatch
):
    """All ranks start again from their copies in memory; the weights are those of an undisturbed run bit by bit, and
    each host says who died."""
    monkeypatch.setattr(Copier, "affordable_every", lambda self, step_s: 1)
    stderr_texts = train_on_two_hosts(tmp_path, job_file, plan)
    (first, _), (again, same_plan) = starts(tmp_path / "run")
    assert (
        first == 0 < again < 8
        and same_plan == plan
        and f"resumed from copy-{again}" in "".join(stderr_texts)
    )


@pytest.mark.slow
def test_the_first_host_comes_back(tmp_path: Path, job_file: Path):
    """Its process is killed: the other host has what both held, though nothing but the first host's own ranks held its
    part, and there is no checkpoint."""
    port, run = free_port(), tmp_path / "run"

    def start(index: int) -> subprocess.Popen[bytes]:
        command = [
            *PACELINE,
            str(job_file),
            "--run",
            str(run),
            "--plan",
            "shard=2",
            "--hosts",
            "2:2",
            "--timeout",
            "5",
            "--set",
            "pause_s=0.1",
            "--steps",
            "80",
            "--resume",
        ]
        with (tmp_path / f"host-{index}").open("a") as stderr:
            return subprocess.Popen(
                command, env=environ(index, 2, "127.0.0.1", port), stderr=stderr
            )

    def stderr_texts() -> list[str]:
        return [(tmp_path / f"host-{index}").read_text()[-2000:] for index in range(2)]

    def recorded() -> int:
        metrics = run / "metrics.jsonl"
        return metrics.read_text().count("step_s") if metrics.exists() else 0

    hosts = [start(index) for index in range(2)]
    try:
        until(lambda: recorded() >= 40, tell=stderr_texts)
        hosts[0].kill()
        hosts[0].wait()
        hosts[0] = start(0)
        until(lambda: all(host.poll() is not None for host in hosts), tell=stderr_texts)
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    assert [host.returncode for host in hosts] == [0, 0], stderr_texts()
    assert 0 < starts(run)[1][0] <= 45 and pl.audit(run).passed
    pl.train(
        JobFile.parse(str(job_file), {}),
        "shard=2",
        run=tmp_path / "whole",
        check=False,
        table=False,
        steps=80,
    )
    assert difference(run, tmp_path / "whole") == 0.0


# --- Three hosts in namespaces --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "hint"), [(None, "apt install iproute2"), ("false", "--privileged")]
)
def test_why_there_are_no_hosts(monkeypatch: pytest.MonkeyPatch, command: str | None, hint: str):
    """Without the command ip, and where it is not allowed: what to do is said."""

    def run(words: list[str], **options: Any) -> Any:
        return subprocess.CompletedProcess(words, 1, stderr="Operation not permitted")

    monkeypatch.setattr(namespaces.shutil, "which", lambda name: command)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(namespaces.subprocess, "run", run)
    with pytest.raises(NoNamespaces) as raised, network_hosts(2):
        pass
    assert hint in str(raised.value.hint)


@pytest.fixture
def three_hosts() -> Iterator[list[NetworkHost]]:
    try:
        with network_hosts(3) as hosts:
            yield hosts
    except NoNamespaces as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("plan", ["data=3", "shard=3"])
def test_a_host_is_cut_off_and_comes_back(
    three_hosts: list[NetworkHost], tmp_path: Path, job_file: Path, plan: str
):
    """The run goes on with two hosts from copies in memory, as there is no checkpoint, and takes the third back. The
    journal has every sample once."""
    run = tmp_path / "run"

    def start(index: int) -> subprocess.Popen[bytes]:
        command = [
            *PACELINE,
            str(job_file),
            "--run",
            str(run),
            "--plan",
            plan,
            "--hosts",
            "2:3",
            "--timeout",
            "4",
            "--steps",
            "400",
            "--set",
            "pause_s=0.1",
        ]
        with (tmp_path / f"host-{index}").open("w") as stderr:
            return subprocess.Popen(
                ["ip", "netns", "exec", three_hosts[index].name, *command],
                stderr=stderr,
                env=environ(index, 3, three_hosts[0].address, 29500),
            )

    def stderr_texts() -> list[str]:
        return [(tmp_path / f"host-{index}").read_text()[-2000:] for index in range(3)]

    def recorded() -> int:
        metrics = run / "metrics.jsonl"
        return metrics.read_text().count("step_s") if metrics.exists() else 0

    hosts = [start(index) for index in range(3)]
    try:
        until(lambda: recorded() >= 12, tell=stderr_texts)
        three_hosts[2].cut()
        until(lambda: len(starts(run)) == 2, tell=stderr_texts)
        assert starts(run)[1][0] > 0 and "resumed from copy-" in "".join(stderr_texts())
        assert f"rank 2 on {socket.gethostname()}: it can't be reached" in stderr_texts()[0]
        until(lambda: recorded() >= 25, tell=stderr_texts)
        three_hosts[2].heal()
        until(lambda: starts(run)[-1][1] == plan, tell=stderr_texts)
        until(lambda: recorded() >= starts(run)[-1][0] + 10, tell=stderr_texts)
        hosts[0].send_signal(signal.SIGTERM)
        until(lambda: hosts[0].poll() is not None, tell=stderr_texts)
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    assert hosts[0].returncode == 5, stderr_texts()
    assert {text for _, text in starts(run)[1:-1]} == {plan.replace("3", "2")}
    subprocess.run(
        [*PACELINE, str(job_file), "--run", str(run), "--plan", plan, "--steps", "400", "--resume"],
        check=True,
        timeout=100,
        capture_output=True,
    )
    audit = pl.audit(run)
    assert audit.passed, audit.describe()
    assert audit.updates == 400
    subprocess.run(
        [
            *PACELINE,
            str(job_file),
            "--run",
            str(tmp_path / "whole"),
            "--plan",
            plan,
            "--steps",
            "400",
            "--check",
            "no",
        ],
        check=True,
        timeout=100,
        capture_output=True,
    )
    assert difference(run, tmp_path / "whole") < 1e-9


# --- Without the first host -----------------------------------------------------------------------------------------


class Hosts:
    """The same command on several hosts: namespaces, or processes of this one. Processes are forks of this one.

    codes: of those that have ended, by host.
    """

    def __init__(
        self,
        tmp_path: Path,
        job_file: Path,
        plan: str,
        hosts: str,
        *,
        steps: int,
        networks: Sequence[NetworkHost] = (),
    ) -> None:
        self.tmp_path, self.run, self.networks = tmp_path, tmp_path / "run", networks
        self.count = int(hosts[-1])
        self.words = [
            "train",
            str(job_file),
            "--run",
            str(self.run),
            "--plan",
            plan,
            "--hosts",
            hosts,
            "--timeout",
            "8",
            "--steps",
            str(steps),
            "--set",
            "pause_s=0.1",
        ]
        self.port = free_port()
        self.commands: list[tuple[int, Command]] = []  # with their hosts
        self.codes: dict[int, int] = {}

    def __enter__(self) -> Hosts:
        for index in range(self.count):
            self.start(index)
        return self

    def __exit__(self, *_: object) -> None:
        self._poll()
        for index in range(self.count):
            if index not in self.codes:
                self.signal(index, signal.SIGKILL)
                self.codes[index] = self._newest(index).wait()

    def start(self, index: int) -> None:
        address = self.networks[0].address if self.networks else "127.0.0.1"
        command = Command(
            self.words,
            environ(index, self.count, address, self.port),
            self.tmp_path / f"command-{len(self.commands)}",
            host=self.networks[index] if self.networks else None,
        )
        self.commands.append((index, command))
        self.codes.pop(index, None)

    def signal(self, index: int, number: signal.Signals) -> None:
        os.kill(self._newest(index).pid, number)

    def _newest(self, index: int) -> Command:
        return [command for host, command in self.commands if host == index][-1]

    def _poll(self) -> None:
        for index in {*range(self.count)} - self.codes.keys():
            pid, status = os.waitpid(self._newest(index).pid, os.WNOHANG)
            if pid:
                self.codes[index] = os.waitstatus_to_exitcode(status)

    def has_ended(self, index: int) -> bool:
        self._poll()
        return index in self.codes

    def texts(self) -> list[str]:
        """What each host has said."""
        return [
            "".join(
                each.stderr.read_text()
                for host, each in self.commands
                if host == index and each.stderr.exists()  # a fork makes it
            )
            for index in range(self.count)
        ]

    def stderr_texts(self) -> list[str]:
        return [text[-3000:] for text in self.texts()]

    def recorded(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return metrics.read_text().count("step_s") if metrics.exists() else 0

    def wait(self, condition: Callable[[], bool]) -> None:
        until(condition, tell=self.stderr_texts)

    def train_together(self) -> None:
        """Wait until a start has all hosts, however late they came, and some steps more."""
        everybody = [*range(self.count)]
        self.wait(lambda: self.members[-1:] == [everybody])
        count = self.recorded()
        self.wait(lambda: self.recorded() >= count + 12)

    def ended(self) -> dict[int, int]:
        self.wait(lambda: self._poll() or len(self.codes) == self.count)
        return dict(self.codes)

    @property
    def members(self) -> list[list[int]]:
        """Hosts of each start, by what they say."""
        starts: dict[int, list[int]] = {}
        for index, text in enumerate(self.texts()):
            for number in re.findall(rf"host {index} \(.*: start (\d+) of the run", text):
                starts.setdefault(int(number), []).append(index)
        return [starts[number] for number in sorted(starts)]

    def check(
        self, tmp_path: Path, job_file: Path, plan: str, *, steps: int, within: float
    ) -> None:
        """Each sample counts once, and the weights are those of an undisturbed run."""
        assert pl.audit(self.run).passed
        pl.train(
            JobFile.parse(str(job_file), {}),
            plan,
            run=tmp_path / "whole",
            check=False,
            table=False,
            steps=steps,
        )
        assert difference(self.run, tmp_path / "whole") <= within


LOST = "host 0, which keeps the meeting place"


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize(
    ("plan", "range_", "members"),
    [
        ("data=3", "1:3", [[0, 1, 2], [0], [0, 1, 2]]),
        ("shard=3", "2:3", [[0, 1, 2], [0, 1, 2]]),
    ],
)
def test_the_first_host_is_cut_off_and_comes_back(
    three_hosts: list[NetworkHost],
    tmp_path: Path,
    job_file: Path,
    plan: str,
    range_: str,
    members: list[list[int]],
):
    """The other two wait, though they are more; the first one goes on alone only where one host is enough."""
    with Hosts(tmp_path, job_file, plan, range_, steps=160, networks=three_hosts) as hosts:
        hosts.train_together()
        three_hosts[0].cut()
        hosts.wait(lambda: all(LOST in text for text in hosts.stderr_texts()[1:]))
        count = hosts.recorded()
        if range_ == "1:3":
            hosts.wait(lambda: hosts.recorded() >= count + 20)
        three_hosts[0].heal()
        assert hosts.ended() == {0: 0, 1: 0, 2: 0}, hosts.stderr_texts()
    assert hosts.members[-len(members) :] == members, hosts.stderr_texts()
    hosts.check(tmp_path, job_file, plan, steps=160, within=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_process_of_the_first_host_is_lost(
    tmp_path: Path, job_file: Path, number: signal.Signals
):
    """The others wait until the same command runs there, or the process goes on, and give it their copies: there is no
    checkpoint."""
    with Hosts(tmp_path, job_file, "data=3", "3:3", steps=80) as hosts:
        hosts.train_together()
        hosts.signal(0, number)
        hosts.wait(lambda: all(LOST in text for text in hosts.stderr_texts()[1:]))
        if number == signal.SIGKILL:
            hosts.wait(lambda: hosts.has_ended(0))
            hosts.start(0)
        else:
            hosts.signal(0, signal.SIGCONT)
        assert hosts.ended() == {0: 0, 1: 0, 2: 0}, hosts.stderr_texts()
    assert hosts.members == [[0, 1, 2], [0, 1, 2]], hosts.stderr_texts()
    assert starts(hosts.run)[1][0] > 0, hosts.stderr_texts()
    hosts.check(tmp_path, job_file, "data=3", steps=80, within=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_first_host_is_gone_for_good(
    tmp_path: Path, job_file: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
):
    """The run ends on all hosts, with a code for which schedulers start it again; at once, with a checkpoint, where the
    first host says that it leaves."""
    monkeypatch.setattr(elastic, "JOIN_S", 60.0)  # for the start, too
    with Hosts(tmp_path, job_file, "data=2", "2:2", steps=60) as hosts:
        hosts.train_together()
        hosts.signal(0, number)
        ended = hosts.ended()
        said = hosts.stderr_texts()[1]
    assert hosts.members == [[0, 1]], hosts.stderr_texts()
    if number == signal.SIGTERM:
        assert ended == {0: 5, 1: 5} and "SIGTERM" in said, hosts.stderr_texts()
    else:
        assert ended == {0: -9, 1: 4} and LOST in said, hosts.stderr_texts()
        assert "--resume on all hosts goes on from the newest checkpoint" in said


@pytest.mark.slow
def test_another_host_leaves(tmp_path: Path, job_file: Path):
    """It saves and ends, and the first one goes on without it."""
    with Hosts(tmp_path, job_file, "data=2", "1:2", steps=60) as hosts:
        hosts.train_together()
        hosts.signal(1, signal.SIGTERM)
        assert hosts.ended() == {0: 0, 1: 5}, hosts.stderr_texts()
    assert hosts.members[-2:] == [[0, 1], [0]], hosts.stderr_texts()
    hosts.check(tmp_path, job_file, "data=2", steps=60, within=1e-9)


@pytest.mark.slow
def test_the_port_of_the_meeting_place_is_taken(tmp_path: Path, job_file: Path):
    """The first host says so at once, and opens it when it is free."""
    with contextlib.ExitStack() as stack:
        hosts = Hosts(tmp_path, job_file, "data=2", "2:2", steps=8)
        taken = stack.enter_context(closed_in_forks(socket.create_server(("", hosts.port))))
        stack.enter_context(hosts)
        hosts.wait(lambda: f"port {hosts.port}, where the hosts meet" in hosts.stderr_texts()[0])
        taken.close()
        assert hosts.ended() == {0: 0, 1: 0}, hosts.stderr_texts()


def test_a_host_parts_from_a_store_that_gives_no_answer(monkeypatch: pytest.MonkeyPatch):
    """The keeper's host has vanished: nothing comes of the connection for minutes."""
    monkeypatch.setattr(elastic, "_PARTED_S", 0.1)
    host = elastic._ElasticHost.__new__(elastic._ElasticHost)
    host.meeting, host.silence_s = SimpleNamespace(is_kept_here=False), 0.1  # type: ignore[assignment]
    never, parted = threading.Event(), threading.Event()
    store = SimpleNamespace(add=lambda key, count: never.wait())
    threading.Thread(target=lambda: (host._part(store, 2), parted.set()), daemon=True).start()
    try:
        assert parted.wait(60)
    finally:
        never.set()
