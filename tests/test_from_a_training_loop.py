"""The page 'from a training loop to a Job': its scripts run, and end with the same weights."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.runtime.checkpoint import load_tensors
from paceline.runtime.streams import seed_model

PAGE = Path(__file__).parent.parent / "docs" / "from-a-training-loop.md"
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
BEFORE, AFTER, LIGHTNING, FROM_LIGHTNING = SCRIPTS


def names_of(script: str, **names: Any) -> dict[str, Any]:
    """What a script defines, run with the samples in their own order, which a loop and a job can share."""
    assert "shuffle=True" in script
    exec(compile(script.replace("shuffle=True", "shuffle=False"), "script", "exec"), names)
    return names


def test_ten_lines_change():
    """Of the loop's script nothing is edited; at most ten lines are new."""
    changes = list(difflib.ndiff(BEFORE.splitlines(), AFTER.splitlines()))
    assert len([line for line in changes if line.startswith("+ ") and line[2:].strip()]) <= 10
    compile(LIGHTNING, "lightning", "exec")


def test_the_job_ends_where_the_loop_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Weights and accuracy of the loop, of the job under two plans, and of the job that Lightning's module becomes."""
    pytest.importorskip("sklearn")
    loop = names_of(BEFORE.replace("torch.manual_seed(0)", "seed_model(0)"), seed_model=seed_model)
    accuracy = float(re.findall(r"epoch 4: accuracy (\S+)", capsys.readouterr().out)[0])
    script = names_of(AFTER, __name__="script")
    for plan in ("single", "data=2 accumulate=2"):
        figures = pl.train(script["job"](), plan, run=tmp_path / plan)
        weights = load_tensors(tmp_path / plan / "model.safetensors")
        for name, weight in loop["model"].state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)
        assert figures["metrics"]["accuracy"] == pytest.approx(accuracy, abs=1e-4)
    exec(FROM_LIGHTNING.replace('precision="bf16", ', ""), script)
    assert pl.train(script["job"](), "single", run=tmp_path / "lightning")["final_loss"] == pytest.approx(
        figures["final_loss"], rel=1e-4)
