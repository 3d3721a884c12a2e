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


def fit(model, train_loader, val_loader, max_epochs, gradient_clip_val):
    optimizer = model.configure_optimizers()
    run = pl.attach(model, optimizer, train_loader, clip=gradient_clip_val)
    for epoch in run.epochs(max_epochs):
        model.train()
        for batch in run:
            run.backward(lambda batch: model.training_step(batch, 0))
            run.update()
        model.eval()
        with torch.no_grad():
            losses = [
                model.validation_step(batch, index) * len(batch[0])
                for index, batch in enumerate(val_loader)
            ]
        print(f"epoch {epoch}: valid_loss {sum(losses) / len(val_loader.dataset):.4f}")


rng = torch.Generator().manual_seed(0)
images = torch.randn(50, 4, 4, generator=rng)
labels = torch.randint(10, (50,), generator=rng)
train_loader = DataLoader(TensorDataset(images[:38], labels[:38]), batch_size=7, shuffle=True)
val_loader = DataLoader(TensorDataset(images[38:], labels[38:]), batch_size=7)
torch.manual_seed(1234)
model = LitClassifier()
fit(model, train_loader, val_loader, max_epochs=2, gradient_clip_val=0.5)
