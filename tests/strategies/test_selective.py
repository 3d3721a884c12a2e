"""recompute=selective: the inside of an attention is not kept, and what backward gives stays the same to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.model.attention import Selective
from paceline.model.cost.trace import profile_job
from paceline.strategies.stages.price import SplitJob

WIDTH, HEADS, LENGTH, SAMPLES = 32, 4, 16, 4
SCORES_BYTES = SAMPLES * HEADS * LENGTH * LENGTH * 4


def plain(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(
        ~block.mask, float("-inf")
    )
    return block.drop(scores.softmax(-1)) @ v


def in_place(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    scores /= math.sqrt(q.shape[-1])
    scores += block.bias
    return block.drop(F.softmax(scores, -1)) @ v


def summed(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) + block.bias
    return torch.einsum("bhts,bhsd->bhtd", scores.float().softmax(-1).to(v.dtype), v)


def fused(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    mask: Tensor

    def __init__(self, attend: Callable[..., Tensor] = plain, dropout: float = 0.2) -> None:
        super().__init__()
        self.attend, self.drop = attend, nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(self.attend(self, q, k, v).transpose(1, 2).flatten(2))


def step(block: nn.Module, x: Tensor, *, selective: bool) -> tuple[list[Tensor | None], int]:
    """The gradients of a step, and the bytes of the different tensors that autograd keeps as they are."""
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    torch.manual_seed(1)
    block.zero_grad()
    hooks = torch.autograd.graph.saved_tensors_hooks
    watch: Any = Selective(kept_as_is=pack) if selective else hooks(pack, lambda tensor: tensor)
    with watch:
        output = block(x)
    output.float().square().mean().backward()
    return [None if p.grad is None else p.grad.clone() for p in block.parameters()], sum(
        storage.nbytes() for storage in kept.values()
    )


@pytest.mark.sweep(6)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(("attend", "spared"), [(plain, 2), (in_place, 2), (summed, 1), (fused, 0)])
def test_what_lies_between_the_products_is_not_kept(
    attend: Callable[..., Tensor], spared: int, precision: str
):
    """The softmax, and after dropout; nothing of fused attention. Gradients are the same to the bit."""
    torch.manual_seed(0)
    block, x = Block(attend), torch.randn(SAMPLES, LENGTH, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext():
        (expected, whole), (actual, less) = (
            step(block, x, selective=selective) for selective in (False, True)
        )

    assert all(a is b is None or torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert whole - less >= spared * SCORES_BYTES * (0.5 if precision == "bf16" else 1)
    if not spared:
        assert whole == less


def test_a_changed_mask_is_told():
    """What the scores are made again from must be what it was."""
    block, x = Block(), torch.randn(SAMPLES, LENGTH, WIDTH)
    with Selective():
        output = block(x)
    block.mask.fill_(True)  # its negation is kept
    output.sum().backward()
    extra = torch.zeros(LENGTH, LENGTH)
    with Selective():
        q = block.qkv(x).chunk(3, -1)[0]
        output = ((q @ q.transpose(-2, -1) + extra).softmax(-1) @ q).sum()
    extra += 1
    with pytest.raises(RuntimeError, match="changed in place before its backward"):
        output.backward()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(summed) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


@pytest.mark.slow
def test_a_price_knows_what_is_spared_and_done_again():
    """Of a block and sample: the scores after the softmax and after dropout, and one of attention's products."""
    x = torch.randn(8, LENGTH, WIDTH)
    job = paceline.Job(
        model=lambda: nn.Sequential(Block(), Block(fused)),
        data=TensorDataset(x, x),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=8,
        steps=1,
    )
    profile = profile_job(job)
    [written, of_torch] = [segment for segment in profile.segments if segment.unit]
    pieces = SplitJob(job, profile).priced(4)[1]

    for core, samples in ((written.core, 1.0), (pieces["0"].core, 4.0)):
        assert core is not None
        assert core.kept_bytes.at(1.0) == 2 * samples * SCORES_BYTES / SAMPLES
        assert core.forward.flops.at(1.0) == samples * HEADS * 2 * LENGTH * LENGTH * WIDTH / HEADS
    assert of_torch.core is None


@pytest.mark.parametrize(
    "plan",
    [
        "shard=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in ("data=2 microbatches=2", "pipeline=2 microbatches=2", "tensor=2")
        ),
    ],
)
def test_plans_are_what_one_device_computes(plan: str):
    """Under replicas, shards, stages and split layers, in micro-batches."""
    x = torch.randn(32, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    job = paceline.Job(
        model=Net,
        data=TensorDataset(x, x.mean((1, 2), keepdim=True)[..., 0].expand(-1, WIDTH)),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named),
        batch=8,
        steps=2,
        precision="float64",
    )
    certificates = paceline.verify(job, [f"{plan} recompute=selective"], restore="no")

    assert [certificate.verdict for certificate in certificates] == ["passed"]
