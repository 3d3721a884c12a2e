"""`paceline verify` of a script finds bugs of loops, and passes a loop without one."""

from __future__ import annotations

import json
import os

import pytest
from commands import Command

from paceline.attached.verify import verify_script

SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline as pl

torch.manual_seed(3)
data = TensorDataset(torch.randn(26, 4), torch.randint(0, 3, (26,)))
test = DataLoader(TensorDataset(torch.randn(7, 4), torch.randint(0, 3, (7,))), batch_size=3)
loader = DataLoader(data, batch_size=8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(), torch.nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run = pl.attach(model, optimizer, loader, clip=1.0)
seen = 0.0
for epoch in run.epochs(2):
    for x, y in run:
        loss = F.cross_entropy(model(x), y)
        run.backward(loss)
        run.update()
        run.log(loss=loss)
    right = run.evaluate(lambda batch: (model(batch[0]).argmax(1) == batch[1]).double().mean(), test)
"""
BUGS = {
    "divided by the batch of a full step": (
        "F.cross_entropy(model(x), y)",
        'F.cross_entropy(model(x), y, reduction="sum") / 8',
    ),
    "clipped before ranks have summed": (
        "seen = 0.0",
        "[p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in model.parameters()]",
    ),
    "seeded alike on all ranks": (
        "        loss =",
        "        torch.manual_seed(0)\n        x = x + torch.randn(x.shape)\n        loss =",
    ),
    "mean over targets that count, weighed by rows": (
        "F.cross_entropy(model(x), y)",
        "F.cross_entropy(model(x), y, ignore_index=0)",
    ),
    "normalised by this rank's rows": ("model(x)", "model((x - x.mean(0)) / x.std(0, False))"),
    "compares this rank's rows": (
        "F.cross_entropy(model(x), y)",
        "torch.logsumexp(model(x), 0).mean()",
    ),
    "rate follows this rank's loss": (
        "        run.update()",
        "        optimizer.param_groups[0]['lr'] = 0.01 * loss.item()\n        run.update()",
    ),
    "carries a figure of this rank's rows": (
        "        run.backward(loss)",
        "        seen = 0.9 * seen + float(loss.detach())\n        run.backward(loss / seen)",
    ),
    "leaves out batches by this rank's loss": (
        "        run.backward(loss)",
        "        loss = loss * (loss.item() < 1.1)\n        run.backward(loss)",
    ),
    "evaluation that is averaged over ranks": (
        "    right =",
        "    mine = [(x, y) for x, y in test][run.rank :: run.world_size]\n"
        "    right = run.evaluate(lambda batch: sum(F.cross_entropy(model(x), y) for x, y in mine) / len(mine), test)\n"
        "    right =",
    ),
    "logs a root of a mean": ("run.log(loss=loss)", "run.log(loss=loss.sqrt())"),
}


def script_of(tmp_path, *bug):
    script = tmp_path / "script.py"
    assert not bug or SCRIPT.count(bug[0]) == 1 or bug[0] in ("model(x)", "    right =")
    script.write_text(SCRIPT.replace(*bug, 1) if bug else SCRIPT)
    return script


def test_a_loop_without_a_bug_passes(tmp_path):
    verdicts = verify_script(script_of(tmp_path), ["data=2", "shard=2", "data=3"])

    assert [verdict.describe() for verdict in verdicts if not verdict.passed] == []
    assert [verdict.steps for verdict in verdicts] == [4, 4, 4]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(tmp_path, bug):
    (verdict,) = verify_script(script_of(tmp_path, *BUGS[bug]), ["data=2"])

    assert not verdict.passed
    assert "step" in verdict.problem


@pytest.mark.slow
def test_the_command_tells_scripts_from_jobs(tmp_path):
    script = script_of(tmp_path, *BUGS["logs a root of a mean"])

    command = Command(
        ["verify", str(script), "--plan", "data=2", "--json"], os.environ, tmp_path / "command"
    )

    assert command.wait() == 1
    (verdict,) = json.loads(command.stdout.read_text())
    assert verdict["plan"] == "data=2" and "'loss' of run.log" in verdict["problem"]
