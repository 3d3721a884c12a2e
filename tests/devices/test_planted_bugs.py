"""Bugs by which runs on GPUs once failed: each, put back, is caught by the test that should see it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = tomllib.loads((ROOT / "scripts" / "device-mutants.toml").read_text())["mutant"]


def test_every_bug_still_fits_the_sources():
    for mutant in MUTANTS:
        text = (ROOT / "src" / "paceline" / mutant["file"]).read_text()
        assert text.count(mutant["old"]) == 1, (
            f"{mutant['name']}: its text must be in {mutant['file']} once"
        )
        compile(text.replace(mutant["old"], mutant["new"]), mutant["file"], "exec")
        assert mutant["says"] and all(
            (ROOT / test.partition("::")[0]).exists() for test in mutant["lint"]
        )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [mutant["name"] for mutant in MUTANTS])
def test_a_bug_is_caught(name: str):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "mutate"), "--devices", name],
        text=True,
        capture_output=True,
        timeout=1100,
    )
    assert done.returncode == 0 and done.stdout.startswith("caught"), done.stdout + done.stderr
