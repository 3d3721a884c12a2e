"""This script logs to TensorBoard with Accelerate, with the loop of its `tracking.py`.

Original: https://github.com/huggingface/accelerate/blob/main/examples/by_feature/tracking.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

EVAL_BATCH_SIZE = 4


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, generator=generator)
    samples = [{"inputs": row, "labels": int(row.sum() > 0)} for row in inputs]
    train_dataloader = DataLoader(samples[:29], shuffle=True, batch_size=batch_size)
    eval_dataloader = DataLoader(samples[29:], shuffle=False, batch_size=EVAL_BATCH_SIZE)
    return train_dataloader, eval_dataloader


def training_function(config):
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=".")
    lr, num_epochs = config["lr"], int(config["num_epochs"])
    seed, batch_size = int(config["seed"]), int(config["batch_size"])
    set_seed(seed)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = LinearLR(optimizer, total_iters=len(train_dataloader) * num_epochs)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    accelerator.init_trackers("classifier", config)

    overall_step = 0
    for _ in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            outputs = model(batch["inputs"])
            loss = nn.functional.cross_entropy(outputs, batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            accelerator.log({"train_loss": loss.item()}, step=overall_step)

        model.eval()
        correct, seen = 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(batch["inputs"])
            predictions, references = accelerator.gather_for_metrics(
                (outputs.argmax(dim=-1), batch["labels"])
            )
            correct += (predictions == references).sum().item()
            seen += len(references)
        accelerator.log({"accuracy": correct / seen}, step=overall_step)

    accelerator.end_training()
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    training_function({"lr": 1e-2, "num_epochs": 2, "seed": 42, "batch_size": 7})
