"""This script trains a character GPT with the loop of nanoGPT's `train.py`.

Learning rates are set by hand, batches are drawn at random positions of the text, and the model computes its own loss.
Original: https://github.com/karpathy/nanoGPT/blob/master/train.py
"""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

import paceline as pl

batch_size = 7
block_size = 6
n_layer, n_head, n_embd = 2, 2, 8
learning_rate, min_lr = 1e-2, 1e-3
warmup_iters, lr_decay_iters, max_iters = 2, 8, 8
weight_decay, beta1, beta2 = 1e-1, 0.9, 0.99
grad_clip = 1.0
vocab_size = 13
rng = torch.Generator().manual_seed(1337)
train_data = torch.randint(vocab_size, (120,), generator=rng)


def get_batch(ix):
    x = torch.stack([train_data[i : i + block_size] for i in ix])
    y = torch.stack([train_data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        q, k, v = (each.view(B, T, n_head, C // n_head).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def get_optimizer(named_parameters):
    params = [p for _, p in named_parameters if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


torch.manual_seed(1337)
model = GPT()
optimizer = get_optimizer(model.named_parameters())

starts = torch.randint(len(train_data) - block_size, (max_iters * batch_size,), generator=rng)
run = pl.attach(model, optimizer, torch.utils.data.DataLoader(starts, batch_size), clip=grad_clip)
for iter_num, ix in enumerate(run.steps(max_iters)):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    X, Y = get_batch(ix)
    loss = run.backward(lambda batch: model(*batch)[1], (X, Y))
    run.update()
    print(f"iter {iter_num}: loss {loss.item():.4f}")
