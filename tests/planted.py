"""Bugs planted in the ranks of plans under proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import paceline
from paceline.api.verify import _certify

Plant = Callable[[pytest.MonkeyPatch], None]


def no_bug(patch: pytest.MonkeyPatch) -> None:
    """The plan as it is."""


def verified(
    job: paceline.Job, planted: Sequence[tuple[str, Plant]], **options: Any
) -> list[paceline.Certificate]:
    """Certificates of plans, each with a bug of its own. Ranks are forks, so that a bug that is patched in here is in
    them too. All are held against the figures of one device, which are computed once."""

    def certified(*given: Any, number: int, **more: Any) -> paceline.Certificate:
        with pytest.MonkeyPatch.context() as patch:
            planted[number][1](patch)
            return _certify(*given, number=number, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.api.verify._certify", certified)
        return paceline.verify(
            job, [plan for plan, _ in planted], **{"steps": 2, "restore": "no", **options}
        )
