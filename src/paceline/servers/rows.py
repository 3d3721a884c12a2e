"""Tables of which a step touches a few rows: workers hold none of the table and fetch the rows of a forward.

A table is the weight of an `nn.Embedding` or `nn.EmbeddingBag` with `sparse=True`. Its rows lie on the servers, in one
run on each. Before a worker's module looks rows up, each row that it needs is fetched once, and the module works on
these alone. Gradients of rows leave when the step's backward is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from paceline.strategies.synchroniser import Synchroniser

if TYPE_CHECKING:
    from torch import nn

    from paceline.servers.connection import ServerConnection

    Table = nn.Embedding | nn.EmbeddingBag


class Rows(Synchroniser):
    """A worker's side of all tables; a `Synchroniser`.

    version: updates that fetched rows must contain at least. update: that gradients are sent as.
    """

    def __init__(self, tables: Mapping[str, Table], links: Sequence[ServerConnection]) -> None:
        self.links, self.modules, self.version, self.update = links, list(tables.values()), -1, -1
        self.touched: list[list[tuple[torch.Tensor, nn.Parameter]]] = [[] for _ in self.modules]
        self.starts = [
            torch.tensor([link.shard.tables[number].start for link in links])
            for number in range(len(self.modules))
        ]
        self.paddings = [module.padding_idx for module in self.modules]
        for number, module in enumerate(self.modules):
            module.weight.data = module.weight.data.new_empty(0)
            module.register_forward_pre_hook(partial(self._look_up, number), with_kwargs=True)

    def finish(self) -> None:
        """Send the gradient of every row that was looked up since the last time."""
        for number, looked_up in enumerate(self.touched):
            gradients = [
                (ids[gradient.indices()[0].cpu()], gradient.values().cpu())
                for ids, p in looked_up
                if p.grad is not None
                for gradient in [p.grad.coalesce()]
            ]
            looked_up.clear()
            dim, dtype = (
                self.links[0].shard.tables[number].shape[1],
                self.modules[number].weight.dtype,
            )
            nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, dim, dtype=dtype)
            ids, values = map(torch.cat, zip(nothing, *gradients, strict=True))
            if len(gradients) > 1:
                ids, places = ids.unique(return_inverse=True)
                values = torch.zeros(len(ids), dim, dtype=dtype).index_add_(0, places, values)
            for link, part in zip(self.links, self._parts(number, ids), strict=True):
                link.push_rows(self.update, number, ids[part], values[part])

    def _look_up(
        self, number: int, module: Table, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the module the rows that it is about to look up, and their places among them."""
        wanted = args[0] if args else kwargs["input"]
        ids, places = wanted.unique(return_inverse=True)
        ids = ids.to("cpu", torch.int64)
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < module.num_embeddings:
            raise IndexError(
                f"index out of range: {int(ids[0])} to {int(ids[-1])} of {module.num_embeddings} rows"
            )
        for link, part in zip(self.links, self._parts(number, ids), strict=True):
            link.ask_rows(number, ids[part], self.version)
        rows = torch.nn.Parameter(
            torch.cat([link.wait_rows() for link in self.links]).to(module.weight)
        )
        module.weight = rows
        padding = self.paddings[number]
        if padding is not None:
            row = int(torch.searchsorted(ids, padding))
            module.padding_idx = row if row < len(ids) and ids[row] == padding else None
        if torch.is_grad_enabled():
            self.touched[number].append((ids, rows))
        return (places, *args[1:]), {key: value for key, value in kwargs.items() if key != "input"}

    def _parts(self, number: int, ids: torch.Tensor) -> list[slice]:
        """Which of these rows, in ascending order, each server has."""
        cuts = [*torch.searchsorted(ids, self.starts[number]).tolist(), len(ids)]
        return [slice(start, stop) for start, stop in pairwise(cuts)]
