"""This script trains a convolutional network with the plain loop that DeepSpeed's CIFAR-10 example amounts to.

Settings stand in a mapping as in DeepSpeed's JSON: an optimizer, a schedule that warms up, and clipping.
Original: https://github.com/deepspeedai/DeepSpeedExamples/blob/master/training/cifar/cifar10_deepspeed.py
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

ds_config = {
    "train_batch_size": 11,
    "optimizer": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    "scheduler": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 4},
    "gradient_clipping": 1.0,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 8, 2)
        self.fc1 = nn.Linear(8, 12)
        self.fc2 = nn.Linear(12, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 8)
        return self.fc2(F.relu(self.fc1(x)))


rng = torch.Generator().manual_seed(0)
images = torch.rand(57, 3, 8, 8, generator=rng) * 2 - 1
labels = torch.randint(10, (57,), generator=rng)
trainset, testset = TensorDataset(images[:46], labels[:46]), TensorDataset(images[46:], labels[46:])


warm, criterion = ds_config["scheduler"]["warmup_num_steps"], nn.CrossEntropyLoss()
job = pl.Job(
    model=Net,
    data=DataLoader(trainset, ds_config["train_batch_size"], shuffle=True),
    compute=lambda model, batch: criterion(model(batch[0]), batch[1]),
    optimizer=lambda named: torch.optim.Adam(named, **ds_config["optimizer"]),
    lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm)
    ),
    epochs=2,
    clip=ds_config["gradient_clipping"],
)
if __name__ == "__main__":
    pl.train(job)
