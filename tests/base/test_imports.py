"""Modules of a run are imported without the cycle collector, which is as it was afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.base.imports import load_modules


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_modules_are_loaded(
    enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is off during an import, also one that fails, and on afterwards if it was on before."""
    (tmp_path / "watched_import.py").write_text("import gc\nwas_enabled = gc.isenabled()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before, frozen = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        load_modules(["watched_import"])
        assert gc.isenabled() == enabled and not sys.modules["watched_import"].was_enabled
        assert gc.get_freeze_count() > frozen
        with pytest.raises(ModuleNotFoundError):
            load_modules(["no_such_module_anywhere"])
        assert gc.isenabled() == enabled
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()


def test_a_plain_run_imports_nothing_that_only_others_need():
    """What callbacks, loggers, automatic plans and prices need is imported for them alone."""
    others = (
        "callbacks.controller",
        "callbacks.keep_best",
        "callbacks.loggers.logger",
        "planner.estimate",
        "planner.remedies",
        "verbs.auto",
        "verbs.calibration",
        "verbs.fine_tuning",
        "reports.page",
    )
    code = (
        "import sys; from paceline.base.imports import OF_RUNS, load_modules; load_modules(OF_RUNS[:2]); "
        f"print([name for name in {others} if 'paceline.' + name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
