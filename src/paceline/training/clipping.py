"""Computes the norm of gradients over all parts of a model, and scales gradients down to the
greatest norm that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline.strategies.data.sparse import with_dense_gradient
from paceline.strategies.mesh import Mesh, axes_cut, local_part


def squared_norm(
    greatest: float | None,
    parameters: Mapping[str, torch.nn.Parameter],
    owned: Collection[str],
    mesh: Mesh,
    device: torch.device,
) -> torch.Tensor:
    """Return the squared norm of the gradients of these parameters, over all parts of the model.

    The result is a scalar in float64; 0 without a greatest norm. Collective if gradients are
    sharded or in stages.

    owned: names of parameters for which this rank is responsible.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if greatest is None:
        return squares

    def square(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.get_total_norm(gradients.values()).to(squares).square()

    return _over_parts(square, squares, parameters, owned, mesh)


def squared_norms(
    names: Iterable[str],
    parameters: Mapping[str, torch.nn.Parameter],
    owned: Collection[str],
    mesh: Mesh,
    device: torch.device,
) -> torch.Tensor:
    """Return the squared norm of the gradient of each name, over all parts of the model, in
    float64; 0 where there is no gradient.

    Collective if gradients are sharded or in stages. names: of parameters on whichever rank they
    are, in the same order on all ranks.
    """
    squares = torch.zeros(len(names := list(names)), dtype=torch.float64, device=device)

    def square(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        norms = torch.zeros_like(squares)
        for place, name in enumerate(names):
            if name in gradients:
                norms[place] = torch.linalg.vector_norm(gradients[name])
        return norms.square()

    return _over_parts(square, squares, parameters, owned, mesh)


def _over_parts(
    square: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
    squares: torch.Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    owned: Collection[str],
    mesh: Mesh,
) -> torch.Tensor:
    """Add the squares of all parts of the model to `squares`. Collective if gradients are sharded
    or in stages.

    square: Squares this rank's gradients by name, which are cut along the same axes.
    """
    cut: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}
    for name, p in parameters.items():
        dense = with_dense_gradient(p)
        if dense.grad is not None and name in owned:
            gradient = local_part(dense.grad)
            cut.setdefault(axes_cut(dense), {})[name] = (
                torch.view_as_real(gradient) if gradient.is_complex() else gradient
            )
    # Ranks that hold parts of the model have other parameters, but cut them along the same axes.
    for axes in mesh.cut_by:
        gradients, meets = cut.get(axes), all(mesh.sizes[axis] > 1 for axis in axes)
        if gradients or (axes and meets):
            squared = square(gradients) if gradients else torch.zeros_like(squares)
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
