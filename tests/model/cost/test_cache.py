"""Measurements that are kept between runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.model.cost import cache


def test_a_document_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No part of it is left beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.write("rates", "cpu", {"flops_per_s": 1.0})

    assert cache.read("rates", "cpu") == {"flops_per_s": 1.0}
    assert [path.suffix for path in (tmp_path / "paceline").iterdir()] == [".json"]


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch):
    """A container may run under a number that no user has, without HOME."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    cache.write("rates", "cpu", {})

    assert cache.read("rates", "cpu") is None
