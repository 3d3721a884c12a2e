"""This script trains a language model with a sparse mixture of experts, with the loop of makeMoE.

Each token goes to two of four experts, and an expert may get no token of a batch.
Original: https://github.com/AviSoori1x/makeMoE/blob/main/makeMoE.py
"""

import torch
import torch.nn as nn
from torch.nn import functional as F

import paceline as pl

batch_size, block_size, max_iters, learning_rate = 5, 6, 8, 1e-2
n_embed, num_experts, top_k, vocab_size = 8, 4, 2, 11
device = "cuda" if torch.cuda.is_available() else "cpu"
rng = torch.Generator().manual_seed(1337)
data = torch.randint(vocab_size, (100,), generator=rng)


def get_batch(ix):
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + block_size + 1] for i in ix])
    return x.to(device), y.to(device)


class Mixer(nn.Module):
    """Causal attention with one head."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(n_embed, n_embed, bias=False)
        self.query = nn.Linear(n_embed, n_embed, bias=False)
        self.value = nn.Linear(n_embed, n_embed, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        _, T, C = x.shape
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * C**-0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ self.value(x)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_embed, 4 * n_embed), nn.ReLU(), nn.Linear(4 * n_embed, n_embed)
        )

    def forward(self, x):
        return self.net(x)


class SparseMoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(n_embed, num_experts)
        self.experts = nn.ModuleList([Expert() for _ in range(num_experts)])

    def forward(self, x):
        logits = self.router(x)
        top_k_logits, indices = logits.topk(top_k, dim=-1)
        sparse_logits = torch.full_like(logits, float("-inf")).scatter(-1, indices, top_k_logits)
        gates = F.softmax(sparse_logits, dim=-1).view(-1, num_experts)
        flat, final = x.reshape(-1, x.size(-1)), torch.zeros_like(x).view(-1, x.size(-1))
        for i, expert in enumerate(self.experts):
            chosen = (indices == i).any(dim=-1).view(-1)
            if chosen.any():
                final[chosen] += expert(flat[chosen]) * gates[chosen, i].unsqueeze(1)
        return final.view_as(x)


class SparseMoELanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding_table = nn.Embedding(vocab_size, n_embed)
        self.position_embedding_table = nn.Embedding(block_size, n_embed)
        self.sa, self.smoe = Mixer(), SparseMoE()
        self.ln1, self.ln2 = nn.LayerNorm(n_embed), nn.LayerNorm(n_embed)
        self.lm_head = nn.Linear(n_embed, vocab_size)

    def forward(self, idx, targets):
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.token_embedding_table(idx) + self.position_embedding_table(positions)
        x = x + self.sa(self.ln1(x))
        x = x + self.smoe(self.ln2(x))
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))
        return logits, loss


torch.manual_seed(1337)
model = SparseMoELanguageModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

starts = torch.randint(len(data) - block_size, (max_iters * batch_size,), generator=rng)
run = pl.attach(model, optimizer, torch.utils.data.DataLoader(starts, batch_size))
for iter, ix in enumerate(run.steps(max_iters)):
    xb, yb = get_batch(ix)
    loss = run.backward(lambda batch: model(*batch)[1], (xb, yb))
    run.update()
    print(f"step {iter}: train loss {loss.item():.4f}")
