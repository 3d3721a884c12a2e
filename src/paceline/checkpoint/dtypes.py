"""Stores tensors of every dtype in safetensors files. Some complex tensors are stored as pairs of
real numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

# The dtypes that a checkpoint can hold, by the names that safetensors uses in its headers.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C32": torch.complex32,
    "C128": torch.complex128,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
# Dtypes that safetensors lacks. A file holds each number as a pair of this dtype, in a last dim of
# 2.
PAIRS = {torch.complex32: torch.float16, torch.complex128: torch.float64}
# Key of a file's metadata. Its value is JSON: the dtype of each tensor that is held in pairs, by
# name.
COMPLEX = "complex"


def in_file(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the shape with which a file holds a tensor.

    >>> in_file(torch.complex128, (4, 3))
    (torch.float64, (4, 3, 2))
    """
    return (PAIRS[dtype], (*shape, 2)) if dtype in PAIRS else (dtype, shape)


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a file holds it, in the same memory."""
    return torch.view_as_real(tensor) if tensor.dtype in PAIRS else tensor


def from_stored(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of this dtype that `as_stored` was given.

    The result shares the memory of `stored` if that is aligned for complex numbers. The memory of a
    mapped file may not be aligned, and torch's kernels end the process in that case (2.13,
    complex128 at 8 bytes), so such memory is copied.
    """
    if dtype not in PAIRS:
        return stored
    return torch.view_as_complex(stored.clone() if stored.data_ptr() % dtype.itemsize else stored)


def metadata(dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Return the metadata for the header of a file of whole tensors; see `load_tensors`.

    >>> metadata({"a": torch.float32, "b": torch.complex128})
    {'format': 'pt', 'complex': '{"b": "C128"}'}
    """
    pairs = {name: DTYPE_NAMES[dtype] for name, dtype in dtypes.items() if dtype in PAIRS}
    return {"format": "pt"} | (
        {COMPLEX: json.dumps(pairs)} if pairs else {}
    )  # transformers refuses it without format


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a safetensors file. They must be contiguous and must not share memory."""
    save_file(
        {name: as_stored(tensor) for name, tensor in tensors.items()},
        path,
        metadata({name: tensor.dtype for name, tensor in tensors.items()}),
    )


def load_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a safetensors file, such as a run's `model.safetensors`, in the dtypes in
    which they were saved.
    """
    with safe_open(path, framework="pt") as file:
        pairs = json.loads((file.metadata() or {}).get(COMPLEX, "{}"))
    return {
        name: from_stored(tensor, DTYPES[pairs[name]]) if name in pairs else tensor
        for name, tensor in load_file(path).items()
    }
