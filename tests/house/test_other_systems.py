"""What runs without Linux's own calls, as on macOS, and what is said on Windows."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.base.errors import UsageError, on_windows

SCRIPT = """
import ctypes, os, pathlib, resource, sys, sysconfig
import psutil, torch, torch.nn.functional as F
import torch.distributed, torch.utils.data, multiprocessing
sysconfig.get_paths()
# This system without what macOS does not have. Libraries have chosen by the true system above.
sys.platform = "darwin"
for name in ("memfd_create", "sched_getaffinity", "posix_fallocate", "pidfd_open"):
    delattr(os, name)
def refuse(*args):
    raise ValueError("macOS does not let a process lower this limit")
resource.setrlimit = refuse
load = ctypes.CDLL
def only_mac(name, *args, **kwargs):
    if "so.6" in str(name):
        raise OSError(f"no {name} here")
    return load(name, *args, **kwargs)
ctypes.CDLL = only_mac
for method in ("exists", "read_text", "read_bytes", "write_text", "open"):
    def hidden(path, *args, real=getattr(pathlib.Path, method), method=method, **kwargs):
        if str(path).startswith(("/proc", "/sys")):
            if method == "exists":
                return False
            raise FileNotFoundError(str(path))
        return real(path, *args, **kwargs)
    setattr(pathlib.Path, method, hidden)
import paceline as pl
x = torch.linspace(-1, 1, 60).view(20, 3)
def job():
    return pl.Job(model=lambda: torch.nn.Linear(3, 2), data=(x, (x[:, 0] > 0).long()), loss=F.cross_entropy, batch=6,
                  steps=5, validation=(x, (x[:, 0] > 0).long()), optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
for plan in ("single", "data=2"):
    figures = pl.train(job(), plan, run=f"{folder}/{plan}", save_every=2)
    print("loss", figures["final_loss"], figures["check"] and figures["check"]["verdict"])
"""


def test_runs_need_no_call_that_linux_alone_has(tmp_path: Path, start_child: Any):
    """One rank, and two that exchange gradients and are checked before, train and save without them."""

    def run_script() -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        for name in [name for name in sys.modules if name.partition(".")[0] == "paceline"]:
            del sys.modules[name]  # its modules are imported anew, on the other system
        exec(SCRIPT, {"folder": tmp_path})

    child = start_child(run_script)
    assert child.exit_code() == 0, child.stderr
    single, both = (
        line.split()[1:] for line in child.stderr.splitlines() if line.startswith("loss ")
    )
    assert abs(float(single[0]) - float(both[0])) < 1e-6
    assert both[1] == "passed"


@pytest.mark.parametrize("name", ["fcntl", "resource"])
def test_windows_is_told_the_way_out(name: str, monkeypatch: pytest.MonkeyPatch):
    """A run is refused with what to use instead, in place of the name of a module that Windows does not have."""

    def missing(module: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.delitem(vars(paceline), "train", raising=False)
    with pytest.raises(UsageError, match=r"this is Windows(?s:.*)WSL 2"):
        paceline.train  # noqa: B018
    assert on_windows(ModuleNotFoundError(name="torch")) is None
