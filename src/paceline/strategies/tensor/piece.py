"""Runs one captured piece on parts of its tensors, by a recorded program of local operators and
exchanges.

The recording decides how each weight is split. A matrix product whose input is whole is split by
columns. A product whose input is already split along the features is split by rows. Operators
between products (heads of an attention, gates of an MLP) run as DTensor would run them. Operators
between a product by rows and the next one by columns (norms, dropout, residual sums) run on a part
of the sequence on each rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from paceline.model.graph import Piece, mutated, statistics
from paceline.strategies.tensor.cut import Cut
from paceline.strategies.tensor.exchange import Exchanges, Sum, local_part
from paceline.strategies.tensor.leaf import leaf_of
from paceline.strategies.tensor.program import Placed, Program, ProgramRecorder
from paceline.strategies.tensor.rules import run_by_rule
from paceline.torch_private import pytree
from paceline.torch_private.dispatch import OpOverload

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten
SEQUENCE = 1  # the dim of (samples, sequence, features)


@dataclass(frozen=True, slots=True)
class CutRules:
    """The rules for cutting parameters."""

    # The reasons why parameters must stay whole, by name.
    forbidden: Mapping[str, str] = field(default_factory=dict)
    sharded: bool = False  # whether FSDP2 will cut the resulting parts along dim 0


class SplitPiece:
    """Runs one piece on parts of its tensors.

    Args:
        cuts: The cut of each parameter that is cut, by its name in the model. If `derive` is set,
            the cuts are found.
        derive: Whether the first run finds how the parameters are cut. Later runs use these cuts.
        sequence: Whether values between products are cut along the sequence, if it divides.
        exchanges: The exchanges; by default over the mesh.
    """

    def __init__(
        self,
        piece: Piece,
        mesh: DeviceMesh,
        cuts: dict[str, Cut],
        *,
        derive: bool = False,
        rules: CutRules | None = None,
        sequence: bool = False,
        exchanges: Exchanges | None = None,
    ) -> None:
        self.piece, self.mesh, self.cuts, self.derive = piece, mesh, cuts, derive
        self.exchanges = exchanges or Exchanges(mesh)
        # cuts_sequence: whether any value was cut along the sequence.
        self.sequence, self.cuts_sequence = sequence, False
        self.inputs = dict(
            zip(reversed(placeholders_of(piece)), reversed(piece.inputs), strict=False)
        )
        self.rules = rules or CutRules()
        self.graph: fx.Graph = piece.run.graph  # type: ignore[attr-defined]
        self.parameter_of = dict(zip(placeholders_of(piece), piece.parameters, strict=False))
        self.turned = _turned(self.graph, self.parameter_of)
        self.whole: set[fx.Node] = set()  # operators that no rule splits
        self.reasons: dict[str, str] = {}  # why parameters could not be cut, by name
        self.notes: list[str] = []  # about computations that every rank does whole
        # The recorded programs, by whether gradients are needed and by dtypes.
        self.programs: dict[Any, Program] = {}
        self.recorder: ProgramRecorder

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the piece. Collective.

        tensors: the arguments of `Piece.run`. Split parameters are DTensors, or whole tensors if
        `derive` is set. All others are whole plain tensors.
        """
        kind = tensors[0].device.type
        key = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            tuple([(tensor.requires_grad, tensor.dtype) for tensor in tensors]),
        )
        if key not in self.programs:
            # Recorded twice, because a weight may be cut after an operator has used it whole.
            if self.derive:
                self.recorded(tensors)
            self.programs[key] = self.recorded(tensors)
        names = self.piece.parameters
        parts = [
            self._part(name, tensor) if name in self.cuts else tensor
            for name, tensor in zip(names, tensors, strict=False)
        ]
        return self.programs[key](*parts, *tensors[len(names) :])

    def _part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter that is cut."""
        if self.derive:
            return self.cuts[name].local_slice(tensor, self.exchanges.rank, self.exchanges.size)
        leaf = leaf_of(tensor)
        return local_part(tensor) if leaf is None else leaf

    def recorded(self, tensors: Sequence[torch.Tensor]) -> Program:
        """Record the program of this rank for such tensors. Only their shapes and types matter."""
        self.recorder = ProgramRecorder(self.exchanges)
        remaining = iter(tensors)
        values: dict[Any, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = self._input(node, next(remaining))
            elif node.op == "get_attr":
                attribute = getattr(self.piece.run, str(node.target))
                values[node] = (
                    self.recorder.constant(attribute)
                    if isinstance(attribute, torch.Tensor)
                    else attribute
                )
            elif node.op == "output":
                outputs = [
                    self.recorder.moved(self.value(arg, values), self._between_pieces(name))
                    for name, arg in zip(self.piece.outputs, node.args[0], strict=True)
                ]
                # The result of an exchange may be a view, which can't be edited in place.
                return self.recorder.program(
                    [
                        self.recorder.run(aten.clone.default, value)
                        if name in self.piece.edited
                        else value
                        for name, value in zip(self.piece.outputs, outputs, strict=True)
                    ]
                )
            elif node not in self.turned:
                values[node] = self._run(node, values)
        raise AssertionError("a graph ends with its output")

    def _input(self, node: fx.Node, tensor: torch.Tensor) -> Placed:
        trained = tensor.requires_grad and torch.is_grad_enabled()
        name = self.parameter_of.get(node)
        cut = self.cuts.get(name) if name is not None else None
        if cut is not None:
            part = self.recorder.empty(cut.part_shape(tensor.shape, self.mesh.size()), tensor)
            return self.recorder.input(part, cut, trained=trained)
        placement = self._between_pieces(self.inputs.get(node))
        value = self.recorder.input(
            self.recorder.fake_of(tensor), placement, trained=trained, is_weight=name is not None
        )
        # Constants of the sequence, such as rotations, stay whole: they are used with values that
        # are cut along heads.
        return (
            self.recorder.moved(value, Cut(SEQUENCE))
            if (node in self.inputs and tensor.requires_grad and self._has_sequence(value))
            else value
        )

    def _between_pieces(self, name: str | None) -> Cut | None:
        """Return the cut of a value that is passed between pieces; None if it is whole."""
        return Cut(SEQUENCE) if name in self.piece.parts else None

    def value(self, node: fx.Node, values: Mapping[Any, Any]) -> Any:
        """Return the result of a node.

        A weight with its dims in another order is made on demand.
        """
        if node not in self.turned:
            return values[node]
        source, turns = self.turned[node]
        placed = values[source]
        if isinstance(placed.placement, Cut) and placed.placement.blocks > 1:
            placed = self.recorder.moved(placed, None)
        return self._turn(placed, turns)

    def _turn(self, value: Placed, turns: Sequence[fx.Node]) -> Placed:
        for turn in turns:
            cut = cut_of(value)
            after = Cut(_dim_after([turn], cut.dim, value.ndim), cut.blocks) if cut else None
            value = self.recorder.run(turn.target, value, *turn.args[1:], placement=after)  # type: ignore[arg-type]
        return value

    def _run(self, node: fx.Node, values: dict[Any, Any]) -> Any:
        if node.target is operator.getitem:
            return values[node.args[0]][node.args[1]]
        known = _WEIGHTED.get(str(node.target))
        if known is not None:
            result = known(self, node, values)
            if result is not None:
                return result
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.value(n, values))
        changed = [self.value(arg, values) for arg in (*mutated(node), *statistics(node))]
        placed = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Placed)]
        # A buffer that changes must be this very tensor. Functions that are not operators run
        # whole.
        is_whole = (
            all(value.placement is None for value in placed)
            or (changed and all(value.placement is None for value in changed))
            or not isinstance(node.target, OpOverload)
            or node in self.whole
        )
        if is_whole:
            return self.run_whole(node, args, kwargs)
        local = _LOCAL.get(node.target)
        if local is not None:
            result = local(self, node, args, kwargs)
            if result is not None:
                return result
        try:
            args_of_rule = pytree.tree_map_only(Placed, self._in_one_block, (args, kwargs))
            return run_by_rule(self.recorder, self.mesh, _operator(node), *args_of_rule)
        except Exception:  # no sharding rule, or one that doesn't accept these placements
            self.whole.add(node)
        return self.run_whole(node, args, kwargs)

    def run_whole(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run an operator on whole tensors, in the same way on every rank."""
        args, kwargs = pytree.tree_map_only(
            Placed, lambda value: self.recorder.moved(value, None), (args, kwargs)
        )
        if isinstance(node.target, OpOverload):
            return self.recorder.run(node.target, *args, **kwargs)
        # For functions that can't run on fakes, the capture has recorded the result.
        result = node.meta.get("val")
        if result is None:
            parts: dict[Any, Any] = {
                user.args[1]: user.meta["val"]
                for user in node.users
                if user.target is operator.getitem
            }
            result = tuple(parts.get(number) for number in range(max(parts, default=-1) + 1))
        result = pytree.tree_map_only(torch.Tensor, self.recorder.fake_of, result)
        return self.recorder.add(node.target, args, kwargs, result, lambda tensor: None)  # type: ignore[arg-type]

    # --- Placements -------------------------------------------------------------------------------

    def _in_one_block(self, value: Placed) -> Placed:
        """Return a value that is cut in one block, as DTensor's rules need it; a whole one if it
        has more."""
        cut = cut_of(value)
        return self.recorder.moved(value, None) if cut is not None and cut.blocks > 1 else value

    def summed(self, value: Placed) -> Placed:
        """Sum the values of all ranks. If the sum has a sequence, each rank keeps a part of it."""
        has_sequence = self._has_sequence(value)
        self.cuts_sequence |= has_sequence
        return self.recorder.moved(value, Cut(SEQUENCE) if has_sequence else None)

    def _has_sequence(self, value: Any) -> bool:
        """Whether a value can be cut along the sequence. value: a tensor, or one of a recording."""
        tensor = value.local if isinstance(value, Placed) else value
        return (
            self.sequence
            and tensor.ndim == 3
            and tensor.is_floating_point()
            and value.shape[SEQUENCE] % self.mesh.size() == 0
        )

    def unfolds_sequence(self, node: fx.Node) -> bool:
        """Whether all users of a product of flat tokens are views that restore the sequence."""
        values = [user.meta["val"] for user in node.users if user.target in _VIEWS]
        return (
            self.sequence
            and len(values) == len(node.users) > 0
            and all(map(self._has_sequence, values))
        )

    # --- Weights ----------------------------------------------------------------------------------

    def cut(self, weight: Any, values: Mapping[Any, Any], wanted: Cut) -> Placed | None:
        """Return this rank's part of a weight; None if the weight is not cut.

        A known cut of the weight takes precedence over the wanted one.
        """
        source, turns = self.turned.get(weight, (weight, ()))
        name = self.parameter_of.get(source)
        if name is None:
            return None
        value: Placed = values[source]
        if name not in self.cuts:
            dim = _dim_before(turns, wanted.dim % value.ndim, value.ndim)
            # FSDP2 would treat rows of several blocks as consecutive rows of the whole.
            cut = Cut(dim, 1 if self.rules.sharded and dim == 0 else wanted.blocks)
            if not self.derive or not self._may_cut(name, value.shape[cut.dim], cut):
                return None
            self.cuts[name] = cut
        return self._turn(self.recorder.moved(value, self.cuts[name]), turns)

    def _may_cut(self, name: str, length: int, cut: Cut) -> bool:
        if name in self.rules.forbidden:
            self.reasons[name] = self.rules.forbidden[name]
        elif not cut.divides(length, self.mesh.size()):
            self.reasons[name] = f"its dim of {length} doesn't divide by {self.mesh.size()}"
        else:
            return True
        return False

    def used_by(self, name: str) -> str:
        """Return the reason why no operator tried to cut a parameter: the operators that use it
        whole."""
        sources = {node for node, known in self.parameter_of.items() if known == name}
        sources |= {node for node, (source, _) in self.turned.items() if source in sources}
        used = {
            str(user.target).removeprefix("aten.").partition(".")[0]
            for node in sources
            for user in node.users
            if user not in self.turned
        }
        return f"{', '.join(sorted(used))} takes it whole" if used else "no operator takes it"

    def blocks_after(self, node: fx.Node, length: int) -> int:
        """Return the number of equal blocks into which later operators divide the features of a
        product.

        Examples are q, k and v, or a gate and its input. length: the number of features.
        """
        blocks = max(map(self._blocks_of, _followers(node, length)), default=1)
        return blocks if Cut(0, blocks).divides(length, self.mesh.size()) else 1

    def _blocks_of(self, user: fx.Node) -> int:
        """Return the number of equal blocks into which one operator divides the last dim of its
        first input."""
        shape = user.args[0].meta["val"].shape  # type: ignore[union-attr]
        last, args = shape[-1], user.args[1:]
        if user.target in _VIEWS:
            parts = _parts_of_last(shape, user.meta["val"].shape)
            ranks = self.mesh.size()
            apart = (
                len(parts) > 2
                and parts[1] % ranks == 0
                and (parts[0] % ranks != 0 or parts[0] < parts[1])
            )
            return parts[0] if apart else 1
        if user.target is aten.slice.Tensor:
            span = _span(user, last)
            return (
                last // (span[1] - span[0])
                if span and last % (span[1] - span[0]) == 0 < span[1]
                else 1
            )
        sizes = _sizes(user)
        return len(sizes) if sizes and len(set(sizes)) == 1 and args else 1

    def _note(self, node: fx.Node, heads: int) -> None:
        """Add a note if the heads don't divide by the number of ranks, so that each rank computes
        all of them."""
        if self.derive and heads % self.mesh.size():
            path = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())[-1][0]
            fits = [n for n in range(2, heads + 1) if heads % n == 0]
            self.notes.append(
                f"{path.partition('@')[0]}: {heads} heads don't divide by tensor={self.mesh.size()}, so every rank "
                f"computes all of them"
                + (f" (tensor={' or '.join(map(str, fits))} would share them)" if fits else "")
            )


# --- Operators that take weights ------------------------------------------------------------------


def _linear(run: SplitPiece, node: fx.Node, values: dict[Any, Any]) -> Any:
    """Record x @ weight.T + bias, weight (out, in)."""
    x, weight, bias = (*node.args, None)[:3]
    return _product(run, node, values, aten.linear.default, x, weight, bias, outer=0, inner=1)


def _addmm(run: SplitPiece, node: fx.Node, values: dict[Any, Any]) -> Any:
    """Record bias + x @ weight, weight (in, out)."""
    if node.kwargs:
        return None
    bias, x, weight = node.args
    return _product(run, node, values, aten.mm.default, x, weight, bias, outer=1, inner=0)


def _matmul(run: SplitPiece, node: fx.Node, values: dict[Any, Any]) -> Any:
    """Record x @ weight, weight (..., in, out): one matrix, or one for each expert."""
    x, weight = node.args
    return _product(run, node, values, _operator(node), x, weight, None, outer=-1, inner=-2)


def _grouped(run: SplitPiece, node: fx.Node, values: dict[Any, Any]) -> Any:
    """Record rows of x in groups, each times the matrix of its expert; weight (experts, in,
    out)."""
    x, weight, *_ = node.args
    more = fx.map_arg(
        (node.args[2:], node.kwargs),
        lambda n: run.recorder.moved(run.value(n, values), None),  # type: ignore[arg-type, return-value]
    )
    return _product(
        run, node, values, _operator(node), x, weight, None, outer=-1, inner=-2, more=more
    )


def _product(
    run: SplitPiece,
    node: fx.Node,
    values: dict[Any, Any],
    product: Callable[..., Any],
    x: Any,
    weight: Any,
    bias: Any,
    *,
    outer: int,
    inner: int,
    more: tuple[Sequence[Any], Mapping[str, Any]] = ((), {}),
) -> Any:
    """Record a product with a weight, split by columns (the outer dim) or rows (the inner one).

    It is split by rows if the features of x are already cut, or if the weight is known to be cut by
    rows.

    Args:
        outer: The weight's dim of the output's features.
        inner: The weight's dim of the input's features.
        more: Further arguments of the product.
    """
    record, (rest, options) = run.recorder, more
    x_placed: Placed = run.value(x, values)
    before = cut_of(x_placed)
    features = before if before is not None and before.dim == x_placed.ndim - 1 else None
    columns = Cut(outer, run.blocks_after(node, node.meta["val"].shape[-1]))
    cut_weight = None
    if features is not None:
        cut_weight = run.cut(weight, values, Cut(inner, features.blocks))
    if cut_weight is None:
        cut_weight = run.cut(weight, values, columns)
    if cut_weight is None:
        return None
    cut = cut_of(cut_weight)
    assert cut is not None
    offset = None if bias is None else run.value(bias, values)
    if cut.dim == inner % cut_weight.ndim:
        moved_input = record.moved(x_placed, Cut(x_placed.ndim - 1, cut.blocks))
        part = record.run(product, moved_input, cut_weight, *rest, placement=Sum(), **options)
        if run.unfolds_sequence(node):
            if offset is not None:  # one of the terms includes it
                part = record.run(
                    aten.add.Tensor,
                    part,
                    record.moved(record.moved(offset, None), Sum()),
                    placement=Sum(),
                )
            return part
        total = run.summed(part)
        return (
            total
            if offset is None
            else record.run(
                aten.add.Tensor, total, record.moved(offset, None), placement=total.placement
            )
        )
    if cut.dim != outer % cut_weight.ndim:
        return None
    if offset is not None:
        known = run.cut(bias, values, Cut(0, cut.blocks))
        offset = record.moved(known or offset, Cut(0, cut.blocks))
    whole, after = record.moved(x_placed, None), Cut(len(node.meta["val"].shape) - 1, cut.blocks)
    if product is aten.linear.default:
        return record.run(product, whole, cut_weight, offset, placement=after)
    if offset is not None:
        return record.run(aten.addmm.default, offset, whole, cut_weight, placement=after)
    return record.run(product, whole, cut_weight, *rest, placement=after, **options)


def _embedding(run: SplitPiece, node: fx.Node, values: dict[Any, Any]) -> Any:
    """Record an embedding whose table is cut by rows. Each rank looks up the rows that it has."""
    arguments: Any = (*node.args, *(-1, False, False)[len(node.args) - 2 :])
    table, ids, padding, *options = arguments
    rows_here = None if any(options) else run.cut(table, values, Cut(0))
    if rows_here is None or rows_here.placement != Cut(0):
        return None
    length = rows_here.local.shape[0]
    rows = run.recorder.run(
        _own_rows,
        rows_here,
        run.recorder.moved(run.value(ids, values), None),
        run.mesh.get_local_rank() * length,
        padding,
        placement=Sum(),
    )
    return run.summed(rows)


def _own_rows(table: torch.Tensor, ids: torch.Tensor, start: int, padding: int) -> torch.Tensor:
    """Return rows of this rank's part of a table, which begins at `start`; zeros for all other
    rows."""
    from_start, length = ids - start, table.shape[0]
    others = (from_start < 0) | (from_start >= length)
    local_padding = padding - start if 0 <= padding - start < length and padding >= 0 else -1
    rows = aten.embedding.default(table, from_start.masked_fill(others, 0), local_padding)
    return rows.masked_fill(others.unsqueeze(-1), 0)


# --- Operators that run on parts ------------------------------------------------------------------


def _attention(run: SplitPiece, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Record attention, cut along heads or samples if its inputs are.

    These are independent of each other.
    """
    heads: Sequence[Placed] = args[:3]
    mask: Placed | None = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    cuts = [cut_of(value) for value in heads]
    size = run.mesh.size()
    dim = next(
        (
            d
            for d in (1, 0)
            if Cut(d) in cuts
            and set(cuts) <= {Cut(d), None}
            and all(value.ndim == 4 and value.shape[d] % size == 0 for value in heads)
        ),
        None,
    )
    if dim is None:
        run._note(node, heads[0].shape[1] if heads[0].shape[1] % size else heads[1].shape[1])
        return run.run_whole(node, args, kwargs)
    local = [run.recorder.moved(value, Cut(dim)) for value in heads]
    if mask is not None:
        mask = run.recorder.moved(
            mask, Cut(dim) if mask.ndim == 4 and mask.shape[dim] > 1 else None
        )
    if len(args) > 3:
        args = (*local, mask, *args[4:])
    else:
        args, kwargs = tuple(local), {**kwargs, "attn_mask": mask}
    draws = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return run.recorder.run(node.target, *args, placement=Cut(dim), draws=bool(draws), **kwargs)  # type: ignore


def _dropout(run: SplitPiece, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Record dropout. Each rank draws for its own part."""
    x = args[0] if cut_of(args[0]) else run.recorder.moved(args[0], None)
    return run.recorder.run(
        node.target,  # type: ignore[arg-type]
        x,
        *args[1:],
        placement=x.placement,
        draws=x.placement is not None,
        **kwargs,
    )


def _view(run: SplitPiece, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Record a view. It may separate features into their blocks, or leave them as they are.

    Heads that don't divide are noted. A pending sum of flat tokens is computed once the view
    restores the sequence.
    """
    value, shape = args[0], tuple(node.meta["val"].shape)
    cut = cut_of(value)
    if isinstance(value.placement, Sum) and run._has_sequence(node.meta["val"]):
        return run.summed(
            run.recorder.run(aten.reshape.default, value, list(shape), placement=value.placement)
        )
    # The view mixes the sequence with other dims.
    if cut == Cut(SEQUENCE) and value.ndim == 3 and shape[:2] != value.shape[:2]:
        return run.run_whole(node, args, kwargs)
    if cut is None or cut.dim != value.ndim - 1:
        return None
    parts = _parts_of_last(tuple(value.shape), shape)
    if cut.blocks == 1:
        if len(parts) > 1 and parts[0] % run.mesh.size():
            run._note(node, parts[0])
        return None
    if not parts or (len(parts) > 1 and parts[0] != cut.blocks):
        return None
    dim = len(shape) - len(parts) + (len(parts) > 1)
    if shape[dim] % run.mesh.size():
        run._note(node, shape[dim])
        return None
    local = [*shape[:dim], shape[dim] // run.mesh.size(), *shape[dim + 1 :]]
    return run.recorder.run(
        aten.reshape.default, value, local, placement=Cut(dim, cut.blocks if len(parts) == 1 else 1)
    )


def _apart(run: SplitPiece, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Record the separation of blocks of features on every rank: q from k and v, or a gate from its
    input."""
    value = args[0]
    cut, sizes = cut_of(value), _sizes(node)
    if (
        cut is None
        or cut.blocks == 1
        or cut.dim != value.ndim - 1
        or len(sizes) != cut.blocks
        or len(set(sizes)) > 1
    ):
        return None
    return run.recorder.run(aten.chunk.default, value, cut.blocks, cut.dim, placement=Cut(cut.dim))


def _slice(run: SplitPiece, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Record a slice of one block of features, or of features at a regular step, such as every
    second one."""
    value = args[0]
    cut = cut_of(value)
    if cut is None or cut.dim != value.ndim - 1:
        return None
    last, local = value.shape[-1], value.local.shape[-1]
    dim, start, end, step = _slice_arguments(node)
    if dim % value.ndim != cut.dim:
        return None
    block = last // cut.blocks
    if cut.blocks == 1 and start < step and end >= last and local % step == 0:
        return run.recorder.run(
            aten.slice.Tensor, value, cut.dim, start, local, step, placement=Cut(cut.dim)
        )
    if cut.blocks > 1 and step == 1 and start % block == 0 and min(end, last) - start == block:
        return run.recorder.run(
            aten.chunk.default, value, cut.blocks, cut.dim, placement=Cut(cut.dim)
        )[start // block]
    return None


_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int)
_APART = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes)
_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)
# By name, because some operators exist only if their library is loaded.
_WEIGHTED: dict[str, Callable[[SplitPiece, fx.Node, dict[Any, Any]], Any]] = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "aten.matmul.default": _matmul,
    "aten.mm.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.embedding.default": _embedding,
    "aten._grouped_mm.default": _grouped,
    "transformers.grouped_mm_fallback.default": _grouped,
}
_LOCAL: dict[Any, Callable[[SplitPiece, fx.Node, Any, Any], Any]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.dropout.default: _dropout,
    aten.slice.Tensor: _slice,
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_APART, _apart),
}


def cut_of(value: Placed) -> Cut | None:
    """Return the cut of a value; None if it is whole, or a pending sum."""
    return value.placement if isinstance(value.placement, Cut) else None


def _operator(node: fx.Node) -> Callable[..., Any]:
    assert not isinstance(node.target, str)
    return node.target


# --- What the graph says --------------------------------------------------------------------------


def placeholders_of(piece: Piece) -> list[fx.Node]:
    """Return the placeholders of a piece: parameters, buffers, inputs."""
    return [node for node in piece.run.graph.nodes if node.op == "placeholder"]  # type: ignore[attr-defined]


def _turned(
    graph: fx.Graph, parameters: Mapping[fx.Node, str]
) -> dict[fx.Node, tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Return the nodes that are a parameter with its dims in another order, each with the parameter
    and the turns."""
    sources: dict[fx.Node, tuple[fx.Node, tuple[fx.Node, ...]]] = {}
    for node in graph.nodes:
        source = node.args[0] if node.target in _TURNS else None
        if not isinstance(source, fx.Node):
            continue
        if source in sources:
            sources[node] = (sources[source][0], (*sources[source][1], node))
        elif source in parameters:
            sources[node] = (source, (node,))
    return sources


def _order(turn: fx.Node, ndim: int) -> list[int]:
    """Return, for each dim after a turn, its number before the turn."""
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
    """Yield the operators that divide a product's features, past biases, casts and views that keep
    them."""
    for user in node.users:
        value = user.meta.get("val")
        same = isinstance(value, torch.Tensor) and value.shape[-1] == length
        if same and user.target in (*_VIEWS, aten.add.Tensor, aten.to.dtype):
            yield from _followers(user, length)
        elif user.target in (*_VIEWS, *_APART, aten.slice.Tensor) and user.args[0] is node:
            yield user


def _parts_of_last(shape_before: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the dims that a view makes of the last dim; () if it mixes this dim with others.

    >>> _parts_of_last((2, 7, 24), (2, 7, 3, 8)), _parts_of_last((14, 24), (2, 7, 24)), _parts_of_last((4, 6), (24,))
    ((3, 8), (24,), ())
    """
    dim, size = len(shape), 1
    while dim and size < shape_before[-1]:
        dim, size = dim - 1, size * shape[dim - 1]
    return tuple(shape[dim:]) if size == shape_before[-1] else ()


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """Return the sizes of the parts into which an operator divides the last dim; () if it divides
    another dim."""
    if node.target not in _APART:
        return ()
    tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    value = node.meta.get("val")
    if dim % tensor.ndim != tensor.ndim - 1 or not isinstance(value, list | tuple):
        return ()
    return tuple(part.shape[-1] for part in value)


def _slice_arguments(node: fx.Node) -> tuple[int, int, int, int]:
    """Return the dim, start, end and step of a slice."""
    arguments: tuple[Any, ...] = (*node.args[1:], *(None,) * 4)
    dim, start, end, step = arguments[:4]
    length = node.args[0].meta["val"].shape[dim or 0]  # type: ignore[union-attr]
    start, end = start or 0, length if end is None else end
    start, end = (
        min(position + length if position < 0 else position, length) for position in (start, end)
    )
    return dim or 0, start, end, step or 1


def _span(node: fx.Node, last: int) -> tuple[int, int] | None:
    """Return start and end of a slice of the last dim if it takes one of several equal blocks;
    otherwise None."""
    dim, start, end, step = _slice_arguments(node)
    tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    inside = dim % tensor.ndim == tensor.ndim - 1 and step == 1 and 0 < end - start < last
    return (start, end) if inside and start % (end - start) == 0 else None
