"""What the tests on pretended devices share: a process that trains on them, one for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pretended_cuda.build import CannotBuild
from pretended_cuda.client import Workshop, workshop


@pytest.fixture(scope="module")
def num_gpus() -> int:
    """That the file's tests have."""
    return 4


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, num_gpus: int) -> Iterator[Workshop]:
    try:
        with workshop(tmp_path_factory.mktemp("workshop"), devices=num_gpus) as opened:
            yield opened
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two parts of the job "blocks", by name."""
    file = tmp_path_factory.mktemp("placement") / "parts.toml"
    file.write_text('[parts]\n0 = ["*", "blocks.5"]\n1 = ["blocks.2", "blocks.3", "last"]\n')
    return str(file)
