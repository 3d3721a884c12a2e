"""Writing: a checkpoint is whole or not there, whatever happens to disks, ranks and processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from saved import names, newest_step

from paceline.base.errors import CheckpointError
from paceline.checkpoint import (
    TensorPiece,
    Writer,
    assemble,
    files,
    load_tensors,
    newest_checkpoint,
    open_checkpoint,
    pieces_of,
    write,
    write_json,
    write_model,
)
from paceline.checkpoint.files import NewFile, write_tensors
from paceline.checkpoint.pieces import copy
from paceline.checkpoint.staging import Staging
from paceline.job.pretrained import Weights
from paceline.training.initial import source_of

W = torch.arange(12.0).reshape(6, 2)


def writers(
    run_dir: Path, world_size: int, *, attempt: str = "first", timeout_s: float = 30.0
) -> list[Writer]:
    return [
        Writer(run_dir, rank=rank, world_size=world_size, attempt=attempt, timeout_s=timeout_s)
        for rank in range(world_size)
    ]


def halves(scale: float = 1.0) -> list[list[TensorPiece]]:
    """One tensor, cut over two ranks."""
    return [
        [TensorPiece("w", (6, 2), (0, 0), scale * W[:4])],
        [TensorPiece("w", (6, 2), (4, 0), scale * W[4:])],
    ]


def write_whole(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_model(path, source_of(Weights(tensors)), {name: name for name in tensors})


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """No test leaves a save running behind it."""
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-")]
    for thread in left:
        thread.join(60)
    assert not left


def test_layout_of_the_folder(tmp_path: Path) -> None:
    """A checkpoint holds one file a rank, the index, the document and COMMIT, which lists all others."""
    first, second = writers(tmp_path, 2)
    for writer, pieces in zip((first, second), halves(), strict=True):
        writer.save(3, pieces, {"cursor": 1})
    first.wait()
    second.wait()

    path = tmp_path / "checkpoints" / "step-3"
    commit = json.loads((path / "COMMIT").read_text())
    assert (commit["format"], commit["version"], commit["step"]) == ("paceline-checkpoint", 2, 3)
    assert names(tmp_path) == ["step-3"]
    assert sorted(p.name for p in path.iterdir()) == sorted(["COMMIT", *commit["files"]])
    assert sorted(commit["files"]) == [
        "document.json",
        "index.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    assert torch.equal(open_checkpoint(path).read("w"), W)


def test_files_have_the_users_mode(tmp_path: Path) -> None:
    """Every file is as readable as the user's umask makes new files, as other people may serve the model."""
    old = os.umask(0o027)
    try:
        [writer] = writers(tmp_path, 1)
        writer.save(1, pieces_of("w", W))
        writer.wait()
        write_whole(tmp_path / "model.safetensors", {"w": W})
    finally:
        os.umask(old)
    files = [*(tmp_path / "checkpoints" / "step-1").iterdir(), tmp_path / "model.safetensors"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


def test_the_snapshot_is_of_the_moment_of_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caller does to its tensors and document after `save` has returned doesn't reach the checkpoint."""
    _, released = block_saves(monkeypatch)
    tensor, document = W.clone(), {"cursor": [1]}
    [writer] = writers(tmp_path, 1)

    writer.save(1, pieces_of("w", tensor), document)
    tensor.zero_()
    document["cursor"].append(2)
    released.set()
    writer.wait()

    checkpoint = open_checkpoint(tmp_path / "checkpoints" / "step-1")
    assert torch.equal(checkpoint.read("w"), W)
    assert checkpoint.document == {"cursor": [1]}


def test_tied_and_strided_tensors(tmp_path: Path) -> None:
    """Tensors that share memory, views with strides and names that safetensors keeps for itself are all there."""
    tensors = {
        "head": W,
        "embedding": W,
        "part": W[2:4],
        "turned": W.T,
        "__metadata__": W + 1,
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    [writer] = writers(tmp_path, 1)
    writer.save(1, [piece for name, tensor in tensors.items() for piece in pieces_of(name, tensor)])
    writer.wait()

    checkpoint = open_checkpoint(tmp_path / "checkpoints" / "step-1")
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor.resolve_conj())


def test_several_pieces_of_one_tensor_from_one_rank(tmp_path: Path) -> None:
    """One rank may own several pieces of a tensor, and a tensor may be called as another's second piece would be."""
    [writer] = writers(tmp_path, 1)
    writer.save(1, [pieces[0] for pieces in halves()] + pieces_of("w+", W + 1))
    writer.wait()
    checkpoint = open_checkpoint(tmp_path / "checkpoints" / "step-1")
    assert torch.equal(checkpoint.read("w"), W)
    assert torch.equal(checkpoint.read("w+"), W + 1)


def test_equal_pieces_of_replicas_are_kept_once(tmp_path: Path) -> None:
    """Ranks that save the same piece don't disturb each other; a rank without pieces takes part."""
    three = writers(tmp_path, 3)
    for writer, pieces in zip(three, (pieces_of("w", W), pieces_of("w", W), []), strict=True):
        writer.save(1, pieces)
    for writer in three:
        writer.wait()
    assert len(open_checkpoint(tmp_path / "checkpoints" / "step-1").tensors["w"].pieces) == 1


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            [],
            r"no rank saves the part of 'w' at \(4, 0\) of shape \(2, 2\); the whole has shape \(6, 2\)",
        ),
        ([TensorPiece("w", (6, 2), (3, 0), W[3:])], "the pieces of 'w' overlap"),
        (
            [TensorPiece("w", (5, 2), (4, 0), W[4:5])],
            r"rank 1 saves 'w' as F32 of shape \[5, 2\], and a rank before it",
        ),
        ([TensorPiece("w", (6, 2), (4, 0), W[4:].double())], "rank 1 saves 'w' as F64"),
    ],
)
def test_pieces_that_do_not_fit_are_never_committed(
    tmp_path: Path, second: list[TensorPiece], message: str
) -> None:
    """A hole, an overlap or a disagreement fails the save on every rank with the same words."""
    two = writers(tmp_path, 2)
    for writer, pieces in zip(two, (halves()[0], second), strict=True):
        writer.save(1, pieces)
    for writer in two:
        with pytest.raises(CheckpointError, match=message):
            writer.wait()
    assert newest_checkpoint(tmp_path, accept=lambda _: None, warn=pytest.fail) is None


def test_overlapping_saves_come_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that begins while one is running waits for it, and both are committed."""
    started, released = block_saves(monkeypatch)
    [writer] = writers(tmp_path, 1)
    writer.save(1, pieces_of("w", W))
    assert started.wait(60)
    writer.poll()
    assert names(tmp_path) == [".step-1.first-1"]

    threading.Timer(0.3, released.set).start()
    writer.save(2, pieces_of("w", W))

    assert "step-1" in names(tmp_path)
    writer.wait()
    assert names(tmp_path) == ["step-1", "step-2"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    """A resumed run replaces a checkpoint of the same step, and so does the same run; every rank sees the new one."""
    for attempt in ("first", "second"):
        two = writers(tmp_path, 2, attempt=attempt)
        for scale in (2.0, 3.0):
            for writer, pieces in zip(two, halves(scale), strict=True):
                writer.save(1, pieces, {"by": attempt})
            for writer in two:
                writer.wait()
            checkpoint = open_checkpoint(tmp_path / "checkpoints" / "step-1")
            assert checkpoint.document == {"by": attempt}
            assert torch.equal(checkpoint.read("w"), scale * W)
            assert names(tmp_path) == ["step-1"]


def test_an_older_folder_of_the_same_step_is_no_commit(tmp_path: Path) -> None:
    """A rank that saves a step again waits for the new commit, not for the one that is there."""
    two = writers(tmp_path, 2)
    for writer, pieces in zip(two, halves(), strict=True):
        writer.save(1, pieces)
    for writer in two:
        writer.wait()
    second = Writer(tmp_path, rank=1, world_size=2, attempt="second", timeout_s=0.2)
    second.save(1, halves()[1])
    with pytest.raises(CheckpointError, match="for rank 0's commit"):
        second.wait()
    assert newest_step(tmp_path) == 1


def test_a_cut_off_replacement_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the new folder can't take its name after the old one has given it up, the old one is still found."""
    [writer] = writers(tmp_path, 1)
    writer.save(1, pieces_of("w", W))
    writer.wait()
    rename = Path.rename

    def rename_only_aside(path: Path, target: Path) -> Path:
        if target.name == "step-1":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_only_aside)
    writer.save(1, pieces_of("w", W + 1))
    with pytest.raises(CheckpointError, match="Input/output error"):
        writer.wait()

    checkpoint = newest_checkpoint(tmp_path, accept=lambda _: None, warn=pytest.fail)
    assert checkpoint is not None and checkpoint.step == 1
    assert torch.equal(checkpoint.read("w"), W)


@pytest.mark.parametrize("junk", ["file", "COMMIT that is no object", "COMMIT of something else"])
def test_junk_of_the_same_name_is_replaced(tmp_path: Path, junk: str) -> None:
    """Something foreign that is called step-1 neither counts as the commit nor stops it."""
    path = tmp_path / "checkpoints" / "step-1"
    path.parent.mkdir()
    if junk == "file":
        path.write_text("")
    else:
        path.mkdir()
        (path / "COMMIT").write_text("3" if "object" in junk else "{}")
    two = writers(tmp_path, 2)
    for writer, pieces in zip(reversed(two), reversed(halves()), strict=True):
        writer.save(1, pieces)
    for writer in two:
        writer.wait()
    assert newest_step(tmp_path) == 1


@pytest.mark.parametrize("moment", ["index", "commit", "rename"])
def test_commit_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """A save that fails at any moment before the end is not seen; the checkpoint before it is used."""
    [writer] = writers(tmp_path, 1)
    writer.save(1, pieces_of("w", W))
    writer.wait()

    def fail_at_index(path: Path, document: Any) -> None:
        if path.name == ("index.json" if moment == "index" else "COMMIT"):
            assert moment == "index" or {p.name for p in path.parent.iterdir()} == {
                "rank-00000.safetensors",
                "index.json",
                "document.json",
            }
            raise OSError(errno.EIO, "Input/output error")
        write_json(path, document)

    def fail_at_rename(temp: Path, final: Path) -> None:
        assert (temp / "COMMIT").exists()
        raise OSError(errno.EIO, "Input/output error")

    if moment == "rename":
        monkeypatch.setattr(write, "_publish", fail_at_rename)
    else:
        monkeypatch.setattr(write, "write_json", fail_at_index)
    writer.save(2, pieces_of("w", W))
    with pytest.raises(
        CheckpointError, match=r"rank 0 could not save step 2 to .*step-2: Input/output error"
    ):
        writer.wait()

    assert newest_step(tmp_path) == 1
    assert [name for name in names(tmp_path) if not name.endswith(".failed")] == ["step-1"]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_fails_the_save_on_every_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing_rank: int,
) -> None:
    """One rank's full disk is told by all at once, with the rank, the bytes and the way out; the next save works."""

    def write_or_fail(path: Path, sources: Any, *wrote: Any) -> Any:
        if path.name == f"rank-{failing_rank:05d}.safetensors":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_tensors(path, sources, *wrote)

    two = writers(tmp_path, 2)
    monkeypatch.setattr(write, "write_tensors", write_or_fail)
    for writer, pieces in zip(two, halves(), strict=True):
        writer.save(1, pieces)
    needed_bytes = 16 if failing_rank else 32
    for writer in two:
        with pytest.raises(CheckpointError) as caught:
            writer.wait()
        text = str(caught.value)
        assert f"rank {failing_rank} could not save step 1 to {tmp_path}/checkpoints/step-1" in text
        assert f"No space left on device ({needed_bytes} bytes needed, " in text
        assert "hint: free some space" in text
    assert [name for name in names(tmp_path) if not name.endswith(".failed")] == []

    monkeypatch.setattr(write, "write_tensors", write_tensors)
    for writer, pieces in zip(two, halves(), strict=True):
        writer.save(1, pieces)
    for writer in two:
        writer.wait()
    assert newest_step(tmp_path) == 1


def test_a_failure_that_is_not_of_space_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that may not be so large is cut short on a disk with any space."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(write, "write_tensors", fail)
    [writer] = writers(tmp_path, 1)
    writer.save(1, pieces_of("w", W))
    with pytest.raises(CheckpointError, match=r"(?s)File too large\n.*hint: .*ulimit -f"):
        writer.wait()


def test_poll_raises_a_failure_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`poll` is silent while a save runs, raises when it has failed, and is silent again after."""
    failed = threading.Event()

    def fail(*_: Any, **__: Any) -> None:
        failed.wait(60)
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(write, "write_tensors", fail)
    [writer] = writers(tmp_path, 1)
    writer.save(1, pieces_of("w", W))
    writer.poll()
    failed.set()
    with pytest.raises(CheckpointError, match=r"(?s)Permission denied.*hint: make .* writable"):
        for _ in range(1000):
            writer.poll()
            threading.Event().wait(0.01)
    writer.poll()
    writer.wait()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs Linux and root: run as root")
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(
            f"can't mount a tmpfs, for which a container needs --cap-add SYS_ADMIN: {mounted.stderr.strip()}"
        )
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_really_full_disk(tiny_disk: Path) -> None:
    """On a file system that is too small the save fails in words, the disk is free again and the older step stays."""
    [writer] = writers(tiny_disk, 1)
    writer.save(1, pieces_of("w", torch.ones(2**18)))
    writer.wait()

    writer.save(2, pieces_of("w", torch.ones(2**20)))
    with pytest.raises(
        CheckpointError, match=r"No space left on device \(4\.0 MiB needed, [\d.]+ MiB free\)"
    ):
        writer.wait()

    assert newest_step(tiny_disk) == 1
    assert shutil.disk_usage(tiny_disk).free > 2.5 * 2**20
    with pytest.raises(
        CheckpointError, match=r"could not write the model to .*No space left on device"
    ):
        write_whole(tiny_disk / "model.safetensors", {"w": torch.ones(2**20)})
    assert sorted(path.name for path in tiny_disk.iterdir()) == ["checkpoints"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A run folder that is a file is named."""
    run_dir = tmp_path / "run"
    run_dir.write_text("")
    [writer] = writers(run_dir, 1)
    writer.save(1, pieces_of("w", W))
    with pytest.raises(
        CheckpointError,
        match=r"(?s)could not save step 1 to .*run/checkpoints/step-1: .*hint: check",
    ):
        writer.wait()


def test_a_document_that_is_not_json(tmp_path: Path) -> None:
    """It is refused while the caller is still there, and the other ranks hear of it."""
    two = writers(tmp_path, 2)
    two[1].save(1, halves()[1])
    with pytest.raises(
        CheckpointError, match=r"rank 0 could not save step 1 to .*not JSON serializable"
    ):
        two[0].save(1, halves()[0], {"weights": W})
    with pytest.raises(
        CheckpointError, match=r"rank 0 could not save step 1 to .*not JSON serializable"
    ):
        two[1].wait()
    two[0].wait()


def test_a_rank_that_never_saves(tmp_path: Path) -> None:
    """Rank 0 names the ranks whose parts didn't come in time, and the others fail with it."""
    first = Writer(tmp_path, rank=0, world_size=3, attempt="first", timeout_s=0.3)
    third = Writer(tmp_path, rank=2, world_size=3, attempt="first", timeout_s=30)
    third.save(1, [])
    wait_for(lambda: [*tmp_path.glob("checkpoints/.step-1.*/rank-00002.json")])
    first.save(1, [])
    for writer in (first, third):
        with pytest.raises(
            CheckpointError, match=r"rank 0 waited 0\.3 s for the parts of ranks 1 to save step 1"
        ):
            writer.wait()


def test_a_rank_whose_rank_0_never_commits(tmp_path: Path) -> None:
    """Without rank 0 the others stop after the time that was given."""
    second = Writer(tmp_path, rank=1, world_size=2, attempt="first", timeout_s=0.3)
    second.save(1, [])
    with pytest.raises(
        CheckpointError, match=r"rank 1 waited 0\.3 s for rank 0's commit to save step 1"
    ):
        second.wait()


def test_a_vanished_folder_ends_the_wait(tmp_path: Path) -> None:
    """Even when no rank could leave word of a failure, the others don't wait for the time limit."""
    second = Writer(tmp_path, rank=1, world_size=2, attempt="first", timeout_s=60)
    second.save(1, [])
    [temp] = wait_for(lambda: [*tmp_path.glob("checkpoints/.step-1.*/rank-00001.json")])
    shutil.rmtree(temp.parent)
    with pytest.raises(CheckpointError, match="another rank gave up the save of step 1"):
        second.wait()


def test_leftovers_of_other_launches_are_removed(tmp_path: Path) -> None:
    """Rank 0 clears what killed launches left; its own launch's files, and whole checkpoints, stay."""
    folder = tmp_path / "checkpoints"
    for name in (
        ".step-1.old-1",
        ".step-2.old-12-7",
        ".step-3.first-1",
        ".step-4.replaced",
        "step-4",
        "step-5",
    ):
        (folder / name).mkdir(parents=True)
    for name in (".step-1.old-1.failed", ".step-3.first-1.failed"):
        (folder / name).write_text("{}")
    weights = tmp_path / ".weights-old-1-1" / "checkpoints"
    weights.mkdir(parents=True)
    for name in (".model.safetensors.7-7.tmp", ".predicted.json.8-8.tmp", "model.safetensors"):
        (tmp_path / name).touch()

    Writer(tmp_path, rank=1, world_size=2, attempt="first")
    assert len(names(tmp_path)) == 8 and weights.exists()
    Writer(tmp_path, rank=0, world_size=2, attempt="first")

    assert names(tmp_path) == [".step-3.first-1", ".step-3.first-1.failed", "step-4", "step-5"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoints",
        ".predicted.json.8-8.tmp",
        "model.safetensors",
    }


def test_parts_of_a_killed_launch_are_not_taken(tmp_path: Path) -> None:
    """A part that an earlier launch wrote for the same step can't complete a save of this one."""
    old = Writer(tmp_path, rank=1, world_size=2, attempt="old", timeout_s=0.2)
    old.save(1, halves()[1])
    with pytest.raises(CheckpointError):
        old.wait()
    new = Writer(tmp_path, rank=0, world_size=2, attempt="new", timeout_s=0.2)
    new.save(1, halves()[0])
    with pytest.raises(CheckpointError, match="the parts of ranks 1"):
        new.wait()


@pytest.mark.parametrize("kills", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_kills_at_random_moments(tmp_path: Path, kills: int) -> None:
    """What a process had saved when it was killed is there, and the newest checkpoint is whole, whatever its step.
    Kills before the first save don't count."""
    source, committed, span_s = random.Random(0), 0, 0.02
    while kills:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _save_for_ever(tmp_path, committed, writing)
        os.close(writing)
        with os.fdopen(reading) as told:
            told.readline()  # it has begun
            threading.Event().wait(source.uniform(0, span_s))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            saved = [*map(int, told.read().split())]
        span_s *= 0.8 if saved else 1.5  # about as long as a save takes on this machine
        committed = max([committed, *saved])
        if committed:
            newest = newest_checkpoint(tmp_path, accept=lambda _: None, warn=pytest.fail)
            assert newest is not None and newest.step >= committed
            assert torch.equal(newest.read("w"), torch.full((5000,), float(newest.step)))
            committed, kills = newest.step, kills - 1


def _save_for_ever(run_dir: Path, step: int, writing: int) -> NoReturn:
    """Save step after step until this process is killed. Each step that is committed is told."""
    try:
        os.write(writing, b"begun\n")
        writer = Writer(run_dir, rank=0, world_size=1, attempt=str(os.getpid()))
        while True:
            step += 1
            writer.save(step, pieces_of("w", torch.full((5000,), float(step))), {"step": step})
            writer.wait()
            os.write(writing, b"%d\n" % step)
    finally:
        os._exit(1)


def test_write_model_has_every_name(tmp_path: Path) -> None:
    """Tied, strided and overlapping tensors are each there in full; an older file is replaced."""
    tensors = {
        "head": torch.nn.Parameter(W),
        "embedding": W,
        "part": W[1:3],
        "turned": W.T,
        "scalar": torch.tensor(1),
        "empty": torch.empty(0, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    path = tmp_path / "model.safetensors"
    for _ in range(2):
        write_whole(path, tensors)
        loaded = load_file(path)
        assert set(loaded) == set(tensors)
        assert all(
            torch.equal(loaded[name], tensor.resolve_conj()) for name, tensor in tensors.items()
        )
        assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyError(torch.int4)]
)
def test_write_model_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A model that can't be written leaves nothing half-written and the old file as it was."""
    path = tmp_path / "model.safetensors"
    write_whole(path, {"w": W})

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(NewFile, "write_from", fail)
    with pytest.raises(CheckpointError, match=r"could not write the model to .*model\.safetensors"):
        write_whole(path, {"w": W})
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(load_file(path)["w"], W)


@given(st.lists(st.integers(0, 5), max_size=3), st.integers(1, 100))
def test_large_tensors_are_written_in_runs(shape: list[int], run_bytes: int) -> None:
    """However few rows are read at a time, the file holds the whole; of an empty tensor and a scalar, too."""
    tensors = {"w": torch.rand(shape), "v": torch.arange(7.0)}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(assemble, "_RUN_BYTES", run_bytes)
        write_whole(Path(folder, "model.safetensors"), tensors)
        loaded = load_file(Path(folder, "model.safetensors"))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_complex_numbers_are_written_as_pairs(tmp_path: Path) -> None:
    """Where safetensors has no dtype for them; its reader gets a last dim of 2, in memory aligned for the numbers."""
    tensors = {
        "odd": torch.rand(3),
        "w": torch.view_as_complex(torch.rand(5, 3, 2, dtype=torch.float64)),
        "lazy": torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
    }
    path = tmp_path / "model.safetensors"
    write_whole(path, tensors)

    plain, loaded = load_file(path), load_tensors(path)

    assert plain["w"].dtype == torch.float64 and plain["w"].data_ptr() % 16 == 0
    assert torch.equal(plain["w"], torch.view_as_real(tensors["w"]))
    assert all(torch.equal(loaded[name], tensor.resolve_conj()) for name, tensor in tensors.items())
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["complex"]) == {"w": "C128", "lazy": "C128"}


def test_without_a_snapshot_nothing_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that is waited for is written from the tensors themselves, but for what a file can't hold as it is."""
    copied = shapes_of_copies(monkeypatch)
    [writer] = writers(tmp_path, 1)
    tensors = {"w": W, "turned": torch.ones(2, 5).T, "tied": W[1:2]}
    writer.save(
        1,
        [piece for name, tensor in tensors.items() for piece in pieces_of(name, tensor)],
        snapshot=False,
    )
    writer.wait()
    checkpoint = open_checkpoint(tmp_path / "checkpoints" / "step-1")
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in tensors.items())
    assert copied == [(5, 2)]


def shapes_of_copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what is copied from now on."""
    shapes: list[tuple[int, ...]] = []

    def noted(target: torch.Tensor, source: torch.Tensor) -> None:
        shapes.append(tuple(source.shape))
        copy(target, source)

    monkeypatch.setattr(files, "copy", noted)
    return shapes


@given(st.lists(st.integers(0, 40), max_size=6), st.sampled_from([4096, 8192]), st.booleans())
def test_files_are_alike_past_the_cache_and_through_it(
    sizes: list[int], buffer_bytes: int, is_refused: bool
) -> None:
    """Of any sizes, from memory and from copies; and where the file system refuses a write past its cache."""
    tensors = {f"t{number}": torch.rand(100 * size) for number, size in enumerate(sizes)}
    pieces = [piece for name, tensor in tensors.items() for piece in pieces_of(name, tensor)]

    def refuse(descriptor: int, data: memoryview, offset: int, pwrite: Any = os.pwrite) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, data[:5000], offset)

    copies = dict(zip(tensors, Staging().copy(pieces), strict=True))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(files, "BUFFER_BYTES", buffer_bytes)
        if is_refused:
            patch.setattr(files.os, "pwrite", refuse)
        for given in (tensors, copies):
            path = Path(folder, "part.safetensors")
            summary = write_tensors(path, given)
            assert summary == {
                "bytes": path.stat().st_size,
                "xxh3_128": xxhash.xxh3_128_hexdigest(path.read_bytes()),
            }
            loaded = load_file(path)
            assert loaded.keys() == tensors.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_memory_of_copies_is_kept(tmp_path: Path) -> None:
    """The second save uses that of the first one again."""
    [writer] = writers(tmp_path, 1)
    tensor = torch.rand(2**22)
    for step in (1, 2):
        writer.save(step, pieces_of("w", tensor + step))
        writer.wait()
        if step == 1:
            [taken] = writer._staging.memory.values()
    assert next(iter(writer._staging.memory.values())) is taken
    assert torch.equal(taken, tensor + 2)
    assert torch.equal(open_checkpoint(tmp_path / "checkpoints" / "step-2").read("w"), tensor + 2)


def test_write_json_in_one_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JSON file is replaced at once or not at all."""
    path = tmp_path / "summary.json"
    write_json(path, {"steps": 1})
    with pytest.raises(TypeError):
        write_json(path, {"steps": W})
    monkeypatch.setattr(write.os, "fsync", raise_full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"steps": 2})
    assert json.loads(path.read_text()) == {"steps": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def raise_full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def block_saves(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The first event is set when a file is about to be written; that goes on only once the second is set."""
    started, released = threading.Event(), threading.Event()

    def write_later(*args: Any) -> Any:
        started.set()
        assert released.wait(60)
        return write_tensors(*args)

    monkeypatch.setattr(write, "write_tensors", write_later)
    return started, released


def wait_for(list_paths: Callable[[], list[Path]]) -> list[Path]:
    """What a look finds, as soon as it finds something."""
    for _ in range(2000):
        if paths := list_paths():
            return paths
        threading.Event().wait(0.005)
    raise AssertionError("nothing came in 10 s")
