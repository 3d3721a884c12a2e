"""Small models for split layers, and what a rank makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline.strategies.mesh import Mesh
from paceline.training.stepper import Stepper


class Points(Dataset[Any]):
    """16 samples of six features in three classes."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        x = torch.sin(torch.arange(6.0) * (index + 1))
        return x, int(3 * (x.sum() / 3 % 1))


def points_job(model: Callable[[], nn.Module], **options: Any) -> paceline.Job:
    """A job of classes over `Points`."""
    chosen: dict[str, Any] = {
        "data": Points(),
        "loss": F.cross_entropy,
        "batch": 8,
        "steps": 3,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
    }
    return paceline.Job(model=model, **{**chosen, **options})


def laid_out(job: paceline.Job, plan: str, context: Any) -> Stepper:
    """The stepper of one rank of a plan."""
    parsed_plan = paceline.Plan.parse(plan).with_(microbatches=1)
    mesh = Mesh(parsed_plan.axes.sizes(), context.rank)
    mesh.connect()
    return Stepper(job, parsed_plan, mesh, context.device)


class Mlp(nn.Module):
    """Two products."""

    def __init__(self, hidden: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.dropout, self.second = (
            nn.Linear(6, hidden),
            nn.Dropout(dropout),
            nn.Linear(hidden, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(torch.relu(self.first(x))))


class SelfAttention(nn.Module):
    """Heads of attention over a sequence, written by hand."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.drop = heads, dropout
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.drop if self.training else 0.0
        )
        return self.o(attended.transpose(1, 2).flatten(2))


class Attention(nn.Module):
    """A block of attention between an embedding of positions and a head."""

    def __init__(self, heads: int, width: int = 12) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(1, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList([SelfAttention(width, heads)])
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unsqueeze(-1))
        return self.out((x + self.blocks[0](self.norm(x))).mean(1))


class Fused(nn.Module):
    """Attention whose q, k and v come from one product, an MLP whose gate and input do; each in one of two ways."""

    def __init__(
        self, width: int = 12, heads: int = 2, *, view: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.view, self.dropout = heads, view, nn.Dropout(dropout)
        self.norm, self.qkv, self.o = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.gated, self.down = nn.Linear(width, 16), nn.Linear(8, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x))
        if self.view:
            q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in qkv.split(x.shape[-1], -1)
            )
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        )
        x = x + self.dropout(self.o(attended))
        both = self.gated(x)
        gate, value = (both[..., :8], both[..., 8:]) if self.view else both.chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class StackedExperts(nn.Module):
    """Every sample through every expert: weights of three dims, one matrix for each expert."""

    def __init__(self, width: int = 12, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 16) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, width, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        gate, value = torch.bmm(flat.expand(len(self.up), -1, -1), self.up).chunk(2, -1)
        each = torch.matmul(F.silu(gate) * value, self.down.transpose(1, 2))
        return x + (each * self.router(flat).softmax(-1).t().unsqueeze(-1)).sum(0).view_as(x)


class Stack(nn.Module):
    """Blocks over the features as a sequence."""

    def __init__(self, *blocks: nn.Module, width: int = 12) -> None:
        super().__init__()
        self.embed, self.blocks, self.out = (
            nn.Linear(1, width),
            nn.ModuleList(blocks),
            nn.Linear(width, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unsqueeze(-1))
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(1))
