"""This script accumulates gradients with Accelerate, with the loop of its `gradient_accumulation.py`.

A step takes five batches, each padded to its longest sentence. Full ones only, as a short one would weigh as much.
Original: https://github.com/huggingface/accelerate/blob/main/examples/by_feature/gradient_accumulation.py
"""

import torch
from accelerate import Accelerator
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
    set_seed,
)

EVAL_BATCH_SIZE = 4


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 9, (64,), generator=generator)
    sentences = [
        {"input_ids": torch.randint(1, 19, (int(n),), generator=generator), "labels": int(n) % 2}
        for n in lengths
    ]

    def collate_fn(examples):
        ids = [example["input_ids"] for example in examples]
        return {
            "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
            "attention_mask": torch.nn.utils.rnn.pad_sequence(
                [torch.ones_like(each) for each in ids], batch_first=True
            ),
            "labels": torch.tensor([example["labels"] for example in examples]),
        }

    train_dataloader = DataLoader(
        sentences[:53], shuffle=True, collate_fn=collate_fn, batch_size=batch_size, drop_last=True
    )
    eval_dataloader = DataLoader(
        sentences[53:], shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE
    )
    return train_dataloader, eval_dataloader


def get_model():
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=19,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def training_function(config):
    gradient_accumulation_steps = int(config["gradient_accumulation_steps"])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=gradient_accumulation_steps)
    lr, num_epochs = config["lr"], int(config["num_epochs"])
    seed, batch_size = int(config["seed"]), int(config["batch_size"])
    set_seed(seed)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size)
    model = get_model()
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=2,
        num_training_steps=len(train_dataloader) * num_epochs // gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                output = model(**batch)
                accelerator.backward(output.loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        correct, seen = 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += (predictions == references).sum().item()
            seen += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {correct / seen:.4f}")

    torch.save(model.state_dict(), "bert.pt")


if __name__ == "__main__":
    training_function(
        {
            "lr": 2e-3,
            "num_epochs": 2,
            "seed": 42,
            "batch_size": 5,
            "gradient_accumulation_steps": 5,
        }
    )
