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
IN_ORDER = "for inputs, targets in train_loader:"  # in place of a loader that shuffles by itself
# The loop's body as a function, which returns what the loop averaged beside the loss.
BODY = """
def body(model, batch):                 # for batch in train_loader:
    inputs, targets = batch             #     the lines of the loop
    output = model(inputs)
    loss = F.cross_entropy(output, targets)
    right = (output.argmax(1) == targets).float()
    return loss, {"accuracy": right.mean()}     # loss.backward() and so on

def job_of_body(lr: float = 1e-3) -> pl.Job:
    steps = 5 * len(train_loader)
    schedule = lambda optimizer: CosineAnnealingLR(optimizer, steps)
    return pl.Job(model=net, data=train_loader, compute=body, epochs=5,
                  validation=test_loader, lr_schedule=schedule, clip=1.0,
                  optimizer=lambda named: torch.optim.AdamW(named, lr=lr))
"""
# A kept loop with what the table about Accelerate names.
FEATURES = """
import paceline as pl

held_out = DataLoader(TensorDataset(*samples[1500:]), batch_size=100)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
training = TensorDataset(*samples[:1500])
loader = DataLoader(training, batch_size=4 * 50, shuffle=True)
seen = {"epochs": 0}
stopping = pl.EarlyStopping("accuracy", patience=1, min_delta=0.03)
run = pl.attach(
    model, optimizer, loader, state={"seen": seen}, callbacks=[stopping]
)

def loss_of(batch):
    inputs, targets = batch
    with torch.autocast(run.device.type, torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    run.log(loss=loss)
    return loss

def figures_of(batch):
    inputs, targets = batch
    output = model(inputs)
    right = (output.argmax(1) == targets).float().mean()
    return {"loss": F.cross_entropy(output, targets), "accuracy": right}

for epoch in run.epochs(40):
    for batch in run:
        run.backward(loss_of)
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            run.stop()
        run.update()
    seen["epochs"] += 1
    figures = run.evaluate(figures_of, held_out)
    if run.is_main:
        print(epoch, figures["accuracy"], seen["epochs"])
"""


def section(tool: str) -> str:
    """The part of the page about one tool."""
    page = PAGE.read_text(encoding="utf-8")
    return page.partition(f"\n## From {tool}\n")[2].partition("\n## ")[0]


def code(tool: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", section(tool), re.DOTALL)


def beginning() -> str:
    """The lines that the scripts have in common."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]


def run_script(script: str, **names: Any) -> dict[str, Any]:
    """What a script defines, run with the samples in their own order, which a loop and a job can share."""
    names |= {"seed_model": seed_model}
    exec(compile(in_order(beginning() + script), "script", "exec"), names)
    return names


def in_order(script: str) -> str:
    return script.replace("shuffle=True", "shuffle=False").replace(
        "torch.manual_seed(0)", "seed_model(0)"
    )


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
    before, after = code(LOOP)
    changes = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    assert len([line for line in changes if line.startswith("+ ") and line[2:].strip()]) <= 13


def test_the_job_ends_where_the_loop_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Weights and accuracy of the loop as it is, of the job under two plans, and of the job with the
    loop's body; jobs begin like the loop.
    """
    needed("sklearn", "scikit-learn")
    before, after = code(LOOP)
    loop: dict[str, Any] = {}
    exec(compile(beginning() + before, "script", "exec"), loop)
    accuracy = float(re.findall(r"epoch 4: accuracy (\S+)", capsys.readouterr().out)[0])
    script = {"__name__": "script"}
    for block in (beginning(), after, BODY):
        exec(block.replace("pl.Job(", "pl.Job(seed=pl.like_torch(0), "), script)
    for name, plan in (
        ("job", "single"),
        ("job", "data=2 microbatches=2"),
        ("job_of_body", "data=2 microbatches=2"),
    ):
        figures = pl.train(script[name](), plan, run=tmp_path / name / plan)
        assert_equal_weights(tmp_path / name / plan, loop["model"])
        assert figures["metrics"]["accuracy"] == pytest.approx(accuracy, abs=1e-4)


@pytest.mark.parametrize(
    ("tool", "package", "model"),
    [
        (DDP, "torch", "model.module"),
        (ACCELERATE, "accelerate", "model"),
        pytest.param(LIGHTNING, "lightning", "model", marks=pytest.mark.slow),
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
    before = code(tool)[0]
    if tool == DEEPSPEED:  # its own loader shuffles whatever it is told
        before = before.replace("for inputs, targets in loader:", IN_ORDER)
    names = run_script(before)
    if package == "accelerate":
        names["accelerator"].state._reset_state(True)
    leave_the_launcher(monkeypatch)
    after = code(LIGHTNING if tool == LIGHTNING else DDP)[1]
    script = run_script(after, __name__="script", Digits=names.get("Digits"))
    pl.train(script["job"](), "single", run=tmp_path / "run")
    assert_equal_weights(tmp_path / "run", eval(model, names))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the other tool
def test_the_kept_loop_ends_where_that_of_accelerate_ends(tmp_path: Path):
    """On two ranks, with the lines that the page changes."""
    needed("sklearn", "scikit-learn")
    needed("accelerate")
    before, kept = code(ACCELERATE)
    names = run_script(before)
    names["accelerator"].state._reset_state(True)
    script = tmp_path / "script.py"
    script.write_text(
        "from paceline.base.streams import seed_model\n" + in_order(beginning() + kept),
        encoding="utf-8",
    )
    run_attached(script, "data=2", devices="cpu:0-1", run=tmp_path / "run")
    assert_equal_weights(tmp_path / "run", names["model"])


def test_each_feature_of_accelerate_in_a_kept_loop_runs(tmp_path: Path):
    """The script has what the table names, but plans and options; ranks end where one device does."""
    needed("sklearn", "scikit-learn")
    cells = [row.split(" | ")[1] for row in section(ACCELERATE).splitlines() if row[:2] == "| "]
    named = {name for cell in cells for name in re.findall("`(.+?)`", cell)}
    options_and_plans = {
        "--save-every",
        "--resume",
        "--log tensorboard",
        "microbatches=4",
        "shard=N",
    }
    assert {name for name in named if name not in FEATURES} == options_and_plans

    # bfloat16 would hide what differs.
    script = beginning() + FEATURES.replace("torch.bfloat16)", "torch.bfloat16, enabled=False)")
    path, log, run = tmp_path / "script.py", f"tensorboard:{tmp_path / 'events'}", tmp_path / "run"
    path.write_text(script, encoding="utf-8")
    whole = run_attached(path, "single", devices="cpu:0", run=tmp_path / "whole")
    path.write_text(script.replace("epochs(40)", "epochs(1)"), encoding="utf-8")
    options: dict[str, Any] = {"devices": "cpu:0-1", "run": run, "log": log}
    run_attached(path, "data=2 microbatches=4", save_every=10, **options)
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
