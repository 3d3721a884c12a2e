"""Keep the Trainer's own process off the GPUs. Only ranks use them, as `devices=` says.

`TrainingArguments` take a GPU as soon as they are made, before anything says which Trainer they are
for, and a script may have moved the model to one. The arguments are told to use the CPU, and the
model is moved back.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments

_DEVICE = "_setup_devices"  # the name under which arguments keep the device that they have taken


def use_cpu(arguments: TrainingArguments) -> None:
    """Change arguments to those of a single process that uses no GPU.

    The arguments may have taken a GPU or joined a launcher's processes. A Trainer that was made
    with them before needs a new accelerator.
    """
    if arguments.device.type == "cpu" and arguments.world_size == 1:
        return
    arguments.use_cpu, arguments.dataloader_pin_memory = True, False
    vars(arguments).pop(_DEVICE)
    assert arguments.device.type == "cpu"


def bring_to_cpu(model: Any) -> None:
    """Move a model from a GPU to the CPU, and free its GPU memory."""
    if isinstance(model, torch.nn.Module) and any(tensor.is_cuda for tensor in model.parameters()):
        model.to("cpu")
        if len(getattr(model, "hf_device_map", None) or {}) == 1:
            vars(model)["hf_device_map"] = {"": "cpu"}
        torch.cuda.empty_cache()
