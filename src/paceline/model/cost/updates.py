"""How torch's Adam and AdamW update on accelerators: all tensors of a group in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from paceline.torch_private.optimizers import has_both_kernels


def let_fuse(optimizer: Optimizer) -> None:
    """Choose torch's fused kernel for groups whose options leave the choice to torch. Before the first step.

    On accelerators torch then updates operator by operator, each over all tensors (`foreach`): about twelve calls, and
    memory for what lies between them. The kernel's updates are equal up to rounding, of betas, too: it holds them in
    float32 (torch 2.11, fused_adam_utils.cuh), which a proof's limits know. CPUs keep torch's choice. A group is left
    alone if it holds a tensor that the kernel can't take, or none; so are subclasses of Adam and AdamW.
    """
    if type(optimizer) not in (Adam, AdamW):
        return
    fused = [
        group
        for group in optimizer.param_groups
        if _leaves_choice(group) and all(map(_fits, group["params"]))
    ]
    for group in fused:
        group["fused"] = True
    if fused:
        optimizer.register_step_pre_hook(_lay_out_gradients)


def _leaves_choice(group: dict[str, Any]) -> bool:
    return (
        bool(group["params"])
        and group["fused"] is None
        and group["foreach"] is None
        and not (group["capturable"] or group["differentiable"])
        and isinstance(group["lr"], float | int)
    )


def _fits(parameter: torch.Tensor) -> bool:
    """Whether torch has both kinds of update for its device, and it is of a kind that both take."""
    return (
        type(parameter) in (torch.Tensor, nn.Parameter)
        and parameter.is_floating_point()
        and parameter.is_contiguous()
        and has_both_kernels(parameter.device.type)
    )


def _lay_out_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The kernel walks through parameters and gradients alike: both must lie in memory in one order. Autograd's do; a
    hook of the user's may have put another one in their place."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["fused"] else ():
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and not gradient.is_contiguous():
                parameter.grad = gradient.contiguous()
