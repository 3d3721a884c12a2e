"""What fused operators spare, against kernels drawn by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from paceline.job import Job
from paceline.model.cost.fusion import Fusion, SparedByFusion
from paceline.model.cost.trace import profile_job

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
