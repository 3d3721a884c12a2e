"""Arrays and tensors as data: samples lie along dim 0, and ranks that are forks share their
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.base.errors import JobError

_ALLOWED = "(x, y), {'name': x, ...} or x, each along dim 0"


@dataclass(frozen=True, eq=False)
class Arrays:
    """A data set whose samples are rows of arrays: an array, or mappings and tuples of arrays of
    one length.
    """

    tensors: Any
    length: int
    is_in_memory: bool = True  # whether all are tensors, so that none reads its rows from a file

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not -self.length <= index < self.length:
            raise IndexError(f"there are {self.length} samples, and no number {index}")
        return _mapped(lambda tensor: tensor[index], self.tensors)


def rows_of(data: Any) -> Any:
    """Return the tensors whose rows are the samples of a data set, nested as a sample is.

    None for other data, such as subclasses, which may change a sample, and files.
    """
    import numpy as np
    import torch

    kind = type(data)
    if kind is Arrays:
        return data.tensors if data.is_in_memory else None
    if kind is torch.Tensor:
        return data if data.layout is torch.strided and data.ndim else None
    if kind in (np.ndarray, np.memmap):
        if data.ndim and data.dtype.isnative and data.flags.writeable:
            # Torch refuses types that it lacks, and strides such as those of a packed record's field.
            with suppress(TypeError, ValueError):
                return torch.from_numpy(data)
        return None
    from torch.utils.data import StackDataset, TensorDataset

    if kind not in (TensorDataset, StackDataset):
        return None
    parts = data.tensors if kind is TensorDataset else data.datasets
    names = parts if isinstance(parts, dict) else range(len(parts))
    rows = {name: rows_of(parts[name]) for name in names}
    if any(part is None for part in rows.values()):
        return None
    return rows if isinstance(parts, dict) else list(rows.values())


def taken(rows: Any, indices: Sequence[int]) -> Any:
    """Return these rows as one batch, as `default_collate` makes it of the samples."""
    import numpy as np
    import torch

    places = torch.from_numpy(np.asarray(indices, dtype=np.int64))  # torch reads lists slowly
    # Unlike `tensor[places]`, this keeps the layout that stacked rows have, such as channels_last.
    return _mapped(lambda tensor: tensor.index_select(0, places.to(tensor.device)), rows)


def as_arrays(value: Any, *, name: str) -> Arrays | None:
    """Return the values of NumPy, torch and pandas as `Arrays`; None for other data.

    A tuple of two is (input, target), of which the input may be a mapping or tuple of arrays; a
    mapping has arrays as its values. Lists of numbers beside an array count as arrays; a list by
    itself stays a list of samples. NumPy's float64, which is its default, becomes float32; tensors
    keep their types. Nothing else is copied.

    Raises:
        JobError: the arrays have different lengths, or hold what is no number.
    """
    value = _with_lists_as_arrays(value)
    if not _holds_arrays(value):
        if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
            odd = next((key for key, item in value.items() if not _is_array(item)), "")
            raise JobError(
                f"{name} is a mapping, and {odd!r} in it is no array along dim 0",
                hint=f"data= takes {_ALLOWED}",
            )
        return None
    tensors = _mapped(lambda array: _tensor(array, name), value)
    leaves = _leaves(tensors)
    lengths = [len(leaf) for leaf in leaves]
    if len(set(lengths)) != 1:
        raise JobError(
            f"{name} holds arrays of {', '.join(map(str, lengths))} samples: dim 0 counts samples and must "
            "be equal",
            hint=f"data= takes {_ALLOWED}",
        )
    return Arrays(
        tensors, lengths[0], is_in_memory=all(hasattr(leaf, "data_ptr") for leaf in leaves)
    )


def _with_lists_as_arrays(value: Any) -> Any:
    """Replace a list by an array if it stands beside an array of as many samples, because labels
    are often a list.
    """
    import numpy as np

    def converted(item: Any, beside: Any) -> Any:
        if type(item) is not list or not _is_array(beside) or len(item) != len(beside):
            return item
        try:
            array = np.asarray(item)
        except ValueError:  # its items have unequal lengths
            return item
        return array if array.dtype.kind in "fiub" else item

    if isinstance(value, Mapping) and (
        arrays := [item for item in value.values() if _is_array(item)]
    ):
        return {key: converted(item, arrays[0]) for key, item in value.items()}
    if type(value) is tuple and len(value) == 2:
        return value[0], converted(value[1], next(iter(_leaves(value[0])), None))
    return value


def _holds_arrays(value: Any) -> bool:
    """Whether the value consists of arrays with a row for each sample, and is no sequence of
    samples.
    """
    if _is_array(value):
        return True
    if isinstance(value, Mapping):
        return bool(value) and all(map(_is_array, value.values()))
    if type(value) is not tuple or len(value) not in (1, 2):
        return False
    inputs, target = _leaves(value[0]), _leaves(value[-1])
    return (
        bool(inputs)
        and bool(target)
        and type(value[-1]) is not tuple
        and all(map(_is_array, [*inputs, *target]))
    )


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return [leaf for item in value for leaf in _leaves(item)] if type(value) is tuple else [value]


def _is_array(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return (
        isinstance(shape, tuple)
        and len(shape) > 0
        and hasattr(value, "__getitem__")
        and (hasattr(value, "dtype") or hasattr(value, "dtypes"))
    )


def _tensor(array: Any, name: str) -> Any:
    """Return an array as a tensor, which shares its memory unless the type changes.

    Arrays in files (h5py, zarr) are returned as they are.
    """
    import numpy as np
    import torch

    if isinstance(array, torch.Tensor) or not (
        hasattr(array, "__array_interface__") or hasattr(array, "to_numpy")
    ):
        return array
    plain = _of_columns(array, name) if hasattr(array, "to_numpy") else np.asarray(array)
    if plain.dtype == np.float64:
        return torch.from_numpy(plain.astype(np.float32))
    if plain.dtype.kind not in "fiubc":
        raise JobError(
            f"{name} holds an array of {plain.dtype}, which is no type of numbers",
            hint="give numbers: codes of categories, tokens of texts",
        )
    if not plain.flags.writeable or not plain.dtype.isnative:
        return _unwritable(plain)
    return torch.from_numpy(plain)


def _of_columns(frame: Any, name: str) -> Any:
    """Return a frame or a series of pandas as an array of numbers, in which a missing value is NaN.

    pandas itself makes an array of objects if there are booleans beside numbers, or types of its
    own that can miss values.
    """
    import numpy as np

    plain = frame.to_numpy()
    if plain.dtype != object:
        return plain
    columns = list(frame.dtypes) if hasattr(frame, "columns") else [frame.dtype]
    kinds = [getattr(dtype, "kind", "O") for dtype in columns]
    if all(kind in "fiub" for kind in kinds):
        is_whole = "f" not in kinds and not frame.isna().to_numpy().any()
        return (
            frame.to_numpy(dtype=np.int64)
            if is_whole
            else frame.to_numpy(dtype=np.float64, na_value=np.nan)
        )
    if hasattr(frame, "columns"):
        wrong = [
            f"{column!r} ({dtype})"
            for column, dtype, kind in zip(frame.columns, columns, kinds, strict=True)
            if kind not in "fiub"
        ]
        raise JobError(
            f"{name} has columns that are no numbers: {', '.join(wrong)}",
            hint="leave them out, or give numbers: codes of categories, tokens of texts",
        )
    return plain


def _unwritable(array: Any) -> Any:
    """Return an array that can't be written as a tensor, without torch's warning.

    A memory-mapped file that was opened for reading is such an array, and the tensor shares its
    pages.
    """
    import warnings

    import torch

    if not array.dtype.isnative:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_mapped(function, item) for item in value)
    return function(value)
