"""What the tests on pretended devices share: a process that trains on them, one for each file of tests. It is a fork of
one that has imported everything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pretended_cuda import client
from pretended_cuda.build import CannotBuild
from pretended_cuda.client import Workshop, Workshops
from pretended_cuda.plans import PLACEMENT


@pytest.fixture(scope="module")
def num_gpus() -> int:
    """That the file's tests have."""
    return 4


@pytest.fixture(scope="session")
def workshops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshops]:
    try:
        with client.workshops(tmp_path_factory.mktemp("workshops")) as opening:
            yield opening
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def shop(
    tmp_path_factory: pytest.TempPathFactory, workshops: Workshops, num_gpus: int
) -> Iterator[Workshop]:
    with workshops.open(tmp_path_factory.mktemp("workshop"), devices=num_gpus) as opened:
        yield opened


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file that plans of the job "blocks" place its parts by."""
    file = tmp_path_factory.mktemp("placement") / "parts.toml"
    file.write_text(PLACEMENT)
    return str(file)
