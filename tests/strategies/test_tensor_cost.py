"""What a tensor axis divides of a layer on described devices, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.devices import DeviceKind
from paceline.cluster.software import PACELINE, SEQUENCE_BYTES, Software
from paceline.model.cost.profile import (
    Affine,
    Exchange,
    Parameter,
    Product,
    Profile,
    Segment,
    TensorCut,
    Work,
)
from paceline.planner.program import rank_program
from paceline.simulate.allocator import CPU_HOLES_EXCHANGED, HOLES_ADDED
from paceline.simulate.program import Allocate, Collective
from paceline.strategies.plan import Plan
from paceline.strategies.stages.cost import whole_rank
from paceline.strategies.tensor.cost import narrow

MEGATRON = Software(sequence_parallel=True)
LARGE, SMALL = float(SEQUENCE_BYTES), SEQUENCE_BYTES - 4.0


def layer(output_bytes: float) -> Segment:
    """Four outputs are kept between products and six inside them; ten are moved between them, and twenty inside."""
    return Segment(
        "layer",
        Work(function_bytes=Affine(0, 30 * output_bytes)),
        Work(function_bytes=Affine(0, 60 * output_bytes)),
        kept_bytes=Affine(0, 10 * output_bytes),
        output_bytes=Affine(0, output_bytes),
        tensor=TensorCut(
            Affine(0, 20 * output_bytes),
            Affine(0, 40 * output_bytes),
            Affine(0, 6 * output_bytes),
            Affine(0, output_bytes),
            2,
            2,
        ),
    )


@pytest.mark.parametrize(
    ("software", "output_bytes", "kept", "output", "moved"),
    [
        (PACELINE, LARGE, 6 / 4 + 2 + 2 / 4, 1 / 4, 30 / 4),  # two inputs of products are whole
        (PACELINE, SMALL, 6 / 4 + 4, 1, 20 / 4 + 10),
        (MEGATRON, LARGE, 10 / 4, 1 / 4, 30 / 4),
        (MEGATRON, SMALL, 10 / 4, 1 / 4, 30 / 4),
        (replace(PACELINE, cut_sequence_bytes=float("inf")), LARGE, 6 / 4 + 4, 1, 20 / 4 + 10),
    ],
)
def test_what_lies_between_layers(
    software: Software, output_bytes: float, kept: float, output: float, moved: float
):
    """It is cut along the sequence by those who do so, in Paceline's runs where a sample has 8 MiB of it."""
    whole = Profile(parameters=(), segments=(layer(output_bytes),), update=Work())

    [part] = narrow(whole, Plan.parse("tensor=4"), software).segments

    assert part.kept_bytes.per_sample == pytest.approx(kept * output_bytes)
    assert part.output_bytes.per_sample == pytest.approx(output * output_bytes)
    assert part.forward.function_bytes.per_sample == pytest.approx(moved * output_bytes)
    assert part.backward.function_bytes.per_sample == pytest.approx(2 * moved * output_bytes)


@pytest.mark.parametrize(
    ("text", "kind", "samples", "times"),
    [
        ("tensor=2", "cpu", (2.0,), 1),
        ("tensor=2", "cpu", (2.0, 2.0), 1),
        ("tensor=2", "cuda", (2.0,), 0),
        ("single", "cpu", (2.0,), 0),
    ],
)
def test_exchanges_leave_holes_beside_activations_in_a_heap_that_is_kept(
    text: str, kind: DeviceKind, samples: tuple[float, ...], times: int
):
    """Later micro-batches find those of the first one."""
    whole = Profile(parameters=(), segments=(layer(SMALL),), update=Work())
    plan = Plan.parse(text)
    kept_bytes = sum(part.kept_bytes.at(2.0) for part in narrow(whole, plan, PACELINE).segments)

    holes = [
        event.num_bytes
        for event in rank_program(whole_rank(whole, samples), plan, kind)
        if isinstance(event, Allocate) and event.ledger == HOLES_ADDED
    ]

    assert sum(holes) == pytest.approx(times * CPU_HOLES_EXCHANGED * kept_bytes)


@pytest.mark.parametrize(("software", "times"), [(PACELINE, 1), (Software(), 2)])
@pytest.mark.parametrize("counted", [False, True])
def test_the_result_of_a_product_that_is_not_done_again_is_not_exchanged_again(
    software: Software, times: int, counted: bool
):
    """A layer ends with it. Two exchanges in forward, two in backward, and those of the second forward."""
    cut = layer(SMALL).tensor
    assert cut is not None
    if counted:
        exchange = Exchange("all_reduce", SMALL)
        cut = replace(cut, counted=((exchange, exchange), (exchange, exchange)))
    first, last = Product(1, 4, 4), Product(1, 4, 4)
    segment = replace(
        layer(SMALL),
        tensor=cut,
        forward=Work(products=(first, last)),
        again=Work(products=(first,)),
    )
    whole = Profile(
        parameters=(Parameter("w", "layer", 4, rows=1),), segments=(segment,), update=Work()
    )

    events = rank_program(
        whole_rank(whole, (1.0,)), Plan.parse("tensor=2 recompute=full"), "cuda", software=software
    )
    sent = sum(
        event.times
        for event in events
        if isinstance(event, Collective) and event.name == "exchange"
    )

    assert sent == 4 + times


def test_what_is_done_again_is_divided_as_the_layer_is():
    """Half of what moves, and one of two products."""
    first, last = Product(1, 4, 4, cut="columns"), Product(1, 4, 4, cut="inner")
    half = replace(layer(LARGE).forward, function_bytes=Affine(0, 15 * LARGE))
    segment = replace(
        layer(LARGE),
        again=replace(half, products=(first,)),
        forward=replace(layer(LARGE).forward, products=(first, last)),
    )
    whole = Profile(parameters=(), segments=(segment,), update=Work())

    [part] = narrow(whole, Plan.parse("tensor=4"), PACELINE).segments

    assert part.again is not None and part.again.products == part.forward.products[:1]
    assert part.again.function_bytes.per_sample == pytest.approx(
        part.forward.function_bytes.per_sample / 2
    )
