"""This script trains a contrastive learner with the loop of a well-known SimCLR.

Its loss compares all samples of a batch with each other.
Original: https://github.com/sthalles/SimCLR/blob/master/simclr.py
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import paceline as pl

batch_size, epochs, out_dim, temperature = 7, 3, 6, 0.07


class ContrastiveDataset(Dataset):
    """Two views of each image, and its label."""

    def __init__(self):
        rng = torch.Generator().manual_seed(0)
        images = torch.randn(23, 1, 5, 5, generator=rng)
        self.views = [images + 0.1 * torch.randn(images.shape, generator=rng) for _ in range(2)]

    def __len__(self):
        return len(self.views[0])

    def __getitem__(self, index):
        return [view[index] for view in self.views], 0


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc = nn.Sequential(nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, out_dim))

    def forward(self, x):
        return self.fc(self.conv(x).relu().flatten(1))


class SimCLR:
    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.criterion = nn.CrossEntropyLoss()

    def info_nce_loss(self, features):
        labels = torch.cat([torch.arange(len(features) // 2) for i in range(2)], dim=0)
        labels = labels.unsqueeze(0) == labels.unsqueeze(1)
        features = F.normalize(features, dim=1)
        similarity_matrix = torch.matmul(features, features.T)
        mask = torch.eye(labels.shape[0], dtype=torch.bool)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
        positives = similarity_matrix[labels].view(labels.shape[0], -1)
        negatives = similarity_matrix[~labels].view(similarity_matrix.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1)
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        return logits / temperature, labels


train_loader = DataLoader(ContrastiveDataset(), batch_size=batch_size, shuffle=True, drop_last=True)
learner = SimCLR(None, None, None)


class TwoViews(Backbone):
    def forward(self, pairs):
        return super().forward(pairs.flatten(0, 1)).unflatten(0, (-1, 2))


def of_all_pairs(features, batch):
    logits, labels = learner.info_nce_loss(features.transpose(0, 1).flatten(0, 1))
    return learner.criterion(logits, labels)


def step(ctx, batch):
    ctx.backward("model", torch.stack(batch.input, 1), of_all_pairs, gather=True)
    ctx.update("model")


def rate(step):
    falls = max(0, step // len(train_loader) - 1)
    return 0.5 * (1 + math.cos(math.pi * falls / len(train_loader)))


job = pl.Job(
    models={"model": TwoViews},
    optimizers={
        "model": pl.Optimizer(
            lambda named: torch.optim.Adam(named, 0.003, weight_decay=1e-4),
            lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        )
    },
    training_step=step,
    data=train_loader,
    epochs=epochs,
)
if __name__ == "__main__":
    pl.train(job)
