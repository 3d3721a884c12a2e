"""`torch_private/storage.py`: keys, references, addresses and lazy copies of tensors' memory."""

from __future__ import annotations

import pytest
import torch

from paceline.torch_private.fake_tensors import FakeTensorMode
from paceline.torch_private.storage import (
    address,
    key_of,
    lazy_clone,
    num_references,
    storage_key,
    stored_values,
)


@pytest.mark.parametrize("device", ["cpu", "meta", "fake"])
def test_tensors_that_share_memory_have_one_key(device: str):
    """Views do, at any place, and so do tensors that were set to each other's memory."""
    if device == "fake":
        with FakeTensorMode():
            tensor, other = torch.ones(4), torch.ones(4)
    else:
        tensor, other = torch.ones(4, device=device), torch.ones(4, device=device)
    assert storage_key(tensor) == storage_key(tensor[2:].view(2, 1)) == storage_key(tensor.detach())
    assert storage_key(tensor) == key_of(tensor.untyped_storage()) != storage_key(other)
    other.data = tensor
    assert storage_key(other) == storage_key(tensor)


def test_references_are_tensors_of_the_memory():
    tensor = torch.ones(4)
    alone = num_references(tensor)
    views = [tensor[:2], tensor.view(2, 2)]
    assert num_references(tensor) == num_references(views[0]) == alone + 2
    views.clear()
    assert num_references(tensor) == alone


def test_a_lazy_copy_gets_memory_at_the_first_write():
    """To either tensor. Asking for the address is no write, and `data_ptr` of the other would be."""
    tensor = torch.arange(3.0)
    copy, other = lazy_clone(tensor), lazy_clone(tensor)
    assert copy is not None and other is not None
    assert address(copy) == address(other) == address(tensor)
    tensor += 1
    assert address(copy) == address(other) != address(tensor)
    copy.data.zero_()  # which versions don't count
    assert address(copy) != address(other)
    assert [t.tolist() for t in (tensor, copy, other)] == [[1, 2, 3], [0, 0, 0], [0, 1, 2]]


def test_a_lazy_copy_can_be_differentiated():
    tensor = torch.ones(3, requires_grad=True)
    copy = lazy_clone(tensor)
    assert copy is not None
    (copy * 2).sum().backward()
    assert tensor.grad is not None and tensor.grad.tolist() == [2, 2, 2]


def test_memory_of_others_has_no_lazy_copy():
    assert lazy_clone(torch.frombuffer(bytearray(8), dtype=torch.float32)) is None


def test_values_of_a_sparse_tensor_are_its_own_memory():
    """Also of one whose indices occur twice, which `values` refuses."""
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2), (3,))
    stored_values(sparse).mul_(3)
    assert sparse.to_dense().tolist() == [0, 6, 0] and len(stored_values(sparse)) == 2
    dense = torch.ones(2)
    assert stored_values(dense) is dense
