"""Operators as a job calls them, and how long they take here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import Cluster, Job
from paceline.cluster import cluster
from paceline.launch.process import malloc
from paceline.model.cost import operators, profile_job, session
from paceline.model.cost.cache import OLD_S
from paceline.model.cost.op_calls import FAR, Operand, OperatorCall, OperatorCalls
from paceline.model.cost.operators import IN_PLACE, OperatorTimes
from paceline.model.cost.session import TimedCalls
from paceline.planner.rank_kinds import measured_rates
from paceline.simulate.device import IN_A_STEP, DeviceRates
from paceline.simulate.program import Compute
from paceline.strategies.costs import compute

MATRIX = Operand((64, 64), (64, 1), "float32", 0.0)
PRODUCT, UNHEARD_OF = (
    OperatorCall("aten.mm.default", (MATRIX, MATRIX)),
    OperatorCall("aten.mm.unheard_of", (MATRIX,)),
)


def perceptron_job(batch: int = 8) -> Job:
    data = [(torch.randn(32), torch.tensor(k % 3)) for k in range(batch)]
    return Job(
        model=lambda: nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)),
        data=data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=batch,
        steps=1,
    )


def test_a_profile_names_the_operators_of_each_number_of_samples():
    """Traced with 2 and 8 samples; with 5 the products have 5 rows."""
    calls = [
        call
        for segment in profile_job(perceptron_job()).segments
        for call, _ in compute(segment.forward, 5).calls
    ]
    products = [call for call in calls if call.operator == "aten.addmm.default"]

    assert [call.arguments[1].shape for call in products] == [(5, 32), (5, 16)]
    assert "aten.relu.default" in {call.operator for call in calls}


def test_an_operand_is_as_far_away_as_what_was_touched_since():
    """A weight was last used in another pass; what the layer before has made is at hand."""
    forward = [
        call
        for segment in profile_job(perceptron_job()).segments
        for call, _ in compute(segment.forward, 8).calls
        if call.operator == "aten.addmm.default"
    ]
    _, activation, weight = forward[1].arguments

    assert activation.distance_bytes == 0 and weight.distance_bytes > 1000


def test_what_is_far_is_spread_over_more_memory():
    assert [Operand((), (), "float32", distance).window for distance in (0.0, 2e6, 1e7, 1e9)] == [
        0,
        4 * 2**20,
        16 * 2**20,
        FAR,
    ]


def test_calls_between_which_there_is_no_line_are_not_known():
    """Sizes that are no whole numbers there, and other operators."""
    other = OperatorCall("aten.mm.default", (Operand((67, 64), (64, 1), "float32", 0.0), MATRIX))

    assert OperatorCalls((PRODUCT,), (other,), (2, 4)).at(3) == ()
    assert OperatorCalls((PRODUCT,), (UNHEARD_OF,), (2, 4)).at(3) == ()
    assert OperatorCalls((PRODUCT,), (PRODUCT,), (2, 4)).times(3).at(3) == ((PRODUCT, 3.0),)


class Machine:
    """Times every operator in `seconds` while its cores are free for `cpu_share` of the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.seconds, self.cpu_share, self.timed, self.beside, self.odd = 0.5, 1.0, [], [], []
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(operators, "session", self._session)
        monkeypatch.setattr(OperatorTimes, "_has_warned", False)

    def _session(
        self,
        calls: Sequence[OperatorCall],
        *_: object,
        beside: Sequence[OperatorCall],
        **__: object,
    ) -> TimedCalls:
        self.timed.append(list(calls))
        self.beside.append(list(beside))
        return TimedCalls(
            [10 * self.seconds if call in self.odd else self.seconds for call in calls],
            self.cpu_share,
        )

    def later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So much later that the machine's pace may be another one."""
        now_s = time.time() + 2 * OLD_S
        monkeypatch.setattr(time, "time", lambda: now_s)


def test_what_was_timed_is_not_timed_again(monkeypatch, tmp_path):
    """In this process, or in another one on this machine; where ranks are at work nothing is."""
    machine = Machine(monkeypatch, tmp_path)
    first, busy = OperatorTimes(1), OperatorTimes(1, measures=False)
    busy.measure([PRODUCT])
    first.measure([PRODUCT, PRODUCT])
    first.measure([PRODUCT])
    OperatorTimes(1).measure([PRODUCT])

    assert machine.timed == [[PRODUCT]] and busy.seconds(PRODUCT) is None
    assert first.seconds(PRODUCT) == OperatorTimes(1).seconds(PRODUCT) == 0.5


def test_what_was_timed_beside_other_work_is_used_and_not_kept(monkeypatch, tmp_path, capsys):
    """A later session without other work doesn't keep it either."""
    machine = Machine(monkeypatch, tmp_path)
    machine.cpu_share = 0.6
    busy = OperatorTimes(1)
    busy.measure([PRODUCT])
    machine.cpu_share = 1.0
    busy.measure([UNHEARD_OF])

    assert (
        busy.seconds(PRODUCT) == 0.5
        and "other work had this machine's cores" in capsys.readouterr().err
    )
    assert OperatorTimes(1).seconds(PRODUCT) is None and OperatorTimes(1).seconds(UNHEARD_OF) == 0.5


@pytest.mark.parametrize(
    ("new_s", "is_timed_again"), [(0.45, False), (0.5, False), (0.3, True), (0.8, True)]
)
def test_operators_are_timed_again_once_the_machine_has_another_pace(
    monkeypatch, tmp_path, new_s, is_timed_again
):
    """Some of those that are wanted are timed anew after a while, once; a process that may not measure takes what there
    is."""
    machine = Machine(monkeypatch, tmp_path)
    OperatorTimes(1).measure([PRODUCT])
    machine.later(monkeypatch)
    machine.seconds = new_s
    busy, idle = OperatorTimes(1, measures=False), OperatorTimes(1)
    busy.measure([PRODUCT])
    for _ in range(2):
        idle.measure([PRODUCT])
    OperatorTimes(1).measure([PRODUCT])

    assert busy.seconds(PRODUCT) == 0.5
    assert machine.timed == [[PRODUCT], [PRODUCT], *([[PRODUCT]] if is_timed_again else [])]
    assert idle.seconds(PRODUCT) == (new_s if is_timed_again else 0.5)


def test_a_pace_is_compared_on_a_few_operators_of_the_job(monkeypatch, tmp_path):
    """Neither on one that tells what memory does, nor on so many that it takes long; one that differs says nothing."""
    machine = Machine(monkeypatch, tmp_path)
    job = [OperatorCall("aten.mm.default", (MATRIX, MATRIX, number)) for number in range(40)]
    OperatorTimes(1).measure([IN_PLACE, *job])
    machine.later(monkeypatch)
    machine.odd = job[:1]
    times = OperatorTimes(1)
    times.measure([IN_PLACE])
    times.measure([UNHEARD_OF])
    assert len(machine.timed) == 2

    times.measure(job)
    assert machine.timed[2:] == [job[::2]] and times.seconds(job[0]) == 0.5


@pytest.mark.parametrize(("slower", "is_timed_again"), [(4, False), (5, True)])
def test_a_quarter_of_the_operators_tells_the_pace(monkeypatch, tmp_path, slower, is_timed_again):
    machine = Machine(monkeypatch, tmp_path)
    job = [OperatorCall("aten.mm.default", (MATRIX, MATRIX, number)) for number in range(20)]
    OperatorTimes(1).measure(job)
    machine.later(monkeypatch)
    machine.odd = job[:slower]
    OperatorTimes(1).measure(job)

    assert len(machine.timed) == (3 if is_timed_again else 2)


def test_few_operators_take_turns_with_others_of_the_job(monkeypatch, tmp_path):
    """Alone they would find a core's caches full of their own code."""
    machine = Machine(monkeypatch, tmp_path)
    times = OperatorTimes(1)
    times.measure([PRODUCT])
    times.measure([PRODUCT, UNHEARD_OF])

    assert machine.timed == [[PRODUCT], [UNHEARD_OF]] and machine.beside == [[], [PRODUCT]]


def test_a_busy_machine_says_nothing_of_its_pace(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path)
    OperatorTimes(1).measure([PRODUCT])
    machine.later(monkeypatch)
    machine.seconds, machine.cpu_share = 5.0, 0.5
    times = OperatorTimes(1)
    times.measure([PRODUCT])

    assert times.seconds(PRODUCT) == 0.5


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"seconds": 1}', '{"seconds": {"key": "fast"}, "compared_s": null}'],
)
def test_damaged_times_are_taken_again(monkeypatch, tmp_path, content):
    machine = Machine(monkeypatch, tmp_path)
    OperatorTimes(1).measure([PRODUCT])
    (path,) = (tmp_path / "paceline").iterdir()
    path.write_text(content)
    OperatorTimes(1).measure([PRODUCT])

    assert machine.timed == [[PRODUCT], [PRODUCT]]


def test_ranks_with_a_memory_limit_are_timed_on_the_heap_that_they_have(monkeypatch, tmp_path):
    """It gives back what is freed: blocks of 2 MiB are in new pages each time, which other ranks pay from 32 MiB on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept: list[bool] = []
    monkeypatch.setattr(malloc, "set_up_heap", lambda *, keep: kept.append(keep))
    monkeypatch.setattr(session, "in_a_fork", lambda run, **_: run())
    operators._operator_times.cache_clear()
    free, limited = (
        measured_rates(Cluster.local("cpu:0", memory=memory), waiting=False, times_operators=True)
        for memory in (None, "1GiB")
    )
    taken = Compute(new_blocks=(2.0 * 2**20, 64.0 * 2**20))
    new_page_s = 1 / 2**20

    assert kept == [True] * (len(kept) // 2) + [False] * (len(kept) // 2) and kept
    assert [
        replace(rates, new_page_s=new_page_s).seconds(taken, "float32")[0]
        for rates in (free, limited)
    ] == [64, 66]


def test_operators_have_as_many_threads_as_ranks_will(monkeypatch):
    monkeypatch.setattr(operators, "usable_cores", lambda: 4)
    monkeypatch.setattr(cluster, "usable_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    shares = [OperatorTimes(num_ranks).threads for num_ranks in (1, 2, 8)]
    monkeypatch.setenv(
        "PACELINE_HOSTS_HERE", "2"
    )  # containers of this machine, each of which sees all cores
    of_two = [OperatorTimes(num_ranks).threads for num_ranks in (1, 2, 8)]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    assert (shares, of_two) == ([4, 2, 1], [2, 1, 1])
    assert operators.operator_times(2).threads == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("PACELINE_HOSTS_HERE")
    assert operators.operator_times(2).threads == 2  # of the same process
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [OperatorTimes(num_ranks).threads for num_ranks in (1, 2, 8)] == [1, 1, 1]


def test_timed_operators_count_and_others_are_priced_by_what_they_move():
    """Twice 0.5 s; 2 MB at 1 MB/s; both longer in a step; and what autograd adds to each of three launches."""

    class Timed:
        launch_s = 0.1

        def seconds(self, call: OperatorCall) -> float | None:
            return 0.5 if call is PRODUCT else None

    rates = DeviceRates(1e9, 1e9, 1e6, 1e6, 0.3, timed=Timed())  # type: ignore[arg-type]
    event = Compute(operators=3, calls=((PRODUCT, 2.0), (OperatorCall("", num_bytes=2e6), 1.0)))

    assert rates.seconds(event, "float32")[0] == pytest.approx(IN_A_STEP * (1.0 + 2.0) + 3 * 0.2)
