"""Assembles a checkpoint's model as whole tensors: in one file, or in one process's memory if they
fit into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from paceline.base.errors import OutOfMemory
from paceline.base.files import fsync, remove, temp_beside
from paceline.base.long_work import long_work
from paceline.checkpoint.dtypes import metadata
from paceline.checkpoint.files import NewFile, header, num_bytes
from paceline.checkpoint.pieces import Region
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.write import write_failure
from paceline.cluster.limits import free_memory_bytes

_RUN_BYTES = 16 * 2**20  # bytes of a large tensor that are read and written at a time
_OF_MODEL = ("parameters/", "buffers/")


def whole_state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer under the model's own names, as its `state_dict` has them.

    A tensor with several names is listed under each of them, as the same tensor.

    Raises:
        OutOfMemory: the tensors would not fit into memory.
    """
    check_fits(checkpoint)
    names = own_names(checkpoint)
    tensors = {stored: checkpoint.read(stored) for stored in set(names.values())}
    return {name: tensors[stored] for name, stored in names.items()}


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


def write_model(path: Path, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
    """Write tensors of a checkpoint to one safetensors file, a few rows at a time; see
    `load_tensors`. The file appears in one move.

    names: the checkpoint's name of each tensor, by its name in the file.

    Raises:
        CheckpointError: the file can't be written; nothing is left behind and an older file stays.
    """
    path = Path(path)
    temp = temp_beside(path)
    entries = {name: checkpoint.tensors[stored] for name, stored in names.items()}
    kinds = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    try:
        dtypes = {name: entry.dtype for name, entry in entries.items()}
        first, ordered = header(kinds, metadata=metadata(dtypes))
        with NewFile(temp) as file:
            file.write(first)
            for name in ordered:
                dtype, shape = kinds[name]
                for run in Region.whole(shape).in_runs(_RUN_BYTES // dtype.itemsize):
                    file.write_from(checkpoint.read(names[name], run))
                    long_work.advanced()
            file.finish()
        temp.replace(path)
        fsync(path.parent)
    except Exception as error:
        needed_bytes = sum(map(num_bytes, kinds.values()))
        raise write_failure(error, "could not write the model", path, needed_bytes) from error
    finally:
        remove(temp)


def check_fits(checkpoint: Checkpoint) -> None:
    """Refuse a model that would not fit into memory.

    Raises:
        OutOfMemory: its tensors need more memory than this machine has free.
    """
    needed_bytes = sum(
        num_bytes((entry.dtype, entry.shape))
        for name, entry in checkpoint.tensors.items()
        if name.startswith(_OF_MODEL)
    )
    free_bytes = free_memory_bytes()
    if needed_bytes > free_bytes:
        raise OutOfMemory(
            f"the whole model has {needed_bytes / 2**30:.1f} GiB and this machine has "
            f"{free_bytes / 2**30:.1f} GiB free",
            hint="paceline evaluate and predict run it under a plan, each rank with its own part; "
            "model.safetensors in the run folder is read tensor by tensor",
        )
