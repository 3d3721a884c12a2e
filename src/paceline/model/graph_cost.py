"""The cost of a captured piece: arithmetic, traffic and memory, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn

from paceline.base.fork import cuda_left_alone
from paceline.model.graph import Piece, Value
from paceline.torch_private.fake_tensors import FakeTensorMode
from paceline.torch_private.pytree import tensor_leaves
from paceline.torch_private.storage import storage_key

INSIDE_OF_OPAQUE = (
    4  # bytes kept inside a module that can't be looked into, for each byte of its results; a guess
)


def forward_flops(piece: Piece, *, flops_per_byte: float) -> float:
    """Return the FLOPs of a piece's forward, from the shapes of its nodes.

    A byte that is moved counts as the FLOPs that a device does in the same time; see
    `Device.flops_per_byte`.
    """
    return sum(_flops(node) + flops_per_byte * _moved_bytes(node) for node in piece.nodes)


def kept_bytes(
    piece: Piece,
    values: Mapping[str, Value],
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, torch.Tensor],
) -> int:
    """Run a piece on fake tensors and return the bytes that its forward keeps for its backward,
    with its outputs.
    """
    if piece.opaque:  # its code may keep what it is given
        return _guessed_bytes(piece, values)
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[storage_key(tensor)] = tensor
        return tensor

    # A graph makes tensors of its own (positions, masks) on the device that it was captured on.
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    with cuda_left_alone(), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), device:
        weights = [
            torch.empty(
                parameters[name].shape,
                dtype=parameters[name].dtype,
                requires_grad=parameters[name].requires_grad,
            )
            for name in piece.parameters
        ]
        also = [
            torch.empty(buffers[name].shape, dtype=buffers[name].dtype) for name in piece.buffers
        ]
        inputs = [
            torch.empty(
                values[name].shape,
                dtype=values[name].dtype,
                requires_grad=values[name].differentiable,
            )
            for name in piece.inputs
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                outputs = piece.run(*weights, *also, *inputs)
        except Exception:  # a function that looks at values
            return _guessed_bytes(piece, values)
        for tensor in outputs:
            pack(tensor)
        not_saved = set(map(storage_key, (*weights, *also, *inputs)))
        return sum(
            tensor.untyped_storage().nbytes()
            for key, tensor in saved.items()
            if key not in not_saved
        )


def _guessed_bytes(piece: Piece, values: Mapping[str, Value]) -> int:
    """Estimate the bytes that a piece with opaque modules keeps, from the sizes of its results."""
    return sum(INSIDE_OF_OPAQUE * values[name].num_bytes for name in piece.outputs)


def _moved_bytes(node: fx.Node) -> int:
    made = tensor_leaves(node.meta.get("val"))
    read = [t for arg in node.all_input_nodes for t in tensor_leaves(arg.meta.get("val"))]
    memory = set(map(storage_key, read))
    if made and all(storage_key(t) in memory for t in made):
        return 0  # a view
    return sum(t.numel() * t.element_size() for t in (*made, *read))


def _flops(node: fx.Node) -> float:
    """Return the FLOPs of matrix products, convolutions and attention.

    A multiplication and an addition count as two.
    """
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    shapes = [
        tuple(t.shape)
        for arg in node.args
        if isinstance(arg, fx.Node)
        for t in tensor_leaves(arg.meta.get("val"))
    ]
    made = tensor_leaves(node.meta.get("val"))
    if (
        name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")
        and len(shapes) >= 2
        and made
    ):
        first = shapes[1] if name in ("addmm", "baddbmm") else shapes[0]
        return 2.0 * made[0].numel() * first[-1]
    if name.startswith("conv") and len(shapes) >= 2 and made:
        weight = shapes[1]
        return 2.0 * made[0].numel() * torch.Size(weight[1:]).numel()
    if name == "scaled_dot_product_attention" and len(shapes) >= 3:
        query, key = shapes[0], shapes[1]
        return 4.0 * torch.Size(query).numel() * key[-2]
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        values = [arg.meta.get("val") for arg in node.args[2]]  # type: ignore
        weights = [t for t in tensor_leaves(values) if t.ndim == 2]
        steps = made[0].numel() // made[0].shape[-1]
        return 2.0 * steps * sum(t.numel() for t in weights)
    return 0.0
