"""Groups gradients into buckets for the all-reduce.

`cost.py` prices the buckets and `run.py` uses them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# Each bucket needs one all-reduce. DistributedDataParallel found that 25 MiB amortise latency. As
# there, the bucket of the first layers is small: it is ready last, so that backward can't hide its
# sum. Models with less than BUCKETS times 25 MiB have smaller buckets, because a sum begins only
# when its bucket is complete. For example, 25 MB in one bucket are sent after backward and take
# 0.94 s on links of 400 Mbit/s; 16 buckets hide two thirds of that. Below LEAST_BUCKET_BYTES
# latency outweighs bytes.
LARGEST_BUCKET_BYTES, LEAST_BUCKET_BYTES = 25 * 2**20, 2**20
LAST_BUCKET_BYTES = 2**20
BUCKETS = 16


def assign(sizes_bytes: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
    """Group gradients into buckets, in the order in which backward makes them: last parameter
    first.

    Args:
        sizes_bytes: Bytes of each gradient held by this rank, in the model's own order.
        kinds: The kind of each gradient (dtype, device, whether it is a shard). Only one kind may
            share a bucket.

    Returns:
        Buckets of indices. Every index is in exactly one bucket. A bucket holds one kind and is
        closed once it reaches its limit, so that a gradient is never split.

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
