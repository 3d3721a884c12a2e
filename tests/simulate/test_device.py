"""Rates of a device and their cache."""

import json
import os
import time

import pytest
import torch

from paceline.model.cost.profile import Product
from paceline.simulate import device
from paceline.simulate.device import DeviceRates, measure_device
from paceline.simulate.program import Compute

RATES = DeviceRates(4e9, 8e9, 2e9, 1e9, 5e-6)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Counts measurements, which answer at once, in a cache of its own."""
    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device, "_measure", lambda kind: calls.append(kind) or RATES)
    return calls


def test_rates_are_measured_once(measured, tmp_path):
    """The second time they come from the cache, the same."""
    assert measure_device("cpu") == measure_device("cpu") == RATES
    assert measured == ["cpu"]
    assert len(list((tmp_path / "paceline").iterdir())) == 1


def test_old_rates_are_measured_again_where_that_is_asked_for(measured, tmp_path):
    """A process that may not measure takes old ones."""
    measure_device("cpu")
    (path,) = (tmp_path / "paceline").iterdir()
    os.utime(path, (time.time() - 100,) * 2)
    measure_device("cpu", oldest_s=200)
    measure_device("cpu")
    assert len(measured) == 1

    measure_device("cpu", oldest_s=50)
    measure_device("cpu", oldest_s=50)
    assert len(measured) == 2


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

    def seconds(run, _):
        (a,) = run.args
        multiplied.append(a.shape[0])
        return 3 * 2 * a.shape[0] ** 3 / flops_per_s

    monkeypatch.setattr(device, "_seconds", seconds)
    monkeypatch.setitem(device.MATRIX_SIDES, "meta", device.MATRIX_SIDES["cuda"])

    assert device._matrix_flops_per_s(torch.device("meta"), torch.bfloat16) == pytest.approx(
        flops_per_s
    )
    assert multiplied == sides


def test_threads_add_up_but_for_launching(measured):
    """Two threads compute almost twice as fast and launch operators no faster."""
    both = measure_device("cpu", num_threads=2)

    assert 1.5 * RATES.flops_per_s < both.flops_per_s <= 2 * RATES.flops_per_s
    assert both.operator_s == RATES.operator_s


def test_a_real_measurement_gives_positive_rates():
    """Seven kernels, on one thread, whose number is put back."""
    import torch

    before = torch.get_num_threads()
    rates = device._measure("cpu")

    assert torch.get_num_threads() == before
    assert rates.flops_per_s > 1e8
    assert rates.memory_bytes_per_s > 1e8
    assert 1e-7 < rates.operator_s < 1e-2


def test_a_product_of_few_rows_waits_for_its_weights():
    """2 x 1000 x 1000: 4 MFLOP take 1 ms, and 1,004,000 values of 4 bytes at 2 GB/s 2.008 ms; of 2,000 rows arithmetic
    is the slower. Attention's products stay in caches."""

    def seconds(product: Product) -> float:
        return RATES.seconds(Compute(flops=product.flops, products=(product,)), "float32")[0]

    assert seconds(Product(2, 1000, 1000)) == pytest.approx(2.008e-3)
    assert seconds(Product(2000, 1000, 1000)) == pytest.approx(1.0)
    assert seconds(Product(2, 1000, 1000, kind="attention")) == pytest.approx(1e-3)
