"""What plans may make of an optimizer's state: as much as kernels round it, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs.classification import adamw, classification_job
from jobs.perceptrons import ListedPerceptron
from torch import Tensor, nn

from paceline.job import Precision
from paceline.model.randomness import WithoutRandomness
from paceline.proof.compare import judge
from paceline.proof.processes import in_precision
from paceline.proof.reference import load_kind, write_reference

BETA = 0.999  # AdamW's for second moments
# By how much 1 - BETA is wrong, relative, where a kernel holds BETA in float32: by -1.29e-5.
LOST = (1 - float(np.float32(BETA))) / (1 - BETA) - 1


class Scaled(ListedPerceptron):
    """With a parameter that is one number, whose limits are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * super().forward(x)


def judged(folder: Path, precision: Precision, relative: float) -> str | None:
    """What is said of a rank that has everything as one device has it, but for the second moment of `gain`."""
    random = WithoutRandomness()
    job = in_precision(classification_job(Scaled, optimizer=adamw), precision, random)
    reference = write_reference(job, folder, steps=1, random=random)
    weights, state = load_kind(folder, "weight", 0), load_kind(folder, "state", 0)
    off = relative * float(state["gain/exp_avg_sq"])
    rank: dict[str, Any] = {
        "first_step": 0,
        "replica": 0,
        "parameter_names": list(weights),
        "marks": reference["marks"],
        "losses": reference["losses"],
        "rates": reference["rates"],
        "drawn": [[]],
        "repeats": [0],
        "evaluated": {},
        "stored_elements": {
            f"optimizer/{name}": size for name, size in reference["state_sizes"][0].items()
        },
        "initial": [dict.fromkeys(weights, 0.0)],
        "gradient": [dict.fromkeys(weights, 0.0)],
        "weight": [dict.fromkeys(weights, 0.0)],
        "buffer": [{}],
        "stored": [{"optimizer/gain/exp_avg_sq": abs(off)}],
    }
    return judge(reference, [rank], precision=precision).difference


def test_a_kernel_may_hold_betas_in_float32(tmp_path: Path) -> None:
    """As torch's fused Adam does, with which ranks on GPUs update: on an H200 the second moment of a parameter that is
    one number was off by 3.64e-9 of 2.86e-4, and 1.16e-9 was allowed."""
    assert judged(tmp_path, "float32", LOST) is None


@pytest.mark.parametrize(("precision", "relative"), [("float32", 1e-3), ("float64", LOST)])
def test_a_wrong_second_moment_is_found(
    tmp_path: Path, precision: Precision, relative: float
) -> None:
    """Such as that of a gradient which is off by half a thousandth. In float64 no kernel rounds betas."""
    difference = judged(tmp_path, precision, relative)
    assert (
        difference is not None
        and "what a checkpoint would hold of 'optimizer/gain/exp_avg_sq'" in difference
    )
