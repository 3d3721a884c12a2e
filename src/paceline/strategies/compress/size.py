"""What a reduction puts on the wire in each form: one arithmetic, counted by `run.py` and priced by the costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK = 256  # elements that share a scale: 1.6 % of their int8 bytes, and an error of 1/254 of the block's largest
SCALE_BYTES = 4
# Elements of which each rank sends the largest, and the bytes that say where one is. 1 % is 50 times fewer bytes than
# all of them in float32 on two ranks; the rest waits in the residual.
TOPK_FRACTION = 0.01
INDEX_BYTES = 4
# How often `run.py` goes through a bucket, reading or writing: its operators, counted. The products of powersgd are
# small beside that.
PASSES = {"bf16": 8, "int8": 18, "topk": 10, "powersgd": 12}
# Columns of the factors; Vogels et al. 2019 use 1 to 4, and 4 for language models.
POWERSGD_RANK = 4


def all_reduce_bytes(num_bytes: float, ranks: int) -> float:
    """What each rank sends in a ring's all-reduce (Thakur, Rabenseifner, Gropp 2005)."""
    return 2 * (ranks - 1) * num_bytes / ranks


def coded_bytes(form: str, elements: int) -> int:
    """A vector in the form bf16, or int8 with its scales.

    >>> coded_bytes("bf16", 512), coded_bytes("int8", 512)
    (1024, 520)
    """
    return 2 * elements if form == "bf16" else elements + SCALE_BYTES * (elements // BLOCK)


def part_elements(elements: int, ranks: int) -> int:
    """What one of the ranks sums of a vector, in whole blocks."""
    return -(-elements // (ranks * BLOCK)) * BLOCK


def rounded_bytes(form: str, elements: int, ranks: int) -> int:
    """What each rank sends of bf16 or int8: every other's part to its owner, and the sum of its own to every other."""
    return 2 * (ranks - 1) * coded_bytes(form, part_elements(elements, ranks))


def topk_elements(elements: int) -> int:
    return max(1, math.ceil(TOPK_FRACTION * elements)) if elements else 0


def topk_bytes(elements: int, item_bytes: int, ranks: int) -> int:
    """What each rank sends on a ring: all values and places but those of the rank after it."""
    return (ranks - 1) * topk_elements(elements) * (item_bytes + INDEX_BYTES)


def is_factored(shape: Sequence[int]) -> bool:
    """Whether a matrix is at least halved by its factors.

    >>> is_factored((256, 256)), is_factored((256, 8)), is_factored((256,))
    (True, False, False)
    """
    return len(shape) == 2 and 2 * POWERSGD_RANK * sum(shape) <= math.prod(shape)


def powersgd_bytes(shapes: Sequence[Sequence[int]], item_bytes: int, ranks: int) -> float:
    """What each rank sends: both factors of each matrix that is factored, and the rest as it is."""
    elements = sum(
        POWERSGD_RANK * sum(shape) if is_factored(shape) else math.prod(shape) for shape in shapes
    )
    return all_reduce_bytes(item_bytes * elements, ranks)


def sent_bytes(form: str, shapes: Sequence[Sequence[int]], item_bytes: int, ranks: int) -> float:
    """What each rank sends to sum one bucket over the ranks, in any form.

    shapes: of the tensors in the bucket; matrices as (rows, columns).
    """
    elements = sum(math.prod(shape) for shape in shapes)
    if form in ("bf16", "int8"):
        return rounded_bytes(form, elements, ranks)
    if form == "topk":
        return topk_bytes(elements, item_bytes, ranks)
    if form == "powersgd":
        return powersgd_bytes(shapes, item_bytes, ranks)
    return all_reduce_bytes(item_bytes * elements, ranks)
