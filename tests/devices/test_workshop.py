"""What tests hear of the process that opens workshops where it dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pretended_cuda import client


@pytest.mark.parametrize("lives", ["", "read line; "])
def test_what_was_printed_before_it_died_is_told(
    lives: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whether it dies before it reads an order or after; each later one is told, too."""
    dying = tmp_path / "python"
    dying.write_text(f"#!/bin/sh\n{lives}echo no such library >&2\nexit 3\n")
    dying.chmod(0o755)
    monkeypatch.setattr(client, "build", lambda: tmp_path / "library.so")
    monkeypatch.setattr(sys, "executable", str(dying))

    with client.workshops(tmp_path) as opening:
        if not lives:
            opening.process.wait(timeout=60)
        for number in range(2):
            (folder := tmp_path / str(number)).mkdir()
            with (
                pytest.raises(RuntimeError, match="ended with 3 and printed: no such library"),
                opening.open(folder),
            ):
                pytest.fail("nothing is opened")
