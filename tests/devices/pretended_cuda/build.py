"""Builds the extension with one call of the compiler, once for each torch, Python and version of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

MODULE = "pretended_cuda_device"
_HERE = Path(__file__).parent


class CannotBuild(Exception):
    """The device can't be had on this machine, and why."""


def build() -> Path:
    """The extension, built if it isn't yet; by one process if several ask at once.

    It lies in a cache folder outside of the tree, under a name made of what it is built from.

    Raises:
        CannotBuild: there is no compiler, Python's headers are missing, or it fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotBuild(
            "the pretended CUDA device is built with a C++ compiler, and there is none: apt install g++"
        )
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        raise CannotBuild(
            f"the pretended CUDA device is built with Python's headers, and {headers} has none: "
            "apt install python3-dev"
        )
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).resolve().parent
    sources = sorted(file for file in _HERE.iterdir() if file.suffix in (".h", ".cpp"))
    # the library looks for torch's own where they were when it was built
    made_of = [
        compiler,
        sys.version,
        str(torch),
        (torch / "version.py").read_text(),
        *(file.read_text() for file in sources),
    ]
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline-tests"
    library = folder / f"{MODULE}-{name}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(f".{os.getpid()}.part")
            _compile(compiler, headers, torch, unfinished)
            unfinished.rename(library)
    return library


def _compile(compiler: str, headers: Path, torch: Path, output: Path) -> None:
    includes = [headers, torch / "include", torch / "include/torch/csrc/api/include"]
    libraries = torch / "lib"
    command = [
        compiler,
        "-O1",
        "-std=c++20",
        "-fPIC",
        "-shared",
        "-w",
        f"-DTORCH_EXTENSION_NAME={MODULE}",
        *(f"-I{folder}" for folder in includes),
        str(_HERE / "module.cpp"),
        "-o",
        str(output),
        f"-L{libraries}",
        "-ltorch_python",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{libraries}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [
            line for line in done.stderr.splitlines() if "error" in line
        ] or done.stderr.splitlines()
        raise CannotBuild(f"the pretended CUDA device does not compile: {'; '.join(errors[:5])}")
