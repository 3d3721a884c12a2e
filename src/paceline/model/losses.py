"""Checks for losses and metrics that use more than the model's output, which no rank has if the
model is split.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.base.errors import PlanRefused
from paceline.base.streams import stream_states
from paceline.model.attributes import plain_attributes
from paceline.model.copy_on_write import lazy_copies, lazy_copy
from paceline.model.forward_state import function_kept, state_kept
from paceline.model.graph_limits import alike
from paceline.model.randomness import WithoutRandomness
from paceline.torch_private import pytree
from paceline.torch_private.dispatch import OperatorMode
from paceline.torch_private.storage import storage_key

Function = Callable[[Any], Any]  # of the model's output alone: its target is given


class RepeatableLoss:
    """A loss that remembers its last call and can repeat it."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        self.loss = loss
        self.last: tuple[Any, Any, Any] | None = None

    def __call__(self, output: Any, target: Any) -> Any:
        copies = _apart(output), lazy_copies(target)
        before = _draws()
        value = self.loss(output, target)
        # The value of a loss that draws is another one each time.
        self.last = (*copies, _as_tensors(value)) if _draws() == before else None
        return value

    def keeps_state(self) -> bool:
        """Whether the same output and target give another value now.

        The result is False if the loss draws random numbers or can't be called again.
        """
        if self.last is None:
            return False
        output, target, value = self.last
        with suppress(Exception):
            return not alike(_as_tensors(self.loss(output, target)), value)
        return False


def _draws() -> tuple[Any, ...]:
    *others, of_torch = stream_states()
    return *others, bytes(of_torch.numpy())


def refuse_readers(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    functions: Mapping[str, Function],
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    altered: Callable[[], Sequence[str]] = list,
) -> None:
    """Refuse losses and metrics that use more of the model than its output.

    The model's state is left as it was.

    Args:
        functions: Functions of the model's output, by their names in messages.
        altered: Names the values in Python that the functions have set and the forward reads, if
            not every rank runs the functions.

    Raises:
        PlanRefused: a function uses a parameter, a tensor that the forward made, or an attribute
            that the forward has set; or the function sets a value that the forward reads.
    """
    with state_kept(model) as before, running(), WithoutRandomness():
        forward = _Fresh((args, kwargs))
        with forward:
            output = model(*args, **kwargs)
        of_model = _tensors_of(model, before.tensors.changed())
        values = {}
        for name, function in functions.items():
            detached = _apart(output)
            watch, altered_before = _Reads(of_model, forward.storages, detached), altered()
            with function_kept(function, model), watch:
                values[name] = _value(name, function, detached, output)
                written = [what for what in altered() if what not in altered_before]
            if written:
                raise PlanRefused(
                    f"{name} sets {written[0]}, which the forward reads, and only the ranks of the "
                    "last stage run it",
                    hint="data=N, shard=N and tensor=N plans run it on every "
                    "rank; or let lr_schedule set it",
                )
            if watch.read:
                raise _refused(name, watch.read)
        if changed := before.attributes.changed():
            before.restore()
            for name, function in functions.items():
                if not _is_same_again(function, output, values[name], model):
                    raise _refused(
                        name, f"what the forward leaves in attributes, such as '{changed[0]}'"
                    )


def _value(name: str, function: Function, detached: Any, output: Any) -> Any:
    """Return the result of a function for an output without its graph.

    Raises:
        PlanRefused: the function needs the graph.
    """
    try:
        return function(detached)
    except RuntimeError as error:
        try:
            function(output)
        except Exception:
            raise error from None
        if "in-place" in str(error):
            raise PlanRefused(
                f"{name} writes to the model's output in place, which a plan that splits the model keeps",
                hint="write output + x and not output += x, or use a data=N or shard=N plan",
            ) from error
        raise PlanRefused(
            f"{name} goes back through the model (torch.autograd.grad), and no rank of a plan that "
            "splits the model has all of it",
            hint="data=N plans keep the whole model on every rank",
        ) from error


def _is_same_again(function: Function, output: Any, before: Any, model: nn.Module) -> bool:
    try:
        with function_kept(function, model):
            return alike(_as_tensors(function(_apart(output))), _as_tensors(before))
    except Exception:
        return False


def _refused(name: str, read: str) -> PlanRefused:
    return PlanRefused(
        f"{name} uses {read} of the model beside its output, and no rank of a plan that splits the "
        "model has that",
        hint="data=N plans keep the whole model on every rank; or let the "
        "model return what the loss needs",
    )


def _tensors_of(model: nn.Module, changed_buffers: Container[str]) -> dict[int, str]:
    """Return the names of tensors that a rank of a split model doesn't have, by the storage of
    each.

    These are parameters, buffers that change, and attributes.
    """
    named = {
        **{
            f"attribute '{name}'": value
            for name, _, _, value in plain_attributes(model)
            if isinstance(value, torch.Tensor) and value.requires_grad
        },
        **{
            f"buffer '{name}'": buffer
            for name, buffer in model.named_buffers()
            if name in changed_buffers
        },
        **{f"parameter '{name}'": parameter for name, parameter in model.named_parameters()},
    }
    return {storage_key(tensor): f"the {name}" for name, tensor in named.items() if tensor.numel()}


def _apart(output: Any) -> Any:
    """Return the output without its graph of operators."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: lazy_copy(tensor.detach()).requires_grad_(tensor.requires_grad),
        output,
    )


def _as_tensors(returned: Any) -> Any:
    return [
        torch.as_tensor(leaf).detach()
        for leaf in pytree.tree_leaves(returned)
        if isinstance(leaf, torch.Tensor | int | float)
    ]


def _storages(values: Any) -> Iterator[int]:
    for leaf in pytree.tensor_leaves(values):
        if leaf.layout is torch.strided:
            yield storage_key(leaf)


class _Fresh(OperatorMode):
    """A mode that collects the storages that operators have made inside it, except those of the
    model's input.

    The weak references in `storages` prevent that tensors of the loss get the same numbers, and do
    not keep the memory.
    """

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.input_storages, self.storages = set(_storages(inputs)), dict[int, StorageWeakRef]()

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        known = set(_storages((args, kwargs))) | self.input_storages
        for leaf in pytree.tree_leaves(result):
            for number in _storages(leaf):
                if number not in known:
                    self.storages[number] = StorageWeakRef(leaf.untyped_storage())
        return result


class _Reads(OperatorMode):
    """A mode that notes in `read` the first thing of a model that operators have used inside it; ""
    if nothing.
    """

    def __init__(self, of_model: Mapping[int, str], made: Container[int], output: Any) -> None:
        super().__init__()
        self.of_model, self.made = of_model, made
        self.known = set(_storages(output))
        self.read = ""

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        for storage in _storages((args, kwargs)):
            if not self.read and storage not in self.known:
                inside = "a tensor that the forward made inside" if storage in self.made else ""
                self.read = self.of_model.get(storage, inside)
        result = func(*args, **kwargs)
        self.known.update(set(_storages(result)) - set(_storages((args, kwargs))))
        return result
