"""What a trainer's script is asked for, and what it leaves: the losses of its steps and its final weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.trainers.jobs import JOBS, STOP_AFTER, TrainerJob, job_of

LOSSES, WEIGHTS = "losses.json", "weights.safetensors"


@dataclass(frozen=True)
class Request:
    """One run of a script.

    Args:
        setting: "" for the job as the documentation has it; else what is set besides, a name of the script's own.
        folder: where the result goes, and a checkpoint of the job that is resumed.
        part: "" for a whole run; "first" stops after STOP_AFTER steps with a checkpoint; "second" goes on from it.
    """

    name: str
    setting: str
    folder: Path
    part: str

    @property
    def job(self) -> TrainerJob:
        return job_of(self.name, self.setting)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def is_second(self) -> bool:
        return self.part == "second"

    def ends_after(self, step: int) -> bool:
        """Whether the run is to be left after this many steps."""
        return self.part == "first" and step == STOP_AFTER


def read_request() -> Request:
    """From the command line. One thread a rank."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--setting", default="")
    parser.add_argument("--part", choices=["", "first", "second"], default="")
    parser.add_argument(
        "--local_rank", type=int, help="given by some launchers; the environment has it too"
    )
    options = parser.parse_args()
    return Request(options.job, options.setting, options.folder, options.part)


def save(
    request: Request, losses: Sequence[float], weights: Mapping[str, Tensor], *, rank: int = 0
) -> None:
    """On rank 0: the loss of every step, averaged over the ranks, and the final weights by the model's names."""
    if rank == 0:
        request.folder.mkdir(parents=True, exist_ok=True)
        (request.folder / LOSSES).write_text(json.dumps(list(losses)))
        save_file(
            {name: tensor.detach().contiguous().clone() for name, tensor in weights.items()},
            request.folder / WEIGHTS,
        )


def load(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """What `save` has left."""
    return json.loads((folder / LOSSES).read_text()), load_file(folder / WEIGHTS)
