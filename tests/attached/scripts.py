"""Scripts with loops of their own, which write what they computed to a file."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import torch

from paceline.attached.launch import run
from paceline.attached.script import run_script
from paceline.attached.session import ScriptProcess
from paceline.launch.process.context import RankContext
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.strategies.plan import Plan
from paceline.training.settings import Settings

SETUP = """
import copy, json, os, sys
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline as pl

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
data = TensorDataset(torch.randn(26, 4), torch.randint(0, 3, (26,)))
loader = DataLoader(data, batch_size=8, sampler=range(26))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
losses, rows = [], []


def tell(model=model, **more):
    whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p
    weights = {name: whole(p.detach()).tolist() for name, p in model.named_parameters()}
    if int(os.environ.get("RANK", 0)) == 0 and globals().get("run") is None or run.is_main:
        with open(os.environ["TOLD"], "w") as file:
            json.dump({"losses": losses, "rows": rows, "weights": weights, **more}, file)
"""
OWN = (
    SETUP
    + """
for epoch in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
tell()
"""
)
ATTACHED = (
    SETUP
    + """
run = pl.attach(model, optimizer, loader, schedule=schedule, clip=0.3)
for epoch in run.epochs(2):
    for x, y in run:
        loss = F.cross_entropy(model(x), y)
        run.backward(loss)
        run.update()
        run.log(loss=loss)
        rows.append(run.rows)
tell()
"""
)


def told(folder: Path, text: str, plan: str | None = None, **options: Any) -> dict[str, Any]:
    """Run a script under a plan, or by itself, and return what it told, with the figures of the run."""
    folder.mkdir(exist_ok=True)
    script, path = folder / "script.py", folder / "told.json"
    script.write_text(text)
    os.environ["TOLD"] = str(path)
    dtype = torch.get_default_dtype()
    if plan is None:
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            torch.set_default_dtype(dtype)
        return json.loads(path.read_text())
    options = {
        "run": folder / f"run-{plan.replace(' ', '-')}",
        "restarts": 0,
        "check": False,
        **options,
    }
    figures = run(script, plan, **options)
    return {**json.loads(path.read_text()), "figures": figures, "run": Path(options["run"])}


def lines(run_dir: Path, key: str) -> list[Any]:
    """Return the values of a key in metrics.jsonl, by step."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row[key] for row in sorted(rows, key=lambda row: row["step"]) if key in row]


def assert_alike(weights: dict[str, Any], others: dict[str, Any], rtol: float = 1e-10) -> None:
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        torch.testing.assert_close(
            torch.tensor(value, dtype=torch.float64),
            torch.tensor(others[name], dtype=torch.float64),
            rtol=rtol,
            atol=1e-12,
        )


def alone(folder: Path, text: str, **settings: Any) -> dict[str, Any]:
    """Run a script on one device in this process, and return the figures of its run."""
    script = folder / "script.py"
    script.write_text(text)
    device = torch.device("cpu")
    context = RankContext(0, 1, 1, device, None, HeartbeatTable(1), 0, "test")
    session = ScriptProcess(context, Plan.read("single"), Settings(None, (1,), **settings))
    return run_script(session, script, ())
