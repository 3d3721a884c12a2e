"""Small all-reduces in shared memory give what torch's give, and end when a rank is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.base.errors import PeerLost
from paceline.launch.process.failure import RankFailed
from paceline.strategies import host_all_reduce
from paceline.strategies.host_all_reduce import all_reduce
from paceline.strategies.shared_barrier import AWAKE_S, SLOT_BYTES, stays_awake

TENSORS = [
    (torch.arange(6.0).view(2, 3), dist.ReduceOp.SUM),
    (torch.arange(5), dist.ReduceOp.MAX),
    (torch.tensor(3.5, dtype=torch.float64), dist.ReduceOp.SUM),
    (torch.zeros(0), dist.ReduceOp.SUM),
    (torch.arange(8.0)[::2], dist.ReduceOp.MAX),
    (torch.ones(SLOT_BYTES // 4), dist.ReduceOp.SUM),
    (torch.ones(SLOT_BYTES // 4 + 1), dist.ReduceOp.SUM),
]


@pytest.fixture
def enough_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ranks meet in memory wherever this runs."""
    monkeypatch.setattr(host_all_reduce, "usable_cores", lambda: 64)


def in_memory(group: dist.ProcessGroup | None = None) -> bool:
    return host_all_reduce._slots.get(group or dist.group.WORLD) is not None


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_gives_what_torch_gives(
    run_ranks: Callable[..., list[Any]], enough_cores: None, ranks: int
) -> None:
    """Of all shapes and kinds, again and again in the same slots, and of one too large for them."""

    def body(context: Any) -> bool:
        equal = []
        for turn in range(3):
            for tensor, op in TENSORS:
                here, there = (tensor.clone() * (context.rank + 1) + turn for _ in range(2))
                all_reduce(here, op)
                dist.all_reduce(there, op)
                equal.append(torch.equal(here, there))
        return all(equal) and in_memory()

    assert run_ranks(body, ranks) == [True] * ranks


def test_ranks_that_share_cores_sleep(
    run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They meet by torch, also where only one rank sees too few cores."""
    monkeypatch.setattr(host_all_reduce, "usable_cores", lambda: 64 if dist.get_rank() else 1)

    def body(context: Any) -> list[Any]:
        tensor = torch.ones(1)
        all_reduce(tensor)
        return [tensor.item(), in_memory()]

    assert run_ranks(body, 2) == [[2.0, False]] * 2


def test_each_group_has_its_own_memory(
    run_ranks: Callable[..., list[Any]], enough_cores: None
) -> None:
    def body(context: Any) -> list[float]:
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        values = []
        for number, group in enumerate(pairs):
            if context.rank in (number, number + 1):
                tensor = torch.tensor([float(context.rank)])
                all_reduce(tensor, group=group)
                values.append(tensor.item())
        everyone = torch.ones(1)
        all_reduce(everyone)
        return [*values, everyone.item()]

    assert run_ranks(body, 3) == [[1.0, 3.0], [1.0, 3.0, 3.0], [3.0, 3.0]]


def test_a_rank_that_is_late_is_waited_for(
    run_ranks: Callable[..., list[Any]], enough_cores: None
) -> None:
    """Longer than its peers stay awake."""

    def body(context: Any) -> float:
        tensor = torch.ones(1)
        all_reduce(tensor)
        if context.rank:
            time.sleep(20 * AWAKE_S)
        all_reduce(tensor)
        return tensor.item()

    assert run_ranks(body, 2) == [4.0, 4.0]


def test_who_is_done_first_may_write_for_the_next(
    run_ranks: Callable[..., list[Any]], enough_cores: None
) -> None:
    """Before a slower rank has read."""

    def slow_sum(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return torch.add(a, b, out=out)

    def body(context: Any) -> list[float]:
        if context.rank:
            host_all_reduce._COMBINE[dist.ReduceOp.SUM] = slow_sum
        first, second = torch.ones(1), torch.full((1,), 10.0)
        all_reduce(first)
        all_reduce(second)
        return [first.item(), second.item()]

    assert run_ranks(body, 2) == [[2.0, 20.0]] * 2


def test_ranks_that_come_with_different_figures_are_told(
    run_ranks: Callable[..., list[Any]], enough_cores: None
) -> None:
    """gloo ends such ranks too; nobody goes on with what belongs elsewhere."""

    def body(context: Any) -> str:
        with pytest.raises(PeerLost) as caught:
            all_reduce(torch.ones(1 + context.rank))
        return str(caught.value)

    expected = (
        "ranks exchange different figures: RedOpType.SUM of [1] torch.float32, RedOpType.SUM of [2] "
        "torch.float32"
    )
    assert run_ranks(body, 2) == [expected] * 2


def test_a_rank_that_is_killed_is_not_waited_for(
    run_ranks: Callable[..., list[Any]], enough_cores: None, tmp_path: Path
) -> None:
    """The others hear of it; who sees why it ended says more. The watchdog would speak after a minute."""

    def body(context: Any) -> None:
        all_reduce(torch.ones(1))
        if context.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match="another rank of the 2 that share memory") as caught:
            all_reduce(torch.ones(1))
        (tmp_path / "heard").write_text(str(caught.value.heard))  # type: ignore[attr-defined]

    with pytest.raises(RankFailed, match="SIGKILL"):
        run_ranks(body, 2)
    assert (tmp_path / "heard").read_text() == "True"


@pytest.mark.parametrize(
    ("ranks", "cores", "machine", "expected"),
    [(2, 2, "x86_64", True), (3, 2, "x86_64", False), (2, 2, "aarch64", False)],
)
def test_who_stays_awake(
    monkeypatch: pytest.MonkeyPatch, ranks: int, cores: int, machine: str, expected: bool
) -> None:
    """On ARM a counter may be seen before what was written ahead of it."""
    monkeypatch.setattr("platform.machine", lambda: machine)

    assert stays_awake(ranks, cores) == expected
