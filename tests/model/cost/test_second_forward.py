"""What a profile says that full recomputation does again, against what torch does again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from paceline.job import Job
from paceline.model.cost.profile import Segment
from paceline.model.cost.trace import profile_job
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.strategies.recompute.run import prepare

WIDTH, BATCH = 16, 8


class Gated(nn.Module):
    """Two branches of one input, and a residual sum that nothing is kept of."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Its scores are a product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.out((query @ key.mT).softmax(-1) @ value)


def _of(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


PRODUCT = 2 * WIDTH * WIDTH * WIDTH  # of a sample, which has so many tokens
# A block, and how many of such products it does again.
BLOCKS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "a product alone": (_linear, 0),
    "a product last": (_of(_linear, nn.GELU, _linear), 1),
    "a function last": (_of(_linear, nn.ReLU), 1),
    "a norm last": (_of(_linear, lambda: nn.LayerNorm(WIDTH)), 1),
    "dropout last": (_of(_linear, lambda: nn.Dropout(0.5)), 1),
    "a sum last": (Gated, 2),
    "attention": (Attention, 5),
}


class Offloaded(nn.Module):
    """Decides for itself what becomes of the tensors that autograd keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _of(_linear, nn.GELU, _linear)()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            out: torch.Tensor = self.inner(x)
        return out


class Chain(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _units(make: Callable[[], nn.Module]) -> list[Segment]:
    x = torch.ones(BATCH, WIDTH, WIDTH)
    profile = profile_job(
        Job(
            model=make,
            data=TensorDataset(x, x),
            loss=F.mse_loss,
            batch=BATCH,
            steps=1,
            optimizer=lambda named: torch.optim.AdamW(named),
        )
    )
    assert profile.notes == ()
    return [
        segment
        for segment in profile.segments
        if segment.unit in ("blocks.0", "blocks.1", "blocks.2")
    ]


def _step_flops(model: nn.Module) -> int:
    x = torch.ones(BATCH, WIDTH, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    return counter.get_total_flops()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", BLOCKS)
def test_it_is_what_torch_does_again(name: str):
    block, products = BLOCKS[name]
    units, model, recomputed = _units(lambda: Chain(block)), Chain(block), Chain(block)
    plan = Plan.parse("single recompute=full")
    prepare(recomputed, plan=plan, mesh=Mesh.of(plan, 0))

    again = [segment.again.flops.at(BATCH) for segment in units if segment.again is not None]

    assert again == [products * BATCH * PRODUCT] * 3
    assert _step_flops(recomputed) - _step_flops(model) == sum(again)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", BLOCKS)
def test_tensors_are_counted_that_autograd_keeps(name: str):
    """Parameters among them: each passes two hooks where a block is recomputed."""
    kept: list[torch.Tensor] = []
    block = BLOCKS[name][0]()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        block(torch.ones(BATCH, WIDTH, WIDTH, requires_grad=True))

    assert _units(lambda: Chain(BLOCKS[name][0]))[-1].kept_tensors == len(kept) > 0


def test_all_of_a_block_is_priced_that_decides_what_autograd_keeps():
    assert [segment.again for segment in _units(lambda: Chain(Offloaded))] == [None] * 3


def test_blocks_that_are_frozen_do_nothing_again():
    """Adapters behind them alone are trained."""

    def half_frozen() -> nn.Module:
        model = Chain(_of(_linear, nn.GELU, _linear))
        for block in model.blocks[:2]:
            block.requires_grad_(False)
        return model

    *frozen, trained = _units(half_frozen)

    assert all(segment.backward.flops.per_sample == 0 for segment in frozen)
    assert trained.again is not None and trained.again.flops.per_sample == PRODUCT
