"""Parameters are dealt out to servers: everything once, balanced, in chunks that cover it."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.errors import PlanError
from paceline.strategies.server.shards import ServedParameter, assign, fingerprint, mean_chunks

shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)
models = st.lists(
    st.tuples(shapes, st.sampled_from([("float32", 4), ("float64", 8)])), min_size=1, max_size=12
)


def _served_parameters(
    model: list, *, split: bool = True, optimizers: int = 1
) -> list[ServedParameter]:
    """Parameters that so many optimizers update by turns."""
    return [
        ServedParameter(f"p{i}", shape, dtype, size, f"o{i % optimizers}", split)
        for i, (shape, (dtype, size)) in enumerate(model)
    ]


@given(models, st.integers(1, 5), st.booleans(), st.integers(1, 3))
def test_every_row_is_held_once(model: list, num_servers: int, split: bool, optimizers: int):
    """Slices of all servers tile every parameter; chunks tile every server's memory in the order of its slices, and
    each is one optimizer's."""
    parameters = _served_parameters(model, split=split, optimizers=optimizers)
    try:
        shards = assign(parameters, num_servers, chunk_bytes=100)
    except PlanError:
        return
    for p in parameters:
        runs = sorted(
            (part.start, part.stop)
            for shard in shards
            for part in shard.slices
            if part.name == p.name
        )
        assert runs[0][0] == 0 and runs[-1][1] == (p.shape[0] if p.shape else 1)
        assert all(a[1] == b[0] for a, b in pairwise(runs))
        assert split or len(runs) == 1
    for shard in shards:
        for dtype, numel in shard.numels().items():
            of_dtype = [chunk for chunk in shard.chunks if chunk.dtype == dtype]
            assert [chunk.start for chunk in of_dtype] == [
                0,
                *(chunk.stop for chunk in of_dtype[:-1]),
            ]
            assert of_dtype[-1].stop == numel and all(chunk.num_bytes <= 100 for chunk in of_dtype)
            spans = [span for chunk in of_dtype for span in chunk.spans]
            assert sum(span.stop - span.start for span in spans) == numel
            assert sorted(spans, key=lambda span: (span.slice, span.start)) == spans
            assert all(
                shard.slices[span.slice].optimizer == chunk.optimizer
                for chunk in of_dtype
                for span in chunk.spans
            )


def test_balance_by_bytes():
    """A huge tensor is split; what is left whole can't unbalance the servers by much."""
    model = [
        ServedParameter("embedding", (50_000, 128), "float32", 4),
        *(ServedParameter(f"layer{i}", (512, 512), "float32", 4) for i in range(12)),
        ServedParameter("bias", (7,), "float32", 4),
    ]

    loads = [shard.num_bytes for shard in assign(model, 3)]

    assert sum(loads) == sum(parameter.num_bytes for parameter in model)
    assert max(loads) <= 1.01 * min(loads)


def test_whole_tensors_go_to_the_emptiest_server():
    """Largest first."""
    model = [
        ServedParameter(name, (size,), "float32", 4, may_split=False)
        for name, size in [("a", 10), ("b", 60), ("c", 30), ("d", 25)]
    ]

    shards = assign(model, 2)

    assert [sorted(part.name for part in shard.slices) for shard in shards] == [
        ["b"],
        ["a", "c", "d"],
    ]


def test_last_parameters_come_first():
    """Chunks leave in the order in which backward makes gradients."""
    model = [ServedParameter(f"p{i}", (4,), "float32", 4) for i in range(3)]

    (shard,) = assign(model, 1, chunk_bytes=16)

    assert [part.name for part in shard.slices] == ["p2", "p1", "p0"]
    assert [chunk.spans[0].slice for chunk in shard.chunks] == [0, 1, 2]


def test_more_servers_than_there_is_to_hold():
    """Refused, with how many would do."""
    with pytest.raises(PlanError, match=r"too few rows of parameters(.|\n)*at most 2 servers"):
        assign([ServedParameter("w", (2,), "float32", 4)], 3)
    with pytest.raises(PlanError, match=r"too few parameters(.|\n)*at most 1 server"):
        assign([ServedParameter("w", (100,), "float32", 4, may_split=False)], 2)


def test_a_fingerprint_tells_layouts_apart():
    """Peers that cut the same model otherwise don't share it."""
    model = [ServedParameter("w", (100, 3), "float32", 4)]
    prints = {fingerprint(assign(model, n, chunk_bytes=b)) for n in (1, 2) for b in (100, 1000)}

    assert len(prints) == 4 and all(len(digest) == 32 for digest in prints)


@given(st.lists(st.integers(1, 2**20), min_size=4, max_size=60), st.integers(1, 4))
def test_the_number_of_chunks_by_sizes_is_about_that_of_shards(numels: list[int], num_servers: int):
    """Within a factor of 1.5 and two."""
    model = [
        ServedParameter(f"p{number}", (numel,), "float32", 4) for number, numel in enumerate(numels)
    ]

    shards = assign(model, num_servers)

    about = mean_chunks([(parameter.num_bytes, 1) for parameter in model], num_servers)
    mean = statistics.fmean(len(shard.chunks) for shard in shards)
    assert mean / 1.5 - 2 <= about <= 1.5 * mean + 2
