"""The user's own hooks on tensors and modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import paceline

from .registry import FEATURES, Net, entry, make_job


class Masked(Net):
    """Half of each block's weights get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        mask = (torch.arange(FEATURES * FEATURES).view(FEATURES, FEATURES) % 2).double()
        for block in self.blocks:
            block.body.weight.register_hook(lambda gradient: gradient * mask)


@entry("a hook on a weight that masks its gradient")
def gradient_mask_hook() -> paceline.Job:
    return make_job(Masked)


@entry("a hook on a weight that clips its gradient, which is not linear: coupled")
def gradient_clip_hook() -> paceline.Job:
    class Clipped(Net):
        def __init__(self) -> None:
            super().__init__()
            self.last.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))

    return make_job(Clipped)


@entry("a hook after a gradient is accumulated that halves it: coupled")
def post_accumulate_hook() -> paceline.Job:
    class Halved(Net):
        def __init__(self) -> None:
            super().__init__()

            def halve(p: Tensor) -> None:
                p.grad.mul_(0.5)

            for block in self.blocks:
                block.body.weight.register_post_accumulate_grad_hook(halve)

    return make_job(Halved)


@entry("a backward hook on a module that scales gradients")
def full_backward_hook() -> paceline.Job:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.body.register_full_backward_hook(
                    lambda module, given, gradients: tuple(
                        g * 0.5 if g is not None else None for g in given
                    )
                )

    return make_job(Scaled)


@entry("a backward hook on the output that a forward makes")
def tensor_hook_in_forward() -> paceline.Job:
    class Hooked(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 2)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    return make_job(Hooked)


@entry("a forward hook that changes an output")
def forward_hook() -> paceline.Job:
    class Hooked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].register_forward_hook(lambda module, given, output: output * 1.5)

    return make_job(Hooked)


@entry("a forward hook that keeps activations for another layer")
def forward_hook_collects() -> paceline.Job:
    class Collecting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []
            self.blocks[0].register_forward_hook(
                lambda module, given, output: self.kept.append(output)
            )

        def forward(self, x: Tensor) -> Tensor:
            self.kept = []
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x + self.kept[0])

    return make_job(Collecting)


@entry("a hook before a module that changes its input")
def forward_pre_hook() -> paceline.Job:
    class Hooked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].body.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))

    return make_job(Hooked)


@entry("a method of the model other than forward, called by its forward")
def inner_method() -> paceline.Job:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = Net(outputs=FEATURES), nn.Linear(FEATURES, 3)

        def encode(self, x: Tensor) -> Tensor:
            return torch.tanh(self.net.last(self.net.first(x)))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encode(x) + self.net(x))

    return make_job(Encoder)
