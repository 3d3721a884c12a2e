"""What the processes of tests import before they fork: forks, ranks above all, would import it each anew."""

from __future__ import annotations

import ctypes
import importlib.util
import tempfile
from pathlib import Path

from paceline.base.imports import OF_RUNS

OF_FORKS = (
    *OF_RUNS,
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.export._trace",
    "numpy.ctypeslib",
    "encodings.idna",
    "paceline.model.cost.trace",
    "paceline.strategies.shard.gathers",
    "paceline.model.attention",
    "paceline.servers.train",
    *filter(importlib.util.find_spec, ("torch.profiler._cupti_monitor",)),
)  # not in torch 2.11

_HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # of Linux 6.1 and later


def capture_once() -> None:
    """Capture a small model. The first capture of a process takes twice as long as others, and each rank would make a
    first one."""
    import torch

    from paceline.model.graph import capture

    with torch.random.fork_rng():
        model = torch.nn.Sequential(
            torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.LayerNorm(2)
        ).double()
    capture(model, (torch.ones(2, 2, dtype=torch.float64),), {})


def train_once() -> None:
    """Train a small model in this process. What a first training looks up and keeps, such as which classes are of an
    abstract one, each rank would look up anew, and write to a page of its own."""
    import random

    import numpy as np
    import torch

    import paceline as pl
    from paceline.launch.process.context import RankContext
    from paceline.launch.process.heartbeats import HeartbeatTable
    from paceline.strategies.plan import Plan
    from paceline.training.drivers import train_rank
    from paceline.training.settings import Settings

    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(), tempfile.TemporaryDirectory() as folder:
        data = (torch.ones(8, 2), torch.ones(8, 1))
        job = pl.Job(
            model=lambda: torch.nn.Linear(2, 1),
            data=data,
            validation=data,
            loss=torch.nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch=4,
            steps=3,
        )
        context = RankContext(
            0, 1, 1, torch.device("cpu"), None, HeartbeatTable(1), 0, attempt="once"
        )
        train_rank(context, job, Plan(), Settings(run_dir=Path(folder), shares=(1,), save_every=2))
    random.setstate(states[0])
    np.random.set_state(states[1])


def use_huge_pages() -> None:
    """Put this process's memory into huge pages, where the kernel can: a fork copies an entry for each page, and each
    launch of ranks forks three times and more."""
    maps = Path("/proc/self/maps")
    advise = ctypes.CDLL(None).madvise
    for span, access, *rest in map(
        str.split, maps.read_text().splitlines() if maps.exists() else []
    ):
        if access == "rw-p" and rest[3:] in ([], ["[heap]"]):  # of no file
            begin, end = (int(place, 16) for place in span.split("-"))
            for place in range(begin + -begin % _HUGE_BYTES, end - _HUGE_BYTES + 1, _HUGE_BYTES):
                advise(ctypes.c_void_p(place), ctypes.c_size_t(_HUGE_BYTES), _MADV_COLLAPSE)
