"""Moves followers after a step. These are models whose weights are functions of other models'
weights.

A rank moves the part that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from paceline.base.errors import PlanRefused
from paceline.job.own_step import FollowerModel
from paceline.strategies.mesh import local_part


@torch.no_grad()
def follow(
    followers: Mapping[str, FollowerModel],
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    step: int,
) -> None:
    """Move every follower that moves after `step`, counted from 1.

    There is no collective: a rank holds the same part of a follower as of its source.

    parameters, buffers: those of all models, by name.
    """
    for name, source in followed(followers, parameters, step).items():
        _move(
            parameters[name],
            parameters[source],
            followers[name.partition(".")[0]].momentum_after(step - 1),
        )
    for name, source in followed(followers, buffers, step).items():
        buffers[name].copy_(buffers[source])


def followed(
    followers: Mapping[str, FollowerModel], names: Iterable[str], step: int = 0
) -> dict[str, str]:
    """Return those of these names that belong to followers that move after `step`, each with the
    name that it follows.

    The names are those of parameters or buffers. For step 0, the result has all followers that ever
    move.
    """
    moving = {
        name: follower.source
        for name, follower in followers.items()
        if (follower.momentum_after(step - 1) != 1.0 if step else follower.is_moving)
    }
    return {
        name: f"{moving[model]}.{rest}"
        for name in names
        for model, _, rest in [name.partition(".")]
        if model in moving
    }


def _move(follower: torch.Tensor, source: torch.Tensor, momentum: float) -> None:
    local, local_source = local_part(follower), local_part(source)
    if local.is_floating_point() or local.is_complex():
        local.mul_(momentum).add_(local_source, alpha=1.0 - momentum) if momentum else local.copy_(
            local_source
        )
    else:
        local.copy_(local_source)


def refuse_apart(
    followers: Mapping[str, FollowerModel], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Refuse a plan that puts a follower's weights on other ranks than its source's.

    Raises:
        PlanRefused: names the first of them.
    """
    for name, source in followed(followers, parameters).items():
        source_tensor = parameters.get(source)
        if (
            source_tensor is None
            or local_part(source_tensor).shape != local_part(parameters[name]).shape
        ):
            raise PlanRefused(
                f"this plan puts '{name}' and what it follows on different ranks",
                hint="a data=N, shard=N or tensor=N plan",
            )
