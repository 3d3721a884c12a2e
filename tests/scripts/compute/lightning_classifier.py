"""This script trains a LightningModule of Lightning's examples with the plain loop that its Trainer amounts to.

Original: https://github.com/Lightning-AI/pytorch-lightning/blob/master/examples/pytorch/basics/backbone_image_classifier.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl


class Backbone(torch.nn.Module):
    def __init__(self, hidden_dim=8):
        super().__init__()
        self.l1 = torch.nn.Linear(4 * 4, hidden_dim)
        self.l2 = torch.nn.Linear(hidden_dim, 10)

    def forward(self, x):
        x = x.view(x.size(0), -1)
        x = torch.relu(self.l1(x))
        return torch.relu(self.l2(x))


class LitClassifier(torch.nn.Module):
    def __init__(self, learning_rate=1e-2):
        super().__init__()
        self.learning_rate = learning_rate
        self.backbone = Backbone()

    def forward(self, x):
        return self.backbone(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self(x)
        return F.cross_entropy(y_hat, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self(x)
        return F.cross_entropy(y_hat, y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


rng = torch.Generator().manual_seed(0)
images = torch.randn(50, 4, 4, generator=rng)
labels = torch.randint(10, (50,), generator=rng)
train_loader = DataLoader(TensorDataset(images[:38], labels[:38]), batch_size=7, shuffle=True)
val_loader = DataLoader(TensorDataset(images[38:], labels[38:]), batch_size=7)
job = pl.Job(
    model=LitClassifier,
    data=train_loader,
    validation=val_loader,
    compute=lambda model, batch: model.training_step(batch, 0),
    optimizer=lambda named: torch.optim.Adam(named, lr=1e-2),
    epochs=2,
    clip=0.5,
)
if __name__ == "__main__":
    pl.train(job)
