"""How long an accelerator computes: matrix products by their shapes, everything else by the bytes it moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.cluster.software import Software
from paceline.job import AUTOCAST, Precision
from paceline.model.cost.profile import Product
from paceline.simulate.identity_cache import IdentityCache
from paceline.simulate.program import Compute

# Sides of the tiles that a multiprocessor computes at a time, and the part of the best rate that their reuse of what
# is loaded allows. Source: NVIDIA, Matrix Multiplication Background User's Guide (tile and wave quantisation);
# a smaller tile does less arithmetic for each byte it loads, which is the part of the largest one's rate it reaches.
TILES: tuple[tuple[int, int], ...] = ((256, 128), (128, 128), (128, 64), (64, 64))
LARGEST_REUSE = 256 * 128 / (256 + 128)
# A tile's products start once its first slices are there and end with its result being written: as long as so many
# of its inner side take. Fitted; see docs/formulas.md.
INNER_START = 40.0
# Tensor cores take sides of whole 16 bytes (NVIDIA, as above); other kernels reach this part. Fitted on BLOOM's heads
# of 108 and 150 values, which make a step 1.3 to 1.45 times as long.
ALIGNED_BYTES, UNALIGNED_PART = 16, 0.07
# Of other products: a head of 50304 instead of 50257 columns made steps of the smallest GPT-2 a quarter faster, and
# has 30 % of its FLOPs (nanoGPT, 2023).
UNALIGNED_LINEAR_PART = 0.5
# Megatron-LM's fused softmax takes samples x heads in fours (its fused_softmax.py, is_kernel_available); else it runs
# operator by operator, so many more around each of attention's products.
SOFTMAX_MULTIPLE, UNFUSED_OPERATORS = 4, 3
ATTENTION = ("attention", "full attention")
# torchao's rule for layers in float8 (the gradient of a weight, whose inner side grows, is in bf16 there).
FLOAT8_MULTIPLE = 16
# Bytes that rounding a value to float8 moves: six kernels of torchao 0.18, counted (absolute value, largest, float32,
# scaled, clamped, float8); compiled into one, it reads each value twice and writes it.
FLOAT8_CAST_BYTES, FLOAT8_FUSED_CAST_BYTES = 33, 5
# The same in Transformer Engine: one kernel reads a value in bf16, and writes it and its transpose for the two products
# that take it (cast_transpose), four bytes for both.
FLOAT8_TRANSPOSED_CAST_BYTES = 2
# The host's time for a product's two roundings, which is Python's dispatch to torchao for the most part: a layer has
# two such products a step, and took 1.92 ms longer on an H200's host, 1.82 ms on another.
FLOAT8_HOST_S = 0.96e-3
MOST_SPLITS = 8  # parts that the inner side is cut into where there are too few tiles


class PricedProducts(NamedTuple):
    """Matrix products of one event, in one precision.

    num_unfused: those that need more operators around them. num_float8: those in float8. num_rounded: values that are
    rounded to float8 for them.
    """

    seconds: float
    flops: float
    num_unfused: int
    num_float8: float
    num_rounded: float


@dataclass(frozen=True)
class AcceleratorRates:
    """One accelerator under one training program.

    flops_per_s: best rate of matrix products, by precision. memory_bytes_per_s: of its memory.
    attention_flops_per_s: best rate of fused attention, by precision.
    multiprocessors: that tiles are dealt out to.
    """

    flops_per_s: dict[Precision, float]
    attention_flops_per_s: dict[Precision, float]
    memory_bytes_per_s: float
    multiprocessors: int
    software: Software
    _priced: IdentityCache[Precision, PricedProducts] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_priced", IdentityCache(self._price))

    @property
    def slowdown(self) -> float:
        return self.software.slowdown

    @property
    def collective_s(self) -> float:
        return self.software.collective_s

    def seconds(self, event: Compute, precision: Precision) -> tuple[float, float]:
        """Of the device, and of the host that launches its operators beside it."""
        software = self.software
        device_s = (event.moved_bytes + event.function_bytes) / (
            self.memory_bytes_per_s * software.memory_rate
        ) + event.operators * software.kernel_s
        flops = event.flops
        operators, host_s = event.operators, event.fixed_s
        if event.products:
            priced = self._priced(event.products, precision)
            cast_bytes = (
                FLOAT8_TRANSPOSED_CAST_BYTES
                if software.fuses_float8
                else FLOAT8_FUSED_CAST_BYTES
                if event.is_compiled
                else FLOAT8_CAST_BYTES
            )
            device_s += priced.seconds + priced.num_rounded * cast_bytes / (
                self.memory_bytes_per_s * software.memory_rate
            )
            flops -= priced.flops
            operators += priced.num_unfused * UNFUSED_OPERATORS
            host_s += (
                0.0
                if event.is_compiled or software.fuses_float8
                else priced.num_float8 * FLOAT8_HOST_S
            )
        if flops > 0.5:  # of unknown shapes
            device_s += flops / (self.flops_per_s[_unshaped(precision)] * software.product_rate)
        return device_s, operators * software.operator_s + host_s

    def _price(self, products: tuple[Product, ...], precision: Precision) -> PricedProducts:
        in_float8 = [p for p in products if self._is_float8(p, precision)]
        return PricedProducts(
            seconds=sum(self._product_s(p, precision) for p in products),
            flops=sum(p.flops for p in products),
            num_unfused=sum(self._is_unfused(p) for p in products),
            num_float8=sum(p.count for p in in_float8),
            num_rounded=sum(
                (max(1.0, p.rows) * max(1.0, p.inner) + max(1.0, p.inner) * max(1.0, p.columns))
                * p.count
                for p in in_float8
            ),
        )

    def _is_unfused(self, product: Product) -> bool:
        return (
            product.kind in ATTENTION
            and self.software.attention == "plain"
            and product.count % SOFTMAX_MULTIPLE != 0
        )

    def _is_float8(self, product: Product, precision: Precision) -> bool:
        return (
            precision == "fp8"
            and product.kind == "linear"
            and (product.grows == "rows" or self.software.fuses_float8)
            and not (product.columns % FLOAT8_MULTIPLE or product.inner % FLOAT8_MULTIPLE)
        )

    def _product_s(self, product: Product, precision: Precision) -> float:
        if product.kind == "recurrent" and product.count > 1:
            return product.count * (
                self._product_s(replace(product, count=1), precision) + self.software.kernel_s
            )
        precision = precision if self._is_float8(product, precision) else _unshaped(precision)
        if precision == "float32" and product.kind in self.software.convolution_rates:
            precision = "tf32"  # torch's default for convolutions: torch.backends.cudnn.allow_tf32
        best_flops_per_s, software = self.flops_per_s[precision], self.software
        item_bytes = software.activation_bytes  # of a product's values
        item_bytes = min(2, item_bytes) if precision in AUTOCAST else item_bytes
        if product.kind in ATTENTION and software.attention == "fused":
            return (
                product.flops
                * (0.5 if software.skips_mask and product.kind == "attention" else 1.0)
                / (self.attention_flops_per_s[precision] * software.attention_rate)
            )
        rows, columns, inner = (
            max(1.0, product.rows),
            max(1.0, product.columns),
            max(1.0, product.inner),
        )
        values = (rows * inner + inner * columns + rows * columns) * product.count
        part = tile_part(rows, columns, inner, product.count, self.multiprocessors)
        part *= software.convolution_rates.get(product.kind, 1.0)
        if (
            product.kind in ("linear", *ATTENTION)
            and item_bytes == 2
            and not (_is_aligned(columns * item_bytes) and _is_aligned(inner * item_bytes))
        ):
            part *= UNALIGNED_LINEAR_PART if product.kind == "linear" else UNALIGNED_PART
        return max(
            product.flops / (best_flops_per_s * software.product_rate * part),
            item_bytes * values / (self.memory_bytes_per_s * software.memory_rate),
        )


def _unshaped(precision: Precision) -> Precision:
    """What a product computes in that is none of a layer in float8."""
    return "bf16" if precision == "fp8" else precision


def _is_aligned(num_bytes: float) -> bool:
    return (
        num_bytes % 1 != 0 or num_bytes % ALIGNED_BYTES == 0
    )  # a part that ranks can't divide evenly is padded


def tile_part(
    rows: float, columns: float, inner: float, count: float, multiprocessors: int
) -> float:
    """The part of the best rate that a product of this shape reaches.

    Results are computed in tiles, which are dealt out to multiprocessors wave by wave: the last wave is rarely full,
    and tiles at the edge reach over it. Where there are fewer tiles than multiprocessors, the inner side is cut too.

    >>> round(tile_part(256, 128, 1e9, 108, 108), 3), round(tile_part(256, 128, 1e9, 109, 108), 3)
    (1.0, 0.505)
    """
    best = 0.0
    for high, wide in TILES:
        reuse = high * wide / (high + wide) / LARGEST_REUSE
        tiles = math.ceil(rows / high) * math.ceil(columns / wide) * count
        filled = rows * columns * count / (tiles * high * wide)
        splits = (
            1
            if tiles >= multiprocessors
            else min(
                MOST_SPLITS,
                int(multiprocessors / tiles) or 1,
                max(1, int(inner / (4 * INNER_START))),
            )
        )
        waves = math.ceil(tiles * splits / multiprocessors)
        full = tiles * splits / (waves * multiprocessors)
        best = max(best, reuse * filled * full * inner / splits / (inner / splits + INNER_START))
    return best
