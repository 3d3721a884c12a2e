"""Trainings on Ray: what is decided of nodes and ranks, and a real local cluster whose node dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conditions import until
from safetensors.torch import load_file

import paceline as pl
from paceline.base.errors import (
    ClusterError,
    PacelineError,
    PeerLost,
    PlanError,
    Preempted,
    UsageError,
)
from paceline.job.file import JobFile
from paceline.launch.hosts.nodes import STARTED
from paceline.launch.hosts.shared_files import marked
from paceline.launch.process.failure import Failure, RankFailed
from paceline.launch.process.fault_policy import RestartPolicy
from paceline.launch.process.messages import Message
from paceline.ray import node_ranks
from paceline.ray import training as ray_training
from paceline.ray.nodes import Node, layouts
from paceline.ray.training import RayRun

DIGITS = Path(__file__).parents[2] / "examples" / "01_digits.py"
FILE = JobFile(DIGITS, settings={"width": 8})


def nodes(*counts: int, kind: str = "cpu") -> list[Node]:
    return [
        Node(f"id{number}", f"10.0.0.{number}", kind, count, f"10.0.0.{number}")
        for number, count in enumerate(counts)
    ]


# --- Which nodes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "counts", "expected"),
    [
        (2, (1, 1), [(2, 1)]),
        (2, (2, 2), [(1, 2), (2, 1)]),  # on one node, whose ranks talk faster, if it has room
        (
            3,
            (2, 2),
            [],
        ),  # never two ranks on one and one on the other: launchers give each host equally many
        (6, (4, 2, 2), [(3, 2)]),
        (1, (0, 1), [(1, 1)]),
    ],
)
def test_ranks_are_shared_evenly_on_the_fewest_nodes(
    world_size: int, counts: tuple[int, ...], expected: Any
):
    assert layouts(world_size, nodes(*counts)) == expected


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_training, "find_nodes", lambda address: nodes(1, 1))


@pytest.mark.parametrize(
    ("where", "request_", "error", "message"),
    [
        ("rays", {}, UsageError, "--on rays: there is no such cluster(?s:.*)--on ray"),
        (
            "ray",
            {"plan": "data=3"},
            ClusterError,
            r"needs 3 CPUs, equally many on each node.*10.0.0.0 \(1\), 10.0.0.1",
        ),
        ("ray", {"plan": "auto"}, UsageError, "plan 'auto' on ray(?s:.*)paceline plan"),
        ("ray", {"plan": "data=2", "procs": 3}, PlanError, "needs 2 ranks and --procs says 3"),
        ("ray", {"devices": "cpu:0"}, UsageError, "devices 'cpu:0' are of this machine"),
    ],
)
@pytest.mark.usefixtures("two_nodes")
def test_requests_that_make_no_sense(
    tmp_path: Path, where: str, request_: dict[str, Any], error: type[Exception], message: str
):
    """Refused before anything is started or written."""
    with pytest.raises(error, match=message):
        pl.train(FILE, on=where, run=tmp_path / "run", **request_)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("two_nodes")
def test_a_job_without_a_file_and_a_rank_of_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A job can't be sent; and a process that is a rank starts none."""
    with pytest.raises(UsageError, match="needs the job's file"):
        pl.train(FILE.load(), on="ray", run=tmp_path / "run")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="a launcher started"):
        pl.train(FILE, on="ray", run=tmp_path / "run")


@pytest.mark.usefixtures("two_nodes")
def test_without_a_plan_each_device_has_a_replica(tmp_path: Path):
    """What ranks are given is text and numbers, which JSON carries."""
    run = RayRun.of(
        "ray:10.0.0.0:6379",
        FILE,
        FILE.load(),
        None,
        run=tmp_path,
        timeout_s=1.0,
        options={"steps": 3, "log": None},
    )
    assert (run.address, str(run.plan)) == ("10.0.0.0:6379", "data=2")
    assert json.loads(json.dumps(run.options)) == {
        "steps": 3,
        "log": None,
        "plan": "data=2",
        "run": str(tmp_path),
    }


# --- How ranks end ----------------------------------------------------------------------------------------------


def failed(rank: int, kind: str = "ValueError", code: int = 1, **changed: Any) -> tuple[int, str]:
    failure = Failure(rank, "a", kind, f"{kind}: said", code, False, 3, "forward", "", "", 0.0)
    return rank, Message(0, "end", rank, None, replace(failure, **changed)).encode()


def lost_1() -> tuple[int, str]:
    """What rank 0 says of rank 1."""
    said = Message.decode(failed(1, "PeerLost", 4, heard=True)[1])
    return 0, replace(said, rank=0).encode()


def refused(rank: int, kind: str) -> tuple[int, str]:
    return rank, Message(
        0, "end", rank, {"kind": kind, "error": f"{kind}: no", "hint": "yes"}
    ).encode()


class Wire:
    """Nodes of one rank each, which say what the test lets them say."""

    names = ("a", "b")

    def __init__(self, *incoming: tuple[int, str | None]) -> None:
        self.incoming, self.told = [[each] for each in incoming], []  # type: ignore[var-annotated]

    def hear(self, timeout_s: float) -> list[tuple[int, str | None]]:
        return self.incoming.pop(0) if self.incoming else []

    def tell(self, node: int, line: str) -> None:
        self.told.append((node, json.loads(line)))

    def drop(self, node: int) -> None:
        pass


def ended(rank: int, code: int = 0) -> tuple[int, str]:
    return rank, Message(0, "ended", rank, code).encode()


def hear_out(wire: Wire, interrupted: list[int] | None = None) -> None:
    ends = ray_training._Ends(wire, [0, 1], Path("run"))  # type: ignore[arg-type]
    ends.hear_out(interrupted or [])


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_training, "_END_S", 0.05)
    monkeypatch.setattr(ray_training, "_POLL_S", 0.01)


def test_all_ranks_that_end_end_the_run():
    hear_out(Wire(ended(0), ended(1)))


@pytest.mark.parametrize(
    ("incoming", "error", "exit_code", "message"),
    [
        (
            [lost_1(), ended(0, 4), (1, None)],
            RankFailed,
            4,
            r"rank 1 on a failed in step 3 \(forward\):\nnode b is lost",
        ),
        # rank 0 says nothing in time
        ([(1, None)], RankFailed, 4, r"rank 1 on b failed in start \(start\):\nnode b is lost"),
        (
            [ended(1, -signal.SIGKILL), lost_1(), ended(0, 4)],
            RankFailed,
            4,
            r"rank 1 on a failed in step 3 \(forward\):\nit was killed by SIGKILL",
        ),
        (
            [lost_1(), failed(1, "PeerLost", 4), ended(0, 4), ended(1, 4)],
            RankFailed,
            4,
            r"rank 1 on a failed in step 3 \(forward\):\nPeerLost: said",
        ),
        (
            [failed(1), lost_1(), ended(1, 1), ended(0, 4)],
            RankFailed,
            1,
            r"rank 1 on a failed in step 3 \(forward\):\nValueError: said",
        ),
        ([failed(0, "OutOfMemory", 3), ended(0, 3), (1, None)], RankFailed, 3, "OutOfMemory"),
        ([refused(0, "PlanError"), ended(0, 2), ended(1, 2)], PlanError, 2, "no(?s:.*)hint: yes"),
        (
            [refused(0, "PeerLost"), refused(1, "PlanError"), ended(0, 4), ended(1, 2)],
            PlanError,
            2,
            "PlanError: no",
        ),
        ([refused(0, "PeerLost"), ended(0, 4), (1, None)], RankFailed, 4, "node b is lost"),
        ([refused(0, "PeerLost"), ended(0, 4), ended(1, 4)], PeerLost, 4, "PeerLost: no"),
        ([ended(0, 7), ended(1)], PacelineError, 1, "rank 0 ended with exit code 7"),
    ],
)
def test_what_ended_the_ranks(incoming: Any, error: type[Exception], exit_code: int, message: str):
    """The cause, as the rank that failed reports it, or as the others saw it if it is gone; 4 starts ranks again."""
    with pytest.raises(error, match=message) as caught:
        hear_out(Wire(*incoming))
    assert caught.value.exit_code == exit_code  # type: ignore[attr-defined]


def test_a_signal_is_passed_on_once_and_the_second_ends_all():
    """Ranks save after the first."""
    preempted = [failed(rank, "Preempted", 5) for rank in range(2)]
    wire = Wire(*preempted, ended(0, 5), ended(1, 5))
    with pytest.raises(RankFailed) as caught:
        hear_out(wire, [int(signal.SIGINT)])
    assert caught.value.exit_code == 130
    assert [(node, message["kind"], message["value"]) for node, message in wire.told] == [
        (0, "order", 15),
        (1, "order", 15),
    ]
    with pytest.raises(Preempted):
        hear_out(Wire(), [15, 15])


def test_nodes_that_do_not_come_back_are_waited_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """With how many are left, and how to go on."""
    monkeypatch.setattr(ray_training, "nodes_now", lambda address: nodes(1))
    run = RayRun("auto", FILE, pl.Plan.parse("data=2"), tmp_path, {}, timeout_s=0.05)
    with pytest.raises(PeerLost, match=r"10\.0\.0\.0 \(1\), have too few(?s:.*)--resume"):
        ray_training._Attempts(run, RestartPolicy(1)).run_once()
    assert capsys.readouterr().err.count("waiting") == 1


def test_restarts_end_where_nothing_is_gained(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A third start in a row that comes no further than the first; or none is left. What was lost is raised then."""
    run, lost = RayRun("auto", FILE, pl.Plan(), tmp_path, {}, 1.0), PeerLost("node b is lost")
    attempts = ray_training._Attempts(run, RestartPolicy(10))
    update = {"launch": 1, "step": 4, "epoch": 0, "start": 96, "count": 32}
    (tmp_path / "journal.jsonl").write_text(json.dumps(update) + '\n{"st')
    for _ in range(3):
        attempts._note_restart(lost)
    with pytest.raises(PeerLost, match="node b is lost"):
        attempts._note_restart(lost)
    assert "no further than step 4" in capsys.readouterr().err
    with pytest.raises(PeerLost, match="node b is lost"):
        ray_training._Attempts(run, RestartPolicy(0))._note_restart(lost)
    assert "no restarts are left" in capsys.readouterr().err


# --- A node -----------------------------------------------------------------------------------------------------


def node(tmp_path: Path, **changed: Any) -> subprocess.Popen[str]:
    """A node's program that was greeted."""
    started = subprocess.Popen(
        [sys.executable, "-m", "paceline.ray.node_ranks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    with marked(FILE, tmp_path) as shared:
        greeting = {"shared": {**asdict(shared), **changed}, "folder": str(tmp_path)}
        assert started.stdin is not None and started.stdout is not None
        started.stdin.write(json.dumps(greeting) + "\n")
        assert json.loads(started.stdout.readline()) == STARTED
        started.answer = json.loads(started.stdout.readline())  # type: ignore[attr-defined]
    return started


def test_a_node_starts_ranks_and_says_how_they_end(tmp_path: Path):
    """With their variables, in the working folder, and what they print; the end of its stdin ends them."""
    (tmp_path / "rank.py").write_text(
        "import os, sys, time\nprint('rank', os.environ['RANK'], os.getcwd(), file=sys.stderr, flush=True)\n"
        "print('''" + Message(0, "end", 0).encode() + "''', flush=True)\n"
        "os.environ['RANK'] == '1' and time.sleep(600)\n"
    )
    with node(tmp_path) as started:
        assert started.stdin is not None and started.stdout is not None
        assert started.answer["port"] in node_ranks._PORTS  # type: ignore[attr-defined]
        for rank in range(2):
            started.stdin.write(
                Message(
                    0,
                    "start",
                    rank,
                    {"words": [str(tmp_path / "rank.py")], "environment": {"RANK": str(rank)}},
                ).encode()
                + "\n"
            )
        messages = [Message.decode(started.stdout.readline()) for _ in range(5)]
        assert {message.value for message in messages if message.kind == "report"} == {
            f"rank 0 {tmp_path}",
            f"rank 1 {tmp_path}",
        }
        assert messages.count(Message(0, "end", 0)) == 2
        assert Message(0, "ended", 0, 0) in messages
        started.stdin.close()
        assert started.wait(timeout=20) == 0


def test_a_rank_that_a_node_can_t_start(monkeypatch: pytest.MonkeyPatch):
    """Its end is told, so that nobody waits for it."""
    reading, writing = os.pipe()

    async def start() -> None:
        ranks = node_ranks._Ranks(writing)
        ranks.do(Message(0, "start", 3, {"words": [], "environment": {}}))
        await asyncio.gather(*ranks.tasks)

    monkeypatch.setattr(sys, "executable", "/no/python")
    asyncio.run(start())
    os.close(writing)
    with open(reading) as lines:
        report, ended = map(Message.decode, lines)
    assert report.value.startswith("rank 3 can't be started: ") and ended == Message(
        0, "ended", 3, 1
    )


def test_a_node_that_sees_other_files_says_so(tmp_path: Path):
    with node(tmp_path, mark="another") as started:
        assert "is not there, or can't be written" in started.answer["error"]  # type: ignore[attr-defined]


# --- A real cluster ---------------------------------------------------------------------------------------------


def command(run: Path, *words: str) -> list[str]:
    return [
        sys.executable,
        "-P",
        "-m",
        "paceline",
        "train",
        str(DIGITS),
        "--plan",
        "data=2",
        "--steps",
        "400",
        "--set",
        "width=8",
        "--save-every",
        "50",
        "--run",
        str(run),
        *words,
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_node_that_dies_changes_no_weight(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run waits until there is a node in its place, goes on from the newest checkpoint, and ends as one device."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with subprocess.Popen(
        command(tmp_path / "ray", "--on", f"ray:{ray_cluster.address}"),
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        commit = tmp_path / "ray" / "checkpoints" / "step-100" / "COMMIT"
        until(lambda: commit.exists() or child.poll() is not None)
        assert child.poll() is None, child.stderr and child.stderr.read()
        ray_cluster.remove_node(ray_cluster.second, allow_graceful=False)
        ray_cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        _, printed = child.communicate(timeout=300)
    assert child.returncode == 0, printed
    assert "all ranks start again" in printed and "resumed from step-" in printed, printed
    subprocess.run(command(tmp_path / "here"), check=True, timeout=200)
    weights, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("ray", "here")
    )
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    subprocess.run(
        [sys.executable, "-P", "-m", "paceline", "audit", str(tmp_path / "ray")],
        check=True,
        timeout=100,
    )
