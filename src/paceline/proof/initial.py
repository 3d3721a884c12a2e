"""Load the weights that a job begins with into a model on one device, as torch loads a state
dict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from paceline.job import Job
from paceline.job.named_fields import init_of
from paceline.job.pretrained import Weights
from paceline.training.initial import matched, source_of


def load_plainly(job: Job, model: torch.nn.Module) -> None:
    """Load the job's initial weights, if it has some, into the whole model.

    Raises:
        JobError: the weights don't exist, or their names or shapes are not the model's.
    """
    for name in job.model_names:
        if (init := init_of(job, name)) is not None:
            _load(init, model.get_submodule(name))


def _load(init: Weights, model: torch.nn.Module) -> None:
    state = _state_of(init)
    # This refuses, with a readable message, weights that are not the model's.
    matched(init, {name: tuple(tensor.shape) for name, tensor in state.items()}, model)
    model.load_state_dict(
        {
            renamed: tensor
            for name, tensor in state.items()
            if (renamed := init.name(name)) is not None
        },
        strict=init.strict and not _has_ties(model),
    )


def _has_ties(model: torch.nn.Module) -> bool:
    """Whether a tensor has several names, of which a file may have only one."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return len(named) > len(list(model.parameters())) + len(list(model.buffers()))


def _state_of(init: Weights) -> Mapping[str, torch.Tensor]:
    origin = init.source
    if isinstance(origin, str) or hasattr(origin, "__fspath__"):
        path = Path(origin).expanduser()
        if path.is_file():
            return load_file(path)
        if (path / "model.safetensors").is_file():
            return load_file(path / "model.safetensors")
        if (path / "model.safetensors.index.json").is_file():
            shards = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
            return {name: load_file(path / shard)[name] for name, shard in shards.items()}
    source = source_of(init)  # a state dict, or a checkpoint of ours
    return {name: source.read(name) for name in source.tensors}
