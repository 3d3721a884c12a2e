"""Runs one captured piece on DTensors, whose sizes are those of the whole tensors.

Operator by operator, so that nothing in the graph has to be rewritten and a placement can be unwise but not wrong.
Which way a weight is split is found by running the piece once: a matrix product whose input is whole is split by
columns, one whose input is already split along the features by rows, and what comes between goes the way DTensor takes
it (heads of an attention, gates of an MLP).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from paceline.capture.graph import Piece

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten


class SplitPiece:
    """Runs one piece on DTensors. The first run derives how its parameters are cut; later ones follow.

    dims: of each parameter that is cut, by its name in the model; found where `derive` is set, else given.
    forbidden: parameters that must not be cut.
    reasons: why parameters could not be cut, by name. notes: what every rank computes whole.
    """

    def __init__(self, piece: Piece, mesh: DeviceMesh, dims: dict[str, int], *, derive: bool = False,
                 forbidden: Collection[str] = ()) -> None:
        self.piece, self.mesh, self.dims, self.derive, self.forbidden = piece, mesh, dims, derive, forbidden
        self.graph: fx.Graph = piece.run.graph  # type: ignore[attr-defined]
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.parameter_of = dict(zip(placeholders, piece.parameters, strict=False))
        self.replicated: set[fx.Node] = set()
        self.last_use = _last_uses(self.graph)
        self.reasons: dict[str, str] = {}
        self.notes: list[str] = []

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """tensors: as `Piece.run` takes them; split parameters as DTensors, all else whole and plain."""
        given = iter(tensors)
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = getattr(self.piece.run, str(node.target))
            elif node.op == "output":
                plain = (self._plain(values[arg]) for arg in node.args[0])
                # What came out of DTensor is a view, which can't be edited in place.
                return tuple(tensor.clone() if name in self.piece.edited else tensor
                             for name, tensor in zip(self.piece.outputs, plain, strict=True))
            else:
                values[node] = self._run(node, values)
            for done in self.last_use.get(node, ()):
                del values[done]
        raise AssertionError("a graph ends with its output")

    def _run(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if node.target is operator.getitem:
            return values[node.args[0]][node.args[1]]  # type: ignore[index]
        known = _WEIGHTED.get(node.target)
        if known is not None:
            found = known(self, node, values)
            if found is not None:
                return found
        args = fx.map_arg(node.args, lambda n: values[n])
        kwargs = fx.map_arg(node.kwargs, lambda n: values[n])
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(map(_is_distributed, leaves)):
            return node.target(*args, **kwargs)  # type: ignore[operator]
        local = _LOCAL.get(node.target)
        if local is not None:
            return local(self, node.target, args, kwargs)
        if node not in self.replicated:
            try:
                return self._call(node, args, kwargs, lambda t: t if _is_distributed(t) else self._replicate(t))
            except Exception:  # no sharding rule, or one that doesn't take these placements
                self.replicated.add(node)
                self._note(node, args)
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._plain, (args, kwargs))
        return pytree.tree_map_only(torch.Tensor, self._replicate, node.target(*args, **kwargs))  # type: ignore

    def _call(self, node: fx.Node, args: Any, kwargs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, change, (args, kwargs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _replicate(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole tensor as a DTensor; its gradient comes back whole."""
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor on every rank."""
        from torch.distributed.tensor import Replicate

        if not _is_distributed(tensor):
            return tensor
        return tensor.redistribute(placements=[Replicate()]).to_local()  # type: ignore[attr-defined]

    def settled(self, tensor: torch.Tensor) -> torch.Tensor:
        """A DTensor whose parts have been summed."""
        from torch.distributed.tensor import Replicate

        if any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
            return tensor.redistribute(placements=[Replicate()])  # type: ignore[attr-defined]
        return tensor

    def cut(self, node: object, values: Mapping[fx.Node, Any], dim: int) -> torch.Tensor | None:
        """A parameter cut along a dim; None if it is none, doesn't divide, or is cut otherwise already."""
        from torch.distributed.tensor import DTensor, Shard

        name = self.parameter_of.get(node)
        if name is None:
            return None
        value: torch.Tensor = values[node]  # type: ignore[index]
        if not self.derive:
            if self.dims.get(name) != dim:
                return None
            # Taken apart and put together again, so that its gradient comes back cut as it is, however DTensor made it.
            own = value.to_local(grad_placements=[Shard(dim)])  # type: ignore[attr-defined]
            return DTensor.from_local(own, self.mesh, [Shard(dim)], run_check=False)
        if name in self.forbidden:
            self.reasons[name] = "another module that uses it can't run split"
        elif value.shape[dim] % self.mesh.size():
            self.reasons[name] = f"its dim of {value.shape[dim]} doesn't divide by {self.mesh.size()}"
        elif self.dims.setdefault(name, dim) != dim:
            self.reasons[name] = "two uses of it would cut it differently"
        if name in self.reasons:
            return None
        return DTensor.from_local(own_part(value, self.mesh, dim), self.mesh, [Shard(dim)], run_check=False)

    def used_by(self, name: str) -> str:
        """Why a parameter was not cut that nothing tried to: the operators that take it."""
        used = {str(user.target).removeprefix("aten.").partition(".")[0] for node, known in self.parameter_of.items()
                if known == name for user in node.users}
        return f"{', '.join(sorted(used))} takes it whole" if used else "no operator takes it"

    def _note(self, node: fx.Node, args: tuple[Any, ...]) -> None:
        """Heads that the ranks can't share alike are computed by each."""
        if self.derive and node.target in _VIEWS and self.is_split_last(args[0]):
            shape, given = node.meta["val"].shape, args[0].shape
            heads = shape[len(given) - 1] if shape[:len(given) - 1] == given[:-1] else 1
            if heads % self.mesh.size():
                path = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())[-1][0]
                fits = [n for n in range(2, heads + 1) if heads % n == 0]
                self.notes.append(
                    f"{path.partition('@')[0]}: {heads} heads don't divide by tensor={self.mesh.size()}, so every rank "
                    f"computes all of them"
                    + (f" (tensor={' or '.join(map(str, fits))} would share them)" if fits else ""))

    def is_split_last(self, tensor: torch.Tensor) -> bool:
        """Whether a value is cut along its last dim, the features."""
        placement = getattr(tensor, "placements", (None,))[0]
        return placement is not None and bool(placement.is_shard(tensor.ndim - 1))


def _linear(run: SplitPiece, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """x @ weight.T + bias, weight (out, in)."""
    x, weight, bias = (*node.args, None)[:3]
    return _product(run, values, x, weight, bias, columns=0, rows=1, apply=lambda x, w, b: aten.linear(x, w, b))


def _addmm(run: SplitPiece, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """bias + x @ weight, weight (in, out)."""
    if node.kwargs:
        return None
    bias, x, weight = node.args
    return _product(run, values, x, weight, bias, columns=1, rows=0,
                    apply=lambda x, w, b: aten.mm(x, w) if b is None else aten.addmm(b, x, w))


def _matmul(run: SplitPiece, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """x @ weight, weight (in, out)."""
    x, weight = node.args
    if weight not in run.parameter_of or values[weight].ndim != 2:  # type: ignore[index]
        return None
    return _product(run, values, x, weight, None, columns=1, rows=0, apply=lambda x, w, b: aten.matmul(x, w))


def _product(run: SplitPiece, values: Mapping[fx.Node, Any], x: Any, weight: Any, bias: Any, *, columns: int,
             rows: int, apply: Callable[[Any, Any, Any], Any]) -> Any:
    given = values[x]
    offset = None if bias is None else values[bias]
    if run.is_split_last(given) and (cut := run.cut(weight, values, rows)) is not None:
        summed = run.settled(apply(given, cut, None))
        return summed if offset is None else summed + run._replicate(offset)
    cut = run.cut(weight, values, columns)
    if cut is None:
        return None
    if bias is not None:
        offset = run.cut(bias, values, 0)
        if offset is None:
            offset = run._replicate(values[bias])
    whole = run._replicate(run._plain(given))
    return apply(whole, cut, offset)


def _embedding(run: SplitPiece, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Rows of the table are cut; each rank looks up those that it has."""
    cut = run.cut(node.args[0], values, 0)
    if cut is None:
        return None
    rest: Any = fx.map_arg(node.args[1:], lambda n: values[n])
    ids = run._replicate(run._plain(rest[0]))
    return run.settled(aten.embedding(cut, ids, *rest[1:]))


def _attention(run: SplitPiece, target: Any, args: Any, kwargs: Any) -> Any:
    """Heads, or samples, are independent of each other: where all three are cut along them, so is the result."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    heads = args[:3]
    mask: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    places = [t.placements[0] if _is_distributed(t) else Replicate() for t in heads]
    dim = next((d for d in (0, 1) if all(place.is_shard(d) for place in places) and heads[0].ndim == 4), None)
    if dim is None:
        args, kwargs = pytree.tree_map_only(torch.Tensor, run._plain, (args, kwargs))
        return run._replicate(target(*args, **kwargs))
    local = [t.to_local() for t in heads]
    if mask is not None:
        mask = mask if _is_distributed(mask) else run._replicate(mask)
        full = mask.ndim == 4 and mask.shape[dim] > 1
        place: Any = Shard(dim) if full else Replicate()
        mask = mask.redistribute(placements=[place]).to_local(grad_placements=[place if full else Partial()])
    if len(args) > 3:
        args = (*local, mask, *args[4:])
    else:
        args, kwargs = tuple(local), {**kwargs, "attn_mask": mask}
    return DTensor.from_local(target(*args, **kwargs), run.mesh, [Shard(dim)], run_check=False)


def _elementwise(run: SplitPiece, target: Any, args: Any, kwargs: Any) -> Any:
    """Random layers: each rank draws for the part that it has."""
    from torch.distributed.tensor import DTensor

    x = run.settled(args[0])
    placements = x.placements  # type: ignore[attr-defined]
    return DTensor.from_local(target(x.to_local(), *args[1:], **kwargs), run.mesh,  # type: ignore[attr-defined]
                              placements, run_check=False)


_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int)
_WEIGHTED: dict[Any, Callable[[SplitPiece, fx.Node, Mapping[fx.Node, Any]], Any]] = {
    aten.linear.default: _linear, aten.addmm.default: _addmm,
    aten.matmul.default: _matmul, aten.mm.default: _matmul, aten.embedding.default: _embedding}
_LOCAL: dict[Any, Callable[[SplitPiece, Any, Any, Any], Any]] = {
    aten.scaled_dot_product_attention.default: _attention, aten.dropout.default: _elementwise}


def _is_distributed(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """After which node each value is needed no more."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(list(graph.nodes)):
        for arg in node.all_input_nodes:
            if arg not in seen:
                seen.add(arg)
                found.setdefault(node, []).append(arg)
    return found


def own_part(tensor: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's part of a tensor that divides evenly along a dim."""
    length = tensor.shape[dim] // mesh.size()
    return tensor.narrow(dim, mesh.get_local_rank() * length, length)
