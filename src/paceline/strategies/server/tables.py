"""Tables of which a step uses only a few rows: the weights of embeddings with sparse gradients."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from paceline.base.errors import JobError

if TYPE_CHECKING:
    from torch import nn

    Table = nn.Embedding | nn.EmbeddingBag


def tables(model: nn.Module) -> dict[str, Table]:
    """Return the modules whose weights are tables, by the name of the weight.

    Raises:
        JobError: a module makes sparse gradients in a way that does not work if it holds only a few
            rows.
    """
    modules: dict[str, Table] = {}
    users: Counter[torch.Tensor] = Counter(
        p
        for module in model.modules()
        for _, p in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is not True:
            continue
        problem = f"'{name}' ({type(module).__name__}) makes sparse gradients"
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise JobError(
                f"{problem}, and servers know those of Embedding and EmbeddingBag alone",
                hint="build it with sparse=False, or train it on one device",
            )
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise JobError(
                f"{problem} and has max_norm or scale_grad_by_freq, which look at rows that others touch",
                hint="leave them out, or build it with sparse=False",
            )
        if users[module.weight] > 1:
            raise JobError(
                f"{problem} and shares its weight with another module",
                hint="build it with sparse=False, or give each a weight of its own",
            )
        if module.weight.requires_grad:
            modules[f"{name}.weight" if name else "weight"] = module
    return modules
