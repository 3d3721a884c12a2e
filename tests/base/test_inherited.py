"""Forks of a process share nothing that a data set keeps: places in files, connections; what they lack is named."""

from __future__ import annotations

import gzip
import io
import os
import socket
import sqlite3
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from multiprocessing import Barrier, get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from later import needed
from torch import nn
from torch.utils.data import Dataset

import paceline
from paceline.base import inherited
from paceline.launch.process.failure import RankFailed

SIZE, WIDTH = 16, 3
RECORDS = np.repeat(np.arange(float(SIZE)), WIDTH).reshape(SIZE, WIDTH)  # each holds its own number
RECORD_BYTES = 8 * WIDTH

Read = Callable[[int], bytes]


class Records(Dataset[Any]):
    """Samples that are read in two halves: both readers are between them at once. A wrong record is an error."""

    def __init__(
        self,
        reads: dict[str, Read],
        begin: Callable[[int], Any] = lambda index: None,
        end: Callable[[], bytes] | None = None,
    ) -> None:
        self.reads, self.begin, self.end, self.both = reads, begin, end, Barrier(2)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.begin(index)
        with suppress(threading.BrokenBarrierError):
            self.both.wait(5)
        got = {name: read(index) for name, read in self.reads.items()}
        if self.end is not None:
            got["halves"] = self.end()
        wrong = [name for name, record in got.items() if record != RECORDS[index].tobytes()]
        assert not wrong, f"record {index} is another one in {wrong}"
        return torch.from_numpy(RECORDS[index] / SIZE), index % 2


def train(data: Any, *, plan: str = "data=2", **options: Any) -> Any:
    job = paceline.Job(
        model=lambda: nn.Linear(WIDTH, 2),
        data=data,
        loss=nn.functional.cross_entropy,
        batch=8,
        epochs=2,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        precision="float64",
    )
    return paceline.train(job, plan=plan, table=False, **options)


@pytest.fixture
def kept_open(tmp_path: Path) -> Iterator[dict[str, Read]]:
    """Files of several kinds that were opened once, and how a record of each is read."""
    tar, packed, lasting, database = (
        tmp_path / name for name in ("a.tar", "a.zip", "a.gz", "a.sqlite")
    )
    with (
        tarfile.open(tar, "w") as to_tar,
        zipfile.ZipFile(packed, "w") as to_zip,
        gzip.open(lasting, "wb") as to_gzip,
    ):
        for number, record in enumerate(RECORDS):
            entry = tarfile.TarInfo(str(number))
            entry.size = RECORD_BYTES
            to_tar.addfile(entry, io.BytesIO(record.tobytes()))
            to_zip.writestr(str(number), record.tobytes())
            to_gzip.write(record.tobytes())
    np.savez(tmp_path / "a.npz", *RECORDS)
    np.save(tmp_path / "a.npy", RECORDS)
    (tmp_path / "removed").write_bytes(RECORDS.tobytes())
    with ExitStack() as files:
        connection = files.enter_context(closing(sqlite3.connect(database)))
        connection.execute("create table records (number, record)")
        connection.executemany(
            "insert into records values (?, ?)",
            [(number, record.tobytes()) for number, record in enumerate(RECORDS)],
        )
        connection.commit()
        temporary = files.enter_context(tempfile.TemporaryFile())
        temporary.write(RECORDS.tobytes())
        temporary.flush()
        in_tar = files.enter_context(tarfile.open(tar))
        in_zip = files.enter_context(zipfile.ZipFile(packed))
        in_gzip = files.enter_context(gzip.open(lasting))
        in_npz = files.enter_context(np.load(tmp_path / "a.npz"))
        removed = files.enter_context(open(tmp_path / "removed", "rb"))
        (tmp_path / "removed").unlink()
        mapped = np.load(tmp_path / "a.npy", mmap_mode="r")

        def sought(file: Any) -> Read:
            def read(index: int) -> bytes:
                file.seek(index * RECORD_BYTES)
                return bytes(file.read(RECORD_BYTES))

            return read

        yield {
            "tar": lambda index: in_tar.extractfile(str(index)).read(),
            "zip": lambda index: in_zip.read(str(index)),
            "gzip": sought(in_gzip),
            "npz": lambda index: in_npz[f"arr_{index}"].tobytes(),
            "removed": sought(removed),
            "temporary": sought(temporary),
            "mapped": lambda index: mapped[index].tobytes(),
            "database": lambda index: connection.execute(
                "select record from records where number = ?", (index,)
            ).fetchone()[0],
        }


@pytest.mark.sweep(2)
@pytest.mark.parametrize("loader_workers", [0, 1])
@pytest.mark.parametrize("mode", ["rb", "r+b"])
def test_each_fork_reads_at_a_place_of_its_own(
    mode: str, loader_workers: int, kept_open: dict[str, Read], tmp_path: Path
):
    """A data set that opened its files once gives each rank and loader worker its own records."""
    (tmp_path / "records").write_bytes(RECORDS.tobytes())
    with open(tmp_path / "records", mode) as file:
        data = Records(
            kept_open,
            lambda index: file.seek(index * RECORD_BYTES),
            lambda: file.read(RECORD_BYTES),
        )
        train(data, run=tmp_path / "run", loader_workers=loader_workers)


def test_a_file_with_the_number_of_an_earlier_output(tmp_path: Path):
    """A file that is no output any more, or one that took over its inode, is read like others."""
    (tmp_path / "records").write_bytes(RECORDS.tobytes())
    with open(tmp_path / "records", "r+b") as file:
        output = os.dup(1)
        os.dup2(file.fileno(), 1)
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        os.dup2(output, 1)
        os.close(output)
        data = Records(
            {}, lambda index: file.seek(index * RECORD_BYTES), lambda: file.read(RECORD_BYTES)
        )
        train(data, run=tmp_path / "run")


def test_a_fork_while_another_thread_closes_and_opens_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """The other files keep their places, and a number that is another file's by now keeps its own."""
    (tmp_path / "records").write_bytes(RECORDS.tobytes())
    (tmp_path / "others").write_bytes(RECORDS.tobytes())
    files = [os.open(tmp_path / "records", os.O_RDONLY) for _ in range(4)]
    kept, closed, closed_later, replaced = files
    for place, file in enumerate(files, 1):
        os.lseek(file, place * RECORD_BYTES, os.SEEK_SET)
    listed = inherited._open

    def closes_meanwhile() -> Iterator[tuple[int, os.stat_result]]:
        for descriptor, status in listed():
            if descriptor == closed:
                os.close(closed)
            yield descriptor, status

    with monkeypatch.context() as patch:
        patch.setattr(inherited, "_open", closes_meanwhile)
        inherited._note_places()
    os.close(closed_later)
    other = os.open(tmp_path / "others", os.O_RDONLY)
    os.dup2(other, replaced)
    os.lseek(kept, 0, os.SEEK_SET)  # as the parent does, which reads on
    inherited._open_again()
    assert os.lseek(kept, 0, os.SEEK_CUR) == RECORD_BYTES
    assert os.lseek(replaced, 0, os.SEEK_CUR) == 0
    assert capfd.readouterr().err == ""
    for file in (kept, replaced, other):
        os.close(file)


@pytest.mark.parametrize("package", ["h5py", "lmdb"])
def test_libraries_read_at_a_place_of_their_own(package: str, tmp_path: Path):
    """HDF5 files and LMDB environments without locks that were opened once."""
    library = needed(package)
    if package == "h5py":
        with library.File(tmp_path / "records.h5", "w") as file:
            file["records"] = RECORDS
        with library.File(tmp_path / "records.h5") as file:
            train(
                Records({"h5py": lambda index: file["records"][index].tobytes()}),
                run=tmp_path / "run",
            )
        return
    with (
        library.open(str(tmp_path / "records")) as environment,
        environment.begin(write=True) as writes,
    ):
        for number, record in enumerate(RECORDS):
            writes.put(bytes([number]), record.tobytes())
    with library.open(str(tmp_path / "records"), readonly=True, lock=False) as environment:

        def read(index: int) -> bytes:
            with environment.begin() as transaction:
                return bytes(transaction.get(bytes([index])))

        train(Records({"lmdb": read}), run=tmp_path / "run")


class Client:
    """Asks a server for records over one connection. reconnects: once it finds that closed."""

    def __init__(self, address: tuple[str, int], *, reconnects: bool) -> None:
        self.address, self.reconnects = address, reconnects
        self.connection = socket.create_connection(address)

    def ask(self, index: int) -> None:
        try:
            self.connection.sendall(bytes([index]))
        except OSError:
            if not self.reconnects:
                raise
            self.connection = socket.create_connection(self.address)
            self.connection.sendall(bytes([index]))

    def answer(self) -> bytes:
        return self.connection.recv(RECORD_BYTES)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """The address of a server of records, in a process of its own."""

    def serve(connection: socket.socket) -> None:
        while request := connection.recv(1):
            connection.sendall(RECORDS[request[0]].tobytes())

    def accept() -> None:
        while True:
            threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = get_context("fork").Process(target=accept, daemon=True)
        process.start()
        yield listener.getsockname()
        process.kill()
        process.join()


def test_no_two_forks_use_one_connection(server: tuple[str, int], tmp_path: Path):
    """A client finds its connection closed: it connects again, or fails and is named. A rank alone keeps it."""

    def records(*, reconnects: bool) -> Records:
        client = Client(server, reconnects=reconnects)
        clients.callback(lambda: client.connection.close())
        return Records({}, client.ask, client.answer)

    with ExitStack() as clients:
        train(records(reconnects=True), run=tmp_path / "again")
        # Another file's test may have left a connection in this process, which is named, too.
        with pytest.raises(
            RankFailed,
            match=rf"can't be read[^\0]*connections to .*127.0.0.1:{server[1]}.* were made",
        ):
            train(records(reconnects=False), run=tmp_path / "closed")
        alone = records(reconnects=False)
        alone.both.abort()
        train(alone, plan="single", run=tmp_path / "alone")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["pool", "processes", "own thread", "lmdb", "connection", "pipe"])
def test_what_forks_lack_is_named(
    kind: str, server: tuple[str, int], tmp_path: Path, start_child: Any
):
    """Threads, connections and pipes that a job's file leaves are named before the first step, and nothing else is."""
    made, named = {
        "pool": (
            "(pool := concurrent.futures.ThreadPoolExecutor(1, 'decoder')).submit(int)",
            "threads decoder_0",
        ),
        "own thread": (
            "threading.Thread(target=lambda: time.sleep(60), name='ahead', daemon=True).start()",
            "threads ahead",
        ),
        "processes": ("multiprocessing.Pool(1)", "(_handle_workers)"),
        "lmdb": (
            f"importlib.import_module('lmdb').open({str(tmp_path / 'records')!r})",
            f"LMDB environments with locks {tmp_path / 'records'} (forks run out of readers",
        ),
        "connection": (
            f"socket.create_connection({server})",
            f"connections to 127.0.0.1:{server[1]}",
        ),
        "pipe": ("os.pipe()", "pipes or sockets with the descriptors"),
    }[kind]
    if kind == "lmdb":
        needed("lmdb")
    file = tmp_path / "named.py"
    file.write_text(
        "import concurrent.futures, importlib, multiprocessing, os, socket, threading, time, torch, paceline as pl\n"
        f"KEPT, FILE = ({made}), open(__file__)\n"
        "def job():\n    return pl.Job(model=lambda: torch.nn.Linear(2, 2), data=(torch.ones(4, 2), torch.ones(4, 2)), "
        "batch=4, steps=1, loss=torch.nn.functional.mse_loss, optimizer=lambda named: torch.optim.SGD(named, lr=.1))\n"
    )
    child = start_child(
        lambda: paceline.train(str(file), plan="single", run=tmp_path / "run", table=False)
    )
    assert child.exit_code() == 0, child.stderr
    notes = [
        line
        for line in child.stderr.splitlines()
        if line.startswith("note: ranks and loader workers")
    ]
    assert len(notes) == 1 and named in notes[0]
    assert notes[0].count("; ") == (
        kind == "processes"
    )  # a pool has threads and pipes; the others nothing else


@pytest.mark.slow
def test_a_pool_that_a_fork_lacks_ends_the_only_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Nobody else waits for it, and it would wait for ever."""
    with ThreadPoolExecutor(1, "decoder") as pool:
        pool.submit(int).result()
        data = Records({}, lambda index: pool.submit(int).result())
        with pytest.raises(RankFailed, match="rank 0 did not go on for 1 s"):
            train(data, plan="single", timeout_s=1.0, restarts=0, run=tmp_path / "run")
    assert "threads decoder_0" in capfd.readouterr().err
