"""This script saves its state with Accelerate and goes on from it, with the loop of its `checkpointing.py`.

The first call ends after three steps, in mid-epoch, and the second one goes on there.
Original: https://github.com/huggingface/accelerate/blob/main/examples/by_feature/checkpointing.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

EVAL_BATCH_SIZE = 4


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, generator=generator)
    samples = [{"inputs": row, "labels": int(row.sum() > 0)} for row in inputs]
    train_dataloader = DataLoader(samples[:29], shuffle=True, batch_size=batch_size)
    eval_dataloader = DataLoader(samples[29:], shuffle=False, batch_size=EVAL_BATCH_SIZE)
    return train_dataloader, eval_dataloader


def training_function(config, checkpointing_steps, num_steps=None, resume_from_checkpoint=None):
    accelerator = Accelerator(cpu=True)
    lr, num_epochs = config["lr"], int(config["num_epochs"])
    seed, batch_size = int(config["seed"]), int(config["batch_size"])
    set_seed(seed)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = CosineAnnealingLR(optimizer, T_max=len(train_dataloader) * num_epochs)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    overall_step, starting_epoch, resume_step = 0, 0, 0
    if resume_from_checkpoint is not None:
        accelerator.load_state(resume_from_checkpoint)
        overall_step = int(resume_from_checkpoint.removeprefix("step_"))
        starting_epoch, resume_step = divmod(overall_step, len(train_dataloader))

    for epoch in range(starting_epoch, num_epochs):
        model.train()
        active_dataloader = train_dataloader
        if resume_step and epoch == starting_epoch:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        for batch in active_dataloader:
            outputs = model(batch["inputs"])
            loss = nn.functional.cross_entropy(outputs, batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if overall_step % checkpointing_steps == 0:
                accelerator.save_state(f"step_{overall_step}")
            if overall_step == num_steps:
                return

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
        accelerator.print(f"epoch {epoch}: accuracy {correct / seen:.4f}")

    accelerator.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    config = {"lr": 1e-2, "num_epochs": 2, "seed": 42, "batch_size": 7}
    training_function(config, checkpointing_steps=3, num_steps=3)
    training_function(config, checkpointing_steps=3, resume_from_checkpoint="step_3")
