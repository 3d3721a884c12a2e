"""Computes the norm of gradients over all parts of a model, and scales gradients down to the
greatest norm that is allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline.strategies.data.sparse import with_dense_gradient
from paceline.strategies.mesh import Mesh, axes_cut, local_part


def squared_norm(
    parameters: Mapping[str, torch.nn.Parameter],
    owned: Collection[str],
    mesh: Mesh,
    device: torch.device,
) -> torch.Tensor:
    """Return the squared norm of the gradients of these parameters, over all parts of the model; 0
    without gradients.

    The result is a scalar in float64. Collective if gradients are sharded or in stages.

    owned: names of parameters for which this rank is responsible.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    cut: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for name, p in parameters.items():
        dense = with_dense_gradient(p)
        if dense.grad is not None and name in owned:
            gradient = local_part(dense.grad)
            cut.setdefault(axes_cut(dense), []).append(
                torch.view_as_real(gradient) if gradient.is_complex() else gradient
            )
    # Ranks that hold parts of the model have other parameters, but cut them along the same axes.
    for axes in mesh.cut_by:
        gradients, meets = cut.get(axes), all(mesh.sizes[axis] > 1 for axis in axes)
        if gradients or (axes and meets):
            norm = torch.nn.utils.get_total_norm(gradients or [])
            squared = norm.to(squares).square()
            for axis in axes if meets else ():
                dist.all_reduce(squared, group=mesh.group(axis))
            squares += squared
    if mesh.sizes[mesh.stage_axis] > 1:
        dist.all_reduce(squares, group=mesh.group(mesh.stage_axis))
    return squares


def clip(
    greatest: float | None, parameters: Mapping[str, torch.nn.Parameter], norm: torch.Tensor | None
) -> None:
    """Scale the gradients down to the greatest norm, as `clip_grad_norm_` does. Do nothing if there
    is no greatest norm.

    norm: the norm of the gradients of all parts of the model, on the device.
    """
    if greatest is None or norm is None:
        return
    for kind in _kinds(map(with_dense_gradient, parameters.values())):
        gradient = next((p.grad for p in kind if p.grad is not None), norm)
        torch.nn.utils.clip_grads_with_norm_(kind, greatest, norm.to(gradient.dtype.to_real()))


def _kinds(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group parameters that torch can treat together: whole ones, and distributed ones of one mesh."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for p in parameters:
        by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return list(by_mesh.values())
