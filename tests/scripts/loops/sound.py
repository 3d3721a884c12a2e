"""This script trains a classifier in a loop of its own. Tests plant bugs into it that such loops have."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

rng = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(32, 6, generator=rng), torch.randint(3, (32,), generator=rng)
train_loader = DataLoader(TensorDataset(inputs[:23], targets[:23]), batch_size=7, shuffle=True)
val_set = TensorDataset(inputs[23:], targets[23:])
val_loader = DataLoader(val_set, batch_size=4)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
run = pl.attach(model, optimizer, train_loader, clip=1.0)
for epoch in run.epochs(2):
    for x, y in run:
        loss = F.cross_entropy(model(x), y)
        run.backward(loss)
        run.update()
        scheduler.step()
    val_loss = run.evaluate(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), val_loader)
    for group in optimizer.param_groups:
        group["lr"] *= val_loss
    print(f"epoch {epoch}: validation loss {val_loss:.4f}")
