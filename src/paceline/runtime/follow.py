"""Followers after a step: models whose weights are functions of others', moved where they are held."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.errors import PlanRefused
from paceline.job.own_step import FollowerModel
from paceline.strategies.mesh import local_part


@torch.no_grad()
def follow(followers: Mapping[str, FollowerModel], held: Mapping[str, torch.Tensor],
           buffers: Mapping[str, torch.Tensor], step: int) -> None:
    """Move every follower that moves after `step`, counted from 1. No collective: a rank holds of a follower what it
    holds of its source.

    held, buffers: of all models, by name.
    """
    for name, follower in followers.items():
        if follower.momentum == 1.0 or step % follower.every:
            continue
        for mine, tensor in held.items():
            if mine.startswith(f"{name}."):
                _move(tensor, held[f"{follower.source}.{mine.removeprefix(f'{name}.')}"], follower.momentum)
        for mine, buffer in buffers.items():
            if mine.startswith(f"{name}."):
                buffer.copy_(buffers[f"{follower.source}.{mine.removeprefix(f'{name}.')}"])


def _move(follower: torch.Tensor, source: torch.Tensor, momentum: float) -> None:
    mine, theirs = local_part(follower), local_part(source)
    if mine.is_floating_point() or mine.is_complex():
        mine.mul_(momentum).add_(theirs, alpha=1.0 - momentum) if momentum else mine.copy_(theirs)
    else:
        mine.copy_(theirs)


def refuse_apart(followers: Mapping[str, FollowerModel], held: Mapping[str, torch.Tensor]) -> None:
    """Refuse a plan that puts a follower's weights on other ranks than its source's.

    Raises:
        PlanRefused: names the first of them.
    """
    for name, follower in followers.items():
        if follower.momentum == 1.0:
            continue
        for mine, tensor in held.items():
            if not mine.startswith(f"{name}."):
                continue
            source = held.get(f"{follower.source}.{mine.removeprefix(f'{name}.')}")
            if source is None or local_part(source).shape != local_part(tensor).shape:
                raise PlanRefused(f"this plan puts '{mine}' and what it follows on different ranks",
                                  hint="a data=N, shard=N or tensor=N plan")
