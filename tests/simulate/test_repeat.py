"""A repetition takes the time and the memory of all its rounds, and collectives know who shares a node."""

import pytest

from paceline.cluster.links import Link, Network
from paceline.simulate.collectives import LATE_AFTER_S, collective_s
from paceline.simulate.device import DeviceRates
from paceline.simulate.play import ROUNDS, play_together
from paceline.simulate.program import COMPUTE, Allocate, Collective, Compute, Repeat
from paceline.simulate.program import NETWORK as BESIDE

RATES = DeviceRates(
    flops_per_s=10,
    bf16_flops_per_s=20,
    memory_bytes_per_s=5,
    function_bytes_per_s=2,
    operator_s=0.1,
)
NETWORK = Network(Link(100, 0.01), Link(10, 0.5), devices_per_node=4)


def play(program, rates, network, **options):
    """Of a rank that waits for no other."""
    return play_together([program], [rates], network, **options)[0]


BODIES = {
    "computing": (Compute(flops=10), Allocate("activations", 3)),
    "network falls behind": (Compute(flops=10), Collective("all_reduce", 40, 2, name="sum")),
    "gathered ahead": (
        Compute(after=("gather",)),
        Collective("all_gather", 15, 2, name="gather"),
        Compute(flops=10),
    ),
    "waited for": (
        Collective("all_gather", 15, 2, name="gather", stream=COMPUTE),
        Compute(flops=10, after=("gather",)),
        Allocate("activations", -2),
    ),
}


@pytest.mark.parametrize("count", [1, 2, ROUNDS, ROUNDS + 1, ROUNDS + 2, 40])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_repetition_is_all_of_its_rounds(body, count):
    """Step, breakdown, peak and ledger are those of the rounds one by one."""
    before, after = (
        (Allocate("parameters", 100), Compute(flops=1)),
        (Compute(flops=7, after=("sum", "gather")),),
    )
    counted = play((*before, Repeat(body, count), *after), RATES, Network(Link(10, 0.1)))
    one_by_one = play((*before, *body * count, *after), RATES, Network(Link(10, 0.1)))

    assert counted.step_s == pytest.approx(one_by_one.step_s)
    assert counted.breakdown == pytest.approx(one_by_one.breakdown)
    assert (counted.peak_memory_bytes, counted.ledger, counted.highest) == (
        one_by_one.peak_memory_bytes,
        one_by_one.ledger,
        one_by_one.highest,
    )


def test_a_group_in_one_node_uses_its_links():
    """Four neighbours: 3 steps of a quarter."""
    assert collective_s(Collective("all_gather", 40, 4), NETWORK) == pytest.approx(
        3 * (0.01 + 10 / 100)
    )


def test_a_group_with_one_device_a_node_has_one_share_of_the_network():
    """Stride 4 in nodes of 4: a ring across."""
    time_s = collective_s(Collective("all_gather", 40, 2, stride=4), NETWORK)

    assert time_s == pytest.approx(0.5 + 20 / 10)


def test_neighbours_in_a_node_drive_their_shares_together():
    """8 ranks on 2 nodes: 4 shares of 10 bytes a second, 1 hop across and 3 inside."""
    time_s = collective_s(Collective("reduce_scatter", 80, 8), NETWORK)

    assert time_s == pytest.approx(0.5 + 3 * 0.01 + 70 / 40)


def test_an_all_reduce_across_many_nodes_goes_along_a_tree():
    """1024 nodes: 20 hops, not 2046."""
    time_s = collective_s(Collective("all_reduce", 0.0, 1024, stride=4), NETWORK)

    assert time_s == pytest.approx(2 * 10 * 0.5)


@pytest.mark.parametrize(
    ("servers", "colocated", "seconds"),
    [
        (1, False, 8 * 10 / 10),
        (2, False, 8 * 10 / 2 / 10),
        (8, False, 10 / 10),
        (8, True, 7 / 8 * 10 / 10),
    ],
)
def test_servers_are_as_fast_as_the_link_that_carries_most(servers, colocated, seconds):
    """8 workers push 10 bytes: one server takes all of it, eight a worker's time; in one process a part is free."""
    event = Collective("push", 10, 8, servers=servers, is_colocated=colocated)

    assert collective_s(event, Network(Link(10, 0.0))) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("stream", "computed_s", "waited_s"),
    [
        (COMPUTE, 0.0, 0.5),
        (COMPUTE, LATE_AFTER_S / 2, 0.5 + 0.1),
        (COMPUTE, 1.0, 0.5 + 0.2),
        (BESIDE, 1.0, 0.0),
    ],
)
def test_workers_wait_for_weights_as_ranks_for_each_other(
    stream: str, computed_s: float, waited_s: float
):
    """The last of them sends its gradients first; beside computing nobody waits."""
    link = Network(Link(10, 0.0, wait_s=0.5, late_s=0.2))
    event = Collective("pull", 10, 2, servers=1, stream=stream)

    assert collective_s(event, link, computed_s) == pytest.approx(
        collective_s(event, Network(Link(10, 0.0))) + waited_s
    )
