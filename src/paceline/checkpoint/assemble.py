"""Assembles a checkpoint's model as whole tensors in one process's memory, and refuses if they
would not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from paceline.base.errors import OutOfMemory
from paceline.checkpoint.read import Checkpoint
from paceline.cluster.limits import free_memory_bytes

_OF_MODEL = ("parameters/", "buffers/")


def whole_state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer under the model's own names, as its `state_dict` has them.

    A tensor with several names is listed under each of them, as the same tensor.

    Raises:
        OutOfMemory: the tensors would not fit into memory.
    """
    names = sorted(name for name in checkpoint.tensors if name.startswith(_OF_MODEL))
    check_fits((checkpoint.tensors[name].dtype, checkpoint.tensors[name].shape) for name in names)
    tensors = {name: checkpoint.read(name) for name in names}
    return {name: tensors[stored] for name, stored in own_names(checkpoint).items()}


def own_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Return each name that the model has for a parameter or buffer, with its name in the
    checkpoint.
    """
    first = {
        name.partition("/")[2]: name
        for name in sorted(checkpoint.tensors)
        if name.startswith(_OF_MODEL)
    }
    return first | checkpoint.document.get("ties", {})


def check_fits(kinds: Iterable[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Refuse tensors of these dtypes and shapes if they would not fit into memory.

    Raises:
        OutOfMemory: the tensors need more memory than this machine has free.
    """
    needed_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in kinds)
    free_bytes = free_memory_bytes()
    if needed_bytes > free_bytes:
        raise OutOfMemory(
            f"the whole model has {needed_bytes / 2**30:.1f} GiB and this machine has "
            f"{free_bytes / 2**30:.1f} GiB free",
            hint="paceline evaluate and predict run it under a plan, each rank with its own part; "
            "model.safetensors in the run folder is read tensor by tensor",
        )
