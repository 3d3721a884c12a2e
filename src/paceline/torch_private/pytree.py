"""Containers as trees: their leaves, and the same container around other leaves.

Private names: `torch.utils._pytree` with the functions below. Tested with torch 2.11 and 2.13.

What matters is that torch.export and FSDP2 take containers apart by the same registry. If torch
makes the module public, import from there.
"""

from typing import Any

import torch
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of a tree, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
