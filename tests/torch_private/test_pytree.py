"""`torch_private/pytree.py`: containers are taken apart as torch does it."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch

from paceline.torch_private import pytree

Pair = namedtuple("Pair", "left right")


@pytest.mark.slow
def test_containers_are_trees_and_other_values_leaves():
    """None is a leaf, unlike in other libraries."""
    value = {"a": [1, (2, None)], "b": OrderedDict(c=Pair(3, {4}))}
    leaves, spec = pytree.tree_flatten(value)
    assert leaves == pytree.tree_leaves(value) == [1, 2, None, 3, {4}]
    assert pytree.tree_unflatten(leaves, spec) == value
    assert spec == pytree.tree_structure(value) != pytree.tree_structure([1])
    assert isinstance(spec, pytree.TreeSpec)


def test_leaves_are_replaced_in_the_same_containers():
    value = Pair([1, "a"], {"b": 2.0})
    assert pytree.tree_map(str, value) == Pair(["1", "a"], {"b": "2.0"})
    assert pytree.tree_map_only(int, lambda n: n + 1, value) == Pair([2, "a"], {"b": 2.0})


def test_paths_are_written_as_python_reads_them():
    paths, _ = pytree.tree_flatten_with_path({"a": [torch.ones(1)], "b": 2})
    assert [pytree.keystr(path) for path, _ in paths] == ["['a'][0]", "['b']"]
