"""Gradients of a part of a batch: brought together when a backward ends, and where an optimizer takes them.

A gradient becomes the mean of the ranks' gradients, weighted by their samples. The mean of gradients that are equal
already is what they are, so gradients that a training step made of reduced ones (clipped, scaled) are right as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from keras.src.optimizers.base_optimizer import BaseOptimizer

from paceline.keras.part import Part, computing, current_part, in_part
from paceline.keras.patches import Patch, with_subclasses
from paceline.torch_private.autograd import version_of

Recorder = Callable[[Sequence[torch.Tensor | None]], None]


class Gradients:
    """Those of one process's model. parameters: all that a backward may give gradients to.

    recorder: is given the gradients that an optimizer is about to use.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters = parameters
        self._reduced: dict[int, tuple[torch.Tensor, int]] = {}
        self._is_in_backward = False
        self.recorder: Recorder | None = None

    def patches(self) -> list[Patch]:
        """(owner, name, replacement)."""
        changes: list[Patch] = [
            (torch.autograd, "backward", in_part(torch.autograd.backward, self._backward))
        ]
        for kind in with_subclasses(BaseOptimizer):
            if "apply" in vars(kind):
                changes.append((kind, "apply", self._applying(vars(kind)["apply"])))
        return changes

    def _backward(
        self,
        part: Part,
        original: Any,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        **others: Any,
    ) -> None:
        def backward() -> None:
            original(tensors, grad_tensors, retain_graph, create_graph, **others)

        if (
            self._is_in_backward or create_graph
        ):  # torch's own call under a mode; a part of a longer computation
            return backward()
        parameters = [parameter for parameter in self._parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._is_in_backward = True
        try:
            backward()
        finally:
            self._is_in_backward = False
        gradients = reduced(part, [parameter.grad for parameter in parameters], parameters)
        for parameter, gradient, earlier in zip(parameters, gradients, before, strict=True):
            if gradient is not None and earlier is not None:
                gradient = earlier + gradient
            parameter.grad = earlier if gradient is None else gradient
            if parameter.grad is not None:
                self._reduced[id(parameter.grad)] = parameter.grad, version_of(parameter.grad)
        return None

    def _applying(self, original: Any) -> Any:
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            part = current_part()
            if part is not None and not all(map(self._is_reduced, grads)):
                variables = trainable_variables or optimizer._trainable_variables
                values = [getattr(variable, "_value", variable) for variable in variables]
                grads = reduced(part, grads, values)
            if self.recorder is not None:
                self.recorder(grads)
            with computing(None):  # for an optimizer inside of this one, too
                answer = original(optimizer, grads, trainable_variables)
            self._reduced.clear()
            return answer

        return apply

    def _is_reduced(self, gradient: torch.Tensor | None) -> bool:
        if gradient is None:
            return True
        known = self._reduced.get(id(gradient))
        return known is not None and known[0] is gradient and known[1] == version_of(gradient)


def reduced(
    part: Part,
    gradients: Sequence[torch.Tensor | None],
    like: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """The weighted means over all ranks; None where no rank has a gradient. One collective a dtype."""
    means: list[torch.Tensor | None] = [None] * len(gradients)
    kinds = [
        like[i].dtype if gradient is None else gradient.dtype
        for i, gradient in enumerate(gradients)
    ]
    for kind in dict.fromkeys(kinds):
        places = [i for i, its in enumerate(kinds) if its is kind]
        taken = [gradients[i] for i in places]
        flat = torch.cat(
            [
                *(
                    torch.zeros_like(like[i], dtype=kind).reshape(-1)
                    if gradient is None
                    else gradient.detach().reshape(-1) * part.weight
                    for i, gradient in zip(places, taken, strict=True)
                ),
                torch.tensor(
                    [float(gradient is not None) for gradient in taken],
                    dtype=kind,
                    device=like[places[0]].device,
                ),
            ]
        )
        *sums, users = part.sum(flat).split([*(like[i].numel() for i in places), len(places)])
        for i, total, num_users in zip(places, sums, users.tolist(), strict=True):
            if num_users:
                means[i] = total.reshape(like[i].shape).clone()
    return means
