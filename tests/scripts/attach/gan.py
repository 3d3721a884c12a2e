"""This script trains a DCGAN with the loop of PyTorch's example.

Two models with BatchNorm and two optimizers take turns in a step: three backwards and two updates.
Original: https://github.com/pytorch/examples/blob/main/dcgan/main.py
"""

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

batchSize, niter, nz, ngf, ndf, nc = 5, 2, 6, 4, 4, 1
lr, beta1 = 0.0002, 0.5
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

images = torch.rand(23, nc, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
dataset = TensorDataset(images, torch.zeros(23))
dataloader = DataLoader(dataset, batch_size=batchSize, shuffle=True)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, nc, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1)


torch.manual_seed(999)
netG = Generator().to(device)
netG.apply(weights_init)
netD = Discriminator().to(device)
netD.apply(weights_init)

criterion = nn.BCELoss()
real_label, fake_label = 1.0, 0.0
optimizerD = optim.Adam(netD.parameters(), lr=lr, betas=(beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=lr, betas=(beta1, 0.999))

run = dataloader = pl.attach({"G": netG, "D": netD}, {"G": optimizerG, "D": optimizerD}, dataloader)

for epoch in run.epochs(niter):
    for i, data in enumerate(dataloader, 0):
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        real_cpu = data[0].to(device)
        batch_size = real_cpu.size(0)
        label = torch.full((batch_size,), real_label, device=device)
        output = netD(real_cpu)
        errD_real = criterion(output, label)
        run.backward(errD_real, "D")
        D_x = output.mean().item()

        noise = torch.randn(batch_size, nz, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        run.backward(errD_fake, "D")
        errD = errD_real + errD_fake
        run.update("D")

        # (2) Update G network: maximize log(D(G(z)))
        label.fill_(real_label)
        output = netD(fake)
        errG = criterion(output, label)
        run.backward(errG, "G")
        run.update("G")
        print(f"[{epoch}/{niter}][{i}] Loss_D: {errD.item():.4f} D(x): {D_x:.4f}")
