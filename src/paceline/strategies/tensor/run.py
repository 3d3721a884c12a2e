"""Splits layers over ranks. The split is derived by recording the captured graph of each piece on
parts (`piece.py`).

The outputs and gradients of every split piece are first compared with those of the whole one. A
piece that differs, or that DTensor can't run, stays whole.
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
from paceline.model.copy_on_write import TensorSnapshot
from paceline.model.graph import Capture, Piece, Value
from paceline.model.randomness import WithoutRandomness
from paceline.strategies.layout import Report
from paceline.strategies.tensor.cut import Cut
from paceline.strategies.tensor.leaf import give_leaf
from paceline.strategies.tensor.piece import SEQUENCE, CutRules, SplitPiece
from paceline.strategies.tensor.report import pattern, report
from paceline.torch_private.autograd import accumulated_hooks, gradient_hooks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Allowed difference between a split piece and the whole one on the example, relative to the
# greatest element. It covers only rounding, by the dtype of the result or that of autocast.
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
# A function that tries a split piece on its weights, buffers and inputs, and on whether each input
# is trained. It returns the whole piece's outputs, and the reason why it can't be split: None if it
# can, "" if nothing in it was cut.
Tried = Callable[
    [SplitPiece, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[bool]],
    tuple[list[torch.Tensor], str | None],
]


@dataclass(frozen=True)
class TensorSplit:
    """The split of a model's layers."""

    mesh: DeviceMesh | None = None  # of one dim; None if nothing is split
    # the cut of each split parameter, by name
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    # Keys of the pieces that cut values between their products along the sequence.
    sequence: frozenset[str] = frozenset()
    # The reason why each other parameter is not split, by name.
    whole: Mapping[str, str] = field(default_factory=dict)
    # About computations that every rank does whole, although the weights are split.
    notes: tuple[str, ...] = ()

    def touches(self, piece: Piece) -> bool:
        return any(name in self.cuts for name in piece.parameters)

    def in_parts(self, capture: Capture) -> Capture:
        """Return the capture as ranks run it. Values between pieces that cut the sequence stay cut.

        The model's outputs, values that are edited in place, and inputs of pieces that cut no
        sequence are whole.
        """
        if self.mesh is None or not self.sequence:
            return capture
        cut = Cut(SEQUENCE)
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
                name: replace(value, shape=tuple(cut.part_shape(value.shape, self.mesh.size())))
                if name in parts
                else value
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
        """Return an empty tensor of the size of a rank's part of a parameter."""
        cut = self.cuts.get(name)
        if cut is None or self.mesh is None:
            return torch.empty_like(whole)
        return whole.new_empty(cut.part_shape(whole.shape, self.mesh.size()))

    def runner(self, piece: Piece) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return the function that runs a piece with the parameters that this rank holds."""
        if self.mesh is None or not self.touches(piece):
            return piece.run
        return SplitPiece(piece, self.mesh, dict(self.cuts), sequence=piece.key in self.sequence)

    def report(self, tensors: Mapping[str, nn.Parameter]) -> Report:
        """Report which parameters are split and which are not. tensors: all parameters, whole."""
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
        """Return each parameter as this rank holds it, on the device. Whole ones are moved there in
        place.

        device: None leaves all parameters where they are; sharding then moves them, see
        `shard/run.py`.
        """
        parameters = dict(tensors)
        for name in [name for name in tensors if name in self.cuts]:
            assert self.mesh is not None
            cut = self.cuts[name]
            part = cut.local_slice(tensors[name].data, self.mesh.get_local_rank(), self.mesh.size())
            parameters[name] = nn.Parameter(
                _distributed(part, self.mesh, cut, device or part.device),
                requires_grad=tensors[name].requires_grad,
            )
            if device is not None:  # otherwise sharding replaces the parameters
                give_leaf(parameters[name])
        for name in tensors.keys() - self.cuts.keys() if device is not None else ():
            tensors[name].data = tensors[name].data.to(device)
        return parameters


def _distributed(
    part: torch.Tensor, mesh: DeviceMesh, cut: Cut, device: torch.device
) -> torch.Tensor:
    """Return a DTensor with a copy of this rank's part on a device, which need not be one of the
    mesh's."""
    from torch.distributed.tensor import DTensor

    if device.type == mesh.device_type:
        local = part.to(device, copy=True, memory_format=torch.contiguous_format)
        return DTensor.from_local(local, mesh, [cut.placement()], run_check=False)
    # `from_local` would move the part to the mesh's devices, unless it is on the meta device.
    shape = DTensor.from_local(part.to("meta"), mesh, [cut.placement()], run_check=False)
    with torch.no_grad():
        distributed = cast(
            DTensor, torch.empty_like(shape, device=device, memory_format=torch.contiguous_format)
        )
        distributed.to_local().copy_(part)
    return distributed


def derive(
    model: nn.Module,
    capture: Capture,
    inputs: Mapping[str, torch.Tensor],
    mesh: DeviceMesh,
    *,
    sharded: bool,
    batches: float,
    tried: Tried | None = None,
) -> TensorSplit:
    """Split the model's pieces over a mesh of one dim, and check each piece on the example.
    Collective.

    Args:
        model: The model with its whole parameters. Each piece moves its own to the device of the
            inputs for a short time.
        inputs: The inputs of the example, by name.
        sharded: Whether FSDP2 will cut the resulting parts.
        batches: The size of a micro-batch divided by that of the example.
        tried: Replaces the comparison of a split piece with the whole one.
    """
    tensors = dict(model.named_parameters())
    buffers = dict(model.named_buffers(remove_duplicate=False))
    forbidden, tried = kept_whole(model, capture), tried or _compare
    while True:
        derived = _derive(
            capture,
            tensors,
            buffers,
            inputs,
            partial(SplitPiece, mesh=mesh, derive=True),
            CutRules(forbidden, sharded),
            batches,
            tried,
        )
        # A tied parameter that one piece cuts and another piece needs whole stays whole in both.
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


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether the user has registered hooks on the parameter's gradient."""
    return bool(gradient_hooks(parameter) or accumulated_hooks(parameter))


def kept_whole(model: nn.Module, capture: Capture) -> dict[str, str]:
    """Return the names of parameters that every rank must hold whole, with the reason."""
    hooked = [name for name, p in model.named_parameters() if has_hooks(p)]
    changed = set().union(*(piece.changes for piece in capture.pieces))
    return dict.fromkeys(hooked, "its gradient has a hook, which expects it whole") | dict.fromkeys(
        changed, "the forward changes it in place"
    )


@dataclass
class _Derived:
    """The results of deriving the split of some pieces; see `TensorSplit`."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    sequence: list[str] = field(default_factory=list)
    unsplit: list[Piece] = field(default_factory=list)  # the pieces that stay whole
    reasons: dict[str, str] = field(default_factory=dict)  # why parameters stay whole, by name
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
        before = [TensorSnapshot(buffer) for buffer in also]
        if piece.opaque:  # its code may keep a state, so that it runs only once
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
            for sequence in (True, False) if large else (False,):
                run = split(piece, cuts=dict(derived.cuts), rules=rules, sequence=sequence)
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
        for seen in before:
            seen.restore()
        values |= zip(piece.outputs, outputs, strict=True)
    return derived


def _bytes_along_sequence(value: Value) -> int:
    """Return the bytes of a value of (samples, sequence, features); 0 for other values."""
    return value.num_bytes if len(value.shape) == 3 and value.dtype.is_floating_point else 0


def _compare(
    run: SplitPiece,
    weights: list[torch.Tensor],
    buffers: list[torch.Tensor],
    inputs: list[torch.Tensor],
    trained: list[bool],
) -> tuple[list[torch.Tensor], str | None]:
    """Compare a split piece with the whole one. Collective.

    Returns:
        The whole piece's outputs, and the reason why the piece can't be split: None if it can, ""
        if nothing in it was cut.
    """
    before = [TensorSnapshot(buffer) for buffer in buffers]
    with WithoutRandomness():  # the ranks of a split layer draw separately
        expected, expected_grads = _outputs_and_gradients(
            run.piece.run, weights, buffers, inputs, trained
        )
    expected_buffers = [buffer.clone() for buffer in buffers]
    for seen in before:
        seen.restore()
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
        if name in run.cuts and gradient is not None:  # each rank has its part, and zeros elsewhere
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
    """Return the reason why a piece stays whole, from the error of running its parts."""
    first_line, kind = str(error).partition("\n")[0], type(error).__name__
    return f"it can't run in parts: {first_line if isinstance(error, PlanRefused) else f'{kind}: {first_line}'}"


def _agreed(fine: bool, mesh: DeviceMesh) -> bool:
    flag = torch.tensor(float(fine), device=mesh.device_type)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=mesh.get_group())
    return bool(flag)


def leaves_of(
    weights: list[torch.Tensor], inputs: list[torch.Tensor], trained: list[bool]
) -> list[torch.Tensor]:
    """Return copies of weights and inputs with gradients. trained: whether each input has one."""
    wanted = (*[True] * len(weights), *trained)
    return [
        t.detach().clone().requires_grad_(t.is_floating_point() and is_wanted)
        for t, is_wanted in zip((*weights, *inputs), wanted, strict=True)
    ]


def _outputs_and_gradients(
    run: Callable[..., tuple[torch.Tensor, ...]],
    parameters: list[torch.Tensor],
    buffers: list[torch.Tensor],
    inputs: list[torch.Tensor],
    trained: list[bool],
) -> tuple[Any, Any]:
    """Return a piece's outputs, and the gradients of a fixed mixture of them with respect to
    weights and inputs.

    trained: whether each input depends on weights.
    """
    leaves, count = leaves_of(parameters, inputs, trained), len(parameters)
    with torch.enable_grad():
        # Inputs are cloned, because the piece may edit them in place.
        outputs = run(*leaves[:count], *buffers, *(leaf.clone() for leaf in leaves[count:]))
        mixed = [
            (out * torch.linspace(-1, 1, out.numel()).to(out).view(out.shape)).sum()
            for out in outputs
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
    """Yield the kind, the difference and the allowed difference of each tensor."""
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
        # A tensor that is zero in exact arithmetic (such as the gradient of an attention key's
        # bias) contains only rounding noise, whose size depends on the other tensors.
        yield (
            kind_of_tensor,
            float((value - reference).abs().max()),
            allowed * max(size, 1e-3 * greatest),
        )
