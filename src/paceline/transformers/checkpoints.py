"""Checkpoints in Trainer's folders: a run's own, from which any plan resumes, beside what
`save_pretrained` writes.

A run's own checkpoint does not contain frozen weights, such as those below adapters. The script
that resumes provides them, and a digest tells whether they are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from paceline.base.errors import CheckpointError
from paceline.checkpoint.read import open_checkpoint
from paceline.runs import folder
from paceline.training.restore import state_of_parameter

_PLACE = "paceline"  # in a folder checkpoint-N
_SCHEDULE, _FROZEN = "plateau.json", "frozen.json"


def keep(run_dir: Path, checkpoint: Path, *, step: int, frozen: str, plateau: Any) -> None:
    """Copy the run's checkpoint of this step into Trainer's folder.

    Args:
        frozen: A `frozen_record`.
        plateau: A schedule that evaluations step; None if the run's checkpoint has the schedule.
    """
    place = checkpoint / _PLACE
    _copy(run_dir, place, step)
    (place / _FROZEN).write_text(frozen)
    if plateau is not None:
        (place / _SCHEDULE).write_text(json.dumps(plateau.state_dict()))


def frozen_record(model: torch.nn.Module) -> str:
    """Return a record of the weights that are not trained, as JSON.

    These weights are in no checkpoint. The record tells whether a model has the same ones.
    """
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return json.dumps({"names": frozen, "sha256": _digest(model, frozen)})


def bring(
    checkpoint: Path, run_dir: Path, *, step: int, model: torch.nn.Module, plateau: Any
) -> None:
    """Copy the checkpoint in Trainer's folder into a new run folder.

    Args:
        model: It must have the frozen weights that the checkpoint needs.
        plateau: A schedule that evaluations step, which gets its state, and its optimizer its learning
            rates; None if the run's checkpoint has the schedule.

    Raises:
        CheckpointError: there is none; or it was written with other frozen weights or a schedule of
            another kind.
    """
    path = checkpoint / _PLACE / _FROZEN
    then = json.loads(path.read_text()) if path.exists() else {"names": []}
    if then["names"] and _digest(model, then["names"]) != then["sha256"]:
        raise CheckpointError(
            f"{checkpoint} was trained on other frozen weights than this model's, and holds only what was trained",
            hint="give the Trainer the model that the run began with, of the same from_pretrained and dtype",
        )
    if not folder.checkpoint_of(checkpoint / _PLACE, step).is_dir():
        raise CheckpointError(
            f"{checkpoint} has no checkpoint of a run under a plan",
            hint="transformers.Trainer goes on from its own checkpoints; to begin anew with these "
            "weights, load them by from_pretrained and leave out resume_from_checkpoint",
        )
    _copy(checkpoint / _PLACE, run_dir, step)
    if plateau is None:
        return
    path = checkpoint / _PLACE / _SCHEDULE
    if not path.exists():
        raise CheckpointError(
            f"{checkpoint} was written without a ReduceLROnPlateau",
            hint="resume with the lr_scheduler_type that the run began with",
        )
    plateau.load_state_dict(json.loads(path.read_text()))
    for group, rate in zip(plateau.optimizer.param_groups, plateau.get_last_lr(), strict=True):
        group["lr"] = rate


def _digest(model: torch.nn.Module, names: Sequence[str]) -> str:
    """Return a digest of values, shapes and dtypes. A weight that the model lacks is left out."""
    digest, parameters = hashlib.sha256(), dict(model.named_parameters())
    for name in names:
        parameter = parameters.get(name)
        if parameter is not None:
            values = parameter.detach().cpu().contiguous()
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
            digest.update(values.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def drop(run_dir: Path, *, step: int) -> None:
    """Delete a checkpoint of the run folder that is kept elsewhere or that nobody asked for."""
    shutil.rmtree(folder.checkpoint_of(run_dir, step), ignore_errors=True)


def load_weights(model: torch.nn.Module, run_dir: Path) -> None:
    """Load a run's newest saved weights into the model."""
    missing: Any = model.load_state_dict(load_file(run_dir / folder.MODEL), strict=False)
    assert not missing.unexpected_keys, missing.unexpected_keys


def optimizer_state(
    model: torch.nn.Module, run_dir: Path, *, step: int
) -> dict[Any, dict[str, Any]]:
    """Return the optimizer state that a run saved in a step, by parameter of the model; empty
    before the first checkpoint.
    """
    if not folder.checkpoint_of(run_dir, step).is_dir():
        return {}
    checkpoint = open_checkpoint(folder.checkpoint_of(run_dir, step), checksums=False)
    return {
        parameter: kept
        for name, parameter in model.named_parameters()
        if (kept := state_of_parameter(checkpoint, name))
    }


def _copy(source: Path, target: Path, step: int) -> None:
    """Copy a checkpoint. One that is there goes first, because its files may be links to those of another run."""
    drop(target, step=step)
    shutil.copytree(
        folder.checkpoint_of(source, step),
        folder.checkpoint_of(target, step),
        copy_function=_link,
    )


def _link(source: str, target: str) -> str:
    """Link a file, so that a checkpoint in two folders takes no more room; copy it where links are
    impossible.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
