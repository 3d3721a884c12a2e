"""Plan for a cluster that you don't own: a GPT of 1.4 billion weights on nodes of H100, without making a weight.

paceline plan examples/13_plan_a_cluster.py --cluster 2x8xH100
paceline plan examples/13_plan_a_cluster.py --cluster 8x8xH100 --scale 8..64 --price-per-hour 2.5
python examples/13_plan_a_cluster.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline as pl


class Tokens(Dataset):
    """Nothing is read for a plan but the shapes of two samples."""

    def __init__(self, sequence: int):
        self.sequence = sequence

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(
            50_304, (self.sequence + 1,), generator=torch.Generator().manual_seed(index)
        )
        return tokens[:-1], tokens[1:]


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, sequence: int):
        super().__init__()
        self.token, self.place = nn.Embedding(50_304, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 128, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 50_304, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=x.device, dtype=x.dtype
        )
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def job(width: int = 2048, layers: int = 24, sequence: int = 1024, batch: int = 512) -> pl.Job:
    return pl.Job(
        model=lambda: GPT(width, layers, sequence),
        data=Tokens(sequence),
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda named: torch.optim.AdamW(named, lr=2e-4),
        batch=batch,
        steps=10_000,
        precision="bf16",
    )


if __name__ == "__main__":
    for cluster in ("8xA100", "8xH100", "4x8xH100"):
        answer = pl.plan(job(), cluster)
        best = answer.ranking.chosen
        print(f"{cluster}: {best.plan}, {best.estimate.step_s:.2f} s a step")
