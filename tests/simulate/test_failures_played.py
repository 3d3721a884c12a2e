"""Checkpoints against failures: formulas, a simulation, and a published run."""

from __future__ import annotations

import pytest
from played_failures import simulated_goodput

from paceline.simulate.failures import (
    CHECKPOINT_BYTES_PER_S,
    RESTART_S,
    Failures,
    daly_interval_s,
    goodput,
)

HOUR_S = 3600.0


@pytest.mark.sweep(16)
@pytest.mark.parametrize("mtbf_s", [1 * HOUR_S, 10 * HOUR_S, 100 * HOUR_S])
@pytest.mark.parametrize("write_s", [5.0, 60.0, 600.0])
@pytest.mark.parametrize("restart_s", [30.0, 600.0])
def test_formula_and_simulation_agree(mtbf_s: float, write_s: float, restart_s: float):
    """Within 3 %, also where failures take most of the time."""
    failures = Failures(mtbf_s, write_s, restart_s)
    interval_s = daly_interval_s(failures)
    assert simulated_goodput(failures, interval_s, seed=1) == pytest.approx(
        goodput(failures, interval_s), rel=0.03
    )


@pytest.mark.parametrize("mtbf_s", [1 * HOUR_S, 10 * HOUR_S])
@pytest.mark.parametrize("write_s", [60.0, 300.0])
def test_formula_and_simulation_agree_on_saves_beside_training(mtbf_s: float, write_s: float):
    """Training waits for a part of a save, and a failure during the rest goes back to the save before."""
    failures = Failures(mtbf_s, write_s, 30.0, blocked_s=0.1 * write_s)
    interval_s = daly_interval_s(failures)
    assert interval_s >= 0.9 * write_s
    formula_goodput = goodput(failures, interval_s)
    assert simulated_goodput(failures, interval_s, seed=1) == pytest.approx(
        formula_goodput, rel=0.03
    )
    waits = Failures(mtbf_s, write_s, 30.0)
    assert goodput(waits, daly_interval_s(waits)) < formula_goodput
    with pytest.raises(ValueError, match="waits no longer"):
        Failures(mtbf_s, write_s, 30.0, blocked_s=2 * write_s)


@pytest.mark.parametrize("write_s", [5.0, 60.0, 600.0, 2000.0])
def test_the_interval_is_the_best(write_s: float):
    """Of any other, half a per cent of goodput at most is to be had."""
    failures = Failures(2 * HOUR_S, write_s, 300.0)
    best = max(goodput(failures, 10.0 * k) for k in range(1, 2000))
    assert goodput(failures, daly_interval_s(failures)) >= 0.995 * best


def test_a_seed_is_an_answer():
    failures = Failures(HOUR_S, 60.0, 300.0)
    assert simulated_goodput(failures, 600.0, seed=3) == simulated_goodput(failures, 600.0, seed=3)
    assert simulated_goodput(failures, 600.0, seed=3) != simulated_goodput(failures, 600.0, seed=4)


def test_what_llama_3_reported():
    """419 unexpected interruptions in 54 days on 16,384 GPUs, and more than 90 % of the time effective (Grattafiori et
    al. 2024, section 3.3.4): state of 405 billion parameters in 14 bytes each."""
    num_gpus = 16_384
    state_s = 405e9 * 14 / (num_gpus * CHECKPOINT_BYTES_PER_S)
    failures = Failures(54 * 24 * HOUR_S / 419, state_s, RESTART_S + state_s)
    formula_goodput = goodput(failures, daly_interval_s(failures))
    assert failures.mtbf_s == pytest.approx(3.1 * HOUR_S, rel=0.01)
    assert 0.90 < formula_goodput < 0.97
    assert simulated_goodput(failures, daly_interval_s(failures)) == pytest.approx(
        formula_goodput, rel=0.01
    )


def test_nothing_lasts_where_failures_come_faster_than_checkpoints():
    """Zero, and no overflow."""
    assert goodput(Failures(1.0, 10_000.0, 10.0), 100.0) == 0.0
    with pytest.raises(ValueError, match="above 0"):
        Failures(0.0, 1.0, 1.0)
