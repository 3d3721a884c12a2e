"""`torch_private/inductor.py`: compiling a graph, with other operators, and where the code is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from paceline.torch_private import inductor


def made(operator: Any, *args: Any) -> fx.GraphModule:
    """A graph that calls an operator, as torch.compile hands it over."""
    graph = fx.Graph()
    graph.output((graph.call_function(operator, (graph.placeholder("x"), *args)),))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_graph_is_compiled():
    """Its function takes the inputs, and returns the outputs. A view needs no C++."""
    inductor.compile_here()
    assert torch._inductor.config.compile_threads == 1
    x = torch.arange(4.0)
    (view,) = inductor.compile_graph(made(torch.ops.aten.view.default, [2, 2]), [x])(x)
    assert view.tolist() == [[0, 1], [2, 3]]


def test_operators_are_replaced_in_compiled_code():
    """By functions of the same arguments. The cache is not asked, which would not know of them."""
    x, graph = torch.arange(4.0), made(torch.ops.aten.bernoulli.p, 0.5)
    for shape in ([2, 2], [1, 4]):
        operators = {torch.ops.aten.bernoulli.p: lambda x, p, shape=shape: x.view(shape)}
        (view,) = inductor.compile_graph(graph, [x], operators)(x)
        assert list(view.shape) == shape


def test_a_missing_compiler_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    from torch._inductor import cpp_builder

    for name in ("get_cpp_compiler", "_get_cpp_compiler"):
        getattr(getattr(cpp_builder, name, None), "cache_clear", lambda: None)()
    assert not inductor.has_cpp_compiler()


def test_compiled_code_is_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    assert inductor.cache_folder() == str(tmp_path / "here")


def test_a_lazy_graph_makes_its_code_when_it_is_asked():
    """Once, and runs as any graph does."""
    graph = fx.Graph()
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), 1)))
    lazy = inductor.LazyGraphModule(torch.nn.Module(), graph)
    assert lazy._needs_recompile()
    inductor.LazyGraphModule.force_recompile(lazy)
    assert not lazy._needs_recompile() and lazy(torch.zeros(1)).item() == 1
