"""Reading: any region under any layout, and what happens to folders that can't be trusted."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base.errors import CheckpointError
from paceline.checkpoint import (
    Checkpoint,
    Region,
    TensorPiece,
    Writer,
    newest_checkpoint,
    open_checkpoint,
    pieces_of,
)
from paceline.checkpoint.dtypes import DTYPES

SHAPE = (11, 6)
DENSE = torch.arange(66, dtype=torch.float64).reshape(SHAPE)


def save(
    run_dir: Path, step: int, *ranks: list[TensorPiece], document: dict[str, Any] | None = None
) -> Path:
    """A committed checkpoint, each list of pieces written by a rank of its own."""
    attempt = f"save{step}"
    writers = [
        Writer(run_dir, rank=rank, world_size=len(ranks), attempt=attempt)
        for rank in range(len(ranks))
    ]
    for writer, pieces in zip(writers, ranks, strict=True):
        writer.save(step, pieces, document)
    for writer in writers:
        writer.wait()
    return run_dir / "checkpoints" / f"step-{step}"


def rows(start: int, stop: int) -> list[TensorPiece]:
    return [TensorPiece("w", SHAPE, (start, 0), DENSE[start:stop])]


@pytest.fixture(scope="module")
def cut() -> Any:
    """One tensor saved by three ranks in uneven parts: rows 0-2, a left and a right part of rows 3-10."""
    with tempfile.TemporaryDirectory() as folder:
        left, right = DENSE[3:, :1], DENSE[3:, 1:]
        path = save(
            Path(folder),
            5,
            rows(0, 3),
            [TensorPiece("w", SHAPE, (3, 1), right)],
            [TensorPiece("w", SHAPE, (3, 0), left)],
        )
        yield open_checkpoint(path)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two good checkpoints, of steps 10 and 20."""
    for step in (10, 20):
        save(tmp_path, step, pieces_of("w", DENSE + step), document={"cursor": step})
    return tmp_path


def newest(run_dir: Path) -> tuple[int, list[str]]:
    warnings: list[str] = []
    checkpoint = newest_checkpoint(run_dir, accept=lambda _: None, warn=warnings.append)
    assert checkpoint is not None
    return checkpoint.step, warnings


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_comes_back(tmp_path: Path) -> None:
    """All dtypes, as matrices, scalars and empty tensors, come back bit by bit."""
    tensors = {
        f"{name}.{len(shape)}": torch.randint(0, 2, (*shape, 16), dtype=torch.uint8).view(dtype)[
            ..., 0
        ]
        for name, dtype in DTYPES.items()
        for shape in ((), (0, 3), (3, 4))
    }
    path = save(
        tmp_path,
        1,
        [piece for name, tensor in tensors.items() for piece in pieces_of(name, tensor)],
    )

    checkpoint = open_checkpoint(path)

    assert list(checkpoint.tensors) == list(tensors)
    for name, tensor in tensors.items():
        for read in (checkpoint.read(name), torch.zeros_like(tensor)):
            checkpoint.read_into(name, read)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert raw(read) == raw(tensor)


def test_the_document_comes_back(tmp_path: Path) -> None:
    """What rank 0 gives as document is read back; what others give is not."""
    document = {"cursor": 7, "groups": [{"lr": 0.1, "betas": [0.9, 0.95]}], "name": "größe"}
    assert open_checkpoint(save(tmp_path, 1, [], document=document)).document == document
    assert open_checkpoint(save(tmp_path, 2, [])).document == {}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_region_of_uneven_pieces(cut: Checkpoint, data: st.DataObject) -> None:
    """A region read across three ranks' pieces is that region of the whole tensor."""
    offsets = tuple(data.draw(st.integers(0, length)) for length in SHAPE)
    shape = tuple(
        data.draw(st.integers(0, length - start))
        for start, length in zip(offsets, SHAPE, strict=True)
    )

    region = cut.read("w", Region(offsets, shape))

    assert torch.equal(
        region, DENSE[offsets[0] : offsets[0] + shape[0], offsets[1] : offsets[1] + shape[1]]
    )


def test_whole_tensor_of_uneven_pieces(cut: Checkpoint) -> None:
    """Without a region all pieces are put together, also into a tensor that is not contiguous."""
    assert torch.equal(cut.read("w"), DENSE)
    target = torch.zeros(6, 11, dtype=torch.float64).T
    cut.read_into("w", target)
    assert torch.equal(target, DENSE)


def test_regions_of_complex_pieces(tmp_path: Path) -> None:
    """What a file holds in pairs has the shape and the dtype of the tensor itself, for all who cut it."""
    whole = torch.view_as_complex(torch.rand(6, 4, 2, dtype=torch.float64))
    path = save(
        tmp_path,
        1,
        [TensorPiece("w", (6, 4), (0, 0), whole[:4])],
        [TensorPiece("w", (6, 4), (4, 0), whole[4:])],
    )
    checkpoint = open_checkpoint(path)

    assert (checkpoint.tensors["w"].dtype, checkpoint.tensors["w"].shape) == (
        torch.complex128,
        (6, 4),
    )
    assert torch.equal(checkpoint.read("w", Region((3, 1), (2, 3))), whole[3:5, 1:])
    assert torch.equal(checkpoint.read("w"), whole)


def test_the_six_lines_of_the_docs(cut: Checkpoint) -> None:
    """What docs/checkpoints.md shows reads a tensor that three ranks wrote, with safetensors alone."""
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    here = code.replace('"RUN/checkpoints/step-100"', repr(str(cut.path))).replace(
        '"parameters/head.weight"', '"w"'
    )
    assert here != code and "paceline" not in code

    names: dict[str, Any] = {}
    exec(here, names)
    assert torch.equal(names["whole"], DENSE)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_what_was_read_is_not_held(tmp_path: Path) -> None:
    """A model is exported tensor by tensor, and a rank under a memory limit must not come to hold the whole file."""

    def mapped_kib() -> int:
        return int(Path("/proc/self/status").read_text().split("RssFile:")[1].split()[0])

    large = torch.ones(64, 2**18)  # 64 MiB
    checkpoint = open_checkpoint(save(tmp_path, 1, [TensorPiece("w", (64, 2**18), (0, 0), large)]))
    before_kib = mapped_kib()
    for row in range(64):
        assert bool(checkpoint.read("w", Region((row, 0), (1, 2**18))).all())
    assert mapped_kib() - before_kib < 16 * 1024


def test_only_the_files_of_the_region_are_opened(run_dir: Path) -> None:
    """A rank that needs the last rows doesn't touch the file of the first ones."""
    path = save(run_dir, 30, rows(0, 3), rows(3, 7), rows(7, 11))
    checkpoint = open_checkpoint(path)
    (path / "rank-00000.safetensors").unlink()

    assert torch.equal(checkpoint.read("w", Region((5, 0), (6, 6))), DENSE[5:])
    with pytest.raises(CheckpointError, match=r"can't read 'w' from rank-00000\.safetensors"):
        checkpoint.read("w")


def test_dtensor_is_filled_with_its_own_rows(cut: Checkpoint) -> None:
    """`read_into` fills the local part of a DTensor, under another number of ranks than wrote it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank, rows_ in enumerate(DENSE.chunk(4)):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (4,))
            tensor = DTensor.from_local(
                torch.zeros_like(rows_), mesh, [Shard(0)], shape=DENSE.shape, stride=(6, 1)
            )
            cut.read_into("w", tensor)
            assert torch.equal(tensor.to_local(), rows_)
        finally:
            dist.destroy_process_group()


def test_a_tensor_of_another_model_is_refused(cut: Checkpoint) -> None:
    """A shape or dtype that differs, and a name that isn't there, are named and nothing is changed."""
    for tensor in (torch.zeros(6, 11, dtype=torch.float64), torch.zeros(SHAPE)):
        with pytest.raises(
            CheckpointError, match=r"'w' is float64 of shape \(11, 6\) there and float\d+ of shape"
        ):
            cut.read_into("w", tensor)
        assert not tensor.any()
    with pytest.raises(CheckpointError, match="no tensor 'w1'; the nearest of its 1 names is 'w'"):
        cut.read("w1")


def test_a_region_outside_the_tensor_is_refused(cut: Checkpoint) -> None:
    """Elements that no piece holds are named by their place."""
    with pytest.raises(
        CheckpointError, match=r"no piece of 'w' .* holds the part at \(11, 0\) of shape \(1, 6\)"
    ):
        cut.read("w", Region((10, 0), (2, 6)))


def test_no_checkpoints_at_all(tmp_path: Path) -> None:
    """A run that has saved nothing has no newest checkpoint; a half-written one doesn't count as saved."""
    assert newest_checkpoint(tmp_path, accept=lambda _: None, warn=pytest.fail) is None
    (tmp_path / "checkpoints" / ".step-5.launch-1").mkdir(parents=True)
    assert newest_checkpoint(tmp_path, accept=lambda _: None, warn=pytest.fail) is None


def test_newest_is_the_highest_step(tmp_path: Path) -> None:
    """Steps are compared as numbers, not as text."""
    for step in (10, 9):
        save(tmp_path, step, [])
    assert newest(tmp_path) == (10, [])


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any], *, commit: bool = True) -> None:
    """Change a JSON file; unless it is COMMIT itself, COMMIT then says what the file now is."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    if commit and path.name != "COMMIT":
        summary = {
            "bytes": path.stat().st_size,
            "xxh3_128": xxhash.xxh3_128_hexdigest(path.read_bytes()),
        }
        edit_json(path.with_name("COMMIT"), lambda c: c["files"].update({path.name: summary}))


def edit_commit(**values: Any) -> Callable[[Path], None]:
    return lambda path: edit_json(path / "COMMIT", lambda content: content.update(values))


def edit_piece(**values: Any) -> Callable[[Path], None]:
    return lambda path: edit_json(
        path / "index.json", lambda index: index["tensors"]["w"]["pieces"][0].update(values)
    )


def as_version_1(path: Path) -> None:
    """Have COMMIT say of the files what the first version said."""
    edit_json(
        path / "COMMIT",
        lambda commit: commit.update(
            version=1,
            files={
                name: {
                    "bytes": entry["bytes"],
                    "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest(),
                }
                for name, entry in commit["files"].items()
            },
        ),
    )


def test_a_checkpoint_of_the_first_version_is_read_and_checked(tmp_path: Path) -> None:
    path = save(tmp_path, 5, [TensorPiece("w", SHAPE, (0, 0), DENSE)])
    as_version_1(path)
    assert torch.equal(open_checkpoint(path).read("w"), DENSE)
    flip(path)
    with pytest.raises(CheckpointError, match=r"is damaged: its sha256 is \w+, and COMMIT says"):
        open_checkpoint(path)


def flip(path: Path) -> None:
    content = bytearray((path / "rank-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "rank-00000.safetensors").write_bytes(content)


def cut_short(path: Path) -> None:
    content = (path / "rank-00000.safetensors").read_bytes()
    (path / "rank-00000.safetensors").write_bytes(content[:-1])


def lengthen(path: Path) -> None:
    with (path / "index.json").open("a") as file:
        file.write(" ")


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("not a folder")


def rename_from_10(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-10"), path)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "damaged byte": (
        flip,
        r"rank-00000\.safetensors is damaged: its xxh3_128 is \w+, and COMMIT says",
    ),
    "truncated": (cut_short, r"rank-00000\.safetensors is truncated: \d+ bytes of \d+"),
    "lengthened": (lengthen, r"index\.json has \d+ bytes instead of \d+"),
    "missing file": (
        lambda p: (p / "rank-00000.safetensors").unlink(),
        r"rank-00000\.safetensors is missing",
    ),
    "missing document": (lambda p: (p / "document.json").unlink(), r"document\.json is missing"),
    "no COMMIT": (
        lambda p: (p / "COMMIT").unlink(),
        "no COMMIT: a save that never ended, or not a checkpoint",
    ),
    "a file": (replace_by_file, "there is no such folder"),
    "COMMIT cut": (lambda p: (p / "COMMIT").write_text('{"form'), "COMMIT is malformed: "),
    "COMMIT not text": (lambda p: (p / "COMMIT").write_bytes(b"\xff\xfe"), "COMMIT is malformed: "),
    "COMMIT a list": (
        lambda p: (p / "COMMIT").write_text("[]"),
        "COMMIT is malformed: not a JSON object",
    ),
    "COMMIT without files": (
        lambda p: edit_json(p / "COMMIT", lambda c: c.pop("files")),
        "malformed: no 'files'",
    ),
    "COMMIT of no step": (
        edit_commit(step=float("inf")),
        "malformed: cannot convert float infinity",
    ),
    "COMMIT too deep": (lambda p: (p / "COMMIT").write_text("[" * 10**5), "COMMIT is malformed: "),
    "COMMIT without index": (
        lambda p: edit_json(p / "COMMIT", lambda c: c["files"].pop("index.json")),
        r"it lists no index\.json",
    ),
    "foreign": (
        edit_commit(format="zip"),
        "not a checkpoint of Paceline: COMMIT says format 'zip'",
    ),
    "newer": (edit_commit(version=3), "format version 3 and this Paceline reads up to 2"),
    "no version": (edit_commit(version="1"), "COMMIT is malformed: version '1'"),
    "renamed": (rename_from_10, "COMMIT says that this is step 10: the folder was renamed"),
    "path in COMMIT": (
        lambda p: edit_json(p / "COMMIT", lambda c: c["files"].update({"../x": {}})),
        r"the path '\.\./x' leads out of the checkpoint's folder",
    ),
    "path in index": (
        edit_piece(file="../step-10/rank-00000.safetensors"),
        "leads out of the checkpoint's folder",
    ),
    "absolute path": (edit_piece(file="/etc/passwd"), "the path '/etc/passwd' leads out"),
    "unlisted file": (
        edit_piece(file="other.safetensors"),
        r"COMMIT doesn't list the file 'other\.safetensors'",
    ),
    "piece outside": (
        edit_piece(offsets=[1, 0]),
        r"a piece at \(1, 0\) of shape \(11, 6\) reaches out of \(11, 6\)",
    ),
    "negative offset": (edit_piece(offsets=[-1, 0]), r"\[-1, 0\] is not a list of whole numbers"),
    "no tensors": (
        lambda p: edit_json(p / "index.json", lambda i: i.pop("tensors")),
        "malformed: no 'tensors'",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_next_older_taken(run_dir: Path, kind: str) -> None:
    """Each way to be damaged or foreign has its own message, and the checkpoint before is used."""
    damage, message = DAMAGE[kind]
    path = run_dir / "checkpoints" / "step-20"
    damage(path)

    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)

    step, [warning] = newest(run_dir)
    assert step == 10
    assert warning.startswith(f"checkpoint {path} is passed over: ")


def test_a_forged_piece_is_not_read(run_dir: Path) -> None:
    """An index that gives a piece another shape than its file does is refused, not broadcast."""
    path = run_dir / "checkpoints" / "step-20"
    edit_json(
        path / "index.json",
        lambda index: index["tensors"].update(
            w={
                "shape": [11, 12],
                "dtype": "F64",
                "pieces": [
                    {
                        "file": "rank-00000.safetensors",
                        "key": "w",
                        "offsets": [0, 0],
                        "shape": [11, 12],
                    }
                ],
            }
        ),
    )
    with pytest.raises(CheckpointError, match="its shape or dtype is not that of the index"):
        open_checkpoint(path).read("w")


def test_checksums_can_be_left_to_one_rank(run_dir: Path) -> None:
    """Without checksums sizes are still checked, and contents are not read."""
    path = run_dir / "checkpoints" / "step-20"
    flip(path)
    assert open_checkpoint(path, checksums=False).step == 20
    cut_short(path)
    with pytest.raises(CheckpointError, match="is truncated"):
        open_checkpoint(path, checksums=False)


def test_an_unaccepted_checkpoint_is_passed_over(run_dir: Path) -> None:
    """The caller's reason against a checkpoint is told with its name, and the next older one is tried."""
    warnings: list[str] = []
    accepted = newest_checkpoint(
        run_dir,
        warn=warnings.append,
        accept=lambda checkpoint: (
            "it is of another seed" if checkpoint.document["cursor"] == 20 else None
        ),
    )
    assert accepted is not None and accepted.step == 10
    assert warnings == [
        f"checkpoint {run_dir}/checkpoints/step-20 is passed over: it is of another seed"
    ]


def test_none_usable_lists_all_reasons(run_dir: Path) -> None:
    """When no checkpoint is left, the error says for each why."""
    flip(run_dir / "checkpoints" / "step-20")
    with pytest.raises(
        CheckpointError, match=r"(?s)can be used:\n  step-20: rank.*damaged.*\n  step-10: too old"
    ):
        newest_checkpoint(run_dir, accept=lambda _: "too old", warn=lambda _: None)


def test_a_replaced_checkpoint_is_found_after_a_kill(run_dir: Path) -> None:
    """Killed between setting the old folder aside and naming the new one, a run still has the old one; a later
    launch leaves it there until the step is saved again."""
    folder = run_dir / "checkpoints"
    (folder / "step-20").rename(folder / ".step-20.replaced")
    writer = Writer(run_dir, rank=0, world_size=1, attempt="next")
    assert newest(run_dir) == (20, [])

    writer.save(20, pieces_of("w", DENSE))
    writer.wait()
    assert sorted(path.name for path in folder.iterdir()) == ["step-10", "step-20"]
    assert torch.equal(open_checkpoint(folder / "step-20").read("w"), DENSE)


def raw(tensor: torch.Tensor) -> bytes:
    return (
        bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        if tensor.numel()
        else b""
    )
