"""How gradients are grouped for the all-reduce: one decision, priced by `cost.py` and carried out by `run.py`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# One all-reduce a bucket. 25 MiB is what DistributedDataParallel found to amortise latency; the first, which is
# ready last and can't hide behind backward, is small for the same reason as there.
BUCKET_BYTES = 25 * 2**20
LAST_BUCKET_BYTES = 2**20


def assign(sizes_bytes: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
    """Group gradients into buckets, in the order in which backward makes them: last parameter first.

    Args:
        sizes_bytes: Bytes of each gradient held by this rank, in the model's own order.
        kinds: What may share a bucket (dtype and device) for each gradient.

    Returns:
        Buckets of indices. Every index is in exactly one; a bucket holds one kind and is closed once it reaches
        its limit, so a gradient is never split.

    >>> assign([10, 10, 30 * 2**20], ["f32"] * 3)
    [[2], [1, 0]]
    """
    buckets: list[list[int]] = []
    open_bucket: dict[Hashable, list[int]] = {}
    remaining = sum(sizes_bytes)
    for index in reversed(range(len(sizes_bytes))):
        bucket = open_bucket.setdefault(kinds[index], [])
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        remaining -= sizes_bytes[index]
        held = sum(sizes_bytes[i] for i in bucket)
        if held >= BUCKET_BYTES or (remaining <= LAST_BUCKET_BYTES < held):
            del open_bucket[kinds[index]]
    return buckets
