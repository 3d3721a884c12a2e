"""What tests of strategies share."""

from __future__ import annotations

import pytest
from jobs.stateful import trained_in_turn
from torch import Tensor


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Tensor]]:
    """What the runs of this module's tests that are `in_turn` end with."""
    items = [
        item
        for item in request.session.items
        if item.path == request.path and hasattr(item.function, "job")
    ]
    return trained_in_turn(items, tmp_path_factory.mktemp("ends"))
