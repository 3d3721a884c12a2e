"""Layers split over ranks, derived from the captured graph of each piece, which is recorded on parts (`piece.py`).

Every split piece is first compared with the whole one, outputs and gradients. A piece that differs, or that DTensor
can't run, stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from paceline.base.errors import PlanRefused
from paceline.cluster.software import SEQUENCE_BYTES
from paceline.model.graph import Capture, Piece, Value
from paceline.model.randomness import WithoutRandomness
from paceline.strategies.layout import Report
from paceline.strategies.tensor.cut import Cut
from paceline.strategies.tensor.leaf import give_leaf
from paceline.strategies.tensor.piece import SEQUENCE, CutRules, SplitPiece
from paceline.strategies.tensor.report import pattern, report

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# How far a split piece may be from the whole one on the example, relative to the greatest element: rounding alone, of
# the dtype of the result or of the one that autocast computes in.
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
# Of a split piece, its weights, buffers, inputs, and whether each of those is trained: the whole piece's outputs, and
# why it can't be split; None if it can, "" if nothing in it was cut.
Tried = Callable[
    [SplitPiece, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[bool]],
    tuple[list[torch.Tensor], str | None],
]


@dataclass(frozen=True)
class TensorSplit:
    """How a model is split.

    mesh: of one dim; None if nothing is split.
    cuts: how each split parameter is cut, by name.
    sequence: keys of the pieces that cut what lies between their products along the sequence.
    whole: why each other parameter is not split, by name.
    notes: what every rank computes whole although its weights are split.
    """

    mesh: DeviceMesh | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    sequence: frozenset[str] = frozenset()
    whole: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def touches(self, piece: Piece) -> bool:
        return any(name in self.cuts for name in piece.parameters)

    def in_parts(self, capture: Capture) -> Capture:
        """The capture as ranks run it: values that go from one piece that cuts the sequence to others stay cut.

        The model's outputs, what is edited in place, and what a piece takes that cuts no sequence are whole.
        """
        if self.mesh is None or not self.sequence:
            return capture
        takers: dict[str, list[Piece]] = {}
        for piece in capture.pieces:
            for name in piece.inputs:
                takers.setdefault(name, []).append(piece)
        outputs = {output for output in capture.outputs if isinstance(output, str)}
        parts = frozenset(
            name
            for piece in capture.pieces
            if piece.key in self.sequence and self.touches(piece)
            for name in piece.outputs
            if name not in outputs
            and name not in piece.edited
            and self._divides(capture.values[name])
            and all(
                taker.key in self.sequence and self.touches(taker) for taker in takers.get(name, ())
            )
        )
        return replace(
            capture,
            values={
                name: _part_of_sequence(value, self.mesh.size()) if name in parts else value
                for name, value in capture.values.items()
            },
            pieces=tuple(
                replace(piece, parts=parts.intersection((*piece.inputs, *piece.outputs)))
                for piece in capture.pieces
            ),
        )

    def _divides(self, value: Value) -> bool:
        assert self.mesh is not None
        return (
            value.differentiable
            and len(value.shape) == 3
            and value.shape[SEQUENCE] % self.mesh.size() == 0
            and value.dtype.is_floating_point
        )

    def empty_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """As large as a rank's part of a parameter."""
        cut = self.cuts.get(name)
        if cut is None or self.mesh is None:
            return torch.empty_like(whole)
        return whole.new_empty(
            [
                length // self.mesh.size() if dim == cut.dim else length
                for dim, length in enumerate(whole.shape)
            ]
        )

    def runner(self, piece: Piece) -> SplitPiece:
        assert self.mesh is not None
        return SplitPiece(piece, self.mesh, dict(self.cuts), sequence=piece.key in self.sequence)

    def report(self, tensors: Mapping[str, nn.Parameter]) -> Report:
        """What is split and what is not. tensors: all parameters, whole."""
        return (
            Report()
            if self.mesh is None
            else report(
                tensors, self.whole, self.notes, sequence=self.sequence, ranks=self.mesh.size()
            )
        )

    def apply(
        self, tensors: Mapping[str, nn.Parameter], device: torch.device | None
    ) -> dict[str, nn.Parameter]:
        """Each parameter as this rank holds it, on the device; whole ones are brought there in place.

        device: None leaves all where they are, for sharding to bring them; see `shard/run.py`.
        """
        parameters = dict(tensors)
        for name in [name for name in tensors if name in self.cuts]:
            assert self.mesh is not None
            cut = self.cuts[name]
            part = cut.local_slice(tensors[name].data, self.mesh)
            parameters[name] = nn.Parameter(
                _distributed(part, self.mesh, cut, device or part.device),
                requires_grad=tensors[name].requires_grad,
            )
            if device is not None:  # sharding puts other parameters in their places
                give_leaf(parameters[name])
        for name in tensors.keys() - self.cuts.keys() if device is not None else ():
            tensors[name].data = tensors[name].data.to(device)
        return parameters


def _part_of_sequence(value: Value, ranks: int) -> Value:
    samples, length, features = value.shape
    return replace(value, shape=(samples, length // ranks, features))


def _distributed(
    part: torch.Tensor, mesh: DeviceMesh, cut: Cut, device: torch.device
) -> torch.Tensor:
    """A DTensor with a copy of this rank's part on a device, which need not be one of the mesh's."""
    from torch.distributed.tensor import DTensor

    if device.type == mesh.device_type:
        local = part.to(device, copy=True, memory_format=torch.contiguous_format)
        return DTensor.from_local(local, mesh, [cut.placement()], run_check=False)
    # `from_local` would bring it to the mesh's devices, unless it is on none.
    shape = DTensor.from_local(part.to("meta"), mesh, [cut.placement()], run_check=False)
    with torch.no_grad():
        distributed = cast(
            DTensor, torch.empty_like(shape, device=device, memory_format=torch.contiguous_format)
        )
        distributed.to_local().copy_(part)
    return distributed


def derive(
    capture: Capture,
    tensors: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    mesh: DeviceMesh,
    *,
    rules: CutRules,
    batches: float = 1.0,
    tried: Tried | None = None,
) -> TensorSplit:
    """How the model's pieces are split over a mesh of one dim, each checked on the example. Collective.

    tensors: the model's parameters, whole; brought piece by piece to the device of the inputs, for a moment.
    inputs: the example's, by name. rules: a piece that can't run as the model wishes is split without that.
    batches: as large as the example that a micro-batch has. tried: in the place of running a split piece beside the
    whole one.
    """
    forbidden, tried = dict(rules.forbidden), tried or _compare
    while True:
        derived = _derive(
            capture,
            tensors,
            buffers,
            inputs,
            partial(SplitPiece, mesh=mesh, derive=True),
            replace(rules, forbidden=forbidden),
            batches,
            tried,
        )
        # A parameter that one piece cuts and another can't take cut (a tied one) stays whole in both.
        clash = {
            name for piece in derived.unsplit for name in piece.parameters if name in derived.cuts
        }
        if not clash:
            reasons = {
                name: derived.reasons.get(name, "no module uses it")
                for name in tensors
                if name not in derived.cuts
            }
            notes = tuple(dict.fromkeys(map(pattern, derived.notes)))
            return TensorSplit(mesh, derived.cuts, frozenset(derived.sequence), reasons, notes)
        forbidden |= dict.fromkeys(clash, "another module that uses it can't run split")


@dataclass
class _Derived:
    """What is known after some pieces. unsplit: those that stay whole. reasons: why parameters do, by name."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    sequence: list[str] = field(default_factory=list)
    unsplit: list[Piece] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _derive(
    capture: Capture,
    tensors: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    split: Callable[..., SplitPiece],
    rules: CutRules,
    batches: float,
    tried: Tried,
) -> _Derived:
    derived = _Derived()
    values = dict(inputs)
    device = next(iter([*inputs.values(), *tensors.values()])).device
    for piece in capture.pieces:
        piece_inputs = [values[name] for name in piece.inputs]
        parameters = [tensors[name].to(device) for name in piece.parameters]
        also = [buffers[name] for name in piece.buffers]
        before = [buffer.clone() for buffer in also]
        if piece.opaque:  # its code keeps what it likes: it is not run more often than it must
            with torch.no_grad():
                outputs = list(piece.run(*parameters, *also, *piece_inputs))
            derived.unsplit.append(piece)
            for name in piece.parameters:
                derived.reasons.setdefault(name, f"'{piece.opaque[0]}' is not looked into")
        elif piece.parameters:
            trained = [
                capture.values[name].differentiable if name in capture.values else False
                for name in piece.inputs
            ]
            between = [
                capture.values[name]
                for name in (*piece.inputs, *piece.outputs)
                if name in capture.values
            ]
            large = max(map(_bytes_along_sequence, between), default=0) * batches >= SEQUENCE_BYTES
            for way in _ways(rules, piece, with_sequence=large):
                run = split(piece, cuts=dict(derived.cuts), **way)
                outputs, reason = tried(run, parameters, also, piece_inputs, trained)
                if reason is None:
                    break
            if reason is None:
                derived.sequence += [piece.key] if run.cuts_sequence else []
                derived.cuts = run.cuts
                derived.notes += run.notes
            else:
                derived.unsplit.append(piece)
            for name in piece.parameters:
                derived.reasons.setdefault(
                    name, run.reasons.get(name) or reason or run.used_by(name)
                )
        else:
            with torch.no_grad():
                outputs = list(piece.run(*also, *piece_inputs))
        for buffer, value in zip(also, before, strict=True):
            buffer.copy_(value)
        values |= zip(piece.outputs, outputs, strict=True)
    return derived


def _bytes_along_sequence(value: Value) -> int:
    """Of a value of (samples, sequence, features); 0 of others."""
    return value.num_bytes if len(value.shape) == 3 and value.dtype.is_floating_point else 0


def _ways(rules: CutRules, piece: Piece, *, with_sequence: bool) -> list[dict[str, Any]]:
    """How a piece is split, the best first: as the model wishes, and with a sequence that is cut too."""
    rule_sets = (
        [rules, replace(rules, wishes={})]
        if rules.wishes.keys() & set(piece.parameters)
        else [rules]
    )
    return [
        {"rules": followed, "sequence": sequence}
        for followed in rule_sets
        for sequence in ((True, False) if with_sequence else (False,))
    ]


def _compare(
    run: SplitPiece,
    weights: list[torch.Tensor],
    buffers: list[torch.Tensor],
    inputs: list[torch.Tensor],
    trained: list[bool],
) -> tuple[list[torch.Tensor], str | None]:
    """The whole piece's outputs, and why it can't be split; None if it can, "" if nothing in it was cut. Collective."""
    before = [buffer.clone() for buffer in buffers]
    with WithoutRandomness():  # parts of a layer draw for themselves
        expected, expected_grads = _outputs_and_gradients(
            run.piece.run, weights, buffers, inputs, trained
        )
    expected_buffers = [buffer.clone() for buffer in buffers]
    for buffer, value in zip(buffers, before, strict=True):
        buffer.copy_(value)
    outputs: list[torch.Tensor] = []
    grads: list[torch.Tensor | None] = []
    reason = None
    try:
        with WithoutRandomness():
            outputs, grads = _outputs_and_gradients(run, weights, buffers, inputs, trained)
    except Exception as error:
        reason = why_whole(error)
    cuts = any(name in run.cuts for name in run.piece.parameters)
    if not _agreed(cuts and reason is None, run.mesh):
        return expected, reason or ("another rank can't run it" if cuts else "")
    for name, gradient in zip(run.piece.parameters, grads, strict=False):
        if name in run.cuts and gradient is not None:  # each rank has its own part's, and zeros
            dist.all_reduce(gradient, group=run.mesh.get_group())
    reason = next(
        (
            f"split, its {kind} differ by {off:.2g}"
            for kind, off, allowed in (
                *_distances("outputs", outputs, expected),
                *_distances("gradients", grads, expected_grads),
                *_distances("buffers", buffers, expected_buffers),
            )
            if not off <= allowed
        ),
        None,
    )
    return expected, None if _agreed(
        reason is None, run.mesh
    ) else reason or "it differs on another rank"


def why_whole(error: Exception) -> str:
    """Why a piece isn't split whose parts failed."""
    first_line, kind = str(error).partition("\n")[0], type(error).__name__
    return f"it can't run in parts: {first_line if isinstance(error, PlanRefused) else f'{kind}: {first_line}'}"


def _agreed(fine: bool, mesh: DeviceMesh) -> bool:
    flag = torch.tensor(float(fine), device=mesh.device_type)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=mesh.get_group())
    return bool(flag)


def _outputs_and_gradients(
    run: Callable[..., tuple[torch.Tensor, ...]],
    parameters: Iterable[torch.Tensor],
    buffers: list[torch.Tensor],
    inputs: Iterable[torch.Tensor],
    trained: list[bool],
) -> tuple[Any, Any]:
    """What a piece gives, and the gradients of a fixed mixture of its outputs with respect to weights and inputs.

    trained: of each input whether it depends on weights.
    """
    count = len(list(parameters))
    leaves = [
        t.detach().clone().requires_grad_(t.is_floating_point() and wanted)
        for t, wanted in zip((*parameters, *inputs), (*[True] * count, *trained), strict=True)
    ]
    with torch.enable_grad():
        outputs = run(
            *leaves[:count], *buffers, *(leaf.clone() for leaf in leaves[count:])
        )  # may be edited in place
        weights = [
            torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
            for out in outputs
        ]
        mixed = [
            (out * weight.view(out.shape)).sum()
            for out, weight in zip(outputs, weights, strict=True)
            if out.requires_grad
        ]
        if mixed:
            torch.stack([part.double() for part in mixed]).sum().backward()
    gradients = (leaf.grad for leaf in leaves)
    return [out.detach() for out in outputs], [
        gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
        for gradient in gradients
    ]


def _distances(
    kind_of_tensor: str, actual: list[Any], expected: list[Any]
) -> Iterable[tuple[str, float, float]]:
    """How far each tensor is off and how far it may be."""
    pairs = [
        (value, reference, float(reference.abs().max()))
        for value, reference in zip(actual, expected, strict=True)
        if value is not None
        and reference is not None
        and reference.is_floating_point()
        and reference.numel()
    ]
    greatest = max((size for *_, size in pairs), default=0.0)
    for value, reference, size in pairs:
        kind = reference.device.type
        rounded = [
            reference.dtype,
            *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else []),
        ]
        allowed = max(ALLOWED.get(dtype, 1e-3) for dtype in rounded)
        # One that is zero in exact arithmetic (the gradient of an attention key's bias) is noise of the others' size.
        yield (
            kind_of_tensor,
            float((value - reference).abs().max()),
            allowed * max(size, 1e-3 * greatest),
        )
