"""Damaged and hostile inputs are read or refused: nothing crashes, and nothing takes long.

`python -m tests.fuzz` does this for as long as is wished, guided by coverage.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.damage import damaged
from tests.fuzz.readers import make_run, readers, try_reader

# What takes longer hangs. A reader answers in milliseconds; a busy machine has stopped one for over 5 s.
HANGS_MS = 30_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_damaged_inputs(run: Path, examples: int):
    known = readers(run)

    @settings(max_examples=examples, deadline=HANGS_MS)
    @given(data=st.data())
    def read(data: st.DataObject) -> None:
        reader = known[data.draw(st.sampled_from(sorted(known)))]
        try_reader(reader, run, data.draw(damaged(reader.seeds)))

    read()


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [1, pytest.param(None, marks=pytest.mark.slow)], ids=["first", "all"]
)
def test_sound_inputs(run: Path, seeds: int | None):
    """Each reader takes what is sound; else the other test would show nothing."""
    every = readers(run).values()
    for read in {
        reader.read for reader in every if reader.is_file
    }:  # most files have their reader in common
        read(run)
    for reader in every:
        for seed in reader.seeds[:seeds]:
            if not reader.is_file and reader.name not in ("fault", "condition"):
                reader.read(run.parent, seed)
