"""What is in a release: the package and what it reads, and nothing of the tests; it runs where nothing else is."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[2]
READ = ["paceline/py.typed", "paceline/cluster/catalogue.toml", "paceline/reports/page.html.j2"]


def test_files_that_are_read_lie_in_the_package():
    """The wheel takes the whole package; files beside it would be missing in it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/paceline"]
    assert [name for name in READ if not (ROOT / "src" / name).is_file()] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_trains_in_an_empty_environment(tmp_path: Path):
    """Built from the source archive, as an index would have it; `paceline` and `python -m paceline` start it."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            str(tmp_path),
            str(ROOT),
        ],
        check=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("paceline-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "paceline",
        f"paceline-{paceline.__version__}.dist-info",
    }
    assert {*READ, "paceline/docs/index.md"} <= set(names)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True, timeout=100)
    python = tmp_path / "empty" / "bin" / "python"
    subprocess.run(
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--constraint",
            str(ROOT / "constraints.txt"),
            f"{wheel}[examples]",
        ],
        check=True,
        timeout=500,
    )
    (tmp_path / "work").mkdir()
    for words in (["-m", "paceline"], [str(python.with_name("paceline"))]):
        completed = subprocess.run(
            [python, *words, "--version"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path / "work",
            env={"PATH": "/usr/bin:/bin"},
        )
        assert completed.stdout == f"paceline {paceline.__version__}\n"
    page = subprocess.run(
        [python.with_name("paceline"), "docs", "job"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path / "work",
        env={"PATH": "/usr/bin:/bin"},
    ).stdout.strip()
    assert Path(page).is_relative_to(tmp_path / "empty") and Path(page).is_file()
    subprocess.run(
        [
            python,
            "-m",
            "paceline",
            "train",
            str(ROOT / "examples" / "01_digits.py"),
            "--plan",
            "data=2",
            "--steps",
            "20",
            "--run",
            "run",
        ],
        check=True,
        timeout=200,
        cwd=tmp_path / "work",
        env={"PATH": "/usr/bin:/bin"},
    )
    assert (tmp_path / "work" / "run" / "model.safetensors").exists()
