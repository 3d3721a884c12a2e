"""Followers after a step: models whose weights are functions of others', moved where they are held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from paceline.errors import PlanRefused
from paceline.job.own_step import FollowerModel
from paceline.strategies.mesh import local_part


@torch.no_grad()
def follow(followers: Mapping[str, FollowerModel], parameters: Mapping[str, torch.Tensor],
           buffers: Mapping[str, torch.Tensor], step: int) -> None:
    """Move every follower that moves after `step`, counted from 1. No collective: a rank holds of a follower what it
    holds of its source.

    parameters, buffers: of all models, by name.
    """
    for mine, source in followed(followers, parameters, step).items():
        _move(parameters[mine], parameters[source], followers[mine.partition(".")[0]].momentum_after(step - 1))
    for mine, source in followed(followers, buffers, step).items():
        buffers[mine].copy_(buffers[source])


def followed(followers: Mapping[str, FollowerModel], names: Iterable[str], step: int = 0) -> dict[str, str]:
    """Which of these names of parameters or buffers are of followers that move after `step`, each with the one that it
    follows; of all that ever move for step 0."""
    moving = {name: follower.source for name, follower in followers.items()
              if (follower.momentum_after(step - 1) != 1.0 if step else follower.is_moving)}
    return {name: f"{moving[model]}.{rest}" for name in names
            for model, _, rest in [name.partition(".")] if model in moving}


def _move(follower: torch.Tensor, source: torch.Tensor, momentum: float) -> None:
    mine, theirs = local_part(follower), local_part(source)
    if mine.is_floating_point() or mine.is_complex():
        mine.mul_(momentum).add_(theirs, alpha=1.0 - momentum) if momentum else mine.copy_(theirs)
    else:
        mine.copy_(theirs)


def refuse_apart(followers: Mapping[str, FollowerModel], parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse a plan that puts a follower's weights on other ranks than its source's.

    Raises:
        PlanRefused: names the first of them.
    """
    for mine, source in followed(followers, parameters).items():
        theirs = parameters.get(source)
        if theirs is None or local_part(theirs).shape != local_part(parameters[mine]).shape:
            raise PlanRefused(f"this plan puts '{mine}' and what it follows on different ranks",
                              hint="a data=N, shard=N or tensor=N plan")
