"""Updates tensors that must be seen whole although ranks hold parts of them (Muon, Adafactor,
optimizers like Shampoo).

Each such tensor has an owner among the ranks that hold its parts. In every step the parts of its
value and gradient go to the owner, the owner's optimizer updates it as one device would, and the
parts of the new value come back. Only the owner has its optimizer state. Tensors are assigned to
owners by size. An optimizer that must see all tensors together (L-BFGS, a norm over all of them)
runs on the first of the ranks that hold a model's parts. That rank owns all tensors, also those of
other stages.

Cost, for N ranks and B bytes of such tensors, spread evenly: a rank sends 3 B (N - 1) / N^2 in a
step, two thirds of it before the update. It holds another 2 B / N for values and (in a step)
gradients, in addition to as much state as it would have had. Messages take up to 4 / N of the bytes
that travel at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn

from paceline.checkpoint.pieces import Region, TensorPiece, pieces_of
from paceline.strategies.mesh import Mesh, local_part

ROUND_BYTES = (
    64 * 2**20
)  # bytes of whole tensors whose parts travel at a time; a larger tensor travels alone


@dataclass(frozen=True)
class _Tensor:
    """A tensor that one rank updates whole, and the parts that ranks hold of it. A rank may have no
    part.
    """

    name: str
    dtype: torch.dtype
    numel: int
    owner: int  # a rank's place in the group
    # The part of each rank that sends one, by the rank's place. Other ranks hold the same part as
    # one of these.
    regions: Mapping[int, tuple[Region, ...]]
    copies: tuple[int, ...]  # for each rank, the place of the rank that sends the same part

    def elements(self, place: int) -> int:
        """Return the number of elements in a rank's part."""
        return sum(region.numel for region in self.regions[self.copies[place]])


class GatheredTensors:
    """Tensors of which ranks hold parts and that one of these ranks updates. Collective over those
    ranks.

    Attributes:
        parameters: This rank's parts of them, by name.
        whole: The tensors that this rank updates, by name.
        is_together: Whether one rank updates all.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        place: int,
        size: int,
        every: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """Assign an owner to each tensor. Collective over the group.

        Args:
            parameters: This rank's tensors, distributed or whole.
            place: This rank's place in the group.
            size: Number of ranks in the group.
            every: All tensors, or stand-ins, if ranks hold different ones. The first rank then owns
                all. None if all ranks hold parts of the same tensors, and each rank owns some.
        """
        self.parameters, self.group, self.place, self.size = dict(parameters), group, place, size
        self.is_together, like = every is not None, dict(parameters if every is None else every)
        self.device = next(local_part(p).device for p in (*parameters.values(), *like.values()))
        owners = deal_out(
            {name: p.numel() * p.element_size() for name, p in like.items()},
            1 if self.is_together else self.size,
        )
        regions = self._regions_everywhere(like)
        self.tensors = [
            _tensor(name, p, owners[name], of_ranks)
            for (name, p), of_ranks in zip(like.items(), regions, strict=True)
        ]
        self.owner_holds = [bool(t.regions[t.copies[t.owner]]) for t in self.tensors]
        self.whole = {
            t.name: nn.Parameter(torch.empty(like[t.name].shape, dtype=t.dtype, device=self.device))
            for t in self.tensors
            if t.owner == self.place
        }
        with torch.no_grad():
            self._to_owners((self.parameters, {name: p.data for name, p in self.whole.items()}))

    @torch.no_grad()
    def before_update(self) -> None:
        """Put values and gradients into `whole`. A tensor that has no gradient here gets none."""
        for whole in self.whole.values():
            whole.grad = torch.empty_like(whole)
        has_gradient = self._has_gradient()
        self._to_owners(
            (self.parameters, {name: p.data for name, p in self.whole.items()}),
            (
                {
                    name: p.grad if p.grad is not None else torch.zeros_like(p)
                    for name, p in self.parameters.items()
                },
                {name: p.grad for name, p in self.whole.items() if p.grad is not None},
            ),
        )
        for name, whole in self.whole.items():
            if not has_gradient[name]:
                whole.grad = None

    @torch.no_grad()
    def after_update(self) -> None:
        """Put the values of `whole` back into the parts."""
        for whole in self.whole.values():
            whole.grad = None
        for dtype, tensors in _rounds(self.tensors):
            sent = [
                [
                    _flat_parts(self.whole[t.name], t.regions[t.copies[place]])
                    for t in tensors
                    if t.owner == self.place
                ]
                for place in range(self.size)
            ]
            expected = [
                sum(t.elements(self.place) for t in tensors if t.owner == place)
                for place in range(self.size)
            ]
            for place, received in enumerate(self._exchange(sent, expected, dtype)):
                for tensor in (t for t in tensors if t.owner == place):
                    part, received = (
                        received[: tensor.elements(self.place)],
                        received[tensor.elements(self.place) :],
                    )
                    for piece in self._pieces(tensor.name, self.parameters):
                        piece.tensor.copy_(part[: piece.tensor.numel()].view(piece.tensor.shape))
                        part = part[piece.tensor.numel() :]

    def _has_gradient(self) -> dict[str, bool]:
        """Return by name whether a tensor has a gradient. Owners need to know it.

        Collective over the group if some owner holds no part of a tensor.
        """
        local = {
            t.name: t.name in self.parameters and self.parameters[t.name].grad is not None
            for t in self.tensors
        }
        if all(self.owner_holds):
            return local
        anywhere = torch.tensor(
            [float(has_gradient) for has_gradient in local.values()], device=self.device
        )
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.group)
        return {
            name: bool(has_gradient)
            for name, has_gradient in zip(local, anywhere.tolist(), strict=True)
        }

    def _regions_everywhere(
        self, like: Mapping[str, torch.Tensor]
    ) -> list[list[tuple[Region, ...]]]:
        """Return the place of every rank's part of each tensor, box by box. Collective."""
        numbers: list[int] = []
        for name in like:
            pieces = self._pieces(name, self.parameters)
            numbers += [
                len(pieces),
                *(number for piece in pieces for number in (*piece.offsets, *piece.tensor.shape)),
            ]
        length = torch.tensor(len(numbers), device=self.device)
        dist.all_reduce(length, dist.ReduceOp.MAX, group=self.group)
        padded = torch.zeros(int(length), dtype=torch.int64, device=self.device)
        padded[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(everyone, padded, group=self.group)
        rows = [iter(row.tolist()) for row in everyone]

        return [
            [
                tuple(
                    Region(tuple(islice(row, p.ndim)), tuple(islice(row, p.ndim)))
                    for _ in range(next(row))
                )
                for row in rows
            ]
            for p in like.values()
        ]

    def _pieces(self, name: str, tensors: Mapping[str, torch.Tensor]) -> list[TensorPiece]:
        """Return the pieces that this rank has of a tensor."""
        return pieces_of(name, tensors[name].detach()) if name in tensors else []

    def _to_owners(
        self, *sets: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
    ) -> None:
        """Send this rank's parts to the owners' whole tensors.

        Each set has the distributed tensors, cut like the parameters, and the owners' whole
        tensors, both by name.
        """
        for dtype, tensors in _rounds(self.tensors):
            sent = [
                [
                    piece.tensor.reshape(-1)
                    for parts, _ in sets
                    for t in tensors
                    if t.owner == place and t.copies[self.place] == self.place
                    for piece in self._pieces(t.name, parts)
                ]
                for place in range(self.size)
            ]
            owned = [t for t in tensors if t.owner == self.place]
            expected = [
                len(sets) * sum(t.elements(place) for t in owned if t.copies[place] == place)
                for place in range(self.size)
            ]
            for place, received in enumerate(self._exchange(sent, expected, dtype)):
                for whole, tensor in [
                    (whole, t) for _, whole in sets for t in owned if t.copies[place] == place
                ]:
                    for region in tensor.regions[place]:
                        whole[tensor.name][region.slices((0,) * len(region.shape))] = received[
                            : region.numel
                        ].view(region.shape)
                        received = received[region.numel :]

    def _exchange(
        self, sent: Sequence[Sequence[torch.Tensor]], expected: Sequence[int], dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """Send flat tensors to each place in the group, and return the expected number of elements
        from each, flat. Collective.
        """
        empty = torch.empty(0, dtype=dtype, device=self.device)
        outgoing = torch.cat([empty, *(tensor for tensors in sent for tensor in tensors)])
        incoming = torch.empty(sum(expected), dtype=dtype, device=self.device)
        item_bytes = dtype.itemsize
        dist.all_to_all_single(  # as bytes, because backends differ in the dtypes that they accept
            incoming.view(torch.uint8),
            outgoing.view(torch.uint8),
            [count * item_bytes for count in expected],
            [sum(tensor.numel() for tensor in tensors) * item_bytes for tensors in sent],
            group=self.group,
        )
        return incoming.split(list(expected))


def deal_out(num_bytes: Mapping[str, int], places: int) -> dict[str, int]:
    """Assign an owner to every tensor. The largest come first, each to the place that has the
    fewest bytes.

    >>> deal_out({"a": 4, "b": 3, "c": 2}, 2)
    {'a': 0, 'b': 1, 'c': 1}
    """
    held_bytes, owners = [0] * places, {}
    for name in sorted(num_bytes, key=lambda name: -num_bytes[name]):
        owners[name] = min(range(places), key=held_bytes.__getitem__)
        held_bytes[owners[name]] += num_bytes[name]
    return {name: owners[name] for name in num_bytes}


def _tensor(
    name: str, like: torch.Tensor, owner: int, regions: Sequence[tuple[Region, ...]]
) -> _Tensor:
    """Describe a tensor. Of ranks that hold the same part the first one sends it, or the owner,
    which needs no message then.
    """
    order = [owner, *(place for place in range(len(regions)) if place != owner)]
    first: dict[tuple[Region, ...], int] = {}
    for place in order:
        first.setdefault(regions[place], place)
    return _Tensor(
        name,
        like.dtype,
        like.numel(),
        owner,
        {place: region for region, place in first.items()},
        tuple(first[region] for region in regions),
    )


def _flat_parts(whole: torch.Tensor, regions: Iterable[Region]) -> torch.Tensor:
    parts = [
        whole.detach()[region.slices((0,) * len(region.shape))].reshape(-1) for region in regions
    ]
    return torch.cat([whole.detach().reshape(-1)[:0], *parts])


def _rounds(tensors: Iterable[_Tensor]) -> Iterable[tuple[torch.dtype, list[_Tensor]]]:
    """Group tensors that travel together: tensors of one dtype, and no more at a time than messages
    have memory for.
    """
    by_dtype: dict[torch.dtype, list[_Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, alike in by_dtype.items():
        together: list[_Tensor] = []
        for tensor in alike:
            if (
                sum(t.numel for t in (*together, tensor)) * dtype.itemsize > ROUND_BYTES
                and together
            ):
                yield dtype, together
                together = []
            together.append(tensor)
        yield dtype, together


def connect(mesh: Mesh, *, stages: bool) -> tuple[dist.ProcessGroup, list[int]]:
    """Return this rank's group of the ranks that hold parts of its tensors, and their ranks in
    order. Collective.

    stages: whether ranks that hold other tensors of the same replica belong to the group, too.
    """
    axes = (
        tuple(axis for axis in mesh.sizes if axis not in mesh.copy_axes)
        if stages
        else mesh.part_axes
    )
    cut = [axis for axis in axes if mesh.sizes[axis] > 1]
    if len(cut) == 1:
        return mesh.group(cut[0]), mesh.ranks_along(cut[0])
    rows: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        places = mesh.at(rank).coordinates
        rows.setdefault(
            tuple(place for axis, place in places.items() if axis not in axes), []
        ).append(rank)
    connected: tuple[dist.ProcessGroup, list[int]] | None = None
    for ranks in rows.values():  # every rank makes every group, in the same order
        group = dist.new_group(ranks)
        if mesh.rank in ranks:
            connected = group, ranks
    assert connected is not None
    return connected
