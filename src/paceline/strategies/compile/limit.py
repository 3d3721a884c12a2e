"""torch.compile with a separate limit of recompilations for each function.

Works also with versions of torch that lack this option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def compile_whole(
    function: Callable[..., Any], *, backend: Callable[..., Any], most_ways: int
) -> Callable[..., Any]:
    """Compile a function as one graph.

    Args:
        most_ways: The number of compilations of the function's code after which torch raises
            `FailOnRecompileLimitHit`.
    """
    compiled = partial(torch.compile, function, fullgraph=True, backend=backend)
    if has_limit_of_its_own():
        return compiled(recompile_limit=most_ways)
    return _under_limit(compiled(), most_ways)


def has_limit_of_its_own() -> bool:
    """Whether torch.compile accepts `recompile_limit`. torch 2.11 doesn't."""
    return "recompile_limit" in inspect.signature(torch.compile).parameters


def _under_limit(compiled: Callable[..., Any], most_ways: int) -> Callable[..., Any]:
    """Set torch's limit for all functions to this value while the function runs.

    torch reads the setting when it compiles. `recompile_limit` of torch 2.13 does the same (source:
    `ConvertFrameAssert` in torch/_dynamo/convert_frame.py). `config.patch` would take 41 us per
    call instead of 4 us (one core, torch 2.11).
    """
    from paceline.torch_private.dynamo import limit_setter

    change = limit_setter(most_ways)

    def run(*args: Any, **kwargs: Any) -> Any:
        revert = change()
        try:
            return compiled(*args, **kwargs)
        finally:
            revert()

    return run
