"""What a precision costs by the catalogue: rates of matrix products."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.catalogue import accelerator
from paceline.job import Precision
from paceline.planner.described import rates_of
from paceline.profile.profile import Product, ProductKind, Side
from paceline.simulate.program import Compute
from paceline.software import Software

# Rounding, and everything else but the arithmetic, takes no time.
PLAIN = Software(product_rate=1.0, operator_s=0.0, kernel_s=0.0, hook_s=0.0, slowdown=0.0, context_bytes=0.0,
                 reserved=1.0, memory_rate=1.0)


def seconds(precision: Precision, name: str = "H100", *, side: int = 8192, kind: ProductKind = "linear",
            grows: Side = "rows", memory_bytes_per_s: float = 1e30) -> float:
    product = Product(rows=side, columns=side, inner=side, kind=kind, grows=grows)
    rates = rates_of(replace(accelerator(name), memory_bytes_per_s=memory_bytes_per_s), PLAIN)
    return rates.seconds(Compute(flops=product.flops, products=(product,)), precision)[0]


def test_rates_are_those_of_the_data_sheets() -> None:
    """An H100 multiplies TF32 half as fast as bf16 and float8 twice as fast; fp16 is bf16."""
    bf16 = seconds("bf16")

    assert seconds("fp16") == bf16
    assert seconds("tf32") == pytest.approx(2 * bf16, rel=1e-3)
    assert seconds("fp8") == pytest.approx(bf16 / 2, rel=1e-3)
    assert seconds("float32") > 10 * bf16


def test_float8_is_for_layers_that_fit() -> None:
    """Gradients of weights, attention and sides that are no multiples of 16 take as long as in bf16."""
    for changes in ({"grows": "inner"}, {"kind": "full attention"}, {"side": 8200}):
        assert seconds("fp8", **changes) == seconds("bf16", **changes)  # type: ignore[arg-type]


def test_rounding_to_float8_is_paid_for() -> None:
    """Where memory is slow, it costs more than the product gains."""
    assert seconds("fp8", memory_bytes_per_s=1e11) > seconds("bf16", memory_bytes_per_s=1e11)


def test_devices_without_such_products() -> None:
    """A V100 computes tf32 in float32, and an A100 emulates float8 beside bf16."""
    assert seconds("tf32", "V100") == seconds("float32", "V100")
    assert seconds("fp8", "A100") >= seconds("bf16", "A100")
