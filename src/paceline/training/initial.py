"""Reads the weights with which a job begins. Each rank reads only the parts that it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import torch

from paceline.base.errors import CheckpointError, JobError
from paceline.base.logs import logger, tell_once
from paceline.checkpoint.dtypes import COMPLEX, DTYPES
from paceline.checkpoint.files import bytes_of, read_header
from paceline.checkpoint.index import StoredPiece, TensorEntry
from paceline.checkpoint.pieces import Region, TensorPiece, pieces_of
from paceline.checkpoint.read import Checkpoint, DiskStore, newest_checkpoint, open_checkpoint
from paceline.job.pretrained import Weights
from paceline.runs.folder import COMMIT, MODEL
from paceline.strategies.layout import Extent
from paceline.training.state import persistent_buffers, saved_shapes, stored_names

MOST_BYTES = 16 * 1024**2  # bytes of a tensor that are read at once
SHOWN_NAMES = 5
_INDEX = "model.safetensors.index.json"  # Transformers' index: which shard holds which tensor
_KINDS = ("parameters/", "buffers/")


class _InMemory:
    """The tensors of a state dict, as a `Store`. Those that are mapped from a file are read when
    they are used; one that does not lie in CPU memory as in a file is copied whole.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._bytes = lru_cache(1)(lambda name: bytes_of(tensors[name]))

    def read_into(
        self, piece: StoredPiece, dtype: torch.dtype, start: int, target: memoryview
    ) -> None:
        target[:] = self._bytes(piece.key)[start : start + len(target)]


def source_of(init: Weights) -> Checkpoint:
    """Return the job's initial weights, by their own names. Only names, dtypes and shapes are read.

    Raises:
        JobError: there are no such weights.
    """
    origin = init.source
    if isinstance(origin, str) or hasattr(origin, "__fspath__"):
        return _at(Path(origin).expanduser())
    state = origin() if callable(origin) and not isinstance(origin, Mapping) else origin
    if not isinstance(state, Mapping):
        raise JobError(
            f"init returned {type(state).__name__} and not a state dict",
            hint="a mapping from names to tensors, as state_dict() gives it",
        )
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise JobError(
                f"init has a {type(value).__name__} for '{name}' and not a tensor",
                hint="give the state dict itself, not what it was saved with"
                if isinstance(value, Mapping)
                else "leave out what is no tensor",
            )
    tensors = {
        name: _whole(tensor.dtype, tuple(tensor.shape), "", name) for name, tensor in state.items()
    }
    return Checkpoint(Path("init"), 0, {}, tensors, _InMemory(state))


def _whole(dtype: torch.dtype, shape: tuple[int, ...], file: str, key: str) -> TensorEntry:
    return TensorEntry(shape, dtype, (StoredPiece(file, key, Region.whole(shape)),))


def _at(path: Path) -> Checkpoint:
    if path.is_file():
        return _of_files(path.parent, [path.name])
    if not path.is_dir():
        raise JobError(
            f"init: there is no file or folder '{path}'",
            hint="give a local path; huggingface_hub.snapshot_download(NAME) fetches a model's folder",
        )
    if (path / MODEL).is_file():  # written by a run that ended, or by Transformers
        return _of_files(path, [MODEL])
    if (path / _INDEX).is_file():
        return _of_files(path, _shards(path / _INDEX))
    checkpoint = (
        open_checkpoint(path)
        if (path / COMMIT).is_file()
        else newest_checkpoint(path, accept=lambda stored: None, warn=logger.warning)
    )
    if checkpoint is not None:
        of_model = {
            name.removeprefix(kind): entry
            for name, entry in checkpoint.tensors.items()
            for kind in _KINDS
            if name.startswith(kind)
        }
        return replace(checkpoint, tensors=of_model)
    raise JobError(
        f"init: the folder '{path}' has no weights that can be read in parts",
        hint=f"{MODEL}, {_INDEX} with its shards, or a run with a checkpoint; save_pretrained(FOLDER) "
        "writes the first",
    )


def _shards(index: Path) -> list[str]:
    """Return the files that Transformers' index names."""
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise JobError(
            f"init: '{index}' can't be read: {type(error).__name__}: {error}",
            hint="fetch the model's folder again; huggingface_hub.snapshot_download(NAME) does so",
        ) from error


def _of_files(folder: Path, files: list[str]) -> Checkpoint:
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        try:
            with (folder / file).open("rb") as opened:
                header, _ = read_header(opened)
            in_pairs = json.loads(header.pop("__metadata__", {}).get(COMPLEX, "{}"))
            for name, entry in header.items():
                dtype, shape = DTYPES[in_pairs.get(name, entry["dtype"])], tuple(entry["shape"])
                shape = shape[:-1] if name in in_pairs else shape
                tensors[name] = _whole(dtype, shape, file, name)
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise JobError(
                f"init: '{folder / file}' can't be read as safetensors: {type(error).__name__}: {error}",
                hint="for files of torch.save: init=lambda: torch.load(PATH, mmap=True, weights_only=True, "
                "map_location='cpu')",
            ) from error
    return Checkpoint(folder, 0, {}, tensors, DiskStore(folder))


def matched(
    init: Weights, shapes: Mapping[str, tuple[int, ...]], model: torch.nn.Module
) -> dict[str, str]:
    """Return for each parameter and buffer the source's name of its initial value. Keys are names
    in a checkpoint.

    If the source has several names of tied weights, the last one in the model's order counts, as
    when torch loads a state dict.

    Raises:
        JobError: the names differ, or a shape does; the message shows which.
    """
    stored = stored_names(model)
    stored_as: dict[str, str] = {}
    for name in shapes:
        if (renamed := init.name(name)) is not None:
            if renamed in stored_as:
                raise JobError(f"init: '{stored_as[renamed]}' and '{name}' both become '{renamed}'")
            stored_as[renamed] = name
    chosen = {key: stored_as[name] for name, key in stored.items() if name in stored_as}
    missing = [
        next(name for name, key in stored.items() if key == wanted)
        for wanted in dict.fromkeys(stored.values())
        if wanted not in chosen
    ]
    unknown = [name for name in stored_as if name not in stored]
    if not chosen or (init.strict and (missing or unknown)):
        raise _other_names(missing, unknown)
    wanted = saved_shapes(model)
    for key, name in chosen.items():
        if shapes[name] != wanted[key]:
            raise JobError(
                f"init: '{name}' has shape {shapes[name]} there and {wanted[key]} in the model",
                hint="leave it out with pl.pretrained(..., rename={...: None}, strict=False) to begin with the "
                "seed's values",
            )
    if missing or unknown:
        tell_once(f"init: {'; '.join(_in_words(missing, unknown))}")
    return chosen


def _in_words(missing: list[str], unknown: list[str]) -> list[str]:
    def shown(names: list[str]) -> str:
        more = len(names) - SHOWN_NAMES
        return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")

    return (
        [f"it has nothing for {len(missing)} of the model's weights: {shown(missing)}"]
        if missing
        else []
    ) + ([f"it has {len(unknown)} that the model doesn't: {shown(unknown)}"] if unknown else [])


def _other_names(missing: list[str], unknown: list[str]) -> JobError:
    hint = "pl.pretrained(..., rename=...) changes names; strict=False loads those that both have and no others"
    for name in missing[:SHOWN_NAMES]:
        for other in unknown:
            if name.endswith(f".{other}"):
                hint = f"pl.pretrained(..., prefix={name.removesuffix(other)!r})"
            elif other.endswith(f".{name}"):
                hint = f"pl.pretrained(..., rename=lambda name: name.removeprefix({other.removesuffix(name)!r}))"
            else:
                continue
            return JobError("init: " + "; ".join(_in_words(missing, unknown)), hint=hint)
    return JobError(
        "init: " + ("; ".join(_in_words(missing, unknown)) or "it has no weights"), hint=hint
    )


def load_initial(
    init: Weights,
    model: torch.nn.Module,
    parameters: Mapping[str, torch.nn.Parameter],
    extents: Mapping[str, Extent] = MappingProxyType({}),
) -> None:
    """Replace the seed's weights by the job's initial weights, in the model's own dtypes.

    Each rank reads the parts of parameters that it holds, at most `MOST_BYTES` at a time, and all
    buffers.

    Args:
        model: The model with every parameter's name and shape.
        parameters: The parameters that this rank holds.
        extents: Places of parameters that are a part of a tensor, held as plain tensors.

    Raises:
        JobError: there are no weights, or their names or shapes are not the model's.
    """
    source = source_of(init)
    chosen = matched(init, source.shapes, model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if key := chosen.get(f"parameters/{name}"):
                for piece in pieces_of(name, parameter, extents.get(name)):
                    _fill(piece, source, key)
        for name, buffer in persistent_buffers(model).items():
            if key := chosen.get(f"buffers/{name}"):
                _fill(pieces_of(name, buffer)[0], source, key)


def _fill(piece: TensorPiece, source: Checkpoint, name: str) -> None:
    """Fill a piece in parts of some rows, so that no large tensor is in memory twice."""
    try:
        for run in piece.region.in_runs(MOST_BYTES // piece.tensor.itemsize):
            piece.tensor[run.slices(piece.offsets)].copy_(source.read(name, run))
    except CheckpointError as error:
        raise JobError(f"init: {error.args[0]}") from error
