"""A script's own loop on pretended GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pretended_cuda.client import Workshop

pytestmark = pytest.mark.timeout(600)  # the first one builds the device
# Of a rank: the most bytes of its GPU so far, where the script attached and where its first batch came.
LOOP = """
import json, os
import torch
import paceline as pl
from paceline.attached.session import ScriptProcess

torch.set_default_dtype(torch.float64)
rank = ScriptProcess.current().context.rank
torch.manual_seed(rank)
block = lambda: torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Tanh())
model = torch.nn.Sequential(torch.nn.BatchNorm1d(128), *(block() for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(16, 128, generator=generator))
loader = torch.utils.data.DataLoader(data, batch_size=8)
run, peaks = pl.attach(model, optimizer, loader), []


def note():
    if run.device.type == "cuda":
        peaks.append(torch.cuda.memory_stats(run.device)["requested_bytes.all.peak"])


note()
for (x,) in run.steps(4):
    if not run.step:
        note()
    assert x.device == run.device and model[0].running_mean.device == run.device
    run.backward(model(x).square().mean())
    run.update()
whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
document = {"peaks": peaks, "weights": [p.sum().item() for p in whole], "bytes": [p.nbytes for p in whole]}
with open(f"{os.environ['TOLD']}-{rank}", "w") as file:
    json.dump(document, file)
"""
START = """
import os, sys
from paceline.attached.launch import run

script, plan, devices, told = sys.argv[1:]
os.environ["TOLD"] = told
run(script, plan, devices=devices, run=told + "-run", restarts=0)
"""


def told(shop: Workshop, folder: Path, plan: str, devices: str) -> list[dict[str, Any]]:
    """Run the loop, and return what its ranks told."""
    (folder / "loop.py").write_text(LOOP)
    (folder / "start.py").write_text(START)
    name = plan.replace(" ", "-")
    shop.script(folder / "start.py", str(folder / "loop.py"), plan, devices, str(folder / name))
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}-[0-9]"))]


@pytest.mark.slow
def test_a_gpu_never_has_more_than_its_part_and_a_block(shop: Workshop, tmp_path: Path):
    """Also where the script attaches. Its ranks draw other weights, and rank 0's are everyone's."""
    (alone,) = told(shop, tmp_path, "single", "cpu:0")
    whole = told(shop, tmp_path, "data=2", "cuda:0-1")
    parts = told(shop, tmp_path, "shard=2", "cuda:0-1")

    model_bytes = sum(alone["bytes"])
    tensor, block = max(alone["bytes"]), sum(alone["bytes"][2:4])
    assert len(whole) == len(parts) == 2
    for rank in (*whole, *parts):
        assert rank["weights"] == pytest.approx(alone["weights"], rel=1e-9)
    assert all(rank["peaks"][0] >= model_bytes for rank in whole)
    for rank in parts:
        attached, built = rank["peaks"]
        assert attached < 1.1 * tensor
        assert built < 1.2 * model_bytes / 2 + 1.1 * block
