"""The index of a run's state: the pieces of every tensor, and where each of them is stored.

A checkpoint on a disk and copies in memory have the same index. Each rank makes the part of it that
lists its own pieces, as JSON; the parts of all ranks are merged and checked.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.base.errors import CheckpointError
from paceline.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from paceline.checkpoint.pieces import Region, TensorPiece, uncovered


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """The place of a part of a tensor in a store."""

    file: str  # what one rank has written
    key: str  # in that file
    region: Region


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of an index."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]


def file_of(rank: int, suffix: str = "safetensors") -> str:
    """Return the name of the file that holds what a rank wrote."""
    return f"rank-{rank:05d}.{suffix}"


def add_piece(part: dict[str, Any], piece: TensorPiece, *, file: str, key: str) -> None:
    """Add a piece to its rank's part of an index."""
    entry = {"shape": list(piece.shape), "dtype": DTYPE_NAMES[piece.tensor.dtype], "pieces": []}
    part.setdefault(piece.name, entry)["pieces"].append(
        {
            "file": file,
            "key": key,
            "offsets": list(piece.offsets),
            "shape": list(piece.tensor.shape),
        }
    )


def merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the index of all ranks' tensors.

    Raises:
        CheckpointError: ranks disagree on a tensor, or their pieces leave a hole or overlap.
    """
    tensors: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        for name, entry in part.items():
            known = tensors.setdefault(name, {**entry, "pieces": []})
            if (known["shape"], known["dtype"]) != (entry["shape"], entry["dtype"]):
                raise CheckpointError(
                    f"rank {rank} saves '{name}' as {entry['dtype']} of shape {entry['shape']}, and "
                    f"a rank before it as {known['dtype']} of shape {known['shape']}"
                )
            known["pieces"] += entry["pieces"]
    for name, entry in tensors.items():
        regions: dict[Region, Any] = {}
        for piece in entry["pieces"]:  # the first of the equal pieces that several ranks wrote
            regions.setdefault(Region(tuple(piece["offsets"]), tuple(piece["shape"])), piece)
        entry["pieces"] = list(regions.values())
        whole = Region.whole(entry["shape"])
        if holes := uncovered(whole, regions):
            raise CheckpointError(
                f"no rank saves the part of '{name}' at {holes[0].offsets} of shape "
                f"{holes[0].shape}; the whole has shape {whole.shape}"
            )
        if sum(region.numel for region in regions) != whole.numel:
            raise CheckpointError(
                f"the pieces of '{name}' overlap: {', '.join(str(r) for r in regions)}"
            )
    return tensors


def entries_of(index: Mapping[str, Any], files: Container[str]) -> dict[str, TensorEntry]:
    """Return the tensors of an index after checking that every piece lies inside its tensor and in
    one of these files.

    Raises:
        LookupError, TypeError, ValueError: the index is malformed.
    """
    return {name: _entry_of(entry, files) for name, entry in index.items()}


def _entry_of(entry: Mapping[str, Any], files: Container[str]) -> TensorEntry:
    shape = _lengths(entry["shape"])
    pieces = []
    for piece in entry["pieces"]:
        region = Region(_lengths(piece["offsets"]), _lengths(piece["shape"]))
        stops = [start + length for start, length in zip(region.offsets, region.shape, strict=True)]
        if any(stop > length for stop, length in zip(stops, shape, strict=True)):
            raise ValueError(
                f"a piece at {region.offsets} of shape {region.shape} reaches out of {shape}"
            )
        if plain_name(piece["file"]) not in files:
            raise ValueError(f"COMMIT doesn't list the file {piece['file']!r}")
        pieces.append(StoredPiece(piece["file"], str(piece["key"]), region))
    return TensorEntry(shape, DTYPES[entry["dtype"]], tuple(pieces))


def _lengths(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(
        type(value) is int and value >= 0 for value in values
    ):
        raise ValueError(f"{values!r} is not a list of whole numbers")
    return tuple(values)


def plain_name(name: Any) -> str:
    """Return a file name, and refuse one that could lead out of the checkpoint's folder."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise ValueError(f"the path {name!r} leads out of the checkpoint's folder")
    return name
