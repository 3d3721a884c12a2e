"""What tests of searches share."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs.studies import JOB


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: Path) -> str:
    """The file of a small job."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "net.py"
    path.write_text(JOB)
    return str(path)
