"""What fused operators spare, against kernels drawn by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from paceline.job import Job
from paceline.model.cost import profile_job
from paceline.model.cost.fusion import COLUMN_SUM_BYTES_PER_S, Fusion, SparedByFusion, saved_s
from paceline.model.cost.op_calls import Operand, OperatorCall

X, Y, Z, W, V = range(5)  # storages
SIZE = 100


def spared(*operators: tuple[list[int], int, bool], place: str = "here") -> SparedByFusion:
    """operators: what each reads, what it writes, and whether it is a product."""
    fusion = Fusion()
    for reads, writes, is_product in operators:
        fusion.add(place, [(name, SIZE) for name in reads], [(writes, SIZE)], is_product=is_product)
    return fusion.spared()[place]


def test_what_the_next_operator_reads_is_not_written():
    """y = f(x), z = g(y): one kernel reads x and writes z."""
    assert spared(([X], Y, False), ([Y], Z, False)) == SparedByFusion(2 * SIZE, 1, 1)


def test_what_a_product_reads_is_written():
    """y = f(x), z = g(y), w = y @ y: y is written, and not read for z."""
    assert spared(([X], Y, False), ([Y], Z, False), ([Y], W, True)) == SparedByFusion(SIZE, 1, 1)


def test_a_product_is_a_kernel_of_its_own():
    assert spared(([X], Y, True), ([Y], Z, False)) == SparedByFusion(kernels=1)
    assert spared(([X], Y, False), ([Y], Z, True)) == SparedByFusion(kernels=1)


def test_a_product_between_two_operators_keeps_them_apart():
    """A residual: y = f(x), z = y @ y, w = z + y. y is read again, long after it was written."""
    assert spared(([X], Y, False), ([Y], Z, True), ([Z, Y], W, False)) == SparedByFusion(kernels=2)


def test_a_tensor_is_read_once_by_all_that_read_it_at_the_same_time():
    """A gradient and the sum over it: y = f(x), z = g(x)."""
    assert spared(([X], Y, False), ([X], Z, False)) == SparedByFusion(SIZE, 1, 1)
    assert spared(([V], X, True), ([X], Y, False), ([X], Z, False)) == SparedByFusion(SIZE, 1, 1)


def test_a_storage_that_is_written_in_place_is_handed_on():
    """y = f(x), y += 1, z = y @ y."""
    assert spared(([X], Y, False), ([Y], Y, False), ([Y], Z, True)) == SparedByFusion(
        2 * SIZE, 1, 1
    )


def test_what_another_place_reads_is_written():
    """The backward of a segment reads what its forward has written."""
    fusion = Fusion()
    fusion.add("forward", [(X, SIZE)], [(Y, SIZE)], is_product=False)
    fusion.add("forward", [(Y, SIZE)], [(Z, SIZE)], is_product=False)
    fusion.add("backward", [(Y, SIZE)], [(W, SIZE)], is_product=False)
    assert fusion.spared() == {
        "forward": SparedByFusion(SIZE, 1, 1),
        "backward": SparedByFusion(kernels=1),
    }


def test_what_lay_between_in_another_place_keeps_nothing_apart():
    """The backward reads what the forward wrote before a product and after it, and reads x for both."""
    fusion = Fusion()
    fusion.add("forward", [(V, SIZE)], [(Y, SIZE)], is_product=False)
    fusion.add("forward", [(Y, SIZE)], [(Z, SIZE)], is_product=True)
    fusion.add("backward", [(Y, SIZE), (X, SIZE)], [(W, SIZE)], is_product=False)
    fusion.add("backward", [(Z, SIZE), (X, SIZE)], [(V, SIZE)], is_product=False)
    assert fusion.spared()["backward"] == SparedByFusion(SIZE, 1, 1)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(F.relu(self.norm(x)))


@pytest.mark.parametrize("batch", [4, 32])
def test_a_block_s_profile_says_what_fusing_it_spares(batch: int):
    """Forward: the norm's result is not written and not read, as relu's backward takes relu's own. Backward: the sum
    for the bias is the gradient's second reader; relu's gradient goes straight to the norm's, which goes to the sum
    with the residual's, the third reader."""
    width = 16
    job = Job(
        model=lambda: nn.Sequential(Residual(width), Residual(width)),
        loss=F.mse_loss,
        batch=batch,
        steps=1,
        data=TensorDataset(torch.ones(64, width), torch.ones(64, width)),
        optimizer=lambda named: torch.optim.SGD(named),
    )
    tensor_bytes = 4 * width
    for segment in profile_job(job).segments:
        if segment.unit:
            assert segment.forward.fused.spared_bytes.per_sample == 2 * tensor_bytes
            assert segment.forward.fused.spared_operators == 1
    last = profile_job(job).segments[-2]
    assert last.unit == "1" and last.backward.fused.spared_bytes.per_sample >= 4 * tensor_bytes


def test_what_is_spared_goes_as_fast_as_the_plain_operators_around_it():
    """100 bytes in 10 s, 2 times; a function's 50 bytes in 50 s, and a product, say nothing of memory."""
    timed = [
        (OperatorCall("aten.add.Tensor", num_bytes=100.0), 2.0, 10.0),
        (OperatorCall("aten.gelu.default", num_bytes=50.0), 1.0, 50.0),
        (OperatorCall("aten.mm.default", flops=9.0, num_bytes=10.0), 1.0, 1.0),
    ]
    assert saved_s(timed, 80.0, memory_bytes_per_s=1.0, threads=1) == pytest.approx(8.0)
    assert saved_s(timed[1:], 80.0, memory_bytes_per_s=4.0, threads=1) == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("rows", "dims", "is_slower"),
    [
        (4096, (0,), True),
        (4096, (-2,), True),
        (1024, (0,), False),
        (4096, (1,), False),
        (4096, (0, 1), False),
    ],
)
def test_long_columns_are_summed_slowly_by_compiled_code(
    rows: int, dims: tuple[int, ...], is_slower: bool
):
    """Of 16 MiB, not of 4, and no rows."""
    num_bytes = 4.0 * rows * 1024
    call = OperatorCall(
        "aten.sum.dim_IntList",
        (Operand((rows, 1024), (1024, 1), "float32"), dims, True),
        num_bytes=num_bytes,
    )
    lost_s = num_bytes / COLUMN_SUM_BYTES_PER_S - 1e-3
    saved = saved_s([(call, 3.0, 1e-3)], 0.0, memory_bytes_per_s=1.0, threads=1)
    assert saved == pytest.approx(-3 * lost_s if is_slower else 0)


@pytest.mark.parametrize(
    ("name", "value_s"),
    [
        ("bernoulli_.float", 33.5e-9),
        ("rand_like.default", 14e-9),
        ("threshold_backward.default", 19.5e-9),
        ("gelu.default", 0.0),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_random_numbers_and_masks_are_slow_in_compiled_code(
    name: str, value_s: float, threads: int
):
    """Threads share the values."""
    call = OperatorCall(
        f"aten.{name}", (Operand((1000, 1000), (1000, 1), "float32"), 0.9), num_bytes=8e6
    )
    slower_s = max(0.0, 1e6 * value_s / threads - 1e-3)
    assert saved_s(
        [(call, 4.0, 1e-3)], 0.0, memory_bytes_per_s=1.0, threads=threads
    ) == pytest.approx(-4 * slower_s)


def test_a_size_in_place_of_a_tensor_counts_values_too():
    call = OperatorCall("aten.rand.default", ((1000, 1000),))
    assert saved_s([(call, 1.0, 1e-3)], 0.0, memory_bytes_per_s=1.0, threads=1) == pytest.approx(
        -13e-3
    )
