"""One device in the place of several replicas: it runs their micro-batches one after another, and joins
what they changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.model.attributes import plain_attributes, tensor_attributes
from paceline.model.forward_state import ForwardState
from paceline.torch_private.modules import own_buffers
from paceline.training.loss import without_total


def met(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """Return what replicas with these shares of the samples have together: the mean of floats, and
    the greatest of whole numbers.
    """
    if not (values[0].is_floating_point() or values[0].is_complex()):
        return torch.stack(list(values)).amax(0)
    terms = [value * share for value, share in zip(values, shares, strict=True)]
    return sum(terms[1:], terms[0])


def summed(value: Any, samples: int, whole: int) -> tuple[float, float]:
    """Return the value of a loss or metric for some of all samples as a sum and a count.

    A scalar is the mean over its samples.
    """
    value = without_total(value, samples=samples, whole=whole)
    total, count = value if isinstance(value, tuple | list) else (value * samples, samples)
    return float(torch.as_tensor(total).detach()), float(count)


def run_backward(
    losses: Iterable[tuple[int, Any]],
    samples: int,
    *,
    scale: float,
    sum_scale: float,
    inputs: list[nn.Parameter] | None = None,
) -> tuple[float, float, float]:
    """Run backward for the losses of micro-batches, and return their loss together, what gradients
    must be divided by, and what the losses count.

    Args:
        losses: The number of samples and the loss of each micro-batch.
        samples: Of all micro-batches.
        scale, sum_scale: The factor of a loss before backward, if it is a mean or a sum.
        inputs: The parameters that get gradients; None for all.
    """
    loss, count, factor, counted = 0.0, 0.0, 1.0, 0.0
    for number, value in losses:
        value = without_total(value, samples=number, whole=samples)
        if isinstance(value, tuple | list):
            total, weight = torch.as_tensor(value[0]), float(value[1])
            loss, count, factor = loss + total.item(), count + weight, sum_scale
        else:
            total, weight = value * (number / samples), float(number)
            loss, count, factor = loss + value.item() * number / samples, 1.0, scale
        counted += weight
        if (
            total.requires_grad and inputs != []
        ):  # a piece in which nothing counts may have no graph
            ((total.float() if total.dtype == torch.float16 else total) * factor).backward(
                inputs=inputs
            )
    return loss / count, count * factor, counted


class Replicas:
    """Joins the replicas of a model that start with the same state.

    Gradients are summed, and buffers are joined as `met` does. If several replicas change a weight
    in the forward, it changes by the mean of their changes.
    """

    def __init__(self, model: nn.Module, shares: list[float]) -> None:
        self.model, self.shares = model, shares
        self.before = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.moment = ForwardState(model).now()
        self.gradients: dict[str, torch.Tensor] = {}
        self.counts: dict[tuple[str, str], int] = {}
        self.tensors: list[dict[str, torch.Tensor]] = []  # of each replica so far
        self.changes: dict[str, list[torch.Tensor]] = {}  # of weights

    def _counts(self) -> dict[tuple[str, str], int]:
        """Return the attributes that are whole numbers, by module and name."""
        return {
            (name.rpartition(".")[0], key): value
            for name, _, key, value in plain_attributes(self.model)
            if type(value) is int
        }

    def _tensors(self) -> dict[str, torch.Tensor]:
        buffers = dict(self.model.named_buffers())
        return buffers | {
            f"attribute {name}": value for name, value in tensor_attributes(self.model)
        }

    @torch.no_grad()
    def begin(self) -> None:
        if self.tensors:
            self.moment.restore()
            for name, p in self.model.named_parameters():
                p.copy_(self.weights[name])
        self.model.zero_grad()  # hooks see the gradients of one replica

    def add(self) -> None:
        """Add the results of a replica."""
        self.counts = {
            key: max(count, self.counts.get(key, count)) for key, count in self._counts().items()
        }
        self.tensors.append(
            {
                name: tensor.detach().clone()
                for name, tensor in self._tensors().items()
                if name in self.before
            }
        )
        for name, p in self.model.named_parameters():
            change = p.detach() - self.weights[name]
            if change.any():
                self.changes.setdefault(name, []).append(change)
            if p.grad is not None:
                self.gradients[name] = (
                    self.gradients[name] + p.grad if name in self.gradients else p.grad
                )

    @torch.no_grad()
    def finish(self) -> None:
        for (path, key), count in self.counts.items():
            setattr(self.model.get_submodule(path), key, count)
        for name, tensor in self._tensors().items():
            if name in self.before:
                joined = met([each[name] for each in self.tensors], self.shares)
                if not torch.equal(joined, self.before[name]):
                    tensor.copy_(joined)
        for name, p in self.model.named_parameters():
            p.grad = self.gradients.get(name)
            p.copy_(self.weights[name])
            if name in self.changes:
                changes = torch.stack(self.changes[name])
                p.add_(changes.sum(0) / (changes != 0).sum(0).clamp(min=1).to(p.dtype))


class BuffersOfReplicas:
    """The buffers of replicas that begin a step with the same state.

    At the end of the step, floats become the mean weighted by samples, and whole numbers the
    greatest. Each replica has its own tensors, because copying values into the models' buffers
    would change what a backward still needs from earlier forwards.
    """

    def __init__(self, models: nn.Module, shares: Sequence[float]) -> None:
        self.models, self.shares = models, shares
        self.originals = self._current_buffers()
        self.values = [self._copies() for _ in shares] if len(shares) > 1 else []

    def _current_buffers(self) -> dict[str, torch.Tensor]:
        """Return the models' buffers; a buffer that modules share has several names."""
        return dict(self.models.named_buffers(remove_duplicate=False))

    def _copies(self) -> dict[str, torch.Tensor]:
        copies = {id(buffer): buffer.detach().clone() for buffer in self.originals.values()}
        return {name: copies[id(buffer)] for name, buffer in self.originals.items()}

    def _put(self, buffers: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in buffers.items():
            path, _, key = name.rpartition(".")
            own_buffers(self.models.get_submodule(path))[key] = buffer

    @contextmanager
    def of(self, replica: int) -> Iterator[None]:
        """Give the models this replica's buffers inside the context."""
        if not self.values:
            yield
            return
        self._put(self.values[replica])
        yield
        self.values[replica] = self._current_buffers()
        self._put(self.originals)

    @torch.no_grad()
    def meet(self) -> None:
        """Join the buffers of the replicas at the end of the step."""
        if not self.values:
            return
        for name, value in self.originals.items():
            value.copy_(met([values[name] for values in self.values], self.shares))
