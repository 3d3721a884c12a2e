"""What workers bring together within a step: summed in their order, made once all is there, and alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.errors import TrainingError
from paceline.servers.meetings import Meetings, OneUpdate, Sums


def meetings(**changes: Any) -> Meetings:
    """Three workers, two servers; only the second has anything of the critic."""
    return Meetings(
        **{
            "num_workers": 3,
            "holders": {"actor": frozenset({0, 1}), "critic": frozenset({1})},
            "clips": {"actor": 1.0, "critic": None},
            "number": 7,
            **changes,
        }
    )


def update(optimizer: str, *unused: str, number: int = 7) -> dict[str, Any]:
    return {"update": number, "optimizer": optimizer, "unused": list(unused)}


@given(st.permutations([0, 1, 2]))
def test_figures_are_summed_in_the_order_of_workers(order: list[int]) -> None:
    """Whoever comes first: a run repeats to the bit."""
    figures, three = {0: [1e16, 1.0], 1: [1.0, 2.0], 2: [-1e16, 4.0]}, meetings()
    for worker in order[:2]:
        three.bring(worker, {"figures": 7, "values": figures[worker]})
        assert three.take_result() is None
    three.bring(order[2], {"figures": 7, "values": figures[order[2]]})

    assert three.take_result() == Sums(7, [1e16 + 1.0 - 1e16, 7.0])
    assert three.take_result() is None and three.number == 8


def test_an_update_waits_for_the_servers_that_hold_it() -> None:
    """Its norm is over them; a parameter that some worker used is used."""
    three = meetings()
    three.hold(1, 7, 9.0)  # gradients may be there before their workers say so
    for worker, unused in enumerate((["a", "b"], ["b"], ["b", "c"])):
        three.bring(worker, update("actor", *unused))
    assert three.take_result() is None
    three.hold(0, 7, 16.0)

    assert three.take_result() == OneUpdate(7, "actor", 1.0 / (5.0 + 1e-6), frozenset("b"))
    for worker in range(3):
        three.bring(worker, update("critic", number=8))
    three.hold(1, 8, 1e6)
    assert three.take_result() == OneUpdate(8, "critic", 1.0, frozenset())


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (
            update("critic"),
            r"worker 1 is at ctx.update\('actor'\), and worker 0 at ctx.update\('critic'\)",
        ),
        ({"figures": 7, "values": [1.0]}, "worker 0 at the loss of a backward"),
    ],
)
def test_workers_that_do_different_things_end_the_run(mine: dict[str, Any], words: str) -> None:
    two = meetings()
    two.bring(1, update("actor"))
    with pytest.raises(TrainingError, match=words):
        two.bring(0, mine)


def test_figures_of_different_backwards_differ() -> None:
    """A backward of a model with more parameters has more figures."""
    two = meetings()
    two.bring(2, {"figures": 7, "values": [1.0, 2.0]})
    with pytest.raises(TrainingError, match="different things"):
        two.bring(0, {"figures": 7, "values": [1.0, 2.0, 3.0]})


def test_what_is_not_due() -> None:
    """Another number, the same worker twice, an optimizer that the job doesn't have."""
    three = meetings()
    three.bring(0, update("actor"))
    assert "meeting 9" in (three.fault(1, update("actor", number=9)) or "")
    assert "meeting 7" in (three.fault(0, update("actor")) or "")
    assert "'other'" in (three.fault(1, update("other")) or "")
    assert three.fault(1, update("actor")) is None
