"""Runs one captured piece on DTensors, whose sizes are those of the whole tensors.

Operator by operator, so that nothing in the graph has to be rewritten and a placement can be unwise but not wrong.
Which way a weight is split is found by running the piece once: a matrix product whose input is whole is split by
columns, one whose input is already split along the features by rows, unless the model says otherwise, and what comes
between goes the way DTensor takes it (heads of an attention, gates of an MLP). What lies between a product by rows and
the next one by columns (norms, dropout, residual sums) runs on a part of the sequence on each rank.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from paceline.capture.graph import Piece, mutated, statistics
from paceline.strategies.tensor.cut import Cut, cut_of
from paceline.strategies.tensor.draws import apart
from paceline.strategies.tensor.published import Direction

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten
SEQUENCE = 1  # the dim of (samples, sequence, features)


class SplitPiece:
    """Runs one piece on DTensors. The first run derives how its parameters are cut; later ones follow.

    cuts: of each parameter that is cut, by its name in the model; found where `derive` is set, else given.
    wishes: how the model itself wants parameters cut, by name.
    forbidden: parameters that must not be cut, and why. sharded: FSDP2 will cut what this leaves along dim 0.
    sequence: whether what lies between products is cut along the sequence, where that divides. cuts_sequence: whether
    anything was.
    reasons: why parameters could not be cut, by name. notes: what every rank computes whole.
    """

    def __init__(self, piece: Piece, mesh: DeviceMesh, cuts: dict[str, Cut], *, derive: bool = False,
                 wishes: Mapping[str, Direction] = MappingProxyType({}),
                 forbidden: Mapping[str, str] = MappingProxyType({}),
                 sharded: bool = False, sequence: bool = False) -> None:
        self.piece, self.mesh, self.cuts, self.derive = piece, mesh, cuts, derive
        self.sequence, self.cuts_sequence = sequence, False
        self.inputs = set(placeholders_of(piece)[-len(piece.inputs):] if piece.inputs else ())
        self.wishes, self.forbidden, self.sharded = wishes, forbidden, sharded
        self.graph: fx.Graph = piece.run.graph  # type: ignore[attr-defined]
        self.parameter_of = dict(zip(placeholders_of(piece), piece.parameters, strict=False))
        self.turned = _turned(self.graph, self.parameter_of)
        self.replicated: set[fx.Node] = set()
        self.last_use = _last_uses(self.graph, self.turned)
        self.reasons: dict[str, str] = {}
        self.notes: list[str] = []

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """tensors: as `Piece.run` takes them; split parameters as DTensors, all else whole and plain."""
        given = iter(tensors)
        values: dict[Any, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
                # Constants of the sequence, such as rotations, are for values that are cut along their heads.
                if node in self.inputs and values[node].requires_grad and self._has_sequence(values[node]):
                    values[node] = self.placed(values[node], Cut(SEQUENCE))
            elif node.op == "get_attr":
                values[node] = getattr(self.piece.run, str(node.target))
            elif node.op == "output":
                plain = (self.plain(self.value(arg, values)) for arg in node.args[0])
                # What came out of DTensor is a view, which can't be edited in place.
                return tuple(tensor.clone() if name in self.piece.edited else tensor
                             for name, tensor in zip(self.piece.outputs, plain, strict=True))
            elif node not in self.turned:
                values[node] = self._run(node, values)
            for done in self.last_use.get(node, ()):
                values.pop(done, None)
                values.pop((done, "gathered"), None)
        raise AssertionError("a graph ends with its output")

    def value(self, node: fx.Node, values: Mapping[Any, Any]) -> Any:
        """What a node gave; a turned weight is made when it is asked for."""
        if node not in self.turned:
            return values[node]
        found = values[self.turned[node][0]]
        cut = cut_of(found)
        if cut is not None and cut.blocks > 1:
            found = self.plain(found)
        for turn in self.turned[node][1]:
            found = _operator(turn)(found, *turn.args[1:])
        return found

    def _run(self, node: fx.Node, values: dict[Any, Any]) -> Any:
        if node.target is operator.getitem:
            return values[node.args[0]][node.args[1]]
        known = _WEIGHTED.get(str(node.target))
        if known is not None:
            found = known(self, node, values)
            if found is not None:
                return found
        args = fx.map_arg(node.args, lambda n: self.value(n, values))
        kwargs = fx.map_arg(node.kwargs, lambda n: self.value(n, values))
        changed = [self.value(arg, values) for arg in (*mutated(node), *statistics(node))]
        if changed and not any(map(_is_distributed, changed)):  # a buffer: it must be this very tensor that changes
            args, kwargs = pytree.tree_map_only(torch.Tensor, self.plain, (args, kwargs))
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if not isinstance(node.target, torch._ops.OpOverload):  # what is taken whole
            self.replicated.add(node)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(map(_is_distributed, leaves)):
            return node.target(*args, **kwargs)  # type: ignore[operator]
        local = _LOCAL.get(node.target)
        if local is not None:
            found = local(self, node, args, kwargs)
            if found is not None:
                return found
        if node not in self.replicated:
            try:
                return self._call(node, args, kwargs)
            except Exception:  # no sharding rule, or one that doesn't take these placements
                self.replicated.add(node)
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.plain, (args, kwargs))
        return pytree.tree_map_only(torch.Tensor, self.replicate, node.target(*args, **kwargs))  # type: ignore

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """As DTensor does it."""
        def change(tensor: torch.Tensor) -> torch.Tensor:
            if not _is_distributed(tensor):
                return self.replicate(tensor)
            cut = cut_of(tensor)
            return self.placed(tensor, None) if cut is not None and cut.blocks > 1 else tensor

        args, kwargs = pytree.tree_map_only(torch.Tensor, change, (args, kwargs))
        with warnings.catch_warnings(), self.draws(*pytree.tree_leaves((args, kwargs)), target=node.target):
            warnings.simplefilter("ignore")
            return node.target(*args, **kwargs)  # type: ignore[operator]

    # --- Placements -----------------------------------------------------------------------------------------------

    def replicate(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole tensor as a DTensor; its gradient comes back whole."""
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)

    def placed(self, tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
        """A tensor as a DTensor that is cut this way, or whole."""
        from torch.distributed.tensor import Replicate

        if tensor.requires_grad and not torch.is_grad_enabled():
            tensor = tensor.detach()  # else torch warns of it
        tensor = tensor if _is_distributed(tensor) else self.replicate(tensor)
        return tensor.redistribute(placements=[Replicate() if cut is None else cut.placement()])  # type: ignore

    def part(self, local: torch.Tensor, cut: Cut) -> torch.Tensor:
        """This rank's part of a tensor that is cut this way, as a DTensor."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, self.mesh, [cut.placement()], run_check=False)

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor on every rank."""
        return self.placed(tensor, None).to_local() if _is_distributed(tensor) else tensor  # type: ignore

    def gathered(self, node: fx.Node, values: dict[Any, Any]) -> torch.Tensor:
        """A whole value that every rank computes with another part of a weight; their gradients for it are summed."""
        from torch.distributed.tensor import Partial

        if (node, "gathered") not in values:
            whole = self.placed(self.value(node, values), None)
            values[node, "gathered"] = whole.to_local(grad_placements=[Partial()])  # type: ignore[attr-defined]
        found: torch.Tensor = values[node, "gathered"]
        return found

    def summed(self, local: torch.Tensor) -> torch.Tensor:
        """The sum of what the ranks have: of its sequence each keeps a part."""
        if not self._has_sequence(local):
            return self.placed(self.unsummed(local), None)
        self.cuts_sequence = True
        return self.placed(self.unsummed(local), Cut(SEQUENCE))

    def unsummed(self, local: torch.Tensor) -> torch.Tensor:
        """What the ranks have to sum."""
        from torch.distributed.tensor import DTensor, Partial

        return DTensor.from_local(local, self.mesh, [Partial()], run_check=False)

    def _has_sequence(self, value: torch.Tensor) -> bool:
        return (self.sequence and value.ndim == 3 and value.is_floating_point()
                and value.shape[SEQUENCE] % self.mesh.size() == 0)

    def unfolds_sequence(self, node: fx.Node) -> bool:
        """Whether all that is done to a product of flat tokens is to give it its sequence back."""
        values = [user.meta["val"] for user in node.users if user.target in _VIEWS]
        return self.sequence and len(values) == len(node.users) > 0 and all(map(self._has_sequence, values))

    def settled(self, tensor: torch.Tensor) -> torch.Tensor:
        """A DTensor whose parts have been summed."""
        return self.placed(tensor, None) if tensor.placements[0].is_partial() else tensor  # type: ignore[attr-defined]

    @contextmanager
    def draws(self, *given: Any, target: Any = None) -> Iterator[None]:
        """Where an operator draws random numbers for a tensor that is cut, each rank draws its own."""
        random = target is None or torch.Tag.nondeterministic_seeded in target.tags
        parts = [tensor for tensor in given if random and cut_of(tensor) is not None]
        with apart(self.mesh.get_local_rank(), parts[0].device) if parts else nullcontext():
            yield

    # --- Weights --------------------------------------------------------------------------------------------------

    def cut(self, weight: Any, values: Mapping[Any, Any], wanted: Cut) -> tuple[torch.Tensor, Cut] | None:
        """This rank's part of a weight, and how it is cut: as is known of it, else as is wanted; None if it is not."""
        source, turns = self.turned.get(weight, (weight, ()))
        name = self.parameter_of.get(source)
        if name is None:
            return None
        value: torch.Tensor = values[source]
        if name not in self.cuts:
            dim = _dim_before(turns, wanted.dim % value.ndim, value.ndim)
            # FSDP2 would say of rows of blocks that they are rows of the whole.
            found = Cut(dim, 1 if self.sharded and dim == 0 else wanted.blocks)
            if not self.derive or not self._may_cut(name, value.shape[found.dim], found):
                return None
            self.cuts[name] = found
        found = self.cuts[name]
        if self.derive:
            own = found.own(value, self.mesh)
        else:  # its gradient comes back cut as it is, however DTensor made it
            own = value.to_local(grad_placements=[found.placement()])  # type: ignore[attr-defined]
        for turn in turns:
            own = _operator(turn)(own, *turn.args[1:])
        return own, Cut(_dim_after(turns, found.dim, value.ndim), found.blocks)

    def _may_cut(self, name: str, length: int, cut: Cut) -> bool:
        if self.wishes.get(name) == "whole":
            self.reasons[name] = "the model's own plan keeps it whole"
        elif name in self.forbidden:
            self.reasons[name] = self.forbidden[name]
        elif not cut.divides(length, self.mesh.size()):
            self.reasons[name] = f"its dim of {length} doesn't divide by {self.mesh.size()}"
        else:
            return True
        return False

    def wish(self, weight: Any) -> Direction | None:
        """How the model itself wants a weight of a product cut."""
        source, _ = self.turned.get(weight, (weight, ()))
        return self.wishes.get(self.parameter_of.get(source, ""))

    def used_by(self, name: str) -> str:
        """Why a parameter was not cut that nothing tried to: the operators that take it."""
        sources = {node for node, known in self.parameter_of.items() if known == name}
        sources |= {node for node, (source, _) in self.turned.items() if source in sources}
        used = {str(user.target).removeprefix("aten.").partition(".")[0] for node in sources for user in node.users
                if user not in self.turned}
        return f"{', '.join(sorted(used))} takes it whole" if used else "no operator takes it"

    def blocks_after(self, node: fx.Node, length: int) -> int:
        """How many equal blocks what follows divides the features of a product into: q, k and v, a gate and its input.

        length: of the features.
        """
        found = max(map(self._blocks_of, _followers(node, length)), default=1)
        return found if Cut(0, found).divides(length, self.mesh.size()) else 1

    def _blocks_of(self, user: fx.Node) -> int:
        """How many equal blocks one operator takes the last dim of its first input apart into."""
        given = user.args[0].meta["val"].shape  # type: ignore[union-attr]
        last, args = given[-1], user.args[1:]
        if user.target in _VIEWS:
            parts = _parts_of_last(given, user.meta["val"].shape)
            ranks = self.mesh.size()
            apart = len(parts) > 2 and parts[1] % ranks == 0 and (parts[0] % ranks != 0 or parts[0] < parts[1])
            return parts[0] if apart else 1
        if user.target is aten.slice.Tensor:
            span = _span(user, last)
            return last // (span[1] - span[0]) if span and last % (span[1] - span[0]) == 0 < span[1] else 1
        sizes = _sizes(user)
        return len(sizes) if sizes and len(set(sizes)) == 1 and args else 1

    def _note(self, node: fx.Node, heads: int) -> None:
        """Heads that the ranks can't share alike are computed by each."""
        if self.derive and heads % self.mesh.size():
            path = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())[-1][0]
            fits = [n for n in range(2, heads + 1) if heads % n == 0]
            self.notes.append(
                f"{path.partition('@')[0]}: {heads} heads don't divide by tensor={self.mesh.size()}, so every rank "
                f"computes all of them" + (f" (tensor={' or '.join(map(str, fits))} would share them)" if fits else ""))


# --- Operators that take weights ----------------------------------------------------------------------------------


def _linear(run: SplitPiece, node: fx.Node, values: dict[Any, Any]) -> Any:
    """x @ weight.T + bias, weight (out, in)."""
    x, weight, bias = (*node.args, None)[:3]
    return _product(run, node, values, x, weight, bias, outer=0, inner=1, apply=aten.linear)


def _addmm(run: SplitPiece, node: fx.Node, values: dict[Any, Any]) -> Any:
    """bias + x @ weight, weight (in, out)."""
    if node.kwargs:
        return None
    bias, x, weight = node.args
    return _product(run, node, values, x, weight, bias, outer=1, inner=0,
                    apply=lambda x, w, b: aten.mm(x, w) if b is None else aten.addmm(b, x, w))


def _matmul(run: SplitPiece, node: fx.Node, values: dict[Any, Any]) -> Any:
    """x @ weight, weight (..., in, out): one matrix, or one for each expert."""
    (x, weight), product = node.args, _operator(node)
    return _product(run, node, values, x, weight, None, outer=-1, inner=-2, apply=lambda x, w, b: product(x, w))


def _grouped(run: SplitPiece, node: fx.Node, values: dict[Any, Any]) -> Any:
    """Rows of x in groups, each times the matrix of its expert; weight (experts, in, out)."""
    x, weight, *_ = node.args
    rest: Any = fx.map_arg((node.args[2:], node.kwargs), lambda n: run.plain(run.value(n, values)))
    product = _operator(node)
    return _product(run, node, values, x, weight, None, outer=-1, inner=-2,
                    apply=lambda x, w, b: product(x, w, *rest[0], **rest[1]))


def _product(run: SplitPiece, node: fx.Node, values: dict[Any, Any], x: Any, weight: Any, bias: Any, *,
             outer: int, inner: int, apply: Callable[[Any, Any, Any], Any]) -> Any:
    """A product with a weight, split by columns (outer) or rows (inner).

    By rows where the features of x are cut already, the model wants it so, or the weight is known to be.
    """
    given = run.value(x, values)
    before, wish = cut_of(given), run.wish(weight)
    features = before if before is not None and before.dim == given.ndim - 1 else None
    columns = Cut(outer, run.blocks_after(node, node.meta["val"].shape[-1]))
    by_rows = wish == "rows" or (features is not None and wish != "columns")
    found = run.cut(weight, values, Cut(inner, features.blocks if features else 1) if by_rows else columns)
    if found is None and by_rows:
        found = run.cut(weight, values, columns)
    if found is None:
        return None
    own, cut = found
    if cut.dim == inner % own.ndim:
        mine = run.placed(given, Cut(given.ndim - 1, cut.blocks)).to_local()  # type: ignore[attr-defined]
        part = apply(mine, own, None)
        if run.unfolds_sequence(node):
            if bias is not None:  # one of those that are summed has it
                part = part + run.gathered(bias, values) * float(run.mesh.get_local_rank() == 0)
            return run.unsummed(part)
        total = run.summed(part)
        return total if bias is None else total + run.placed(run.value(bias, values), None)
    if cut.dim != outer % own.ndim:
        return None
    offset = None
    if bias is not None:
        known = run.cut(bias, values, Cut(0, cut.blocks))
        offset = known[0] if known else cut_part(run, run.value(bias, values), Cut(0, cut.blocks))
    made = apply(run.gathered(x, values), own, offset)
    return run.part(made, Cut(made.ndim - 1, cut.blocks))


def cut_part(run: SplitPiece, whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    """This rank's part of a whole tensor, whose gradient is gathered."""
    return run.placed(whole, cut).to_local()  # type: ignore[attr-defined]


def _embedding(run: SplitPiece, node: fx.Node, values: dict[Any, Any]) -> Any:
    """Rows of the table are cut; each rank looks up those that it has."""
    found = run.cut(node.args[0], values, Cut(0))
    if found is None or found[1] != Cut(0):
        return None
    rest: Any = fx.map_arg(node.args[1:], lambda n: run.value(n, values))
    ids = run.placed(rest[0], None)
    rows = aten.embedding(run.part(found[0], Cut(0)), ids, *rest[1:])
    if run._has_sequence(rows):
        run.cuts_sequence = True
        return run.placed(rows, Cut(SEQUENCE))
    return run.settled(rows)


# --- Operators that run on parts ----------------------------------------------------------------------------------


def _attention(run: SplitPiece, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Heads, or samples, are independent of each other: where they are cut along them, so is the result."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    heads = args[:3]
    mask: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    cuts = [cut_of(t) for t in heads]
    size = run.mesh.size()
    dim = next((d for d in (1, 0) if Cut(d) in cuts and set(cuts) <= {Cut(d), None}
                and all(t.ndim == 4 and t.shape[d] % size == 0 for t in heads)), None)
    if dim is None:
        run._note(node, heads[0].shape[1] if heads[0].shape[1] % size else heads[1].shape[1])
        args, kwargs = pytree.tree_map_only(torch.Tensor, run.plain, (args, kwargs))
        return run.replicate(node.target(*args, **kwargs))  # type: ignore[operator]
    local = [run.placed(t, Cut(dim)).to_local() for t in heads]  # type: ignore[attr-defined]
    if mask is not None:
        mask = mask if _is_distributed(mask) else run.replicate(mask)
        full = mask.ndim == 4 and mask.shape[dim] > 1
        place: Any = Shard(dim) if full else Replicate()
        mask = mask.redistribute(placements=[place]).to_local(grad_placements=[place if full else Partial()])
    if len(args) > 3:
        args = (*local, mask, *args[4:])
    else:
        args, kwargs = tuple(local), {**kwargs, "attn_mask": mask}
    draws = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    with apart(run.mesh.get_local_rank(), local[0].device) if draws else nullcontext():
        return run.part(node.target(*args, **kwargs), Cut(dim))  # type: ignore[operator]


def _dropout(run: SplitPiece, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Each rank draws for the part that it has."""
    from torch.distributed.tensor import DTensor

    x = run.settled(args[0])
    with run.draws(x):
        made = node.target(x.to_local(), *args[1:], **kwargs)  # type: ignore[operator, attr-defined]
    return DTensor.from_local(made, run.mesh, x.placements, run_check=False)  # type: ignore[attr-defined]


def _view(run: SplitPiece, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Features in blocks come apart as blocks, or stay as they are; heads that don't divide are told.

    Flat tokens whose parts are to be summed are summed once they have their sequence back.
    """
    given, shape = args[0], tuple(node.meta["val"].shape)
    cut = cut_of(given)
    if given.placements[0].is_partial() and run._has_sequence(node.meta["val"]):
        return run.summed(given.to_local().reshape(shape))
    if cut == Cut(SEQUENCE) and given.ndim == 3 and shape[:2] != given.shape[:2]:  # a sequence among other dims
        return run._call(node, (run.placed(given, None), *args[1:]), kwargs)
    if cut is None or cut.dim != given.ndim - 1:
        return None
    parts = _parts_of_last(tuple(given.shape), shape)
    if cut.blocks == 1:
        if len(parts) > 1 and parts[0] % run.mesh.size():
            run._note(node, parts[0])
        return None
    if not parts or (len(parts) > 1 and parts[0] != cut.blocks):
        return None
    at = len(shape) - len(parts) + (len(parts) > 1)
    if shape[at] % run.mesh.size():
        run._note(node, shape[at])
        return None
    local = (*shape[:at], shape[at] // run.mesh.size(), *shape[at + 1:])
    return run.part(given.to_local().reshape(local), Cut(at, cut.blocks if len(parts) == 1 else 1))


def _apart(run: SplitPiece, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Blocks of features come apart on every rank: q from k and v, a gate from its input."""
    given = args[0]
    cut, sizes = cut_of(given), _sizes(node)
    if cut is None or cut.blocks == 1 or cut.dim != given.ndim - 1 or len(sizes) != cut.blocks or len(set(sizes)) > 1:
        return None
    return [run.part(part, Cut(cut.dim)) for part in given.to_local().chunk(cut.blocks, cut.dim)]


def _slice(run: SplitPiece, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """One block of features, or every second one."""
    given = args[0]
    cut = cut_of(given)
    if cut is None or cut.dim != given.ndim - 1:
        return None
    last = given.shape[-1]
    dim, start, end, step = _slice_arguments(node)
    if dim % given.ndim != cut.dim:
        return None
    local, block = given.to_local(), last // cut.blocks
    if cut.blocks == 1 and start < step and end >= last and local.shape[-1] % step == 0:
        return run.part(local[..., start::step], Cut(cut.dim))
    if cut.blocks > 1 and step == 1 and start % block == 0 and min(end, last) - start == block:
        return run.part(local.chunk(cut.blocks, cut.dim)[start // block], Cut(cut.dim))
    return None


_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int)
_APART = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes)
_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)
# By their names: some are there only when the library that brings them is.
_WEIGHTED: dict[str, Callable[[SplitPiece, fx.Node, dict[Any, Any]], Any]] = {
    "aten.linear.default": _linear, "aten.addmm.default": _addmm, "aten.matmul.default": _matmul,
    "aten.mm.default": _matmul, "aten.bmm.default": _matmul, "aten.embedding.default": _embedding,
    "aten._grouped_mm.default": _grouped, "transformers.grouped_mm_fallback.default": _grouped}
_LOCAL: dict[Any, Callable[[SplitPiece, fx.Node, Any, Any], Any]] = {
    aten.scaled_dot_product_attention.default: _attention, aten.dropout.default: _dropout, aten.slice.Tensor: _slice,
    **dict.fromkeys(_VIEWS, _view), **dict.fromkeys(_APART, _apart)}


def _operator(node: fx.Node) -> Callable[..., Any]:
    assert not isinstance(node.target, str)
    return node.target


# --- What the graph says ------------------------------------------------------------------------------------------


def placeholders_of(piece: Piece) -> list[fx.Node]:
    """What a piece takes: parameters, buffers, inputs."""
    return [node for node in piece.run.graph.nodes if node.op == "placeholder"]  # type: ignore[attr-defined]


def _turned(graph: fx.Graph, parameters: Mapping[fx.Node, str]) -> dict[fx.Node, tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Nodes that are a parameter with its dims in another order: the parameter, and how it was turned."""
    found: dict[fx.Node, tuple[fx.Node, tuple[fx.Node, ...]]] = {}
    for node in graph.nodes:
        given = node.args[0] if node.target in _TURNS else None
        if not isinstance(given, fx.Node):
            continue
        if given in found:
            found[node] = (found[given][0], (*found[given][1], node))
        elif given in parameters:
            found[node] = (given, (node,))
    return found


def _order(turn: fx.Node, ndim: int) -> list[int]:
    """For each dim after a turn the dim that it was."""
    order = list(range(ndim))
    if turn.target is aten.permute.default:
        return [dim % ndim for dim in turn.args[1]]  # type: ignore
    first, second = turn.args[1:] if len(turn.args) > 1 else (0, 1)
    order[first], order[second] = order[second], order[first]  # type: ignore[index]
    return order


def _dim_before(turns: Sequence[fx.Node], dim: int, ndim: int) -> int:
    for turn in reversed(turns):
        dim = _order(turn, ndim)[dim]
    return dim


def _dim_after(turns: Sequence[fx.Node], dim: int, ndim: int) -> int:
    for turn in turns:
        dim = _order(turn, ndim).index(dim)
    return dim


def _followers(node: fx.Node, length: int) -> Iterator[fx.Node]:
    """What uses a product's features: past biases, dtypes and views that leave them alone."""
    for user in node.users:
        value = user.meta.get("val")
        same = isinstance(value, torch.Tensor) and value.shape[-1] == length
        if same and user.target in (*_VIEWS, aten.add.Tensor, aten.to.dtype):
            yield from _followers(user, length)
        elif user.target in (*_VIEWS, *_APART, aten.slice.Tensor) and user.args[0] is node:
            yield user


def _parts_of_last(given: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """What a view makes of the last dim: its parts, or the dim itself; () where it is mixed with others.

    >>> _parts_of_last((2, 7, 24), (2, 7, 3, 8)), _parts_of_last((14, 24), (2, 7, 24)), _parts_of_last((4, 6), (24,))
    ((3, 8), (24,), ())
    """
    at, size = len(shape), 1
    while at and size < given[-1]:
        at, size = at - 1, size * shape[at - 1]
    return tuple(shape[at:]) if size == given[-1] else ()


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """Of the parts that an operator takes the last dim apart into; () where it takes another one."""
    if node.target not in _APART:
        return ()
    given = node.args[0].meta["val"]  # type: ignore[union-attr]
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    value = node.meta.get("val")
    if dim % given.ndim != given.ndim - 1 or not isinstance(value, list | tuple):
        return ()
    return tuple(part.shape[-1] for part in value)


def _slice_arguments(node: fx.Node) -> tuple[int, int, int, int]:
    """dim, start, end, step."""
    given: tuple[Any, ...] = (*node.args[1:], *(None,) * 4)
    dim, start, end, step = given[:4]
    length = node.args[0].meta["val"].shape[dim or 0]  # type: ignore[union-attr]
    start, end = start or 0, length if end is None else end
    start, end = (min(at + length if at < 0 else at, length) for at in (start, end))
    return dim or 0, start, end, step or 1


def _span(node: fx.Node, last: int) -> tuple[int, int] | None:
    """Of the last dim, what a slice of it takes: start and end; None where it takes another dim, or not all of it."""
    dim, start, end, step = _slice_arguments(node)
    given = node.args[0].meta["val"]  # type: ignore[union-attr]
    inside = dim % given.ndim == given.ndim - 1 and step == 1 and 0 < end - start < last
    return (start, end) if inside and start % (end - start) == 0 else None


def _is_distributed(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")


def _last_uses(graph: fx.Graph, turned: Mapping[fx.Node, tuple[fx.Node, Any]]) -> dict[fx.Node, list[fx.Node]]:
    """After which node each value is needed no more."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(list(graph.nodes)):
        if node in turned:
            continue
        for arg in (turned[arg][0] if arg in turned else arg for arg in node.all_input_nodes):
            if arg not in seen:
                seen.add(arg)
                found.setdefault(node, []).append(arg)
    return found
