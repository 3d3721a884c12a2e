"""Run folders of earlier versions resume, report and audit: those in `earlier/` were written on 28 November 2026."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch

import paceline
from paceline.strategies.plan import Plan

EARLIER = Path(__file__).parent / "earlier"
OWN_STEP = "own_step"
RUNS = {
    "single": "single",
    "data": "data=2",
    "shard": "shard=2",
    "tensor_pipeline": "tensor=2 pipeline=2",
    "server": "server=1 workers=2",
    OWN_STEP: "data=2",
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the whole run on one device; clipping is all that a step of its own leaves out."""
    return trained("single", tmp_path_factory.mktemp("whole") / "run")


def trained(
    plan: str, run: Path, *, own_step: bool = False, resume: bool = False
) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", FutureWarning)
        job = paceline.load(str(EARLIER / "job.py"), {"own_step": own_step})
        result = paceline.train(
            job, Plan.parse(plan), run=run, resume=resume, check=False, table=False
        )
    assert len(notes) == own_step  # of the field in job.py, and none of what the run recorded
    assert result["steps"] == 8 and result.history[0]["step"] == 1
    return {name.removeprefix("net."): value for name, value in result.model().state_dict().items()}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", RUNS)
def test_it_resumes_reports_and_audits(
    name: str, expected: dict[str, torch.Tensor], tmp_path: Path
):
    """Half of the steps are the earlier version's, and the weights are those of a whole run of this one."""
    run = tmp_path / "run"
    shutil.copytree(EARLIER / name, run)
    if name == OWN_STEP:
        expected = trained("single", tmp_path / "whole", own_step=True)

    assert paceline.audit(run).passed
    assert RUNS[name] in paceline.report(run).read_text()
    weights = trained(RUNS[name], run, own_step=name == OWN_STEP, resume=True)

    assert weights.keys() == expected.keys()
    assert max(float((weights[key] - expected[key]).abs().max()) for key in expected) <= 1e-12
    assert paceline.audit(run).passed
