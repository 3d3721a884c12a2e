"""What a precision costs by the catalogue: rates of matrix products."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.catalogue import _listed, accelerator
from paceline.cluster.software import Software
from paceline.job import Precision
from paceline.model.cost.profile import Product, ProductKind, Side
from paceline.planner.rank_kinds import accelerator_rates
from paceline.simulate.program import Compute

# Rounding, and everything else but the arithmetic, takes no time.
PLAIN = Software(
    product_rate=1.0,
    operator_s=0.0,
    kernel_s=0.0,
    hook_s=0.0,
    slowdown=0.0,
    context_bytes=0.0,
    reserved=1.0,
    memory_rate=1.0,
)


def seconds(
    precision: Precision,
    name: str = "H100",
    *,
    side: int = 8192,
    kind: ProductKind = "linear",
    grows: Side = "rows",
    memory_bytes_per_s: float = 1e30,
) -> float:
    product = Product(rows=side, columns=side, inner=side, kind=kind, grows=grows)
    rates = accelerator_rates(
        replace(accelerator(name), memory_bytes_per_s=memory_bytes_per_s), PLAIN
    )
    return rates.seconds(Compute(flops=product.flops, products=(product,)), precision)[0]


@pytest.mark.slow
def test_rates_are_those_of_the_data_sheets() -> None:
    """An H100 multiplies TF32 half as fast as bf16 and float8 twice as fast; fp16 is bf16."""
    bf16 = seconds("bf16")

    assert seconds("fp16") == bf16
    assert seconds("tf32") == pytest.approx(2 * bf16, rel=1e-3)
    assert seconds("fp8") == pytest.approx(bf16 / 2, rel=1e-3)
    assert seconds("float32") > 10 * bf16


def test_rates_are_dense_and_of_products_that_a_run_makes() -> None:
    """Sheets put the rates of half empty matrices (sparsity) first, twice as high. TF32 is half as fast as bf16 from
    Ampere and MI300 on, float8 twice as fast from Ada and Hopper on; on AMD's it is emulated."""
    listed = {chip.name: chip for chip in _listed()}
    tf32 = {
        name: chip.tf32_flops_per_s / chip.bf16_flops_per_s
        for name, chip in listed.items()
        if chip.tf32_flops_per_s is not None
    }
    fp8 = {
        name: chip.fp8_flops_per_s / chip.bf16_flops_per_s
        for name, chip in listed.items()
        if chip.fp8_flops_per_s is not None
    }

    assert listed.keys() - tf32.keys() == {
        "K80",
        "P100",
        "V100",
        "V100-16",
        "T4",
        "MI250X",
        "TPUv4",
    }
    assert (
        tf32.keys() - fp8.keys() == {"A10", "A100-40", "A100-80", "RTX3090", "MI300X"}
        and fp8.keys() < tf32.keys()
    )
    assert tf32 == pytest.approx(dict.fromkeys(tf32, 0.5), rel=0.01)
    assert fp8 == pytest.approx(dict.fromkeys(fp8, 2.0), rel=0.01)


def test_float8_is_for_layers_that_fit() -> None:
    """Gradients of weights, attention and sides that are no multiples of 16 take as long as in bf16."""
    for changes in ({"grows": "inner"}, {"kind": "full attention"}, {"side": 8200}):
        assert seconds("fp8", **changes) == seconds("bf16", **changes)  # type: ignore[arg-type]


def test_rounding_to_float8_is_paid_for() -> None:
    """Where memory is slow, it costs more than the product gains."""
    assert seconds("fp8", memory_bytes_per_s=1e11) > seconds("bf16", memory_bytes_per_s=1e11)


def test_float8_without_compiling_is_bound_by_the_host() -> None:
    """An H200 took 1.92 ms longer for each layer and step, of which two products are in float8 (docs/precision.md)."""
    rates = accelerator_rates(accelerator("H200"), PLAIN)
    products = (
        Product(rows=8192, columns=4096, inner=1024, kind="linear", grows="rows"),
        Product(rows=8192, columns=1024, inner=4096, kind="linear", grows="rows"),
    )
    eager, compiled = (
        rates.seconds(
            Compute(flops=2 * products[0].flops, products=products, is_compiled=is_compiled), "fp8"
        )
        for is_compiled in (False, True)
    )

    assert eager[1] == pytest.approx(1.92e-3, rel=0.01) and compiled[1] == 0
    assert eager[0] > 2 * compiled[0]


def test_devices_without_such_products() -> None:
    """A V100 computes tf32 in float32, and an A100 emulates float8 beside bf16."""
    assert seconds("tf32", "V100") == seconds("float32", "V100")
    assert seconds("fp8", "A100") >= seconds("bf16", "A100")


@pytest.mark.parametrize(
    ("fuses", "grows", "bytes_a_value"),
    [(True, "rows", 2), (True, "inner", 2), (False, "rows", 33), (False, "inner", 0)],
)
def test_rounding_in_one_kernel(fuses: bool, grows: Side, bytes_a_value: int) -> None:
    """As in Transformer Engine, where gradients of weights are in float8 as well; none of the host's time is left."""
    side, memory_bytes_per_s = 8192, 1e12
    product = Product(rows=side, columns=side, inner=side, grows=grows)
    chip = accelerator("H100")

    def both(memory_bytes_per_s: float) -> tuple[float, float]:
        rates = accelerator_rates(
            replace(chip, memory_bytes_per_s=memory_bytes_per_s), replace(PLAIN, fuses_float8=fuses)
        )
        return rates.seconds(Compute(flops=product.flops, products=(product,)), "fp8")

    (device_s, host_s), (without_s, _) = both(memory_bytes_per_s), both(1e30)

    assert device_s - without_s == pytest.approx(bytes_a_value * 2 * side**2 / memory_bytes_per_s)
    assert (host_s == 0) is (fuses or grows == "inner")
    assert (without_s < seconds("bf16")) is (fuses or grows == "rows")
