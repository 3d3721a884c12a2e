"""What Paceline reads of others: the files of a run folder, inputs, texts, and messages between its processes.

Each reader returns, or raises one of the errors that its caller expects. Anything else is a defect.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

import paceline as pl
from paceline.api.fine_tuning import FineTuning
from paceline.api.inference import read_tensors
from paceline.base.errors import PacelineError
from paceline.checkpoint import open_checkpoint
from paceline.checkpoint.assemble import whole_state
from paceline.checkpoint.read import newest_checkpoint
from paceline.cluster import file as cluster_file
from paceline.cluster.cluster import Cluster, _parse_names
from paceline.job.file import JobFile
from paceline.job.shards import read_tar
from paceline.launch.process.faults import Fault
from paceline.launch.process.messages import Message
from paceline.reports.comparison import Condition
from paceline.servers.wire import Header, Kind

JOB = """
import paceline as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset


def job():
    pairs = TensorDataset(torch.arange(36.0).reshape(12, 3) / 36, torch.arange(24.0).reshape(12, 2) / 24)
    return pl.Job(model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), data=pairs,
                  validation=pairs, loss=nn.functional.mse_loss, batch=6, steps=4,
                  optimizer=lambda named: torch.optim.AdamW(named, lr=0.1))
"""


@dataclass(frozen=True)
class Reader:
    """
    name: of the file that it reads, or of a text. seeds: sound contents. read: gets the folder of a sound run, whose
        file of this name is damaged, or the damaged bytes. errors: what it may raise.
    """

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[..., Any]
    errors: tuple[type[Exception], ...] = (PacelineError,)
    is_file: bool = True


def make_run(folder: Path, *, proved: bool = False) -> Path:
    """Train a small job, and return its run folder. proved: also with a certificate, which takes a few seconds."""
    (folder / "job.py").write_text(JOB)
    job = JobFile(folder / "job.py")
    run = pl.train(job, "single", run=folder / "run", save_every=2, check=False, trace=2).run
    (run / "events.jsonl").write_text(
        json.dumps({"time": 1.0, "event": "lost", "worker": 0}) + "\n"
    )
    if proved:
        pl.verify(job, ["microbatches=2"], steps=2, restore="no", run=run)
    return run


_STUDY = {
    "study": "digits",
    "objectives": [{"name": "accuracy", "direction": "maximize"}],
    "importances": {"lr": 0.9},
    "trials": [
        {"number": 0, "state": "complete", "params": {"lr": 0.1}, "value": 0.9, "plan": "data=2"},
        {"number": 1, "state": "failed", "params": {"lr": 1.0}},
    ],
    "best": {
        "trial": 0,
        "value": 0.9,
        "params": {"lr": 0.1},
        "command": "paceline train job.py lr=0.1",
    },
}


def _read_study(folder: Path, data: bytes) -> None:
    study = folder / "study"
    study.mkdir(exist_ok=True)
    (study / "study.json").write_bytes(data)
    pl.report(study)


def _read_run(run: Path) -> None:
    """What commands read of a run folder without running its job."""
    for read in (
        lambda: pl.audit(run).describe(),
        lambda: pl.report(run),
        lambda: pl.compare(run, run).describe(),
        lambda: pl.open(run),
    ):
        with suppress(PacelineError):
            read()


def _read_checkpoints(run: Path) -> None:
    newest_checkpoint(run, accept=lambda checkpoint: None, warn=lambda *_: None)
    for step in sorted((run / "checkpoints").iterdir()):
        with suppress(PacelineError):
            whole_state(open_checkpoint(step))


def _tar() -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as file:
        for number in range(2):
            for suffix, data in (("json", b'{"a": 1}'), ("txt", b"word"), ("npy", _npy())):
                info = tarfile.TarInfo(f"{number}.{suffix}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return memory.getvalue()


def _npy() -> bytes:
    memory = io.BytesIO()
    np.save(memory, np.ones((2, 3), np.float32))
    return memory.getvalue()


def _npz() -> bytes:
    memory = io.BytesIO()
    np.savez(memory, input=np.ones((2, 3), np.float32))
    return memory.getvalue()


def _given(suffix: str, read: Callable[[Path], Any]) -> Callable[[Path, bytes], Any]:
    def call(folder: Path, data: bytes) -> Any:
        path = folder / f"given{suffix}"
        path.write_bytes(data)
        return read(path)

    return call


def _text(read: Callable[[str], Any]) -> Callable[[Path, bytes], Any]:
    return lambda folder, data: read(data.decode("utf8", "surrogateescape"))


_CLUSTER = b"""[[nodes]]
count = 2
devices = ["8xH100"]
memory = "900GiB"
network_bytes_per_s = 5e10
network_latency_s = 1e-5

[accelerator.Mine]
bf16_flops_per_s = 1e14
float32_flops_per_s = 1e13
product_reached = 0.7
attention_reached = 0.5
memory_bytes = 2.4e10
memory_bytes_per_s = 1e12
multiprocessors = 80
link = "pcie4"
network = "ethernet"
devices_per_node = 8
"""
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def readers(run: Path) -> Mapping[str, Reader]:
    """All of them. run: of `make_run`."""
    every = []
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(run))
        if name.startswith("logs") or path.suffix in (".html", ".svg") or ".py" in name:
            continue
        read = _read_checkpoints if name.startswith("checkpoints") else _read_run
        if name == "model.safetensors":
            read = lambda folder: read_tensors(folder / "model.safetensors", float64=False)  # noqa: E731
        every.append(Reader(name, (path.read_bytes(),), read))
    tensors = {"input": torch.ones(2, 3)}
    plans = (
        b"data=2 shard=2 microbatches=3",
        b"servers=2 workers=3 staleness=4 compress=int8",
        b"pipeline=2 microbatches=8 schedule=zero-bubble",
        b"place=2",
    )
    every += [
        Reader("plan.txt", plans, _text(pl.Plan.parse), is_file=False),
        Reader(
            "plan file",
            (b'{"plan": "data=2 tensor=2"}',),
            _given(".json", lambda path: pl.Plan.read(str(path))),
            is_file=False,
        ),
        Reader("study.json", (json.dumps(_STUDY).encode(),), _read_study, is_file=False),
        Reader("cluster", (_CLUSTER,), _given(".toml", cluster_file.read), is_file=False),
        Reader(
            "cluster word",
            (b"2x8xH100", b"8xA100", b"2x24GB", b"16x8xB200"),
            _text(Cluster.parse),
            is_file=False,
        ),
        Reader(
            "devices",
            (b"cuda:0-3", b"cpu:0,cpu:1", b"cuda:2,cuda:5"),
            _text(_parse_names),
            is_file=False,
        ),
        Reader(
            "npy",
            (_npy(),),
            _given(".npy", lambda path: read_tensors(path, float64=False)),
            is_file=False,
        ),
        Reader(
            "npz",
            (_npz(),),
            _given(".npz", lambda path: read_tensors(path, float64=True)),
            is_file=False,
        ),
        Reader(
            "csv",
            (b"1,2,3\n4,5,6\n",),
            _given(".csv", lambda path: read_tensors(path, float64=False)),
            is_file=False,
        ),
        Reader(
            "safetensors",
            (save(tensors),),
            _given(".safetensors", lambda path: read_tensors(path, float64=False)),
            is_file=False,
        ),
        Reader(
            "weights",
            (save(tensors),),
            _given(".safetensors", lambda path: pl.pretrained(str(path))),
            is_file=False,
        ),
        Reader(
            "config.json",
            (json.dumps(_CONFIG).encode(),),
            _given(".json", lambda path: FineTuning(str(path)).job()),
            is_file=False,
        ),
        Reader(
            "tar",
            (_tar(),),
            _given(".tar", lambda path: list(read_tar(path))),
            errors=(PacelineError, ValueError, OSError, tarfile.TarError),
            is_file=False,
        ),
        Reader(
            "fault", (b"kill 1@50", b"slow 0:3x", b"flip 1@60"), _text(Fault.read), is_file=False
        ),
        Reader(
            "condition", (b"step_s>5%", b"final_loss>0.1"), _text(Condition.parse), is_file=False
        ),
        Reader(
            "message",
            (Message(1, "end", 0, {"a": 1}).encode().encode(),),
            lambda folder, data: Message.decode(data),
            errors=(ValueError,),
            is_file=False,
        ),
        Reader(
            "header",
            (Header(Kind.MESSAGE, 10).pack(),),
            lambda folder, data: Header.unpack(data[:36].ljust(36, b"\0")),
            is_file=False,
        ),
    ]
    return {reader.name: reader for reader in every}


def try_reader(reader: Reader, run: Path, data: bytes) -> None:
    """Let it read damaged bytes; the run is whole again afterwards."""
    if not reader.is_file:
        with suppress(*reader.errors):
            reader.read(run.parent, data)
        return
    path = run / reader.name
    whole = path.read_bytes()
    path.write_bytes(data)
    try:
        with suppress(*reader.errors):
            reader.read(run)
    finally:
        path.write_bytes(whole)
