"""Playing programs whose times and bytes are counted by hand."""

import pytest

from paceline.cluster.links import Link, Network
from paceline.simulate.collectives import LATE_AFTER_S, collective_s
from paceline.simulate.device import DeviceRates
from paceline.simulate.play import play_together
from paceline.simulate.program import COMPUTE, Allocate, Collective, Compute, Receive, Send, free

RATES = DeviceRates(
    flops_per_s=10,
    bf16_flops_per_s=20,
    memory_bytes_per_s=5,
    function_bytes_per_s=2,
    operator_s=0.1,
)
LINK = Network(Link(bytes_per_s=10, latency_s=0))


def play(program, rates, network, **options):
    """Of a rank that waits for no other."""
    return play_together([program], [rates], network, **options)[0]


def second(part="compute", after=()) -> Compute:
    return Compute(flops=10, part=part, after=after)


def seconds(kind: str, num_bytes: float, group: int = 2, **more) -> Collective:
    return Collective(kind, num_bytes, group, **more)


def test_kinds_of_work_add_up():
    """Arithmetic, memory, functions, launches and fixed time come one after another."""
    work = Compute(flops=10, moved_bytes=10, function_bytes=2, operators=5, fixed_s=0.25)

    assert play((work,), RATES, LINK).step_s == pytest.approx(1 + 2 + 1 + 0.5 + 0.25)


def test_precision_picks_the_rate_of_products():
    """bf16 has its own rate, float64 half that of float32."""
    times = {
        p: play((second(),), RATES, LINK, precision=p).step_s
        for p in ("float32", "bf16", "float64")
    }

    assert times == {"float32": 1.0, "bf16": 0.5, "float64": 2.0}


def test_a_collective_hides_behind_computing():
    """2 s of computing and a 1 s all-reduce issued after the first take 2 s."""
    timeline = play((second(), seconds("all_reduce", 10), second()), RATES, LINK)

    assert timeline.step_s == 2
    assert timeline.breakdown == {"compute": 2.0, "optimizer": 0.0, "communication": 0.0}


def test_waiting_shows_what_is_not_hidden():
    """A 3 s all-reduce beside 1 s of computing leaves 2 s, and then comes the optimizer."""
    program = (
        second(),
        seconds("all_reduce", 30, name="sum"),
        second(),
        second("optimizer", after=("sum",)),
    )

    assert play(program, RATES, LINK).breakdown == {
        "compute": 2.0,
        "optimizer": 1.0,
        "communication": 2.0,
    }


def test_a_collective_on_the_compute_stream_stops_it():
    """Nothing hides it."""
    program = (second(), seconds("all_reduce", 10, stream=COMPUTE), second())

    assert play(program, RATES, LINK).step_s == 3


def test_collectives_of_a_stream_queue():
    """Two 1 s all-reduces issued together end after 2 s."""
    assert play((seconds("all_reduce", 10), seconds("all_reduce", 10)), RATES, LINK).step_s == 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_reduce", 2 * 3 * (0.5 + 1)),
        ("all_gather", 3 * (0.5 + 1)),
        ("reduce_scatter", 3 * (0.5 + 1)),
    ],
)
def test_ring_times(kind, expected):
    """n-1 steps of a quarter of the tensor each, twice for an all-reduce, latency at each."""
    assert collective_s(
        seconds(kind, 40, group=4), Network(Link(bytes_per_s=10, latency_s=0.5))
    ) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("times", "computed_s", "waits_s"),
    [
        (1, 0.0, 2.0),
        (1, LATE_AFTER_S / 4, 3.0),
        (1, LATE_AFTER_S, 6.0),
        (1, 9.0, 6.0),
        (3, LATE_AFTER_S, 10.0),
    ],
)
def test_ranks_that_computed_come_at_different_times(times, computed_s, waits_s):
    """2 s at every collective, and up to 4 s more by how long they computed; three share what lies before them."""
    event = Collective("all_reduce", 0.0, group=2, times=times)

    assert collective_s(
        event, Network(Link(1.0, 0.0, wait_s=2.0, late_s=4.0)), computed_s
    ) == pytest.approx(waits_s)


def test_computing_counts_since_ranks_met():
    """The second collective follows the first one at once."""
    link = Network(Link(10, 0.0, wait_s=0.0, late_s=4.0))
    twice = (
        second(),
        seconds("all_reduce", 0, stream=COMPUTE),
        seconds("all_reduce", 0, stream=COMPUTE),
    )

    assert play(twice, RATES, link).step_s == 1 + 4
    assert play((*twice, second(), twice[1]), RATES, link).step_s == 2 + 2 * 4


def test_a_group_of_one_costs_nothing():
    """There is nobody to talk to."""
    assert collective_s(seconds("all_reduce", 40, group=1), Network(Link(10, 0.5))) == 0.0


def test_memory_peaks_where_most_is_held():
    """The ledger is that of the peak, `highest` is each entry's own."""
    program = (
        Allocate("parameters", 10),
        Allocate("activations", 5),
        free("activations", 5),
        Allocate("gradients", 4),
        free("gradients", 4),
    )
    timeline = play(program, RATES, LINK)

    assert timeline.peak_memory_bytes == 15
    assert timeline.ledger == {"parameters": 10, "activations": 5}
    assert timeline.highest == {"parameters": 10, "activations": 5, "gradients": 4}


def test_ranks_wait_for_messages():
    """A second rank starts when the first one's bytes are there, whatever order they are played in."""
    first = (
        Compute(flops=30),
        Send(1, "x", 20),
        Compute(flops=40),
        Receive(1, "y"),
        Compute(flops=10),
    )
    second = (Allocate("activations", 7), Receive(0, "x"), Compute(flops=50), Send(0, "y", 10))
    link = Network(Link(bytes_per_s=10, latency_s=0.5))

    first_rank, second_rank = play_together([first, second], [RATES, RATES], link)

    assert first_rank.step_s == pytest.approx(3 + 2 + 0.5 + 5 + 1 + 0.5 + 1)
    assert first_rank.breakdown["compute"] == pytest.approx(8)
    assert second_rank.step_s == pytest.approx(3 + 2 + 0.5 + 5 + 1)
    assert (first_rank.peak_memory_bytes, second_rank.peak_memory_bytes) == (0, 7)
    # Until the other has computed what a rank waits for, it is in a bubble; after that the link is what it waits for.
    assert (
        second_rank.breakdown["bubble"],
        second_rank.breakdown["communication"],
    ) == pytest.approx((3, 2 + 0.5 + 1))
    assert first_rank.breakdown["bubble"] == pytest.approx(3 + 2 + 0.5 + 5 - (3 + 4))
    assert first_rank.breakdown["communication"] == pytest.approx(1 + 0.5)


def test_messages_leave_one_after_the_other():
    """A rank's link carries one of them at a time; computing goes on meanwhile."""
    sends = (Send(1, "a", 10), Send(1, "b", 20), Compute(flops=10))
    first_rank, second_rank = play_together(
        [sends, (Receive(0, "b"), Receive(0, "a"))], [RATES, RATES], LINK
    )
    assert (first_rank.breakdown["compute"], first_rank.step_s, second_rank.step_s) == (1, 3, 3)


def test_a_message_that_nobody_sends():
    """Ranks that would wait for ever are an error of the program."""
    with pytest.raises(ValueError, match="rank 1 waits for Receive"):
        play_together([(), (Receive(0, "x"),)], [RATES, RATES], LINK)
