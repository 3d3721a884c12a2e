"""The memory of tensors: who shares it, where it is, and copies that take none until a write.

Private names: `UntypedStorage._cdata`, `torch._C._storage_Use_Count`, `torch._C._data_address`,
`torch._lazy_clone`, `Tensor._values`. Tested with torch 2.11 and 2.13.

If torch drops the key of a storage, `UntypedStorage.data_ptr` serves for real tensors, but not for
fake ones. Without copies on write, `lazy_clone` returns None and callers copy at once. Without
`_data_address`, `data_ptr` serves, but ends the sharing of a lazy copy.
"""

import torch

# Unlike `data_ptr` it does not count as writing.
address = torch._C._data_address  # type: ignore[attr-defined]


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that two tensors share if they share memory; fake tensors have one, too."""
    return tensor.untyped_storage()._cdata


def key_of(storage: torch.UntypedStorage) -> int:
    """Return the `storage_key` of the storage's tensors."""
    return storage._cdata


def num_references(tensor: torch.Tensor) -> int:
    """Return the number of tensors, and of this function's storage, that share the memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a differentiable copy that takes memory when one of the two is written to.

    None if torch did not allocate the tensor's memory itself.
    """
    try:
        return torch._lazy_clone(tensor)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that a sparse tensor stores, coalesced or not; a dense one is returned."""
    return tensor._values() if tensor.is_sparse else tensor
