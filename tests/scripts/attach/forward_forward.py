"""This script trains a network layer by layer with the loop of a well-known forward-forward implementation.

Each layer has its own optimizer and its own loss, and learns from all samples at once before the next layer begins.
Original: https://github.com/mpezeshki/pytorch_forward_forward/blob/main/main.py
"""

import torch
import torch.nn as nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl


def overlay_y_on_x(x, y):
    """Replace the first 3 numbers of data [x] with one-hot-encoded label [y]."""
    x_ = x.clone()
    x_[:, :3] *= 0.0
    x_[range(x.shape[0]), y] = x.max()
    return x_


class Net(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = nn.ModuleList([Layer(dims[d], dims[d + 1]) for d in range(len(dims) - 1)])

    def predict(self, x):
        goodness_per_label = []
        for label in range(3):
            h = overlay_y_on_x(x, label)
            goodness = []
            for layer in self.layers:
                h = layer(h)
                goodness += [h.pow(2).mean(1)]
            goodness_per_label += [sum(goodness).unsqueeze(1)]
        return torch.cat(goodness_per_label, 1).argmax(1)

    def fit(self, x_pos, x_neg):
        h_pos, h_neg = x_pos, x_neg
        for i, layer in enumerate(self.layers):
            print("training layer", i, "...")
            h_pos, h_neg = layer.fit(h_pos, h_neg, f"layer{i}")


class Layer(nn.Linear):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.relu = torch.nn.ReLU()
        self.opt = Adam(self.parameters(), lr=0.03)
        self.threshold = 2.0
        self.num_epochs = 5

    def forward(self, x):
        x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return self.relu(torch.mm(x_direction, self.weight.T) + self.bias.unsqueeze(0))

    def fit(self, x_pos, x_neg, name):
        for _ in range(self.num_epochs):
            rows = next(batches)
            g_pos = self.forward(x_pos[rows]).pow(2).mean(1)
            g_neg = self.forward(x_neg[rows]).pow(2).mean(1)
            # Positive samples are pushed above the threshold, negative ones below it.
            loss = torch.log(
                1 + torch.exp(torch.cat([-g_pos + self.threshold, g_neg - self.threshold]))
            ).mean()
            run.backward(loss, name)
            run.update(name)
        print("loss", loss.item())
        return self.forward(x_pos).detach(), self.forward(x_neg).detach()


if __name__ == "__main__":
    rng = torch.Generator().manual_seed(0)
    images = torch.rand(23, 10, generator=rng)
    labels = torch.randint(3, (23,), generator=rng)
    train_loader = DataLoader(TensorDataset(images, labels), batch_size=23, shuffle=True)
    torch.manual_seed(1234)
    net = Net([10, 8, 8])
    x, y = next(iter(train_loader))
    x_pos = overlay_y_on_x(x, y)
    rnd = torch.randperm(x.size(0))
    x_neg = overlay_y_on_x(x, y[rnd])
    layers = {f"layer{i}": layer for i, layer in enumerate(net.layers)}
    optimizers = {name: layer.opt for name, layer in layers.items()}
    run = pl.attach(layers, optimizers, DataLoader(range(23), batch_size=23))
    batches = run.steps(10)
    net.fit(x_pos, x_neg)
    print("train error:", 1.0 - net.predict(x).eq(y).double().mean().item())
