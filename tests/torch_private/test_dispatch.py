"""`torch_private/dispatch.py`: modes below autograd, and what operators say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher

from paceline.torch_private.dispatch import (
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    entered_modes,
    forget_kernels,
    is_composite,
    is_traceable_wrapper_subclass,
    is_writing,
    schema_of,
    without_all_modes,
    without_functions,
    without_last_mode,
    without_subclass_functions,
    written,
)

aten = torch.ops.aten


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert isinstance(func, OpOverload)
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_modes_see_operators_below_autograd():
    """Those of a backward too. What runs inside of a mode, it does not see; the outer one does."""
    x = torch.ones(2, requires_grad=True)
    with Seen() as outer, Seen() as inner:
        assert entered_modes()[-2:] == [outer, inner]
        torch.sigmoid(x).sum().backward()
    assert "sigmoid" in inner.names and "sigmoid_backward" in inner.names
    assert inner.names == outer.names and not entered_modes()


def test_modes_can_be_left_for_a_while():
    with Seen() as outer, Seen() as inner:
        with without_all_modes():
            torch.ones(1).exp()
        assert not outer.names and not inner.names
        with without_last_mode() as left:
            assert left is inner
            torch.ones(1).exp()
        assert outer.names == ["ones", "exp"] and not inner.names
        assert entered_modes()[-2:] == [outer, inner]


def test_functions_of_subclasses_can_be_left_out():
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            with without_subclass_functions():
                return func(*args, **(kwargs or {}))

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append("mode")
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(1).as_subclass(Watched)
    tensor.exp()
    assert seen == [torch.Tensor.exp]
    with Mode():
        with without_functions():
            tensor.exp()
        assert len(seen) == 1
        with without_subclass_functions():  # modes stay
            tensor.exp()
        assert seen[1:] == ["mode"]


@pytest.mark.parametrize(
    ("operator", "args", "kwargs", "changed"),
    [
        (aten.add.Tensor, (1, 2), {}, []),
        (aten.add_.Tensor, ("self", "other"), {}, ["self"]),
        (aten.add.out, ("self", "other"), {"out": "out"}, ["out"]),
        (aten._foreach_add_.Scalar, (["a", "b"], 1), {}, ["a", "b"]),
        (aten.native_batch_norm.default, tuple("xwbmvtpe"), {}, []),
        (
            aten._native_batch_norm_legit.default,
            ("x", "w", "b", "mean", "var", True, 0.1, 1e-5),
            {},
            ["mean", "var"],
        ),
        (torch.add, ("self", "other"), {}, []),
        (len, ("self",), {}, []),
    ],
)
def test_an_operator_says_to_what_it_writes(
    operator: Any, args: Any, kwargs: Any, changed: list[str]
):
    assert is_writing(operator) == bool(changed)
    assert [*written(operator, args, kwargs)] == changed


def test_schemas_have_names_arguments_and_returns():
    schema = schema_of(aten.view.default)
    assert schema.name == "aten::view" and [a.name for a in schema.arguments] == ["self", "size"]
    assert schema.returns[0].alias_info is not None  # it returns a view
    assert schema_of(aten.exp.default).returns[0].alias_info is None
    assert schema_of(torch.exp) is None


def test_composite_operators_have_no_kernels_of_their_own():
    assert is_composite(aten.reshape.default) and is_composite(aten.linear.default)
    assert not is_composite(aten.exp.default) and not is_composite(aten.view.default)


def test_blocks_of_a_graph_are_operators_of_a_higher_order():
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x

    graph = torch.export.export(Model(), (torch.ones(2, 2),)).graph
    assert any(isinstance(node.target, HigherOrderOperator) for node in graph.nodes)
    assert not isinstance(aten.exp.default, HigherOrderOperator)


def test_kernels_are_looked_up_anew():
    """torch.export keeps those that it has called, whatever is registered later."""
    library = torch.library.Library("paceline_dispatch", "FRAGMENT")
    library.define("number(Tensor x) -> Tensor")
    library.impl("number", lambda x: x + 1, "CompositeImplicitAutograd")
    operator, x = torch.ops.paceline_dispatch.number.default, torch.zeros(1)
    with enable_python_dispatcher():
        assert operator(x).item() == 1
        library.impl("number", lambda x: x + 2, "CPU")
        assert operator(x).item() == 1
        forget_kernels(operator)
        assert operator(x).item() == 2


def test_wrappers_of_tensors_are_known():
    from torch.testing._internal.two_tensor import TwoTensor

    assert is_traceable_wrapper_subclass(TwoTensor(torch.ones(1), torch.ones(1)))
    assert not is_traceable_wrapper_subclass(torch.nn.Parameter(torch.ones(1)))
