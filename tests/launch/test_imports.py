"""Modules of a run are imported without the cycle collector, which is as it was afterwards."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from paceline.launch.imports import load_modules


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_modules_are_loaded(enabled: bool, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
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
