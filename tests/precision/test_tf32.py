"""tf32 turns TF32 on while a job runs on GPUs, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs.mixed_precision import mixed_precision_job

from paceline.training.products import float32_products


def switches() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def on(kind: str) -> Any:
    return SimpleNamespace(device=torch.device(kind), rank=0)


def test_the_switches_are_put_back() -> None:
    """Also where the job fails; a rank's process may run other jobs after it."""
    before = switches()
    with (
        pytest.raises(ValueError, match="fails"),
        float32_products(mixed_precision_job(precision="tf32"), on("cuda")),
    ):
        assert switches() == ("high", True)
        raise ValueError("fails")
    assert switches() == before


def test_other_precisions_leave_the_users_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with float32_products(mixed_precision_job(precision="float32"), on("cuda")):
        assert switches() == ("highest", False)


def test_a_cpu_says_that_it_computes_in_float32(caplog: pytest.LogCaptureFixture) -> None:
    before = switches()
    with float32_products(mixed_precision_job(precision="tf32"), on("cpu")):
        assert switches() == before
    assert "computes in float32 on a cpu device" in caplog.text
