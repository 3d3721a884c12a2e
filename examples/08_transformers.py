"""A fine-tuning script of Transformers with one changed import: a small Llama learns to write Python.

python examples/08_transformers.py                        # the fastest plan for the devices that are here
CUDA_VISIBLE_DEVICES= PACELINE_PLAN="data=2" python examples/08_transformers.py    # two ranks; without the first
                                                          # variable, on a machine with GPUs, each has one
"""

import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
    set_seed,
)

from paceline.transformers import Trainer  # was: from transformers import Trainer

FILES = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:24]


def make_tokenizer():
    """Byte pairs of the standard library's own text: nothing is downloaded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (path.read_text() for path in FILES),
        trainers.BpeTrainer(vocab_size=512, special_tokens=["<pad>", "<s>"], show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")


def samples(tokenizer, files):
    """Functions of unequal lengths. Their first lines are a prompt: labels of -100 keep it out of the loss."""
    for path in files:
        for block in path.read_text().split("\ndef ")[1:]:
            head, _, body = ("def " + block).partition("\n")
            prompt, answer = tokenizer(head + "\n").input_ids, tokenizer(body[:300]).input_ids
            if body:
                yield {
                    "input_ids": prompt + answer,
                    "attention_mask": [1] * len(prompt + answer),
                    "labels": [-100] * len(prompt) + answer,
                }


def accuracy(prediction):
    """Of the next tokens that count. Predictions are already the likeliest tokens."""
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels)[labels != -100].mean())}


def main():
    set_seed(0)
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=1024,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    )
    model = get_peft_model(
        model, LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"])
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="runs/transformers",
            num_train_epochs=2,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            warmup_steps=10,
            logging_steps=10,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=list(samples(tokenizer, FILES[4:])),
        eval_dataset=list(samples(tokenizer, FILES[:4])),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    trainer.save_model("runs/transformers/best")
    print(f"best {trainer.state.best_metric:.4f}, in {trainer.state.best_model_checkpoint}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
