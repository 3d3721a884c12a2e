"""Rates of a device and their cache."""

import json
import time
from dataclasses import replace

import pytest
import torch

from paceline.model.cost.profile import Product
from paceline.simulate import device
from paceline.simulate.device import (
    MOST_NOISE,
    NOISY_S,
    DeviceRates,
    measure_device,
    refresh_device,
)
from paceline.simulate.program import Compute

RATES = DeviceRates(4e9, 8e9, 2e9, 1e9, 5e-6)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Counts measurements, which answer at once, in a cache of its own."""
    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        device,
        "_measure",
        lambda kind: calls.append(kind) or replace(RATES, measured_at=time.time()),
    )
    return calls


def aged(path, seconds, **changes):
    """The file of rates, as if it had been written so long ago."""
    rates = json.loads(path.read_text())
    path.write_text(json.dumps({**rates, "measured_at": rates["measured_at"] - seconds, **changes}))


def test_rates_are_measured_once(measured, tmp_path):
    """The second time they come from the cache, the same."""
    assert measure_device("cpu") == measure_device("cpu") == RATES
    assert measured == ["cpu"]
    assert len(list((tmp_path / "paceline").iterdir())) == 1


def test_old_rates_are_measured_again_where_that_is_asked_for(measured, tmp_path):
    """A process that may not measure takes old ones."""
    measure_device("cpu")
    (path,) = (tmp_path / "paceline").iterdir()
    aged(path, 100)
    measure_device("cpu", oldest_s=200)
    measure_device("cpu")
    assert len(measured) == 1

    measure_device("cpu", oldest_s=50)
    measure_device("cpu", oldest_s=50)
    assert len(measured) == 2


def test_rates_that_other_work_disturbed_are_measured_again_soon(measured, tmp_path):
    """But not by who may not measure, beside ranks at work."""
    measure_device("cpu")
    (path,) = (tmp_path / "paceline").iterdir()
    aged(path, NOISY_S + 1, noise=MOST_NOISE + 0.1)
    measure_device("cpu")
    assert len(measured) == 1
    measure_device("cpu", oldest_s=1000)
    measure_device("cpu", oldest_s=1000)
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("age_s", "factor", "is_told"), [(100, 2.0, True), (100, 1.1, False), (5, 2.0, False)]
)
def test_rates_that_a_step_contradicts_are_measured_again(
    measured, tmp_path, age_s, factor, is_told
):
    """Unless they are new. A line says how old and how noisy they were, if they have changed."""
    measure_device("cpu")
    (path,) = (tmp_path / "paceline").iterdir()
    before = json.loads(path.read_text())
    slower = {name: before[name] / factor for name in device.SPEEDS}
    aged(path, age_s, noise=0.07, **slower)
    said = refresh_device("cpu")

    assert len(measured) == (2 if age_s == 100 else 1)
    assert bool(said) == is_told
    if is_told:
        assert (
            "(noise 7 %)" in said and time.strftime("%d %B") in said and "2 times as high" in said
        )


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"flops_per_s": 1}', "null"])
def test_a_damaged_cache_is_measured_again(measured, tmp_path, content):
    """And written anew."""
    measure_device("cpu")
    (path,) = (tmp_path / "paceline").iterdir()
    path.write_text(content)

    assert measure_device("cpu") == RATES
    assert len(measured) == 2
    assert json.loads(path.read_text())["flops_per_s"] == 4e9


def test_rates_of_zero_are_not_believed(measured, tmp_path):
    """Nothing is divided by what a broken measurement left."""
    measure_device("cpu")
    (path,) = (tmp_path / "paceline").iterdir()
    path.write_text(path.read_text().replace("4000000000.0", "0.0"))

    assert measure_device("cpu").flops_per_s == 4e9


def test_a_cache_that_cant_be_written_is_no_error(measured, monkeypatch, tmp_path):
    """The rates are measured each time."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    assert measure_device("cpu") == RATES


@pytest.mark.parametrize(
    ("flops_per_s", "sides"), [(100e6, [256]), (50e9, [256, 1024]), (40e12, [256, 1024, 4096])]
)
def test_a_slow_device_is_not_given_large_products(monkeypatch, flops_per_s, sides):
    """A dtype that a device has no kernel for takes minutes for what others do in milliseconds."""
    multiplied = []

    def seconds(watch, run):
        (a,) = run.args
        multiplied.append(a.shape[0])
        return 3 * 2 * a.shape[0] ** 3 / flops_per_s

    monkeypatch.setattr(device._Stopwatch, "seconds", seconds)
    monkeypatch.setitem(device.MATRIX_SIDES, "meta", device.MATRIX_SIDES["cuda"])

    watch = device._Stopwatch(torch.device("meta"))
    assert device._matrix_flops_per_s(watch, torch.bfloat16) == pytest.approx(flops_per_s)
    assert multiplied == sides


def test_threads_add_up_but_for_launching(measured):
    """Two threads compute almost twice as fast and launch operators no faster."""
    both = measure_device("cpu", num_threads=2)

    assert 1.5 * RATES.flops_per_s < both.flops_per_s <= 2 * RATES.flops_per_s
    assert both.operator_s == RATES.operator_s


def test_a_real_measurement_gives_positive_rates():
    """Eight kernels, on one thread, whose number is put back."""
    import torch

    before = torch.get_num_threads()
    rates = device._measure("cpu")

    assert torch.get_num_threads() == before
    assert rates.flops_per_s > 1e8
    assert rates.memory_bytes_per_s > 1e8
    assert 1e-7 < rates.operator_s < 1e-2
    assert 0 <= rates.new_page_s < 1e-6 and rates.noise >= 0
    assert rates.measured_at == pytest.approx(time.time(), abs=60)


def test_a_product_of_few_rows_waits_for_its_weights():
    """2 x 1000 x 1000: 4 MFLOP take 1 ms, and 1,004,000 values of 4 bytes at 2 GB/s 2.008 ms; of 2,000 rows arithmetic
    is the slower. Attention's products stay in caches."""

    def seconds(product: Product) -> float:
        return RATES.seconds(Compute(flops=product.flops, products=(product,)), "float32")[0]

    assert seconds(Product(2, 1000, 1000)) == pytest.approx(2.008e-3)
    assert seconds(Product(2000, 1000, 1000)) == pytest.approx(1.0)
    assert seconds(Product(2, 1000, 1000, kind="attention")) == pytest.approx(1e-3)
