"""Whatever goes wrong: one clear message, a non-zero exit, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conditions import PATIENCE_S, until, until_asked_to_stop
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline.api import summary_table
from paceline.base import signals
from paceline.base.errors import PacelineError, UsageError
from paceline.checkpoint import write
from paceline.job.file import JobFile
from paceline.launch.local import ranks as local_ranks
from paceline.launch.process import watchdog
from paceline.launch.process.supervisor import Supervisor
from paceline.training.parts.saves import Saves
from tests.commands import Command

pytestmark = [pytest.mark.usefixtures("nothing_left", "quick")]

SAMPLES, BATCH = 24, 8


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter waits for what other ranks have to say."""
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.5)
    monkeypatch.setattr(local_ranks, "_GRACE_S", 1.5)


class Points(Dataset[Any]):
    """Points and the class each is in. `instead[i]` makes item i."""

    def __init__(
        self, instead: Mapping[int, Callable[[], Any]] = {}, *, samples: int = SAMPLES
    ) -> None:
        self.x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
        self.instead = instead

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return (
            self.instead[index]()
            if index in self.instead
            else (self.x[index], int(self.x[index].sum() > 0))
        )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def a_job(**changes: Any) -> paceline.Job:
    fields: dict[str, Any] = {
        "model": Net,
        "data": Points(),
        "loss": F.cross_entropy,
        "batch": BATCH,
        "steps": 6,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
    }
    return paceline.Job(**{**fields, **changes})


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def failing(
    job: paceline.Job | JobFile, run_dir: Path, *, plan: str = "data=2", **options: Any
) -> PacelineError:
    """The error of a run that fails and leaves nothing half-written."""
    with pytest.raises(PacelineError) as raised:
        paceline.train(job, plan, run=run_dir, **{"restarts": 0, **options})
    assert_nothing_half_written(run_dir)
    assert str(raised.value).count("hint:") <= 1
    return raised.value


def assert_nothing_half_written(run_dir: Path) -> None:
    summary = run_dir / "summary.json"
    assert not summary.exists() or json.loads(summary.read_text()).keys() == {"plan", "failure"}
    assert not (run_dir / "model.safetensors").exists()
    assert not list(run_dir.glob("**/*.tmp"))
    for path in (run_dir / "checkpoints").glob("*"):
        assert re.fullmatch(r"step-\d+", path.name), f"{path.name} is left"
        assert (path / "COMMIT").exists(), f"{path.name} is not complete"


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*")
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


# --- What is explained -------------------------------------------------------------------------------------------


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "name"), [("single", "y"), ("tensor=2", "image"), ("pipeline=2", "y")]
)
def test_items_of_a_sample_that_the_model_does_not_take(plan: str, name: str, run_dir: Path):
    """A data set of dictionaries is told how its items reach the model, and how a target reaches the loss."""
    data = [{"x" if name == "y" else name: torch.ones(4), "y": i % 2} for i in range(16)]
    error = str(failing(a_job(data=data), run_dir, plan=plan))
    assert f"unexpected keyword argument '{name}'" in error
    named = ", ".join(f"{column}=" for column in data[0])
    assert f"a sample is a dict, so the model is called with {named}:\nlet the data set" in error
    assert "(x, y) or ({'x': x}, y)" in error
    assert plan != "single" or "no step was lost" in summary_table.card(run_dir)


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss])
def test_a_loss_that_does_not_take_a_dictionary(loss: Any, run_dir: Path):
    error = str(failing(a_job(data=[{"x": torch.ones(4)} for _ in range(16)], loss=loss), run_dir))
    assert (
        "the target is a dict of x:\nlet the data set, or collate=, give (input, target)" in error
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("place", ["file", "model"])
def test_a_process_group_of_the_jobs_own(place: str, tmp_path: Path, start_child: Any):
    """A script for torchrun that was made into a job is told what to leave out."""
    begin = (
        f"dist.init_process_group('gloo', store=dist.FileStore({str(tmp_path / 'store')!r}, 1), rank=0, "
        "world_size=1)"
    )
    file = job_file(
        tmp_path,
        "import torch, torch.distributed as dist, paceline as pl\n"
        f"{begin if place == 'file' else ''}\n"
        f"def model():\n    {begin if place == 'model' else ''}\n    return torch.nn.Linear(4, 2)\n"
        "def job():\n    return pl.Job(model=model, data=(torch.ones(8, 4), torch.ones(8, 2)), batch=8, "
        "steps=1, loss=torch.nn.functional.mse_loss, optimizer=lambda named: torch.optim.SGD(named))\n",
    )
    child = start_child(
        lambda: paceline.train(str(file), "data=2", run=tmp_path / "run", restarts=0)
    )
    assert child.exit_code() == 1
    assert (
        "hint: ranks make torch's process group themselves: leave init_process_group out"
        in child.stderr
    )


# --- Requests that make no sense: refused before anything starts --------------------------------------------------


JOB_FILE = """
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import paceline as pl

def job(lr: float = 0.1, hidden: int = 8) -> pl.Job:
    x = torch.randn({samples}, 4, generator=torch.Generator().manual_seed(0))
    return pl.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 2)),
        data=TensorDataset(x, (x.sum(1) > 0).long()), loss={loss},
        optimizer=lambda named: torch.optim.SGD(named, lr=lr), batch={batch}, steps={steps})
"""


def job_file(folder: Path, text: str = "", **fields: Any) -> Path:
    path = folder / "digits.py"
    values = {"samples": 24, "batch": 8, "steps": 4, "loss": "F.cross_entropy", **fields}
    path.write_text(text or JOB_FILE.format(**values))
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"digits\.py has no function 'job', nor any other"),
        ("def jobs(): ...\n", r"digits\.py has no function 'job', did you mean 'jobs'\?"),
        (
            "def job():\n    raise RuntimeError('no such disk')\n",
            r"job\(\) in digits\.py raised RuntimeError at digits\.py:2: no such disk",
        ),
        (
            "import sklaern\ndef job(): ...\n",
            r"digits\.py:1 needs the package 'sklaern', which is not installed",
        ),
        ("def job():\n    return 3\n", r"returned a value of type int, not a paceline\.Job"),
        ("def job(:\n", r"digits\.py:1: SyntaxError"),
    ],
    ids=["no job", "another name", "raises", "missing package", "no Job", "no Python"],
)
def test_a_file_that_gives_no_job(tmp_path: Path, run_dir: Path, text: str, words: str):
    """A file without a usable job is refused with its line, and no folder is made."""
    error = failing(JobFile.parse(str(job_file(tmp_path, text or "x = 1\n"))), run_dir)
    assert re.search(words, str(error))
    assert (type(error).__name__, error.exit_code) == ("JobError", 2)
    assert not run_dir.exists()


def test_an_unknown_hyperparameter(tmp_path: Path, run_dir: Path):
    """The nearest name is offered, and all there are."""
    error = failing(JobFile.parse(str(job_file(tmp_path)), {"hiden": "9"}), run_dir)
    assert "unknown hyperparameter 'hiden', did you mean 'hidden'? Known: lr, hidden" in str(error)
    assert (error.exit_code, run_dir.exists()) == (2, False)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("dta=2", "unknown plan key 'dta', did you mean 'data'?"),
        ("data=2 zero=3", "zero=3 splits the shard axis, and the plan has none"),
        (
            "data=25",
            "plan 'data=25' has 25 replicas and the data has 24 samples: some would never have any",
        ),
        ("data=9", "plan 'data=9' has 9 replicas and a global batch has 8 samples"),
    ],
)
def test_a_plan_that_does_not_suit(run_dir: Path, plan: str, words: str):
    """Unknown keys, contradictions, and more ranks than samples."""
    error = failing(a_job(), run_dir, plan=plan)
    assert words in str(error)
    assert (error.exit_code, run_dir.exists()) == (2, False)


# --- Jobs that can't be trained -----------------------------------------------------------------------------------


def unlike_others() -> Any:
    return torch.zeros(5), 0


def unreadable() -> Any:
    raise OSError("img17.png is truncated")


class Raising(Net):
    def forward(self, x: Tensor) -> Tensor:
        if rank() == 1:
            raise ValueError("a layer is missing")
        return super().forward(x)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def nan_on_one_rank(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * (float("nan") if rank() == 1 else 1.0)


def vector(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def constant(output: Tensor, target: Tensor) -> Tensor:
    return torch.tensor(1.0)


def detached(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.detach(), target)


def of_its_own(output: Tensor, target: Tensor) -> Tensor:
    return torch.ones((), requires_grad=True) * 2


def counts_nothing(output: Tensor, target: Tensor) -> Any:
    return F.cross_entropy(output, target, reduction="sum") * 0, 0


BAD_JOBS: dict[str, tuple[dict[str, Any], str, int]] = {
    "wrong shape on one rank": (
        {"data": Points({17: unlike_others})},
        r"rank \d on .* failed in step [123] \(input\):\nsample 17 is \(5, int\) and others are \(4, int\)",
        1,
    ),
    "an item that raises": (
        {"data": Points({17: unreadable})},
        r"at .*test_failures\.py:\d+:\nsample 17 of the data can't be read: OSError: img17\.png is truncated",
        1,
    ),
    "no pair": (
        {"data": Points({17: lambda: torch.zeros(4)})},
        r"sample 17 is a Tensor and not \(input, target\)",
        1,
    ),
    "a model that raises": (
        {"model": Raising},
        r"rank 1 on .* failed in step 1 \(forward\), at .*test_failures\.py:\d+:\nValueError: a layer is missing",
        1,
    ),
    "loss is NaN": (
        {"loss": nan_on_one_rank},
        r"rank 1 on .* failed in step 1 .*\nthe loss is not a number \(NaN\) in step 1; the weights of the step",
        1,
    ),
    "loss is a vector": ({"loss": vector}, r"the loss is not a scalar: it has shape \(4,\)", 1),
    "loss is no tensor": ({"loss": lambda output, target: 0.5}, r"the loss returned float", 1),
    "loss is constant": (
        {"loss": constant},
        r"the loss does not depend on the model: it has no gradient",
        1,
    ),
    "loss is detached": (
        {"loss": detached},
        r"the loss does not depend on the model: it has no gradient",
        1,
    ),
    "loss ignores its input": (
        {"loss": of_its_own},
        r"the loss does not depend on the model: no parameter has",
        1,
    ),
    "loss counts nothing": (
        {"loss": counts_nothing},
        r"the loss counts nothing in step 1: its count is 0",
        1,
    ),
    "nothing to train": ({"model": Frozen}, r"the model has no trainable parameter", 2),
    "no module": ({"model": lambda: 3}, r"model returned int and not a torch\.nn\.Module", 2),
    "no optimizer": (
        {"optimizer": lambda named: None},
        r"optimizer returned NoneType and not a torch\.optim\.Opti",
        2,
    ),
    "an empty stream": ({"data": iter(())}, r"the data stream gave 0 samples in epoch 0", 2),
    "a metric that is no scalar": (
        {"validation": Points(), "metrics": {"error": vector}},
        r"metric 'error' is not a scalar: it has shape \(4,\)",
        1,
    ),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("defect", BAD_JOBS)
def test_a_job_that_cannot_be_trained(
    run_dir: Path, capfd: pytest.CaptureFixture[str], defect: str
):
    """The cause is told with rank and step, whichever ranks see it, and once."""
    changes, words, exit_code = BAD_JOBS[defect]
    error = failing(a_job(**changes), run_dir)
    matches = re.findall(words, str(error))
    assert len(matches) == 1, str(error)
    assert error.exit_code == exit_code
    # 2: it can't be built. A metric is looked at before the first step, and nothing is left of such a run.
    has_begun = exit_code != 2 and defect != "a metric that is no scalar"
    assert run_dir.exists() == has_begun
    # Ranks that check the first update keep no log.
    assert ("full log: " in str(error)) == any(run_dir.glob("logs/*"))
    assert saved_steps(run_dir) == []
    assert "Traceback" not in capfd.readouterr().err  # the caller prints the error


@pytest.mark.checked_runs
def test_a_failure_in_the_check_is_in_the_run_folder(run_dir: Path):
    """One device can do what a rank can't, and the check's rank fails as the run's would."""
    error = failing(a_job(model=Raising), run_dir)
    failure = json.loads((run_dir / "summary.json").read_text())["failure"]
    assert failure["rank"] == 1 and "a layer is missing" in failure["message"]
    assert failure["exit_code"] == error.exit_code == 1
    assert not (run_dir / "logs").exists()  # no rank of the run has begun


@pytest.mark.sweep(3)
@pytest.mark.parametrize("plan", ["single", "shard=2", "data=2 microbatches=2 recompute=full"])
@pytest.mark.parametrize("defect", ["loss is NaN", "loss ignores its input", "loss is a vector"])
def test_under_other_plans_too(run_dir: Path, plan: str, defect: str):
    """What is wrong with a job does not depend on the plan, nor does what is said of it."""
    changes, words, exit_code = BAD_JOBS[defect]
    if defect == "loss is NaN" and plan == "single":
        changes, words = (
            {"loss": lambda output, target: output.sum() * float("nan")},
            words.replace("rank 1", "rank 0"),
        )
    error = failing(a_job(**changes), run_dir, plan=plan)
    assert re.search(words.replace(r"\(4,\)", r"\(\d,\)"), str(error))
    assert error.exit_code == exit_code


@pytest.mark.slow
def test_what_was_saved_before_stays(run_dir: Path):
    """A loss that becomes NaN later costs the steps since the last checkpoint and no more; with the cause mended the
    run goes on from there."""
    factor = torch.tensor(1.0)

    def diverge() -> None:
        until(lambda: saved_steps(run_dir) == [2, 4])  # they are written in the background
        factor.fill_(float("inf"))

    loss = in_step(5, diverge, where=0)
    error = failing(
        a_job(loss=lambda output, target: loss(output, target) * factor),
        run_dir,
        save_every=2,
        check=False,  # it calls the loss as often, and nothing is saved in a check
    )
    assert "rank 0 on" in str(error)
    assert "the loss is infinite in step 5" in str(error)
    assert saved_steps(run_dir) == [2, 4]
    steps = [
        json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(steps) == 4
    summary = paceline.train(a_job(), "data=2", run=run_dir, resume=True)
    assert summary["steps"] == 6
    paceline.train(a_job(), "data=2", run=run_dir.with_name("whole"))
    assert_equal_models(run_dir, run_dir.with_name("whole"))


def assert_equal_models(run: Path, other: Path) -> None:
    actual, expected = (load_file(path / "model.safetensors") for path in (run, other))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


# --- Full disks ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(1)
@pytest.mark.parametrize("where", [0, 1])
def test_a_full_disk(run_dir: Path, monkeypatch: pytest.MonkeyPatch, where: int):
    """A disk that is full on any one rank ends the run with path and sizes; the checkpoint before is untouched."""
    write_tensors, written = write.write_tensors, []

    def write_or_fail(path: Path, sources: Any, *wrote: Any) -> Any:
        written.append(path)
        if rank() == where and len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_tensors(path, sources, *wrote)

    monkeypatch.setattr(write, "write_tensors", write_or_fail)
    error = failing(a_job(), run_dir, save_every=2)
    failure = json.loads((run_dir / "summary.json").read_text())["failure"]
    assert (failure["reason"], failure["rank"], failure["exit_code"]) == (
        "checkpoint_error",
        where,
        1,
    )
    assert "free some space" in failure["hint"] and paceline.open(run_dir)["plan"] == "data=2"
    assert re.search(
        rf"rank {where} could not save step 4 to {run_dir}/checkpoints/step-4: "
        r"No space left on device \(.* needed, .* free\)",
        str(error),
    )
    assert "hint: free some space or use another folder (--run DIR)" in str(error)
    assert error.exit_code == 1
    assert saved_steps(run_dir) == [2]
    monkeypatch.setattr(write, "write_tensors", write_tensors)
    assert paceline.train(a_job(), "data=2", run=run_dir, resume=True)["steps"] == 6


def test_a_full_disk_of_which_another_rank_hears_first(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 leaves before rank 1 looks at its own save, and rank 1 finds itself alone in the next step."""
    write_tensors, counted = write.write_tensors, Saves.counted

    def write_or_fail(path: Path, sources: Any, *wrote: Any) -> Any:
        if rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_tensors(path, sources, *wrote)

    def counted_late(saves: Saves) -> None:
        if saves.run.step <= 2:
            counted(saves)
        elif rank() == 0:
            saves.end()

    monkeypatch.setattr(write, "write_tensors", write_or_fail)
    monkeypatch.setattr(Saves, "counted", counted_late)
    failing(a_job(), run_dir, save_every=2)
    failure = json.loads((run_dir / "summary.json").read_text())["failure"]
    assert (failure["reason"], failure["rank"]) == ("checkpoint_error", 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(
            "can't mount a small disk, which needs Linux and root (in a container --cap-add SYS_ADMIN): "
            f"{mounted.stderr.strip()}"
        )
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 30_000), nn.Linear(30_000, 2))


def test_a_disk_that_is_really_full(small_disk: Path):
    """On a file system of 1 MiB a larger model trains, is not saved, and leaves no part of a checkpoint."""
    error = failing(a_job(model=wide, steps=2), small_disk / "run")
    assert "No space left on device (" in str(error)
    assert "could not save step 2" in str(error)
    assert saved_steps(small_disk / "run") == []


def test_a_disk_that_is_full_from_the_start(small_disk: Path):
    """Nothing at all can be written: the message names the folder."""
    (small_disk / "filler").write_bytes(b"x" * (1 << 20))
    with pytest.raises(
        UsageError, match=r"can't write the run folder .*/run: No space left on device"
    ):
        paceline.train(a_job(), "data=2", run=small_disk / "run")


def fill(folder: Path) -> Path:
    """Leave no room for a byte."""
    filler = folder / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def test_a_disk_that_fills_up_before_resume(small_disk: Path, tmp_path: Path):
    """The path and the reason are told, without a traceback; the run goes on when there is room."""
    path, run = job_file(tmp_path), small_disk / "run"
    words = ["train", str(path), "--plan", "data=2", "--run", str(run)]
    assert Command([*words, "--steps", "2"], os.environ, tmp_path / "first").wait() == 0
    for name in (
        "summary.json",
        "model.safetensors",
        "predicted.json",
    ):  # whose room --resume would get
        (run / name).unlink()
    filler = fill(small_disk)
    full = Command([*words, "--resume"], os.environ, tmp_path / "full")
    assert full.wait() == 1
    told = full.stderr.read_text()
    assert re.search(
        rf"error: can't write {run}/\w+\.json\w?: No space left on device\n\nhint: free some space",
        told,
    )
    assert "Traceback" not in told and "bug" not in told
    filler.unlink()
    assert Command([*words, "--resume"], os.environ, tmp_path / "again").wait() == 0


def test_prints_that_fill_the_disk(small_disk: Path, capfd: pytest.CaptureFixture[str]):
    """They end no run: it says once what it can't write, and saves when there is room."""
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        print("x" * 400_000)
        if len(calls) == 6:
            for log in (small_disk / "run" / "logs").iterdir():
                os.truncate(log, 0)
        return F.cross_entropy(output, target)

    assert paceline.train(a_job(loss=loss), "data=2", run=small_disk / "run")["steps"] == 6
    assert (
        1 <= capfd.readouterr().err.count("No space left on device; the run goes on") <= 2
    )  # by rank


@pytest.mark.parametrize(
    "fate",
    [
        lambda run: shutil.rmtree(run, ignore_errors=True),
        lambda run: run.rename(run.with_name("elsewhere")),
    ],
    ids=["removed", "renamed"],
)
def test_a_run_folder_that_goes_away(run_dir: Path, fate: Callable[[Path], Any]):
    """The run says so and stops; what was saved goes on under its new name."""
    with pytest.raises(PacelineError, match=r"removed, renamed or unmounted") as raised:
        paceline.train(
            a_job(loss=in_step(4, lambda: fate(run_dir))),
            "data=2",
            run=run_dir,
            save_every=2,
            restarts=0,
        )
    assert raised.value.exit_code == 1
    if (elsewhere := run_dir.with_name("elsewhere")).exists():
        assert paceline.train(a_job(), "data=2", run=elsewhere, resume=True)["steps"] == 6


# --- Checkpoints that can't be used -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that was never interrupted."""
    path = tmp_path_factory.mktemp("whole") / "run"
    paceline.train(a_job(), "data=2", run=path, save_every=2)
    return path


def interrupted(whole_run: Path, run_dir: Path) -> Path:
    """The same run as if it had been killed right after its last checkpoint."""
    shutil.copytree(whole_run, run_dir)
    for name in ("summary.json", "model.safetensors"):
        (run_dir / name).unlink()
    return run_dir


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def not_complete(folder: Path) -> None:
    (folder / "COMMIT").unlink()


def damaged(folder: Path) -> None:
    flip(folder / "rank-00000.safetensors")


def truncated(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def foreign(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"not ours")


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (not_complete, r"it has no COMMIT"),
        (damaged, r"rank-00000\.safetensors is damaged"),
        (truncated, r"is truncated: \d+ bytes of \d+"),
        (foreign, r"it has no COMMIT: .* or not a checkpoint of Paceline"),
    ],
)
def test_the_next_older_checkpoint_is_taken(
    whole_run: Path,
    run_dir: Path,
    capfd: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    words: str,
):
    """A checkpoint that is damaged or foreign is passed over with one warning; the run ends as if nothing had been."""
    interrupted(whole_run, run_dir)
    spoil(run_dir / "checkpoints" / "step-6")
    paceline.train(a_job(), "data=2", run=run_dir, resume=True)
    shown = capfd.readouterr().err
    assert len(re.findall(rf"warning: checkpoint .*step-6 is passed over: .*{words}", shown)) == 1
    assert "resumed from step-4" in shown
    assert_equal_models(run_dir, whole_run)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 6}, "its batch was 8 and this job's is 6"),
        ({"seed": 1}, "its seed was 0 and this job's is 1"),
        ({"data": Points(samples=20)}, "its num_samples was 24 and this job's is 20"),
        ({"model": Unused}, "it lacks parameters/spare."),
        (
            {"optimizer": lambda named: torch.optim.AdamW(named)},
            "its optimizer was SGD and this job's is AdamW",
        ),
    ],
)
def test_checkpoints_of_another_job(
    whole_run: Path, run_dir: Path, changes: dict[str, Any], words: str
):
    """Where none of the checkpoints is this job's, the reasons are listed and nothing is changed."""
    interrupted(whole_run, run_dir)
    error = failing(a_job(**changes), run_dir, resume=True)
    assert "none of the checkpoints in" in str(error)
    assert str(error).count(words) == 3
    assert error.exit_code == 1
    assert saved_steps(run_dir) == [2, 4, 6]


def test_every_checkpoint_damaged(whole_run: Path, run_dir: Path):
    """The run does not quietly start over."""
    interrupted(whole_run, run_dir)
    for step in (2, 4, 6):
        flip(run_dir / "checkpoints" / f"step-{step}" / "index.json")
    error = failing(a_job(), run_dir, resume=True)
    assert str(error).count("index.json is damaged") == 3
    assert "bring one of them back from a copy, or start anew in another folder" in str(error)


# --- Run folders --------------------------------------------------------------------------------------------------


def test_a_folder_of_an_earlier_run(whole_run: Path, run_dir: Path):
    """An earlier run is never written over."""
    shutil.copytree(whole_run, run_dir)
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(
        UsageError, match=r"already holds a run(?s:.*)hint: --resume goes on with it"
    ):
        paceline.train(a_job(), "data=2", run=run_dir)
    assert {
        path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()
    } == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_in_use_by_a_live_run(
    run_dir: Path, tmp_path: Path, start_child: Any, wait_for: Callable[..., None], resume: bool
):
    """A second run in the folder of a live one is refused, and the first goes on as if nothing had been."""

    def wait_in_step_2(output: Tensor, target: Tensor) -> Tensor:
        (tmp_path / "started").touch()
        until((tmp_path / "go on").exists)
        return F.cross_entropy(output, target)

    child = start_child(lambda: paceline.train(a_job(loss=wait_in_step_2), "data=2", run=run_dir))
    wait_for(lambda: (tmp_path / "started").exists())
    with pytest.raises(UsageError, match=rf"in use by a live run \(process {child.pid}\)"):
        paceline.train(a_job(), "data=2", run=run_dir, resume=resume)
    (tmp_path / "go on").touch()
    assert child.exit_code() == 0, child.stderr
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 6


# --- Ranks that die, hang or are asked to stop ----------------------------------------------------------------------


def in_step(
    step: int, action: Callable[[], None], where: int = 1
) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that does something else on one rank in a step."""
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == step and rank() == where:
            action()
        return F.cross_entropy(output, target)

    return loss


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "it was killed by SIGKILL"),
        (lambda: os._exit(3), "it ended with exit code 3 and no exception"),
    ],
)
@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_a_rank_that_dies(
    run_dir: Path, whole_run: Path, plan: str, end: Callable[[], None], words: str
):
    """The rank and its step are named; the checkpoint before is whole, and the run goes on from it."""
    error = failing(a_job(loss=in_step(5, end)), run_dir, plan=plan, save_every=2)
    assert re.search(rf"rank 1 on .* failed in step 5 \(forward\):\n{words}", str(error))
    assert error.exit_code == 4
    assert saved_steps(run_dir)[0] == 2
    assert paceline.train(a_job(), plan, run=run_dir, resume=True)["steps"] == 6
    if plan == "data=2":
        assert_equal_models(run_dir, whole_run)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "shard=2", "pipeline=2 microbatches=1", "place=2"])
def test_a_rank_that_hangs(run_dir: Path, plan: str, hang_begins: Path):
    """The rank, its step and its line are named after the timeout, however the others wait for it."""

    def hang() -> None:
        hang_begins.touch()
        time.sleep(1000)

    error = failing(a_job(loss=in_step(3, hang)), run_dir, plan=plan, timeout_s=3.0)
    assert re.search(
        r"rank 1 on .* failed in step 3 \(forward\), at .*test_failures\.py:\d+:\n"
        r"rank 1 did not reach the collective that the others wait for in 3 s; rank 0 waited",
        str(error),
    )
    assert error.exit_code == 4


def test_a_scheduler_that_wants_the_machine_back(
    run_dir: Path, whole_run: Path, tmp_path: Path, start_child: Any, wait_for: Callable[..., None]
):
    """SIGTERM ends the run after its step with a checkpoint and exit code 5; resumed, it ends as if never stopped."""

    loss = in_step(2, lambda: until_asked_to_stop((tmp_path / "waits").touch), where=0)
    # A check calls the loss as often, and nothing asks its processes to stop.
    child = start_child(
        lambda: paceline.train(a_job(loss=loss), "data=2", run=run_dir, check=False)
    )
    wait_for((tmp_path / "waits").exists)
    os.kill(child.pid, signal.SIGTERM)
    assert child.exit_code() == 5
    assert re.search(
        r"error: stopped by SIGTERM after step \d; a checkpoint is saved\n\n"
        r"hint: the same command with --run .* --resume",
        child.stderr,
    )
    assert "failed" not in child.stderr
    assert_nothing_half_written(run_dir)
    assert len(saved_steps(run_dir)) == 1
    paceline.train(a_job(), "data=2", run=run_dir, resume=True)
    assert_equal_models(run_dir, whole_run)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("number", "to_rank", "phase"),
    [
        (signal.SIGUSR1, False, "step"),
        (signal.SIGUSR2, True, "build"),
        (signal.SIGTERM, True, "evaluate"),
    ],
)
def test_a_scheduler_at_any_moment(
    run_dir: Path,
    whole_run: Path,
    tmp_path: Path,
    start_child: Any,
    wait_for: Callable[..., None],
    number: signal.Signals,
    to_rank: bool,
    phase: str,
):
    """Every signal of schedulers, to the command or a rank, gives exit code 5; resumed, the run ends as if it never
    had been."""

    def waits(where: str) -> None:
        if where == phase and rank() == 1 - (
            where == "build"
        ):  # no group yet: each says that it is 0
            until_asked_to_stop(lambda: pid.write_text(str(os.getpid())))

    class Slow(Net):
        def __init__(self) -> None:
            super().__init__()
            waits("build")

    def loss(output: Tensor, target: Tensor) -> Tensor:
        waits("step" if output.requires_grad else "evaluate")
        return F.cross_entropy(output, target)

    pid = tmp_path / "pid"
    child = start_child(
        lambda: paceline.train(
            a_job(model=Slow, loss=loss, validation=Points(samples=8)),
            "data=2",
            run=run_dir,
            check=False,
        )
    )
    wait_for(lambda: pid.exists() and pid.read_text())
    os.kill(int(pid.read_text()) if to_rank else child.pid, number)
    assert child.exit_code() == 5, child.stderr
    assert "stopped by" in child.stderr and "--resume goes on" in child.stderr
    if phase == "evaluate":
        assert re.search(r"stopped by SIGTERM to rank 1 after step \d", child.stderr)
    paceline.train(a_job(), "data=2", run=run_dir, resume=True)
    assert_equal_models(run_dir, whole_run)


def test_a_request_while_the_last_checkpoint_is_written(
    run_dir: Path,
    whole_run: Path,
    tmp_path: Path,
    start_child: Any,
    wait_for: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
):
    """The run has taken all its steps, and what it has trained is not lost."""
    write_tensors = write.write_tensors

    def slowly(*arguments: Any) -> Any:
        (tmp_path / "saving").touch()
        until((tmp_path / "asked").exists)
        return write_tensors(*arguments)

    def pass_on(*arguments: Any) -> None:
        passed_on(*arguments)
        (tmp_path / "asked").touch()

    passed_on = Supervisor.signal
    monkeypatch.setattr(write, "write_tensors", slowly)
    monkeypatch.setattr(Supervisor, "signal", pass_on)
    child = start_child(lambda: paceline.train(a_job(), "data=2", run=run_dir, check=False))
    wait_for((tmp_path / "saving").exists)
    os.kill(child.pid, signal.SIGTERM)
    assert child.exit_code() == 0, child.stderr
    assert_equal_models(run_dir, whole_run)


# --- The command line ---------------------------------------------------------------------------------------------


@pytest.mark.sweep(1)
@pytest.mark.checked_runs
@pytest.mark.parametrize(
    ("fields", "words", "exit_code", "says"),
    [
        (
            {"loss": "lambda o, t: F.cross_entropy(o, t) * float('nan')"},
            [],
            1,
            "the loss is not a number (NaN) in step 1",
        ),
        (
            {},
            ["--set", "hiden=9"],
            2,
            "error: unknown hyperparameter 'hiden', did you mean 'hidden'?",
        ),
        (
            {"loss": "lambda o, t: __import__('os').kill(__import__('os').getpid(), 9)"},
            ["--restarts", "0"],
            4,
            "it was killed by SIGKILL",
        ),
    ],
    ids=["NaN", "usage", "killed"],
)
def test_exit_codes(
    tmp_path: Path, fields: dict[str, Any], words: list[str], exit_code: int, says: str
):
    """Each kind of failure has its exit code; the message stands once on stderr, and stdout stays empty."""
    path = job_file(tmp_path, **fields)
    done = Command(
        ["train", str(path), "--plan", "data=2", "--run", str(tmp_path / "run"), "--json", *words],
        os.environ,
        tmp_path / "command",
    )
    assert done.wait() == exit_code, done.stderr.read_text()
    assert done.stdout.read_text() == ""
    stderr_text = done.stderr.read_text()
    assert stderr_text.count(says) == 1
    assert stderr_text.count("error: ") == 1
    assert "Traceback" not in stderr_text
    assert_nothing_half_written(tmp_path / "run")


def test_ctrl_c(tmp_path: Path, wait_for: Callable[..., None]):
    """Ctrl-C in a terminal goes to every process: the run ends with 130 and a checkpoint, and no process is left."""
    path = job_file(tmp_path, steps=100_000)
    running = Command(
        ["train", str(path), "--plan", "data=2", "--check", "no", "--run", str(tmp_path / "run")],
        os.environ,
        tmp_path / "command",
    )
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    ranks = psutil.Process(running.pid).children(recursive=True)
    os.killpg(running.pid, signal.SIGINT)
    code, stderr_text = running.wait(), running.stderr.read_text()
    assert code == 130, stderr_text
    assert running.stdout.read_text() == ""
    assert re.search(r"stopped by .* after step \d+; a checkpoint is saved", stderr_text)
    assert "Traceback" not in stderr_text
    assert len(ranks) >= 2
    assert not psutil.wait_procs(ranks, timeout=PATIENCE_S)[1]
    assert_nothing_half_written(tmp_path / "run")
    assert len(saved_steps(tmp_path / "run")) == 1


def drawn_by(work: Callable[[], object], end: Callable[[int], None]) -> bytes:
    """What the work writes to a terminal. end: Given its process, ends the work."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    drawn = b""
    try:
        end(pid)
        with suppress(OSError):  # which Linux gives where the other end is closed
            while part := os.read(terminal, 4096):
                drawn += part
    finally:
        os.waitpid(pid, 0)
    return drawn


def test_a_restart_is_told_on_a_line_of_its_own(tmp_path: Path):
    """The rank that was killed had drawn a line, and hidden the cursor, before new ranks began."""
    run, killed = tmp_path / "run", tmp_path / "killed"

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if (run / "metrics.jsonl").exists() and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(output, target)

    drawn = drawn_by(
        lambda: paceline.train(a_job(loss=loss), "single", run=run, restarts=1), lambda pid: None
    )
    assert 0 < drawn.find(b"\r\x1b[2K\x1b[?25h") < drawn.find(b"resumed from"), drawn


def test_a_second_ctrl_c_shows_the_cursor(tmp_path: Path, wait_for: Callable[..., None]):
    """A rank that draws on a terminal has hidden it, and is killed before it can show it."""
    run, started, asked = tmp_path / "run", tmp_path / "started", tmp_path / "asked"

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if (run / "metrics.jsonl").exists():
            until_asked_to_stop(started.touch)
            asked.touch()
            time.sleep(1000)
        return F.cross_entropy(output, target)

    def end(pid: int) -> None:
        wait_for(started.exists)
        os.kill(pid, signal.SIGINT)
        wait_for(asked.exists)
        time.sleep(signals.SAME_REQUEST_S + 0.1)  # what comes before is the same request
        os.kill(pid, signal.SIGINT)

    drawn = drawn_by(lambda: paceline.train(a_job(loss=loss), "single", run=run), end)
    assert b"\x1b[?25l" in drawn and drawn.rindex(b"\x1b[?25h") > drawn.rindex(b"\x1b[?25l")
