"""This script logs to TensorBoard with Accelerate, with the loop of its `tracking.py`.

`paceline run --log tensorboard` begins the tracker, and `run.evaluate` tells it what it measures.
Original: https://github.com/huggingface/accelerate/blob/main/examples/by_feature/tracking.py
"""

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

import paceline as pl

EVAL_BATCH_SIZE = 4


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, generator=generator)
    samples = [{"inputs": row, "labels": int(row.sum() > 0)} for row in inputs]
    train_dataloader = DataLoader(samples[:29], shuffle=True, batch_size=batch_size)
    eval_dataloader = DataLoader(samples[29:], shuffle=False, batch_size=EVAL_BATCH_SIZE)
    return train_dataloader, eval_dataloader


def training_function(config):
    lr, num_epochs = config["lr"], int(config["num_epochs"])
    seed, batch_size = int(config["seed"]), int(config["batch_size"])
    set_seed(seed)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = LinearLR(optimizer, total_iters=len(train_dataloader) * num_epochs)
    run = pl.attach(model, optimizer, train_dataloader, schedule=lr_scheduler)

    def evaluated(batch):
        outputs = model(batch["inputs"])
        return {
            "loss": nn.functional.cross_entropy(outputs, batch["labels"]),
            "accuracy": (outputs.argmax(dim=-1) == batch["labels"]).float().mean(),
        }

    for _ in run.epochs(num_epochs):
        model.train()
        for batch in run:
            outputs = model(batch["inputs"])
            loss = nn.functional.cross_entropy(outputs, batch["labels"])
            run.backward(loss)
            run.update()
            run.log(loss=loss)

        run.evaluate(evaluated, eval_dataloader)


if __name__ == "__main__":
    training_function({"lr": 1e-2, "num_epochs": 2, "seed": 42, "batch_size": 7})
