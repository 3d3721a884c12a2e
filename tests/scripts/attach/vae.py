"""This script trains a variational autoencoder with the loop of PyTorch's example.

Its loss is a sum over the batch, and its forward draws noise.
Original: https://github.com/pytorch/examples/blob/main/vae/main.py
"""

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

epochs, batch_size, log_interval = 2, 7, 2
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

rng = torch.Generator().manual_seed(0)
images = torch.rand(52, 1, 4, 4, generator=rng)
labels = torch.randint(10, (52,), generator=rng)
train_set, test_set = (
    TensorDataset(images[:37], labels[:37]),
    TensorDataset(images[37:], labels[37:]),
)
train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
test_loader = DataLoader(test_set, batch_size=batch_size)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 12)
        self.fc21 = nn.Linear(12, 3)
        self.fc22 = nn.Linear(12, 3)
        self.fc3 = nn.Linear(3, 12)
        self.fc4 = nn.Linear(12, 16)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 16))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


torch.manual_seed(1)
model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)
run = pl.attach(model, optimizer, train_loader)


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 16), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def train(epoch):
    model.train()
    train_loss = 0

    def loss_of(data):
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        return pl.total(loss)

    for batch_idx, (data, _) in enumerate(run):
        loss = run.backward(loss_of, data)
        train_loss += loss.item()
        run.update()
        if batch_idx % log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}]\tLoss: {loss.item() / len(data):.6f}")
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_set):.4f}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, _ in test_loader:
            data = data.to(device)
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
    print(f"====> Test set loss: {test_loss / len(test_set):.4f}")


if __name__ == "__main__":
    for epoch in run.epochs(epochs):
        train(epoch)
        test(epoch)
