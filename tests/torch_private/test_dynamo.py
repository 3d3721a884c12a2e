"""`torch_private/dynamo.py`: what torch.compile tells of its compilations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.torch_private import dynamo


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def grows(x: torch.Tensor, number: int) -> torch.Tensor:
    return x * number


def test_compilations_are_told(monkeypatch: pytest.MonkeyPatch):
    """With a number that is the same at the beginning and at the end."""
    told: list[Any] = []
    handler = dynamo.callback_handler
    begun, ended = (
        (lambda args: told.append(("begins", args))),
        (lambda args: told.append(("ends", args))),
    )
    handler.register_start_callback(begun)
    handler.register_end_callback(ended)
    try:
        torch.compile(grows, backend="eager")(torch.ones(1), 2)
    finally:
        handler.remove_start_callback(begun)
        handler.remove_end_callback(ended)
    (first, begins), (second, ends) = told
    assert (first, second) == ("begins", "ends") and isinstance(begins, dynamo.CallbackArgs)
    assert begins.compile_id == ends.compile_id


def test_guards_that_fail_are_told_with_their_code():
    compiled = torch.compile(grows, backend="eager", dynamic=False)
    for number in (2, 3):
        compiled(torch.ones(1), number)
    (reason,) = dynamo.guard_failures[grows.__code__]
    assert "number" in str(reason)


def test_a_limit_is_set_and_unset():
    """And torch says by this exception that it was reached."""
    before = torch._dynamo.config.recompile_limit
    unset = dynamo.limit_setter(2)()
    try:
        assert torch._dynamo.config.recompile_limit == 2
        compiled = torch.compile(grows, backend="eager", dynamic=False, fullgraph=True)
        for number in (2, 3):
            compiled(torch.ones(1), number)
        with pytest.raises(dynamo.FailOnRecompileLimitHit):
            compiled(torch.ones(1), 4)
    finally:
        unset()
    assert torch._dynamo.config.recompile_limit == before != 2


def test_code_that_can_not_be_compiled_is_an_exception():
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(dynamo.TorchDynamoException):
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(1))


def test_compiled_modules_are_of_this_class():
    assert isinstance(torch.compile(torch.nn.Linear(1, 1)), dynamo.OptimizedModule)
