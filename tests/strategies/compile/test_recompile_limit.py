"""The limit on compilations is each function's own, whichever version of torch compiles it."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from paceline.strategies.compile import limit

# The way of the version that is installed, and that of versions without the keyword, which all versions can go.
WAYS = pytest.mark.parametrize("has_keyword", [True, False])


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.sweep(2)
@WAYS
@pytest.mark.parametrize(
    "most_ways", [2, 10]
)  # below torch's setting for all functions, which is 8, and above it
def test_a_function_is_compiled_so_often_and_then_refused(
    has_keyword: bool, most_ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_keyword:
        monkeypatch.setattr(limit, "has_limit_of_its_own", lambda: False)
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        assert torch._dynamo.config.recompile_limit == most_ways
        compiled.append(len(inputs))
        return graph

    def power(x: torch.Tensor, exponent: str) -> torch.Tensor:
        return x ** float(exponent)  # text is part of the code

    before = torch._dynamo.config.recompile_limit
    run = limit.compile_whole(power, backend=backend, most_ways=most_ways)
    for exponent in range(most_ways):
        torch.testing.assert_close(
            run(torch.tensor([2.0]), str(exponent)), torch.tensor([2.0**exponent])
        )
        assert torch._dynamo.config.recompile_limit == before
    with pytest.raises(FailOnRecompileLimitHit):
        run(torch.tensor([2.0]), str(most_ways))
    assert len(compiled) == most_ways and torch._dynamo.config.recompile_limit == before
