"""Hosts that are lost and repaired: formulas beside a simulation that plays each of them."""

from __future__ import annotations

import pytest
from played_failures import simulated_goodput

from paceline.simulate.failures import Failures, goodput
from paceline.simulate.outages import Outages, spares_for

HOUR_S = 3600.0
INTERVAL_S = 200.0


def failures(mtbf_hours: float) -> Failures:
    return Failures(mtbf_hours * HOUR_S, 20.0, 70.0, blocked_s=1.0)


def fewer(num_hosts: int, repair_hours: float, *speeds: float) -> Outages:
    return Outages(
        num_hosts,
        repair_s=repair_hours * HOUR_S,
        speeds=(1.0, *speeds),
        joining_s=60.0,
        resumed_s=400.0,
    )


def spare(num_hosts: int, repair_hours: float, num_spares: int) -> Outages:
    return Outages(num_hosts, num_spares, repair_hours * HOUR_S, resumed_s=400.0)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("mtbf_hours", [1.0, 10.0, 100.0])
@pytest.mark.parametrize(
    "outages",
    [
        fewer(8, 1.0, 0.87),
        fewer(8, 0.01, 0.5),
        fewer(4, 20.0, 0.7, 0.4),
        fewer(200, 5.0, 0.9, 0.8, 0.7, 0.6, 0.5),
        spare(8, 1.0, 1),
        spare(8, 2.0, 1),
        spare(200, 5.0, 8),
    ],
    ids=str,
)
def test_formula_and_simulation_agree_on_hosts(mtbf_hours: float, outages: Outages):
    """Within 3 %, also where runs lack hosts most of the time, or wait for half of it until enough are back."""
    formula_goodput = goodput(failures(mtbf_hours), INTERVAL_S, outages)
    assert simulated_goodput(failures(mtbf_hours), INTERVAL_S, outages, seed=1) == pytest.approx(
        formula_goodput, rel=0.03
    )


def test_what_is_back_at_once_costs_nothing_more():
    """The goodput of a run whose hosts stay, by formula and as played."""
    plain, at_once = failures(10.0), fewer(8, 1e-6, 0.1)
    assert goodput(plain, INTERVAL_S, at_once) == pytest.approx(
        goodput(plain, INTERVAL_S), rel=1e-6
    )
    played = simulated_goodput(plain, INTERVAL_S, at_once, seed=1)
    assert played == pytest.approx(simulated_goodput(plain, INTERVAL_S, seed=1), rel=2e-3)


def test_longer_repairs_cost_more_without_spares():
    """Spares of eight hosts are worth their time only if the others are slow without the host, for long."""

    def worth(repair_hours: float) -> tuple[float, float]:
        num_spares = spares_for(8, repair_hours / (repair_hours + 8 * 10.0))
        return (
            goodput(failures(10.0), INTERVAL_S, fewer(8, repair_hours, 0.1)),
            8
            / (8 + num_spares)
            * goodput(failures(10.0), INTERVAL_S, spare(8, repair_hours, num_spares)),
        )

    short, long = worth(0.5), worth(4.0)
    assert short[0] > short[1] and long[0] < long[1] - 0.05


def test_a_unit_that_is_taken_back_costs_its_start():
    free, dear = (
        Outages(8, repair_s=HOUR_S, speeds=(1.0, 1.0), joining_s=joining_s)
        for joining_s in (0.0, 600.0)
    )
    for value in (goodput, simulated_goodput):
        lost = value(failures(10.0), INTERVAL_S, free) / value(failures(10.0), INTERVAL_S, dear) - 1
        assert lost == pytest.approx(600.0 / (10 * HOUR_S), rel=0.2)


def test_spares_are_as_many_as_are_out_and_two_deviations_more():
    for num_units, part in ((8, 0.01), (100, 0.1), (2048, 0.3)):
        total = num_units + spares_for(num_units, part)
        assert total - num_units >= total * part + 2 * (total * part * (1 - part)) ** 0.5
        assert total - 1 - num_units <= max(
            1, (total - 1) * part + 2 * ((total - 1) * part * (1 - part)) ** 0.5
        )


def test_outages_that_no_run_has():
    for wrong in (
        {"num_units": 0},
        {"num_spares": -1},
        {"repair_s": -1.0},
        {"speeds": ()},
        {"speeds": (1.0, 0.5)},
        {"num_units": 2, "speeds": (1.0, 0.0)},
    ):
        with pytest.raises(ValueError, match="no run has such outages"):
            Outages(**wrong)
