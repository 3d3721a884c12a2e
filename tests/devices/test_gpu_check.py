"""`scripts/gpu-check`: what it says of runs, and on the pretended device that it can make them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_cuda.build import CannotBuild, build

from benchmarks.gpu import __main__ as gpu_check
from benchmarks.gpu import command, machine, matrix, memory, page, proof, recovery, speed
from benchmarks.gpu.__main__ import PARTS, check
from benchmarks.gpu.machine import seen
from paceline import cli

HERE = Path(__file__).parent
TINY = {"tiny": {"width": 32, "layers": 2, "sequence": 16, "batch": 8}}


def ended(stderr: str = "", exit_code: int | None = 1) -> command.Ended:
    return command.Ended(exit_code, "", stderr, 3.0)


def trained(weight: float, loss: float = 1.0) -> matrix._Trained:
    return matrix._Trained(
        [2.0, loss], {"w": torch.tensor([weight, -4.0], dtype=torch.float64)}, 1.0
    )


RUN = matrix._Run("blocks", "data=2", "cuda:0-1")


@pytest.mark.parametrize(
    ("actual", "verdict", "off_by"),
    [
        (trained(1.0), "equal", 0.0),
        (trained(1.0 + 4e-11), "equal", 1e-11),
        (trained(1.0 + 4e-3), "differs", 1e-3),
        (trained(1.0, loss=1.001), "differs", 1e-3),
        (ended("error: no"), "failed", None),
        (None, "not run", None),
    ],
)
def test_a_cell_says_how_far_off_it_is(
    actual: matrix._Trained | command.Ended | None, verdict: str, off_by: float | None
):
    cell = matrix._compared(RUN, actual, trained(1.0))
    assert cell.verdict == verdict
    assert cell.off_by == (None if off_by is None else pytest.approx(off_by, rel=1e-3))


def test_a_number_that_is_none_differs():
    cell = matrix._compared(RUN, trained(float("nan")), trained(1.0))
    assert cell.verdict == "differs"


def test_what_there_was_no_time_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "run", lambda *_, **__: pytest.fail("nothing is to be run"))
    cells = list(matrix.matrix(1, tmp_path, ["python"], lambda: True))
    assert len(cells) == len(matrix.CELLS)
    assert {(cell.verdict, cell.reason) for cell in cells} == {("not run", "the time was up")}
    rows = list(memory.memory(1, tmp_path, ["python"], lambda: True))
    assert [row["plan"] for row in rows if row["reason"] == "the time was up"] == list(memory.PLANS)


@pytest.mark.parametrize(
    ("plan", "gpus", "expected"),
    [
        ("single", 1, "cuda:0"),
        ("data=2", 2, "cuda:0-1"),
        ("data=2", 1, "cuda:0,cuda:0"),
        ("data=2 shard=2", 3, "cuda:0,cuda:0,cuda:0,cuda:0"),
        ("servers=2 workers=2", 2, "cuda:0-1"),
        ("servers=1 workers=2 colocate=yes", 1, "cuda:0,cuda:0"),
        ("servers=2 workers=1", 1, "cuda:0"),
    ],
)
def test_ranks_share_a_gpu_where_there_are_too_few(plan: str, gpus: int, expected: str):
    assert command.devices(plan, gpus) == expected


def test_relaxed_plans_are_compared_with_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They are no device's; they run on CPUs for it, and those that are exact don't."""
    requested: list[tuple[str, str]] = []

    def note(given: list[str]) -> command.Ended:
        requested.append((given[given.index("--plan") + 1], given[given.index("--devices") + 1]))
        return ended()

    monkeypatch.setattr(command, "run", note)
    list(
        matrix.matrix(
            1,
            tmp_path,
            ["python"],
            lambda: False,
            [("blocks", "data=2"), ("blocks", "data=2 local=2")],
        )
    )
    assert requested == [
        ("single", "cuda:0"),
        ("data=2", "cuda:0,cuda:0"),
        ("data=2 local=2", "cpu:0-1"),
        ("data=2 local=2", "cuda:0,cuda:0"),
    ]


@pytest.mark.slow
def test_a_job_that_can_not_repeat_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As it should be: its row names the operator, and is nothing wrong. Another failure is."""
    monkeypatch.setattr(command, "devices", lambda plan, gpus: "cpu:0")
    arguments = 1, tmp_path, [sys.executable]
    row = proof._repeated(*arguments, "without a deterministic form", "single")
    assert row["verdict"] == "refused" and row["reason"].startswith(
        "the operator 'put_' has no deterministic form"
    )
    assert "hint: use another operator" in row["stderr_tail"] and page.wrong({"proof": [row]}) == []

    monkeypatch.setattr(command, "run", lambda given: ended("error: no such job", exit_code=2))
    row = proof._repeated(*arguments, "unknown", "single")
    assert row["verdict"] == "failed" and len(page.wrong({"proof": [row]})) == 1


def test_steps_that_draw_are_compared_with_a_gpu_alone():
    """CUDA draws other numbers than a CPU."""
    drawing = [(job, plan) for job, plan in matrix.CELLS if job in ("gan", "of a generator")]
    assert len(drawing) > 5
    assert {matrix._reference(job, plan).devices for job, plan in drawing} == {"cuda:0"}


def test_a_contender_that_fails_is_left_out():
    """The others are compared pair by pair."""
    runs = iter([2.0, 1.0, 4.0, 1.0])

    def run() -> dict[str, float]:
        return {"steps_per_s": next(runs), "peak_memory_bytes": 2**30, "host_s": 1.0}

    compiled = []
    rows = speed._beside(
        "tiny",
        "float32",
        {
            "plain loop": run,
            "single": run,
            "plain loop, torch.compile": lambda: compiled.append(1) or "no compiler",
        },
        2,
        lambda: False,
    )
    assert [row.get("ratio") for row in rows] == [1.0, 0.375, None]
    assert [row.get("host ratio") for row in rows] == [1.0, 1.0, None]
    assert rows[2]["reason"] == "no compiler" and compiled == [1]


def test_why_a_command_failed():
    assert ended("starting\nerror: no such plan\nhint: another").reason == "error: no such plan"
    assert ended("killed").reason == "killed"
    assert ended(exit_code=7).reason == "exit code 7"
    assert ended("error: rank 1 failed at a.py:7:\nit hangs\n\nhint").reason == (
        "error: rank 1 failed at a.py:7: it hangs"
    )
    assert ended("plan\nstep 1", exit_code=None).reason == "took longer than 3 s; step 1"
    assert ended("", exit_code=None).reason == "took longer than 3 s"
    hung = ended(
        "step 1\nwarning: rank 0 failed at a.py:7:\nrank 0 did not go on\n\nhint: x", exit_code=None
    )
    assert (
        hung.reason
        == "took longer than 3 s; warning: rank 0 failed at a.py:7: rank 0 did not go on"
    )


def test_a_command_that_takes_too_long_is_ended():
    result = command.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)
    assert result.exit_code is None


def test_a_rank_that_hangs_is_named_before_its_command_is_ended(tmp_path: Path):
    """In time for two of them, and later than a model takes to compile."""
    words = command.train(["python"], "job", "data=2", "cuda:0-1", tmp_path)
    assert 60 < float(words[words.index("--timeout") + 1]) < command.TIMEOUT_S / 2
    words = command.train(["python"], "job", "data=2", "cuda:0-1", tmp_path, "--timeout", "5")
    assert cli.parse(words[4:])[1]["timeout_s"] == 5


def test_rows_are_written_and_told_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A check that is ended has those in its file, and what a command that failed had said is printed."""

    def one_row(*_: Any, **__: Any) -> Iterator[matrix.Cell]:
        yield matrix.Cell(
            "blocks",
            "data=2",
            "cuda:0-1",
            "failed",
            reason="error: rank 1",
            stderr_tail="it waits in\nupdate",
        )
        yield matrix.Cell("blocks", "shard=2", "cuda:0-1", "equal", off_by=0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "seen", lambda python: {"gpus": ["One"]})
    monkeypatch.setattr(gpu_check, "matrix", one_row)
    with pytest.raises(KeyboardInterrupt):
        check(["matrix"], 1.0, tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())["matrix"]
    assert [(cell["plan"], cell["verdict"]) for cell in written] == [
        ("data=2", "failed"),
        ("shard=2", "equal"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert capsys.readouterr().err.splitlines() == [
        "matrix:",
        "  blocks, data=2: failed error: rank 1",
        "    it waits in",
        "    update",
        "  blocks, shard=2: equal",
    ]


def test_the_page_names_what_is_wrong():
    document = {
        "gpus": ["One"],
        "date": "2026-01-01",
        "matrix": [
            {
                "job": "blocks",
                "plan": "shard=2",
                "devices": "cuda:0-1",
                "verdict": "differs",
                "off_by": 0.5,
                "reason": "",
            }
        ],
        "proof": [
            {"job": "half", "plan": "shard=2", "verdict": "failed", "reason": "off by\nmuch"},
            {"job": "half", "plan": "data=2", "verdict": "coupled", "reason": "a BatchNorm"},
        ],
        "failures": [
            {
                "failure": "a kill",
                "plan": "data=2",
                "devices": "cuda:0,cuda:0",
                "expected_exit_code": 4,
                "exit_code": 1,
                "verdict": "differs",
                "reason": "a | b",
            }
        ],
        "memory": [
            {
                "model": "m",
                "plan": "single",
                "devices": "cuda:0",
                "peak_memory_bytes": 3 << 20,
                "predicted_bytes": 4 << 20,
                "of_predicted": 0.75,
            },
            {"model": "m", "plan": "data=2", "devices": "cuda:0,cuda:0", "reason": "error: y"},
        ],
        "speed": [{"model": "m", "precision": "bf16", "contender": "single", "reason": "error: x"}],
    }
    assert page.wrong(document) == [
        "blocks under shard=2: differs",
        "half under shard=2: failed off by",
        "a kill: differs",
        "memory of m under data=2: error: y",
        "single, m, bf16: error: x",
    ]
    lines = page.page(document).splitlines()
    assert "| blocks | `shard=2` | cuda:0-1 | differs | 5e-01 |  |" in lines
    assert "| a kill | `data=2` | cuda:0,cuda:0 | 1 | 4 |  | differs a / b |" in lines
    assert (
        "| half | `shard=2` | failed | off by |" in lines
        and "| half | `data=2` | coupled | a BatchNorm |" in lines
    )
    assert "| m | `single` | cuda:0 | 3.0 | 4.0 | 0.75 |" in lines
    assert "Not as it should be: 5" in lines


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without GPUs: set CUDA_VISIBLE_DEVICES="
)
def test_a_machine_without_gpus_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        command, "run", lambda given: command.Ended(0, json.dumps(machine._look()), "", 0.1)
    )
    with pytest.raises(RuntimeError, match="torch can use no GPU here: `paceline doctor` says why"):
        check(["matrix"], 1.0, tmp_path / "out.json")


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[str, ...]]:
    """What runs Python with so many pretended GPUs."""
    try:
        library = build()
    except CannotBuild as error:
        pytest.skip(str(error))
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setitem(os.environ, name, value)

    def python(gpus: int) -> tuple[str, ...]:
        monkeypatch.setitem(os.environ, "PRETENDED_CUDA_DEVICES", str(gpus))
        return sys.executable, "-m", "pretended_cuda.pretend", str(library)

    return python


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_proofs_on_a_pretended_gpu(tmp_path: Path, pretended: Callable[[int], tuple[str, ...]]):
    """With one GPU: a plan that cuts the batch, whose BatchNorm is named, and runs that repeat."""
    rows = list(proof.proof(1, tmp_path, pretended(1), lambda: False, ["images in float32"]))
    assert [(row["plan"], row["verdict"]) for row in rows] == [
        ("single microbatches=4", "coupled"),
        *(
            (f"{plan} deterministic=yes", "repeats")
            for plan in ("single", "data=2", "shard=2", "tensor=2")
        ),
    ]
    assert rows[0]["device"]["name"] == "Pretended" and "BatchNorm" in rows[0]["reason"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recovery_on_a_pretended_gpu(tmp_path: Path, pretended: Callable[[int], tuple[str, ...]]):
    rows = list(
        recovery.recovery(
            1,
            tmp_path,
            pretended(1),
            lambda: False,
            plans=("single", "data=2"),
            model=TINY["tiny"],
            steps=40,
        )
    )
    assert [(row["plan"], row["verdict"], row["weights"], row["samples_lost"]) for row in rows] == [
        ("single", "as expected", "equal", 0),
        ("data=2", "as expected", "equal", 0),
    ], rows
    assert all(row["next_step_s"] > 0 for row in rows)
    assert "| `single` | cuda:0 |" in page.page(
        {"gpus": ["One"], "date": "2026-01-01", "recovery": rows}
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gpus", [1, 2])
def test_the_whole_check_on_pretended_gpus(
    tmp_path: Path, pretended: Callable[[int], tuple[str, ...]], gpus: int
):
    """With one GPU every kind of plan is tried, too: its ranks share it."""
    python = pretended(gpus)
    assert seen(python)["gpus"] == ["Pretended"] * gpus
    output = tmp_path / "gpu-check.json"
    plans = (
        "single",
        "data=2",
        "shard=3",
        "servers=1 workers=2",
        *(
            (
                "tensor=2",
                "pipeline=2 schedule=1f1b",
                "place=2",
                "data=2 local=2 outer=diloco",
                "data=2 compress=int8",
            )
            if gpus == 1
            else ()
        ),
    )
    cells = (*(("blocks", plan) for plan in plans), ("statistics", "single"))
    parts = [part for part in PARTS if part not in ("proof", "recovery")]
    document = check(
        parts,
        20.0,
        output,
        python=python,
        cells=cells,
        models=TINY,
        plans=("single", "shard=2"),
        rounds=1,
        precisions=("float32", "fp16"),
    )
    assert json.loads(output.read_text()) == document
    assert {cell["plan"]: cell["verdict"] for cell in document["matrix"]} == dict.fromkeys(
        plans, "equal"
    )
    assert {cell["devices"] for cell in document["matrix"]} == (
        {"cuda:0", "cuda:0,cuda:0", "cuda:0,cuda:0,cuda:0"}
        if gpus == 1
        else {"cuda:0", "cuda:0-1", "cuda:0,cuda:0,cuda:0"}
    )
    # A pretended GPU has no kernels that run by themselves.
    assert [row["verdict"] for row in document["failures"]] == [
        "as expected",
        "as expected",
        "differs",
    ]
    assert all(0.5 < row["of_predicted"] < 2 for row in document["memory"]), document["memory"]
    compared = {row["contender"]: row for row in document["speed"] if row["precision"] == "float32"}
    assert compared["single"]["ratio"] > 0 and compared["single"]["host ratio"] > 0
    assert all(
        compared[plan]["memory of predicted"] > 0
        for plan in ("single", *(("data=2", "shard=2") if gpus > 1 else ()))
    )
    # torchrun and inductor know no pretended GPU.
    known = (
        "a kernel of one rank",
        "plain loop, torch.compile",
        "single compile=blocks",
        "DistributedDataParallel",
    )
    assert [line for line in page.wrong(document) if not line.startswith(known)] == []
    assert {
        row["precision"]
        for row in document["speed"]
        if row["contender"] == "single" and "ratio" in row
    } == {"float32", "fp16"}
