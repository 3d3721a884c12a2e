"""`torch_private/autograd.py`: versions, views, hooks, and how torch runs functions and backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.torch_private.autograd import (
    GETTERS,
    accumulated_hooks,
    apply_function,
    gradient_hooks,
    is_in_backward,
    is_view_of_other,
    replaced,
    version_of,
)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.add_(1),
        lambda p: p[0].mul_(2),
        lambda p: p.detach().zero_(),
        lambda p: torch._foreach_add_([p], 1.0),
        lambda p: torch.nn.init.zeros_(p),
    ],
)
def test_each_write_is_counted(write: Callable[[Any], Any]):
    """Also by a view or a detached tensor, which share the count."""
    p = torch.nn.Parameter(torch.ones(3))
    before, view = version_of(p), p.detach()
    with torch.no_grad():
        write(p)
    assert version_of(p) == version_of(view) == before + 1
    with torch.no_grad():
        assert version_of(p + p) == 0 and version_of(p) == before + 1


def test_writes_to_data_are_not_counted():
    """Therefore `TensorSnapshot` looks at addresses."""
    p = torch.nn.Parameter(torch.ones(3))
    before = version_of(p)
    p.data.add_(1)
    p.data = torch.zeros(3)
    assert version_of(p) == before


def test_getters_are_what_torch_functions_see():
    """A subclass is asked with these, when somebody reads the attributes."""
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(1).as_subclass(Watched)
    version_of(tensor)
    gradient_hooks(tensor)
    assert seen == [*GETTERS]


def test_views_are_of_others():
    tensor = torch.ones(4, requires_grad=True) * 1
    assert is_view_of_other(tensor[:2]) and is_view_of_other(tensor.view(2, 2))
    assert not is_view_of_other(tensor) and not is_view_of_other(tensor.clone())


def test_hooks_are_those_that_are_registered():
    """By the numbers that torch gave them; what is put in the place of one, runs."""
    p, called = torch.nn.Parameter(torch.ones(1)), []
    assert not gradient_hooks(p) and not accumulated_hooks(p)
    handle = p.register_hook(lambda gradient: called.append("gradient"))
    p.register_post_accumulate_grad_hook(lambda p: called.append("never"))
    assert [*gradient_hooks(p)] == [handle.id] and len(accumulated_hooks(p)) == 1
    for number in accumulated_hooks(p):
        accumulated_hooks(p)[number] = lambda p: called.append("accumulated")
    (p * 2).sum().backward()
    assert called == ["gradient", "accumulated"]
    for number in [*accumulated_hooks(p)]:
        del accumulated_hooks(p)[number]
    handle.remove()
    assert not gradient_hooks(p)
    (p * 2).sum().backward()
    assert len(called) == 2


def test_a_backward_is_known_from_inside():
    p, seen = torch.nn.Parameter(torch.ones(1)), []
    loss = (p * 2).sum()
    loss.register_hook(lambda gradient: seen.append(is_in_backward()))
    seen.append(is_in_backward())
    loss.backward()
    assert seen == [False, True] and not is_in_backward()


def test_functions_and_backwards_can_be_replaced():
    """By whatever way they are called, and only for so long."""
    apply, seen = Double.apply, []

    def own_apply(function: Any, *args: Any) -> Any:
        seen.append(function)
        return apply_function(function, *args) + 1

    def own_backward(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        seen.append(type(args[0]))
        return run(*args, **options)

    x = torch.ones(1, requires_grad=True)
    with replaced(own_apply, own_backward):
        assert apply(x).item() == Double.apply(x).item() == 3
        Double.apply(x).sum().backward()
        torch.autograd.grad(Double.apply(x).sum(), x)
        torch.autograd.backward([Double.apply(x).sum()])
    assert seen.count(Double) == 5 and len(seen) == 8
    assert x.grad is not None and x.grad.item() == 4
    seen.clear()
    apply(x).sum().backward()
    assert Double.apply(x).item() == 2 and not seen
