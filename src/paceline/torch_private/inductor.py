"""The back end of torch.compile, and the code of graphs.

Private names: `torch._inductor` with `config`, `compile_fx.compile_fx`,
`cpp_builder.get_cpp_compiler`, `exc.InvalidCxxCompiler`, `runtime.cache_dir_utils.cache_dir` and
`decomposition.select_decomp_table`; `torch._functorch.config`;
`torch.fx._lazy_graph_module` with `_LazyGraphModule` and `_use_lazy_graph_module`. Tested with
torch 2.11 and 2.13.

`torch.compile(backend="inductor")` is the public way to `compile_fx`, without decompositions. A
plain `torch.fx.GraphModule` can stand for a lazy one, and makes its code whether it runs or not; so
`lazy_graphs` may do nothing.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module


def lazy_graphs() -> AbstractContextManager[None]:
    """Let torch make a graph's code when the graph first runs, not after each change of it."""
    return _use_lazy_graph_module(True)


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], operators: Mapping[Any, Any] | None = None
) -> Any:
    """Compile a graph with torch's default backend.

    operators: Other code for some operators.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    if operators is None:
        return compile_fx(graph, inputs)
    with config.patch(enable_autograd_cache=False):  # the cache's key ignores the operators
        return compile_fx(graph, inputs, decompositions={**select_decomp_table(), **operators})


def compile_here() -> None:
    """Let torch compile in this process alone."""
    torch._inductor.config.compile_threads = 1


def has_cpp_compiler() -> bool:
    """Whether torch finds a C++ compiler, which CPUs need."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return shutil.which(get_cpp_compiler()) is not None
    except (InvalidCxxCompiler, RuntimeError):
        return False


def cache_folder() -> str:
    """Return the folder of compiled code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()
