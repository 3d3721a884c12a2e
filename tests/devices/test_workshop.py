"""What tests hear of a process with pretended devices that dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pretended_cuda import client


@pytest.mark.parametrize("lives", ["", "read line; "])
def test_what_a_workshop_printed_before_it_died_is_told(lives: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whether it dies before it reads a request or after; each later request is told, too."""
    dying = tmp_path / "python"
    dying.write_text(f"#!/bin/sh\n{lives}echo no such library >&2\nexit 3\n")
    dying.chmod(0o755)
    monkeypatch.setattr(client, "build", lambda: tmp_path / "library.so")
    monkeypatch.setattr(sys, "executable", str(dying))

    with client.workshop(tmp_path) as shop:
        if not lives:
            shop.process.wait(timeout=60)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ended with 3 and printed: no such library"):
                shop.check("anything")
