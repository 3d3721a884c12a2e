"""Transformers' Trainer under a plan, held against transformers.Trainer on one device."""

from __future__ import annotations

import json
import math
import multiprocessing
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from later import Later, needed, not_installed

from paceline.api.plan_choice import PlanChoice
from paceline.base.errors import CheckpointError, UsageError
from paceline.launch.process.failure import RankFailed
from paceline.strategies.plan import Plan

transformers, callbacks = Later("transformers"), Later("trainer_callbacks")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        None in map(find_spec, ("transformers", "accelerate")),
        reason=not_installed("transformers or accelerate", "transformers accelerate"),
    ),
]
_TOLERANCE = 3e-6  # of logged figures, which are of float32; relative where they are large


def _samples(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Of unequal lengths, the first labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        length = int(torch.randint(4, 20, (1,), generator=generator))
        tokens = torch.randint(3, 60, (length,), generator=generator).tolist()
        ignored = int(torch.randint(1, max(2, length // 2), (1,), generator=generator))
        samples.append(
            {
                "input_ids": tokens,
                "attention_mask": [1] * length,
                "labels": [-100] * ignored + tokens[ignored:],
            }
        )
    return samples


def _collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: torch.tensor(
            [sample[key] + [value] * (longest - len(sample[key])) for sample in samples]
        )
        for key, value in fill.items()
    }


def _model() -> Any:
    transformers.set_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
        )
    )


def _adapted() -> Any:
    peft = needed("peft")
    model = _model()
    transformers.set_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    )


def _accuracy(prediction: Any) -> dict[str, float]:
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {
        "accuracy": float((guesses == labels)[labels != -100].mean()),
        "width": float(guesses.shape[1]),
    }


def _likeliest(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


def _trainer(
    kind: Any, folder: Path, model: Any, *, arguments: dict[str, Any] | None = None, **options: Any
) -> Any:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "warmup_steps": 3,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "disable_tqdm": True,
        "metric_for_best_model": "loss",
        "per_device_eval_batch_size": 5,
        **(arguments or {}),
    }
    return kind(
        model=model,
        args=transformers.TrainingArguments(str(folder), **given),
        train_dataset=_samples(37, 1),
        eval_dataset=_samples(11, 2),
        data_collator=_collate,
        compute_metrics=_accuracy,
        preprocess_logits_for_metrics=_likeliest,
        **options,
    )


def _equal_logs(history: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    """All figures that are not of time."""
    assert [entry.keys() for entry in history] == [entry.keys() for entry in plain]
    for entry, expected in zip(history, plain, strict=True):
        for key, value in expected.items():
            if not key.endswith(("runtime", "per_second", "total_flos")):
                assert math.isclose(entry[key], value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE), (
                    key,
                    entry,
                    expected,
                )


def _equal_weights(model: Any, plain: Any) -> None:
    for (name, tensor), expected in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(tensor, expected, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.slow
def test_adapters_are_trained_as_on_one_device(tmp_path: Path):
    """Losses, norms, rates, metrics, predictions, events, the best checkpoint and the adapters are Trainer's own under
    data=2, and what was saved loads again."""
    from peft import PeftModel

    from paceline.transformers import Trainer

    plain_notes, notes = callbacks.Notes(), callbacks.Notes()
    plain = _trainer(transformers.Trainer, tmp_path / "plain", _adapted(), callbacks=[plain_notes])
    plain.train()
    planned = _trainer(Trainer, tmp_path / "planned", _adapted(), callbacks=[notes], plan="data=2")
    planned.train()

    _equal_logs(planned.state.log_history, plain.state.log_history)
    _equal_weights(planned.model, plain.model)
    assert notes.seen == plain_notes.seen
    assert (
        Path(planned.state.best_model_checkpoint).name
        == Path(plain.state.best_model_checkpoint).name
    )
    others = _samples(7, 3)
    answers = [trainer.predict(others) for trainer in (planned, plain)]
    assert (answers[0].predictions == answers[1].predictions).all()
    assert math.isclose(
        answers[0].metrics["test_loss"], answers[1].metrics["test_loss"], rel_tol=_TOLERANCE
    )
    planned.save_model(str(tmp_path / "saved"))
    loaded, batch = (
        PeftModel.from_pretrained(_model(), tmp_path / "saved").eval(),
        _collate(_samples(3, 4)),
    )
    assert torch.equal(loaded(**batch).logits, planned.model.eval()(**batch).logits)


def test_a_run_goes_on_under_another_plan(tmp_path: Path):
    """Stopped after step 4 under shard=2 and resumed on one device, a run of adapters logs and trains what an
    uninterrupted one does; the loss is a function of one's own. Checkpoints hold the adapters alone, and are refused
    above another model."""
    from paceline.transformers import Trainer

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    arguments = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_steps": 4,
        "load_best_model_at_end": False,
        "prediction_loss_only": True,
    }
    options: dict[str, Any] = {"arguments": arguments, "compute_loss_func": loss}
    plain = _trainer(transformers.Trainer, tmp_path / "plain", _adapted(), **options)
    plain.train()
    first = _trainer(
        Trainer,
        tmp_path / "run",
        _adapted(),
        plan="shard=2",
        callbacks=[callbacks.Notes(last=4)],
        **options,
    )
    first.train()
    assert first.state.global_step == 4
    second = _trainer(Trainer, tmp_path / "run", _adapted(), plan="single", **options)
    second.train(resume_from_checkpoint=True)

    history = [
        entry
        for entry in second.state.log_history
        if not ("eval_loss" in entry and entry["step"] == 3) and "train_runtime" not in entry
    ]
    _equal_logs(
        history, [entry for entry in plain.state.log_history if "train_runtime" not in entry]
    )
    _equal_weights(second.model, plain.model)
    assert (
        json.loads((tmp_path / "run/checkpoint-8/trainer_state.json").read_text())["global_step"]
        == 8
    )
    stored = (tmp_path / "run/checkpoint-8/paceline/checkpoints/step-8/index.json").read_text()
    assert "parameters/base_model.model.model.layers.0.self_attn.q_proj.lora_A" in stored
    assert "base_layer" not in stored
    other = _adapted()
    other.base_model.model.lm_head.weight.data[0, 0] += 1
    third = _trainer(Trainer, tmp_path / "run", other, plan="single", **options)
    with pytest.raises(CheckpointError, match="trained on other frozen weights"):
        third.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-8"))


class _OwnLoss:
    """A loss of logits, before a Trainer among the bases."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_a_plateau_and_a_compute_loss_go_on_under_another_plan(tmp_path: Path):
    """Rates follow evaluations, the loss is a subclass's, and a run that stopped under shard=2 after its rate fell goes
    on on one device."""
    from paceline.transformers import PlannedTraining

    planned_class = type("Ours", (PlannedTraining, _OwnLoss, transformers.Trainer), {})
    plain_class = type("Theirs", (_OwnLoss, transformers.Trainer), {})
    arguments = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "optim": "sgd",
        "num_train_epochs": 3,
        "gradient_accumulation_steps": 1,
        "warmup_steps": 0,
        "per_device_train_batch_size": 10,
        "load_best_model_at_end": False,
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 0.5},
    }
    plain = _trainer(plain_class, tmp_path / "plain", _model(), arguments=arguments)
    plain.train()
    stops = callbacks.Asks("should_training_stop", 8)
    _trainer(
        planned_class,
        tmp_path / "run",
        _model(),
        arguments=arguments,
        plan="shard=2",
        callbacks=[stops],
    ).train()
    resumed = _trainer(
        planned_class, tmp_path / "run", _model(), arguments=arguments, plan="single"
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-8"))

    rates = [
        entry["learning_rate"] for entry in plain.state.log_history if "learning_rate" in entry
    ]
    assert len(set(rates)) > 1
    assert resumed.lr_scheduler.get_last_lr() == plain.lr_scheduler.get_last_lr() != rates[-1:]
    _equal_logs(resumed.state.log_history[:-1], plain.state.log_history[:-1])
    _equal_weights(resumed.model, plain.model)


class _Logs(_OwnLoss):
    """Logs a mean over the samples of a batch, by the trainer's own model."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        loss, outputs = super().compute_loss(self.model, inputs, return_outputs=True)  # type: ignore[attr-defined]
        size = outputs.logits[:, 0].detach().square().mean()
        self.log({"size": float(size)})  # type: ignore[attr-defined]
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_what_a_compute_loss_logs_is_in_the_log(tmp_path: Path):
    """In each step and in each batch of an evaluation, over uneven parts."""
    from paceline.transformers import PlannedTraining

    arguments = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 7}
    plain = _trainer(
        type("Theirs", (_Logs, transformers.Trainer), {}),
        tmp_path / "plain",
        _model(),
        arguments=arguments,
    )
    planned = _trainer(
        type("Ours", (PlannedTraining, _Logs, transformers.Trainer), {}),
        tmp_path / "planned",
        _model(),
        arguments=arguments,
        plan="data=2",
    )
    plain.train()
    planned.train()

    assert sum("size" in entry for entry in plain.state.log_history) == 2 * (6 + 3)
    for each in (plain, planned):  # labels weigh a loss, and samples what is logged
        each.state.log_history = [entry for entry in each.state.log_history if "size" in entry]
    _equal_logs(planned.state.log_history, plain.state.log_history)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["shard=2", "tensor=2", "pipeline=2 microbatches=2"])
def test_a_compute_loss_is_recorded_with_the_model(plan: str, tmp_path: Path):
    """The weights of a model in float64 are those of one device, but for its norms, which compute in float32; so are
    predictions without labels."""
    from paceline.transformers import PlannedTraining

    def answers(base: Any, **options: Any) -> Any:
        kind = type("Ours", (*base, _PerLabel, transformers.Trainer), {})
        arguments = {"gradient_accumulation_steps": 1, "max_steps": 3, "eval_strategy": "no"}
        arguments |= {"save_strategy": "no", "load_best_model_at_end": False}
        trainer = _trainer(kind, tmp_path, _model().double(), arguments=arguments, **options)
        trainer.train()
        unlabelled = [{**sample, "labels": None} for sample in _samples(3, 3)]
        trainer.data_collator = _without_labels
        trainer.compute_metrics = None
        return trainer.model, trainer.predict(unlabelled).predictions

    (plain, expected), (planned, predicted) = answers(()), answers((PlannedTraining,), plan=plan)
    for weight, other in zip(planned.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-8)
    assert (predicted == expected).all()


class _PerLabel:
    """A loss over labels that takes their number."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss = total / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def _without_labels(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    collated = _collate([{**sample, "labels": sample["input_ids"]} for sample in samples])
    return {name: value for name, value in collated.items() if name != "labels"}


def _weighted(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return torch.nn.CrossEntropyLoss(weight=torch.linspace(0.1, 3.0, 64))(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )


@pytest.mark.checked_runs
def test_the_check_before_a_run_tells_of_a_weighted_mean(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """torch divides it by the weights, which no part of a batch knows of the others."""
    from paceline.transformers import Trainer

    arguments = {"gradient_accumulation_steps": 1, "max_steps": 1}
    _trainer(
        Trainer,
        tmp_path,
        _model(),
        arguments=arguments,
        plan="data=2",
        compute_loss_func=_weighted,
    ).train()
    assert "note: cutting a batch changes what this job computes" in capfd.readouterr().err


def test_ranks_end_with_an_interrupt_while_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As that of a notebook, whose process lives on."""
    from paceline.transformers import Trainer
    from paceline.transformers.session import Session

    def interrupted(self: Any) -> Any:
        while not multiprocessing.active_children():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "_hear_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _trainer(Trainer, tmp_path, _model(), plan="single").train()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("kills", [False, True])
def test_a_callback_that_fails_and_a_rank_that_dies_end_the_training(kills: bool, tmp_path: Path):
    """Nothing is started again that the script would have to serve anew, and no process stays."""
    from paceline.transformers import Trainer

    class Fails(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if kills:
                (rank,) = psutil.Process(multiprocessing.active_children()[0].pid).children()
                rank.kill()
            else:
                raise ValueError("no")

    error, words = (RankFailed, "SIGKILL") if kills else (ValueError, "no")
    with pytest.raises(error, match=words):
        _trainer(Trainer, tmp_path, _model(), callbacks=[Fails()], plan="single").train()
    assert multiprocessing.active_children() == []


def _translator(
    kind: Any, folder: Path, *, arguments: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Encoder and decoder, which generate what is evaluated."""
    transformers.set_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64,
            d_model=8,
            d_kv=4,
            d_ff=8,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )
    given: dict[str, Any] = {
        "predict_with_generate": True,
        "generation_max_length": 6,
        "generation_num_beams": 2,
        "learning_rate": 0.03,
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "disable_tqdm": True,
        **(arguments or {}),
    }
    return kind(
        model=model,
        args=transformers.Seq2SeqTrainingArguments(str(folder), **given),
        train_dataset=_samples(21, 1),
        eval_dataset=_samples(11, 2),
        data_collator=_collate,
        compute_metrics=_token_sum,
        **options,
    )


def _token_sum(made: Any) -> dict[str, float]:
    return {"tokens": float(made.predictions.sum())}


def test_ranks_generate_by_the_arguments_of_an_evaluation(tmp_path: Path):
    """Ranks started before it are told its length and beams: those of the arguments, then those of a call."""
    from paceline.transformers import PlannedTraining

    class Generates(PlannedTraining, transformers.Seq2SeqTrainer):
        """Evaluates once more where the training ends."""

        def _bring_weights(self) -> None:
            if not self.state.global_step:  # a callback looks at the model before the training, too
                return
            self.longer = self.evaluate(max_length=9, num_beams=1)
            self.configured = self.evaluate(generation_config=config)
            with pytest.raises(UsageError, match="logits_processor="):
                self.evaluate(logits_processor=[print])

    config = transformers.GenerationConfig(
        max_length=8, num_beams=1, decoder_start_token_id=0, eos_token_id=1
    )
    arguments = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    plain = _translator(transformers.Seq2SeqTrainer, tmp_path, arguments=arguments)
    plain.train()
    planned = _translator(Generates, tmp_path, arguments=arguments, plan="single")
    planned.train()
    _equal_logs(planned.state.log_history[:2], plain.state.log_history[:2])
    assert planned.longer["eval_tokens"] == plain.evaluate(max_length=9, num_beams=1)["eval_tokens"]
    assert (
        planned.configured["eval_tokens"] == plain.evaluate(generation_config=config)["eval_tokens"]
    )


@pytest.mark.slow
def test_what_is_generated_is_by_the_weights_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Under data=2 each rank generates for its part; a plan under which no rank has the whole model is refused. Ranks
    give signs of life where they wait."""
    from paceline.transformers import PlannedTraining, rank

    monkeypatch.setattr(rank, "_BEAT_S", 1e-4)
    planned_class = type("Ours", (PlannedTraining, transformers.Seq2SeqTrainer), {})
    plain = _translator(transformers.Seq2SeqTrainer, tmp_path / "plain")
    plain.train()
    planned = _translator(planned_class, tmp_path / "planned", plan="data=2")
    planned.train()
    _equal_logs(planned.state.log_history, plain.state.log_history)
    assert (
        len({entry["eval_tokens"] for entry in plain.state.log_history if "eval_tokens" in entry})
        == 2
    )
    assert planned.state.total_flos > 0
    with pytest.raises(UsageError, match="whole model"):
        _translator(planned_class, tmp_path / "split", plan="shard=2").train()
    with pytest.raises(UsageError, match="should_epoch_stop"):
        _translator(
            planned_class,
            tmp_path / "epoch",
            plan="single",
            callbacks=[callbacks.Asks("should_epoch_stop", 1)],
        ).train()


@pytest.mark.slow
def test_smoothed_labels_and_images_are_trained_as_on_one_device(tmp_path: Path):
    """Mappings of images, classes as labels, label smoothing, a schedule that was given; operations are counted."""
    from paceline.transformers import Trainer

    drawn = torch.Generator().manual_seed(0)
    data = [
        {"pixel_values": torch.randn(3, 8, 8, generator=drawn), "labels": place % 3}
        for place in range(30)
    ]

    def trainer(kind: Any, **options: Any) -> Any:
        transformers.set_seed(0)
        model = transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
                num_labels=3,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=8,
            num_train_epochs=2,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            label_smoothing_factor=0.1,
            save_strategy="no",
            eval_strategy="epoch",
            disable_tqdm=True,
        )
        made = kind(
            model=model,
            args=arguments,
            train_dataset=data[:21],
            eval_dataset=data[21:],
            optimizers=(optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)),
            compute_metrics=lambda its: {
                "right": float((its.predictions.argmax(-1) == its.label_ids).mean())
            },
            **options,
        )
        made.train()
        return made

    plain, planned = trainer(transformers.Trainer), trainer(Trainer, plan="data=2")
    _equal_logs(planned.state.log_history, plain.state.log_history)
    _equal_weights(planned.model, plain.model)
    assert planned.state.total_flos == plain.state.total_flos > 0


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_supervised_fine_tuning_logs_the_same_losses(plan: str, tmp_path: Path):
    """TRL's trainer on tokens; what it notes of each forward is left out."""
    trl = needed("trl")
    datasets = needed("datasets")
    tokenizers = needed("tokenizers")
    from paceline.transformers import SFTTrainer

    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number + 2 for number in range(62)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(
            tokenizers.models.WordLevel(vocabulary, unk_token="<pad>")
        ),
        pad_token="<pad>",
        eos_token="<eos>",
    )

    def trainer(kind: Any, **options: Any) -> Any:
        data = datasets.Dataset.from_list(
            [{"input_ids": sample["input_ids"]} for sample in _samples(37, 1)]
        )
        arguments = trl.SFTConfig(
            str(tmp_path),
            per_device_train_batch_size=8,
            num_train_epochs=2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=32,
            eval_strategy="epoch",
            save_strategy="no",
            disable_tqdm=True,
        )
        made = kind(
            model=_model(),
            args=arguments,
            train_dataset=data,
            eval_dataset=data.select(range(9)),
            processing_class=tokenizer,
            **options,
        )
        made.train()
        return made

    plain, planned = trainer(trl.SFTTrainer), trainer(SFTTrainer, plan=plan)
    noted = ("entropy", "mean_token_accuracy", "num_tokens")
    _equal_logs(
        planned.state.log_history,
        [
            {key: value for key, value in entry.items() if not key.endswith(noted)}
            for entry in plain.state.log_history
        ],
    )
    _equal_weights(planned.model, plain.model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"torch_compile": True}, 'compiling belongs to the plan: .* compile=blocks"'),
        ({"lr_scheduler_type": "greedy"}, "reduce_lr_on_plateau"),
        ({"train_sampling_strategy": "batch_rebalance"}, "group_by_length"),
    ],
)
def test_what_is_not_honoured_is_refused(arguments: dict[str, Any], message: str, tmp_path: Path):
    """An argument that a plan contradicts is named before anything starts."""
    from paceline.transformers import Trainer

    with pytest.raises(UsageError, match=message):
        _trainer(Trainer, tmp_path, _model(), arguments=arguments)


def test_plans_with_servers_are_refused_and_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Their workers don't update. Where they are the fastest, replicas train."""
    from paceline.api import auto
    from paceline.transformers import Trainer

    with pytest.raises(
        UsageError, match=r"'servers=1 workers=2' servers update(?s:.*)plan='data=2'"
    ):
        _trainer(Trainer, tmp_path / "named", _model(), plan="servers=1 workers=2").train()
    monkeypatch.setattr(
        auto, "_choose", lambda *_, **__: PlanChoice(Plan.parse("servers=2 workers=2 colocate=yes"))
    )
    fastest = _trainer(
        Trainer, tmp_path / "auto", _model(), arguments={"max_steps": 1}, devices="cpu:0-1"
    )
    fastest.train()
    assert str(fastest._plan_in_use) == "data=2"


def test_several_hosts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from paceline.transformers import Trainer

    arguments = {
        "RANK": 1,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    given = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    for name, value in arguments.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UsageError, match="torchrun started 4 processes, 2 of them here"):
        Trainer(model=_model(), args=given)


def test_labels_that_the_trainer_counts_and_the_loss_leaves_out(tmp_path: Path):
    """GPT-2's loss is over fewer labels than Trainer divides by, in training and in evaluation."""
    from paceline.transformers import Trainer

    tokens = [(7 * place) % 60 + 3 for place in range(12 * 8)]
    data = [
        {"input_ids": tokens[at : at + 8], "labels": tokens[at : at + 8]}
        for at in range(0, len(tokens), 8)
    ]

    def trainer(kind: Any, **options: Any) -> Any:
        transformers.set_seed(0)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=64,
                n_embd=8,
                n_layer=1,
                n_head=2,
                n_positions=8,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=2,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            eval_strategy="steps",
            eval_steps=2,
            disable_tqdm=True,
        )
        made = kind(
            model=model, args=arguments, train_dataset=data[:8], eval_dataset=data[8:11], **options
        )
        made.train()
        return made

    plain, planned = trainer(transformers.Trainer), trainer(Trainer, plan="data=2")
    _equal_logs(planned.state.log_history, plain.state.log_history)
    _equal_weights(planned.model, plain.model)


@pytest.mark.slow
def test_tags_weigh_the_same_in_two_micro_batches_as_in_one(tmp_path: Path):
    """Trainer sums the means of micro-batches of a model that takes no number of items. Here their mean is one over all
    labels, which is Trainer's of the whole batch. One sample is evaluated under two replicas, too."""
    from paceline.transformers import Trainer

    def trainer(kind: Any, batch: int, accumulated: int, **options: Any) -> Any:
        transformers.set_seed(0)
        model = transformers.BertForTokenClassification(
            transformers.BertConfig(
                vocab_size=64,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=8,
                num_labels=3,
                max_position_embeddings=32,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
        data = [
            {**each, "labels": [label if label < 0 else label % 3 for label in each["labels"]]}
            for each in _samples(12, 1)
        ]
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulated,
            max_steps=2,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        made = kind(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=data[:1],
            data_collator=_collate,
            **options,
        )
        made.train()
        return made

    plain, planned = trainer(transformers.Trainer, 4, 1), trainer(Trainer, 2, 2, plan="data=2")
    summed = trainer(transformers.Trainer, 2, 2)
    losses = [each.state.log_history[0]["loss"] for each in (plain, planned, summed)]
    assert math.isclose(losses[0], losses[1], rel_tol=_TOLERANCE) and losses[2] > 1.5 * losses[0]
    _equal_weights(planned.model, plain.model)
    assert math.isclose(
        planned.evaluate()["eval_loss"], plain.evaluate()["eval_loss"], rel_tol=_TOLERANCE
    )


@pytest.mark.slow
def test_a_stream_is_evaluated_where_it_ends(tmp_path: Path):
    """Each time, as by Trainer; `epoch` counts how often it began."""
    from paceline.transformers import Trainer

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(_samples(14, 1))

    arguments = {
        "max_steps": 6,
        "gradient_accumulation_steps": 1,
        "load_best_model_at_end": False,
        "save_strategy": "no",
        "learning_rate": 1e-3,
    }
    histories = []
    for kind, options in ((transformers.Trainer, {}), (Trainer, {"plan": "data=2"})):
        trainer = _trainer(kind, tmp_path, _model(), arguments=arguments, **options)
        trainer.train_dataset = Stream()
        trainer.train()
        histories.append(trainer.state.log_history)
    assert [entry["epoch"] for entry in histories[0] if "eval_loss" in entry] == [4 / 6, 1 + 2 / 6]
    _equal_logs(histories[1], histories[0])


def test_a_stream_knows_an_epoch_s_end_with_its_last_sample():
    from paceline.transformers.experiment import CountedStream, EpochPlace

    stream = CountedStream(range(5), batch=2, drop_last=False)
    samples = iter(stream)
    assert [next(samples) for _ in range(4)] == [0, 1, 2, 3]
    assert stream.place(2) == EpochPlace(0, 2, False)
    assert next(samples) == 4
    assert [stream.place(step) for step in (3, 4)] == [
        EpochPlace(0, 3, True),
        EpochPlace(1, 1, False),
    ]
    assert CountedStream([], batch=2, drop_last=False).place(1) == EpochPlace(0, 1, False)


@pytest.mark.slow
def test_the_first_process_of_torchrun_trains_alone(tmp_path: Path):
    """With a replica for each process, as on one device; the others end, and so does the launcher, without an error."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_transformers_trainer import _model, _trainer
from paceline.transformers import Trainer
trainer = _trainer(Trainer, {str(tmp_path)!r} + "/out", _model(), arguments={{"max_steps": 3}})
assert str(trainer.plan) == "data=2"
trainer.train()
trainer.state.save_to_json({str(tmp_path)!r} + "/state.json")
""")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            str(script),
        ],
        check=True,
        timeout=200,
    )
    plain = _trainer(transformers.Trainer, tmp_path / "plain", _model(), arguments={"max_steps": 3})
    plain.train()

    _equal_logs(
        json.loads((tmp_path / "state.json").read_text())["log_history"], plain.state.log_history
    )


def test_an_epoch_is_drawn_as_accelerate_draws_it(tmp_path: Path):
    """The sampler gives the same order for an epoch each time, which is that of the Trainer's own loader."""
    from paceline.transformers import Trainer
    from paceline.transformers.experiment import job_of

    trainer = _trainer(Trainer, tmp_path, _model(), arguments={"dataloader_drop_last": True})
    trainer.create_optimizer()
    sampler = job_of(trainer, trainer.get_train_dataloader(), steps=4).sampler
    loader = trainer.get_train_dataloader()
    for epoch in range(2):
        loader.set_epoch(epoch)
        sampler.set_epoch(epoch)
        drawn = [index for batch in loader.batch_sampler for index in batch]
        assert list(sampler) == drawn == list(sampler)
        assert len(drawn) == len(sampler) == 36
    grouped = _trainer(
        Trainer,
        tmp_path,
        _model(),
        arguments={"train_sampling_strategy": "group_by_length", "data_seed": 5},
    )
    grouped.create_optimizer()
    loader = grouped.get_train_dataloader()
    torch.manual_seed(grouped.args.seed)
    torch.empty((), dtype=torch.int64).random_()
    drawn = list(loader.batch_sampler.sampler)
    assert list(job_of(grouped, loader, steps=4).sampler) == drawn


def test_a_replaced_forward_is_of_the_copy():
    """A copy of a model whose forward was replaced by a function that holds the one before runs its own weights."""
    from paceline.transformers.copies import copied

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    before = model.forward
    model.forward = lambda batch: 2 * before(batch)  # type: ignore[method-assign]
    twin, batch = copied(model), torch.ones(1, 2)
    assert torch.equal(twin(batch), model(batch))
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
    assert not twin(batch).any() and model(batch).any()


def test_frozen_weights_are_shared_and_trained_ones_are_not():
    """A copy on a rank has the frozen weights in the memory that the fork shares; another dtype leaves the model's."""
    from paceline.transformers.copies import copied

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    twin = copied(model, shares_frozen=True)
    assert (
        twin[0].weight.data_ptr() == model[0].weight.data_ptr() and not twin[0].weight.requires_grad
    )
    assert twin[1].weight.data_ptr() != model[1].weight.data_ptr() and twin[1].weight.requires_grad
    twin.double()
    assert model[0].weight.dtype == torch.float32
