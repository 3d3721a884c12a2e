"""This script trains a convolutional network with the plain loop that DeepSpeed's CIFAR-10 example amounts to.

Settings stand in a mapping as in DeepSpeed's JSON: an optimizer, a schedule that warms up, and clipping.
Original: https://github.com/deepspeedai/DeepSpeedExamples/blob/master/training/cifar/cifar10_deepspeed.py
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

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


def initialize(model, training_data, config):
    optimizer = torch.optim.Adam(model.parameters(), **config["optimizer"])
    warm = config["scheduler"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warm["warmup_num_steps"]),
    )
    loader = DataLoader(training_data, batch_size=config["train_batch_size"], shuffle=True)
    return model, optimizer, loader, scheduler


def test(net, testset):
    correct = 0
    net.eval()
    with torch.no_grad():
        for inputs, targets in DataLoader(testset, batch_size=4):
            correct += (net(inputs).argmax(1) == targets).sum().item()
    print(f"Accuracy of the network on the test images: {100 * correct / len(testset):.0f} %")


torch.manual_seed(42)
net, optimizer, trainloader, scheduler = initialize(Net(), trainset, ds_config)
criterion = nn.CrossEntropyLoss()

for epoch in range(2):
    net.train()
    running_loss = 0.0
    for data in trainloader:
        inputs, labels = data
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), ds_config["gradient_clipping"])
        optimizer.step()
        scheduler.step()
        running_loss += loss.item()
    print(f"[{epoch + 1}] loss: {running_loss / len(trainloader):.3f}")
test(net, testset)
torch.save(net.state_dict(), "net.pt")
