"""The bytes that a reduction sends in each form.

`run.py` counts them, and cost models price them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Elements that share a scale. The scale adds 1.6 % to their int8 bytes. The error is 1/254 of the
# block's largest value.
BLOCK = 256
SCALE_BYTES = 4
# The part of the elements that each rank sends (the largest ones), and the bytes of an index. On
# two ranks, 1 % is 50 times fewer bytes than all elements in float32. The rest waits in the
# residual.
TOPK_FRACTION = 0.01
INDEX_BYTES = 4
# How often `run.py` reads or writes a whole bucket, by a count of its operators. The products of
# powersgd are small compared with that.
PASSES = {"bf16": 8, "int8": 18, "topk": 10, "powersgd": 12}
# Columns of the factors; Vogels et al. 2019 use 1 to 4, and 4 for language models.
POWERSGD_RANK = 4


def all_reduce_bytes(num_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce (Thakur, Rabenseifner, Gropp
    2005)."""
    return 2 * (ranks - 1) * num_bytes / ranks


def coded_bytes(form: str, elements: int) -> int:
    """Return the bytes of a vector in the form bf16, or int8 with its scales.

    >>> coded_bytes("bf16", 512), coded_bytes("int8", 512)
    (1024, 520)
    """
    return 2 * elements if form == "bf16" else elements + SCALE_BYTES * (elements // BLOCK)


def part_elements(elements: int, ranks: int) -> int:
    """Return the number of elements of a vector that one rank sums, in whole blocks."""
    return -(-elements // (ranks * BLOCK)) * BLOCK


def rounded_bytes(form: str, elements: int, ranks: int) -> int:
    """Return the bytes that each rank sends in the forms bf16 and int8.

    It sends each other rank's part to that rank, and the sum of its own part to all others.
    """
    return 2 * (ranks - 1) * coded_bytes(form, part_elements(elements, ranks))


def topk_elements(elements: int) -> int:
    return max(1, math.ceil(TOPK_FRACTION * elements)) if elements else 0


def topk_bytes(elements: int, item_bytes: int, ranks: int) -> int:
    """Return the bytes that each rank sends on a ring: all values and indices except those of the
    next rank."""
    return (ranks - 1) * topk_elements(elements) * (item_bytes + INDEX_BYTES)


def is_factored(shape: Sequence[int]) -> bool:
    """Whether a matrix's factors have at most half of its elements.

    >>> is_factored((256, 256)), is_factored((256, 8)), is_factored((256,))
    (True, False, False)
    """
    return len(shape) == 2 and 2 * POWERSGD_RANK * sum(shape) <= math.prod(shape)


def powersgd_bytes(shapes: Sequence[Sequence[int]], item_bytes: int, ranks: int) -> float:
    """Return the bytes that each rank sends: both factors of each factored matrix, and all others
    unchanged."""
    elements = sum(
        POWERSGD_RANK * sum(shape) if is_factored(shape) else math.prod(shape) for shape in shapes
    )
    return all_reduce_bytes(item_bytes * elements, ranks)


def sent_bytes(form: str, shapes: Sequence[Sequence[int]], item_bytes: int, ranks: int) -> float:
    """Return the bytes that each rank sends to sum one bucket over the ranks, in any form.

    shapes: the shapes of the tensors in the bucket; matrices as (rows, columns).
    """
    elements = sum(math.prod(shape) for shape in shapes)
    if form in ("bf16", "int8"):
        return rounded_bytes(form, elements, ranks)
    if form == "topk":
        return topk_bytes(elements, item_bytes, ranks)
    if form == "powersgd":
        return powersgd_bytes(shapes, item_bytes, ranks)
    return all_reduce_bytes(item_bytes * elements, ranks)
