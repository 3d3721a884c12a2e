"""How long a rank waited for a core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.training import cores
from paceline.training.cores import CoreWait


@pytest.mark.skipif(not cores._SCHEDULED.exists(), reason="needs Linux's /proc/self/schedstat")
def test_a_process_that_shares_its_core_waits():
    """Beside one other process on the same core, for about half of the time. Alone it would wait for ever here."""
    core = {min(os.sched_getaffinity(0))}
    code = f"import os; os.sched_setaffinity(0, {core})\nwhile True: pass"
    before = os.sched_getaffinity(0)
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        try:
            os.sched_setaffinity(0, core)
            waited = CoreWait()
            while waited.ns < 0.02e9:
                pass
        finally:
            os.sched_setaffinity(0, before)
            other.kill()


def test_where_nobody_says_it_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(cores, "_SCHEDULED", tmp_path / "none")
    assert CoreWait().ns == 0
