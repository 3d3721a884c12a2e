"""Layers split over ranks, derived from the captured graph of each piece; DTensor does the arithmetic.

A piece runs operator by operator on DTensors, whose sizes are those of the whole tensors, so that nothing in the
graph has to be rewritten and a placement can be unwise but not wrong. Which way a weight is split is found by running
the piece once: a matrix product whose input is whole is split by columns, one whose input is already split along the
features by rows, and what comes between goes the way DTensor takes it (heads of an attention, gates of an MLP).

Every piece that is split is first held against the whole one, outputs and gradients. One that differs, or that DTensor
can't run, stays whole.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils import _pytree as pytree

from paceline.capture.graph import Capture, Piece
from paceline.capture.randomness import WithoutRandomness

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten
# How far a split piece may be from the whole one on the example, relative to the greatest element: rounding alone.
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True)
class Split:
    """How a model is split.

    mesh: of one dim; None if nothing is split.
    dims: of each split parameter the dim that is cut, by name.
    whole: why each other piece with parameters is not split, by key.
    """

    mesh: DeviceMesh | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)

    def touches(self, piece: Piece) -> bool:
        return any(name in self.dims for name in piece.parameters)

    def runner(self, piece: Piece) -> SplitPiece:
        assert self.mesh is not None
        return SplitPiece(piece, self.mesh, dict(self.dims))

    def apply(self, tensors: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Each parameter as this rank holds it."""
        from torch.distributed.tensor import DTensor, Shard

        found = dict(tensors)
        for name in [name for name in tensors if name in self.dims]:
            assert self.mesh is not None
            dim = self.dims[name]
            own = own_part(tensors[name].data, self.mesh, dim).clone(memory_format=torch.contiguous_format)
            found[name] = nn.Parameter(DTensor.from_local(own, self.mesh, [Shard(dim)], run_check=False),
                                       requires_grad=tensors[name].requires_grad)
        return found


class SplitPiece:
    """Runs one piece on DTensors. The first run derives how its parameters are cut; later ones follow.

    dims: of each parameter that is cut, by its name in the model; found where `derive` is set, else given.
    forbidden: parameters that must not be cut.
    """

    def __init__(self, piece: Piece, mesh: DeviceMesh, dims: dict[str, int], *, derive: bool = False,
                 forbidden: Collection[str] = ()) -> None:
        self.piece, self.mesh, self.dims, self.derive, self.forbidden = piece, mesh, dims, derive, forbidden
        self.graph: fx.Graph = piece.run.graph  # type: ignore[attr-defined]
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.parameter_of = dict(zip(placeholders, piece.parameters, strict=False))
        self.replicated: set[fx.Node] = set()
        self.last_use = _last_uses(self.graph)

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
        if name in self.forbidden or value.shape[dim] % self.mesh.size() or self.dims.setdefault(name, dim) != dim:
            return None
        return DTensor.from_local(own_part(value, self.mesh, dim), self.mesh, [Shard(dim)], run_check=False)

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


def derive(capture: Capture, tensors: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor],
           inputs: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> Split:
    """How the model's pieces are split over a mesh of one dim, each checked on the example. Collective.

    tensors: the model's parameters, whole. inputs: the example's, by name.
    """
    forbidden: set[str] = set()
    while True:
        dims, whole = _derive(capture, tensors, buffers, inputs, mesh, forbidden)
        # A parameter that one piece cuts and another can't take cut (a tied one) stays whole in both.
        clash = {name for piece in capture.pieces if piece.key in whole for name in piece.parameters if name in dims}
        if not clash:
            return Split(mesh, dims, whole)
        forbidden |= clash


def _derive(capture: Capture, tensors: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor],
            inputs: Mapping[str, torch.Tensor], mesh: DeviceMesh,
            forbidden: Collection[str]) -> tuple[dict[str, int], dict[str, str]]:
    dims: dict[str, int] = {}
    whole: dict[str, str] = {}
    values = dict(inputs)
    for piece in capture.pieces:
        given = [values[name] for name in piece.inputs]
        held = [tensors[name] for name in piece.parameters]
        also = [buffers[name] for name in piece.buffers]
        before = [buffer.clone() for buffer in also]
        if piece.parameters:
            run = SplitPiece(piece, mesh, dict(dims), derive=True, forbidden=forbidden)
            outputs, reason = _compare(run, held, also, given)
            if reason is None:
                dims = run.dims
            else:
                whole[piece.key] = reason
        else:
            with torch.no_grad():
                outputs = list(piece.run(*also, *given))
        for buffer, value in zip(also, before, strict=True):
            buffer.copy_(value)
        values |= zip(piece.outputs, outputs, strict=True)
    return dims, whole


def _compare(run: SplitPiece, held: list[torch.Tensor], buffers: list[torch.Tensor],
             given: list[torch.Tensor]) -> tuple[list[torch.Tensor], str | None]:
    """The whole piece's outputs, and why it can't be split; None if it can. Collective."""
    with WithoutRandomness():  # parts of a layer draw for themselves
        expected, expected_grads = _outputs_and_gradients(run.piece.run, held, buffers, given)
    found: list[torch.Tensor] = []
    grads: list[torch.Tensor | None] = []
    reason = None
    try:
        with WithoutRandomness():
            found, grads = _outputs_and_gradients(run, held, buffers, given)
    except Exception as error:
        reason = f"DTensor can't run it: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not any(name in run.dims for name in run.piece.parameters):
        reason = reason or "nothing in it can be split"
    if not _agreed(reason is None, run.mesh):
        return expected, reason or "another rank can't run it"
    for name, gradient in zip(run.piece.parameters, grads, strict=False):
        if name in run.dims and gradient is not None:  # each rank has its own part's, and zeros
            dist.all_reduce(gradient, group=run.mesh.get_group())
    reason = next((f"split, its {what} differ by {off:.2g}" for what, off, allowed in
                   (*_distances("outputs", found, expected), *_distances("gradients", grads, expected_grads))
                   if not off <= allowed), None)
    return expected, None if _agreed(reason is None, run.mesh) else reason or "it differs on another rank"


def _agreed(fine: bool, mesh: DeviceMesh) -> bool:
    flag = torch.tensor(float(fine), device=mesh.device_type)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=mesh.get_group())
    return bool(flag)


def _outputs_and_gradients(run: Callable[..., tuple[torch.Tensor, ...]], held: Iterable[torch.Tensor],
                           buffers: list[torch.Tensor], given: Iterable[torch.Tensor]) -> tuple[Any, Any]:
    """What a piece gives, and the gradients of a fixed mixture of its outputs with respect to all it is given."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in (*held, *given)]
    count = len(list(held))
    with torch.enable_grad():
        outputs = run(*leaves[:count], *buffers, *leaves[count:])
        mixed = [(out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
                 for out in outputs if out.requires_grad]
        if mixed:
            torch.stack([part.double() for part in mixed]).sum().backward()
    return [out.detach() for out in outputs], [leaf.grad for leaf in leaves]


def _distances(what: str, found: list[Any], expected: list[Any]) -> Iterable[tuple[str, float, float]]:
    for mine, theirs in zip(found, expected, strict=True):
        if mine is None or theirs is None or not theirs.is_floating_point() or not theirs.numel():
            continue
        scale = max(float(theirs.abs().max()), 1e-6)
        yield what, float((mine - theirs).abs().max()), ALLOWED.get(theirs.dtype, 1e-3) * scale
