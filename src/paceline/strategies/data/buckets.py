"""How gradients are grouped for the all-reduce: one decision, priced by `cost.py` and carried out by `run.py`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# One all-reduce a bucket. 25 MiB is what DistributedDataParallel found to amortise latency; the first, which is
# ready last and can't hide behind backward, is small for the same reason as there. Models of less than BUCKETS times as
# much have smaller ones, for a sum begins when a whole bucket is there: 25 MB in one bucket leave after backward, and
# on links of 400 Mbit/s take 0.94 s, of which 16 buckets hide two thirds. Below LEAST_BUCKET_BYTES latency outweighs
# bytes.
LARGEST_BUCKET_BYTES, LEAST_BUCKET_BYTES = 25 * 2**20, 2**20
LAST_BUCKET_BYTES = 2**20
BUCKETS = 16


def assign(sizes_bytes: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
    """Group gradients into buckets, in the order in which backward makes them: last parameter first.

    Args:
        sizes_bytes: Bytes of each gradient held by this rank, in the model's own order.
        kinds: What may share a bucket (dtype, device, whether it is a shard) for each gradient.

    Returns:
        Buckets of indices. Every index is in exactly one; a bucket holds one kind and is closed once it reaches
        its limit, so a gradient is never split.

    >>> assign([10, 10, 30 * 2**20], ["f32"] * 3)
    [[2], [1, 0]]
    >>> assign([2**20] * 4, ["f32"] * 4)
    [[3], [2], [1], [0]]
    """
    buckets: list[list[int]] = []
    open_bucket: dict[Hashable, list[int]] = {}
    remaining_bytes = sum(sizes_bytes)
    enough_bytes = min(LARGEST_BUCKET_BYTES, max(LEAST_BUCKET_BYTES, remaining_bytes / BUCKETS))
    for index in reversed(range(len(sizes_bytes))):
        bucket = open_bucket.setdefault(kinds[index], [])
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        remaining_bytes -= sizes_bytes[index]
        bucket_bytes = sum(sizes_bytes[i] for i in bucket)
        if bucket_bytes >= enough_bytes or (remaining_bytes <= LAST_BUCKET_BYTES < bucket_bytes):
            del open_bucket[kinds[index]]
    return buckets
