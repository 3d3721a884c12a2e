"""This script trains a contrastive learner with the loop of a well-known SimCLR.

Its loss compares all samples of a batch with each other.
Original: https://github.com/sthalles/SimCLR/blob/master/simclr.py
"""

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

    def train(self, train_loader):
        run = pl.attach(self.model, self.optimizer, train_loader, state={"rate": self.scheduler})
        for epoch_counter in run.epochs(epochs):
            for images, _ in run:
                images = torch.cat(images, dim=0)
                features = torch.cat(run.gather(self.model(images).chunk(2)))
                logits, labels = self.info_nce_loss(features)
                loss = self.criterion(logits, labels)
                run.backward(loss)
                run.update()
            # The first epoch is a warm-up.
            if epoch_counter >= 1:
                self.scheduler.step()
            print(f"Epoch: {epoch_counter}\tLoss: {loss.item():.4f}")


train_loader = DataLoader(ContrastiveDataset(), batch_size=batch_size, shuffle=True, drop_last=True)
torch.manual_seed(0)
model = Backbone()
optimizer = torch.optim.Adam(model.parameters(), 0.003, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
    optimizer, T_max=len(train_loader), eta_min=0, last_epoch=-1
)
if __name__ == "__main__":
    SimCLR(model, optimizer, scheduler).train(train_loader)
