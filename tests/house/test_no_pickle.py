"""A pickle in place of any input is refused, and never loaded: it would run what its maker likes."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.base.errors import PacelineError
from paceline.checkpoint import open_checkpoint
from paceline.checkpoint.dtypes import load_tensors
from paceline.launch.hosts.host_copies import HostCopies
from paceline.launch.process.faults import struck
from paceline.launch.process.messages import Message
from paceline.servers.wire import Connection, Header, Kind
from paceline.training.parts.copied_state import open_copies

pytestmark = pytest.mark.usefixtures("charts_drawn_once")


class Trap:
    """Leaves a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    return tmp_path / "loaded"


@pytest.fixture(params=["pickle", "torch"])
def planted(request: Any, trap: Path, tmp_path: Path) -> bytes:
    """What pickle, or torch.save, makes of the trap; it works where it is loaded."""
    if request.param == "pickle":
        return pickle.dumps(Trap(trap))
    torch.save(Trap(trap), tmp_path / "made")
    return (tmp_path / "made").read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = TensorDataset(torch.randn(12, 3), torch.randn(12, 2))
    job = pl.Job(
        model=lambda: nn.Linear(3, 2),
        data=pairs,
        loss=nn.functional.mse_loss,
        batch=6,
        steps=4,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    return pl.train(
        job, "single", run=tmp_path_factory.mktemp("trained") / "run", save_every=4, check=False
    ).run


def _read_run(run: Path) -> None:
    for read in (
        pl.open,
        pl.audit,
        lambda path: pl.report(path),
        lambda path: pl.compare(path, path),
        struck,
        pl.evaluate,
        lambda path: pl.predict(path, "[1.0, 2.0, 3.0]"),
        lambda path: load_tensors(path / "model.safetensors"),
        lambda path: open_checkpoint(path / "checkpoints" / "step-4"),
    ):
        with suppress(PacelineError, ValueError, LookupError, OSError, SafetensorError):
            read(run)


@pytest.mark.sweep(1)
def test_a_run_folder_of_pickles(trained: Path, tmp_path: Path, planted: bytes, trap: Path):
    """Every file that is there, one after another."""
    import shutil

    names = [path.relative_to(trained) for path in sorted(trained.rglob("*")) if path.is_file()]
    assert {"journal.jsonl", "plan.json", "summary.json", "model.safetensors"} <= {
        str(name) for name in names
    }
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for name in names:
        whole = (run / name).read_bytes()
        (run / name).write_bytes(planted)
        _read_run(run)
        (run / name).write_bytes(whole)
        assert not trap.exists(), name


@pytest.mark.parametrize(
    "read",
    [
        lambda path: pl.Plan.read(str(path)),
        lambda path: pl.plan(job_without_data(), str(path), calibrate_s=0),
        lambda path: pl.predict(path.parent, str(path)),
        lambda path: Message.decode(path.read_bytes()),
        lambda path: pl.pretrained(str(path)),
    ],
    ids=["plan", "cluster", "predict", "message", "weights"],
)
@pytest.mark.parametrize("suffix", [".json", ".toml", ".npy", ".safetensors"])
def test_a_pickle_as_a_file(
    tmp_path: Path, planted: bytes, trap: Path, read: Callable[[Path], Any], suffix: str
):
    path = tmp_path / f"given{suffix}"
    path.write_bytes(planted)
    with suppress(PacelineError, ValueError, OSError):
        read(path)
    assert not trap.exists()


def job_without_data() -> pl.Job:
    return pl.Job(
        model=lambda: nn.Linear(3, 2),
        data=TensorDataset(torch.ones(2, 3), torch.ones(2, 2)),
        loss=nn.functional.mse_loss,
        batch=2,
        steps=1,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


def test_a_pickle_on_the_wire(planted: bytes, trap: Path):
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    connection = Connection(server.accept()[0])
    client.sendall(Header(Kind.MESSAGE, len(planted)).pack() + planted)
    with pytest.raises(PacelineError, match="no JSON"):
        connection.receive_message()
    for sock in (server, client, connection.sock):
        sock.close()
    assert not trap.exists()


def test_a_pickle_as_a_copy_of_another_host(planted: bytes, trap: Path):
    """As its index, and from a peer that has yet to prove itself."""
    host = HostCopies(1)
    host.memory.write(0, 1, [], planted)
    with pytest.raises(PacelineError, match="is none"):
        open_copies(1, [(host.memory, 0)])
    host.serve("127.0.0.1")
    with socket.create_connection(("127.0.0.1", host.address.port)) as stranger:
        stranger.sendall(planted.ljust(64))
        with suppress(ConnectionError):  # it is closed with what was sent unread
            assert len(stranger.recv(100)) == 36 and not stranger.recv(100)
    host.close()
    host.memory.close()
    assert not trap.exists()


def test_the_trap_works(tmp_path: Path, trap: Path):
    pickle.loads(pickle.dumps(Trap(trap)))
    assert trap.exists()
