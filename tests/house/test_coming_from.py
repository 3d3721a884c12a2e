"""docs/coming-from.md: its scripts run, and the job ends with the weights that the script ends with."""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from later import needed
from torch.utils.data import DataLoader

import paceline as pl
from paceline.attached.launch import run as run_attached
from paceline.base.streams import seed_model
from paceline.checkpoint import load_tensors

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
LOOP, DDP, ACCELERATE, LIGHTNING, DEEPSPEED = (
    "a training loop",
    "DistributedDataParallel",
    "Accelerate",
    "Lightning",
    "DeepSpeed",
)
ATTACHED = "pl.attach("  # in scripts that keep their loop
AS_IT_IS = "pl.from_lightning("  # in scripts that keep their module
IN_ORDER = "for inputs, targets in DataLoader(samples, batch_size=60):"  # in place of a loader that shuffles by itself


def section(tool: str) -> str:
    """The part of the page about one tool."""
    page = PAGE.read_text(encoding="utf-8")
    return page.partition(f"\n## From {tool}\n")[2].partition("\n## ")[0]


def code(tool: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", section(tool), re.DOTALL)


def scripts(tool: str) -> tuple[str, str]:
    """The script before and the job after, which Accelerate and DeepSpeed have in common with DDP."""
    kept = (ATTACHED, AS_IT_IS)
    blocks = [block for block in code(tool) if not any(word in block for word in kept)]
    return blocks[0], code(DDP)[1] if tool in (ACCELERATE, DEEPSPEED) else blocks[1]


def run_script(script: str, **names: Any) -> dict[str, Any]:
    """What a script defines, run with the samples in their own order, which a loop and a job can share."""
    script = script.replace("shuffle=True", "shuffle=False").replace(
        "torch.manual_seed(0)", "seed_model(0)"
    )
    names |= {"seed_model": seed_model}
    exec(compile(script, "script", "exec"), names)
    return names


def assert_equal_weights(run: Path, model: torch.nn.Module) -> None:
    weights = load_tensors(run / "model.safetensors")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What torchrun tells the only process that it starts; files go to a folder of the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_ten_lines_change():
    """Of the loop's script nothing is edited; few lines are new."""
    before, after = scripts(LOOP)
    changes = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    assert len([line for line in changes if line.startswith("+ ") and line[2:].strip()]) <= 13


def test_the_job_ends_where_the_loop_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Weights and accuracy of the loop as it is, of the job under two plans, and of the job with the
    loop's body; jobs begin like the loop.
    """
    needed("sklearn", "scikit-learn")
    before, after = scripts(LOOP)
    loop: dict[str, Any] = {}
    exec(compile(before, "script", "exec"), loop)
    accuracy = float(re.findall(r"epoch 4: accuracy (\S+)", capsys.readouterr().out)[0])
    script = {"__name__": "script"}
    exec(after.replace("pl.Job(", "pl.Job(seed=pl.like_torch(0), "), script)
    body = code(LOOP)[2]
    exec(body.replace("pl.Job(", "pl.Job(seed=pl.like_torch(0), "), script)
    for name, plan in (
        ("job", "single"),
        ("job", "data=2 accumulate=2"),
        ("job_of_body", "data=2 accumulate=2"),
    ):
        figures = pl.train(script[name](), plan, run=tmp_path / name / plan)
        assert_equal_weights(tmp_path / name / plan, loop["model"])
        assert figures["metrics"]["accuracy"] == pytest.approx(accuracy, abs=1e-4)


@pytest.mark.parametrize(
    ("tool", "package", "model"),
    [
        (DDP, "torch", "model.module"),
        (ACCELERATE, "accelerate", "model"),
        pytest.param(LIGHTNING, "lightning", "model.net", marks=pytest.mark.slow),
        pytest.param(DEEPSPEED, "deepspeed", "engine.module", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the other tool
def test_the_job_ends_where_the_script_of_another_tool_ends(
    tool: str,
    package: str,
    model: str,
    tmp_path: Path,
    one_process: None,
    monkeypatch: pytest.MonkeyPatch,
):
    """The other tool runs in one process, where it computes what one device computes."""
    needed("sklearn", "scikit-learn")
    needed(package)
    before, after = scripts(tool)
    if tool == DEEPSPEED:  # its own loader shuffles whatever it is told
        before = before.replace("for inputs, targets in loader:", IN_ORDER)
    names = run_script(before, DataLoader=DataLoader)
    if package == "accelerate":
        names["accelerator"].state._reset_state(True)
    leave_the_launcher(monkeypatch)
    pl.train(run_script(after, __name__="script")["job"](), "single", run=tmp_path / "run")
    assert_equal_weights(tmp_path / "run", eval(model, names))
    if tool == LIGHTNING:  # its module as it is, in the same script
        names |= {"__name__": "script"}
        exec(code(LIGHTNING)[1], names)
        pl.train(names["job"](), "single", run=tmp_path / "module")
        assert_equal_weights(tmp_path / "module", names["model"])


@pytest.mark.filterwarnings("ignore")  # of the other tool
def test_the_kept_loop_ends_where_that_of_accelerate_ends(tmp_path: Path):
    """On two ranks, with the lines that the page changes."""
    needed("sklearn", "scikit-learn")
    needed("accelerate")
    before, _ = scripts(ACCELERATE)
    kept, _ = (block for block in code(ACCELERATE) if ATTACHED in block)
    names = run_script(before)
    names["accelerator"].state._reset_state(True)
    script = tmp_path / "script.py"
    script.write_text(
        "from paceline.base.streams import seed_model\n"
        + kept.replace("shuffle=True", "shuffle=False").replace(
            "torch.manual_seed(0)", "seed_model(0)"
        ),
        encoding="utf-8",
    )
    run_attached(script, "data=2", devices="cpu:0-1", run=tmp_path / "run")
    assert_equal_weights(tmp_path / "run", names["model"])


def test_each_feature_of_accelerate_in_a_kept_loop_runs(tmp_path: Path):
    """What the table names is in the script, its commands or its other plan; ranks end where one device does."""
    needed("sklearn", "scikit-learn")
    features = section(ACCELERATE).partition("features in a kept loop")[2].partition("\n### ")[0]
    _, script = (block for block in code(ACCELERATE) if ATTACHED in block)
    cells = [row.split(" | ")[1] for row in features.splitlines() if row.startswith("| ")]
    text = features.partition("\n|")[0]
    named = {name for cell in cells for name in re.findall("`(.+?)`", cell)}
    assert named - {name for name in named if name in text} == {"break", "data=2 local=8"}

    # bfloat16 would hide what differs.
    script = script.replace("torch.bfloat16)", "torch.bfloat16, enabled=False)")
    path, log, run = tmp_path / "script.py", f"tensorboard:{tmp_path / 'events'}", tmp_path / "run"
    path.write_text(script, encoding="utf-8")
    whole = run_attached(path, "single", devices="cpu:0", run=tmp_path / "whole")
    path.write_text(script.replace("epochs(40)", "epochs(1)"), encoding="utf-8")
    options: dict[str, Any] = {"devices": "cpu:0-1", "run": run, "log": log}
    run_attached(path, "data=2 accumulate=4", save_every=10, **options)
    path.write_text(script, encoding="utf-8")
    ended = run_attached(path, "data=2", resume=True, **options)

    assert ended["steps"] == whole["steps"] > 8 and "accuracy was not better" in ended["stopped"]
    assert ended["metrics"] == pytest.approx(whole["metrics"], abs=1e-3)
    weights = load_tensors(tmp_path / "whole" / "model.safetensors")
    for name, weight in load_tensors(run / "model.safetensors").items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-4)
    accumulator = needed("tensorboard.backend.event_processing.event_accumulator", "tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "events"), size_guidance={"scalars": 0})
    steps = [event.step for event in events.Reload().Scalars("train_loss")]
    assert steps == [*range(1, whole["steps"] + 1)]
