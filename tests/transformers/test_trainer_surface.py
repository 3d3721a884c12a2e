"""What Transformers' Trainer hands to the user's code: what that code reads is of the moment, and what it changes is
followed or refused. Runs are held against transformers.Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from later import Later, needed, not_installed

from paceline.base.errors import UsageError
from paceline.launch.process.failure import RankFailed

transformers = Later("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        None in map(find_spec, ("transformers", "accelerate")),
        reason=not_installed("transformers or accelerate", "transformers accelerate"),
    ),
]
_TOLERANCE = 1e-5


class _Line(torch.nn.Module):
    """3 numbers to 1, times `scale`. The labels may come in lists of mappings, and the output may be a tuple."""

    main_input_name = "x"

    def __init__(self, *, is_tuple: bool = False) -> None:
        super().__init__()
        self.config, self.scale, self.is_tuple = None, 1.0, is_tuple
        self.a = torch.nn.Linear(3, 1)
        self.never = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        with torch.no_grad():
            self.a.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
            self.a.bias.fill_(0.2)

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        y = self.a(x).squeeze(-1) * self.scale
        if isinstance(labels, list):
            labels = torch.stack([label["of"]["value"] for label in labels])
        loss = ((y - labels) ** 2).mean()
        return (loss, y) if self.is_tuple else {"loss": loss, "logits": y}


def _data() -> list[dict[str, Any]]:
    x = torch.randn(18, 3, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": row.sum() * (1 + place)} for place, row in enumerate(x)]


def _trainer(
    base: Any, folder: Path, model: Any, *, arguments: dict[str, Any] | None = None, **options: Any
) -> Any:
    given = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 6,
        "learning_rate": 0.1,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        "lr_scheduler_type": "constant",
        **(arguments or {}),
    }
    data = _data()
    return base(
        model=model,
        args=transformers.TrainingArguments(str(folder), **given),
        train_dataset=data,
        eval_dataset=data[:7],
        **options,
    )


def _kinds(*changes: Any) -> tuple[Any, Any]:
    """A Trainer of Transformers and one of Paceline with the same changes."""
    from paceline.transformers import PlannedTraining

    return (
        type("Theirs", (*changes, transformers.Trainer), {}),
        type("Ours", (*changes, PlannedTraining, transformers.Trainer), {}),
    )


def _compare(make: Callable[..., Any], folder: Path, plan: str, *changes: Any) -> tuple[Any, Any]:
    """Train both, and hold logs, weights and what callbacks have seen against each other."""
    theirs, ours = _kinds(*changes)
    plain, planned = make(theirs, folder / "plain"), make(ours, folder / "planned", plan=plan)
    for trainer in (plain, planned):
        trainer.train()
    for entry, expected in zip(planned.state.log_history, plain.state.log_history, strict=True):
        for key, value in expected.items():
            if not key.endswith(("runtime", "per_second", "total_flos")):
                assert math.isclose(entry[key], value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE), (
                    key,
                    entry,
                    expected,
                )
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(
            planned.model.state_dict()[name], tensor, atol=_TOLERANCE, rtol=_TOLERANCE, msg=name
        )
    return plain, planned


def _changing() -> Any:
    """A callback that changes rates, options, frozen weights and attributes, and notes all that it is given."""

    class Changing(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def _note(self, model: Any, optimizer: Any, lr_scheduler: Any) -> None:
            moments = [float(kept["momentum_buffer"].sum()) for kept in optimizer.state.values()]
            self.seen += [
                optimizer.param_groups[0]["lr"],
                lr_scheduler.get_last_lr()[0],
                float(len(optimizer.state)),
                float(model.a.weight.detach().sum()),
                float(model.a.bias.detach().sum()),
                *moments,
            ]

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            given["model"].a.bias.requires_grad_(False)

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            given["model"].a.bias.requires_grad_(state.global_step % 3 == 1)
            given["optimizer"].param_groups[0]["weight_decay"] = 0.1 * state.global_step

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.epoch:
                given["model"].scale = 0.5
                given["lr_scheduler"].base_lrs = [0.02 for _ in given["lr_scheduler"].base_lrs]
                for group in given["optimizer"].param_groups:
                    group["lr"] = 0.04

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self._note(given["model"], given["optimizer"], given["lr_scheduler"])

    return Changing()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        "single",
        "data=2",
        *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("shard=2", "tensor=2")),
    ],
)
def test_what_a_callback_changes_is_followed_and_what_it_reads_is_of_the_moment(
    plan: str, tmp_path: Path
):
    """Rates, weight decay, `requires_grad_` and attributes; weights, the optimizer's state and rates of each step."""
    notes = []

    def make(kind: Any, folder: Path, **options: Any) -> Any:
        notes.append(_changing())
        return _trainer(
            kind,
            folder,
            _Line(),
            callbacks=[notes[-1]],
            arguments={"lr_scheduler_type": "linear", "optim": "sgd", "optim_args": "momentum=0.9"},
            **options,
        )

    _compare(make, tmp_path, plan)
    assert len(notes[0].seen) > 30
    assert notes[1].seen == pytest.approx(notes[0].seen, abs=_TOLERANCE)


class _Predicts:
    """Evaluates in a way of its own, with what the model is now."""

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        assert model.training is False and model.scale == 1.0
        with torch.no_grad():
            out = model(**inputs)
        return out[0], out[1] + 1, out[1]


class _Pairs:
    """Trains on batches of two and three in turn."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_size=3, collate_fn=self.data_collator
        )  # type: ignore[attr-defined]


def _with_labels_in_lists(rows: list[Any]) -> dict[str, Any]:
    return {
        "x": torch.stack([row["x"] for row in rows]),
        "labels": [{"of": {"value": row["labels"]}} for row in rows],
    }


@pytest.mark.slow
def test_overridden_methods_run_where_the_model_is(tmp_path: Path):
    """A model that returns a tuple and has a hook on a parameter, labels in nested lists, Adagrad, an overridden
    `prediction_step` and a loader with another batch size are as on one device."""

    def make(kind: Any, folder: Path, **options: Any) -> Any:
        model = _Line(is_tuple=True)
        model.a.weight.register_hook(lambda gradient: gradient * torch.tensor([1.0, 0.0, 1.0]))
        return _trainer(
            kind,
            folder,
            model,
            data_collator=_with_labels_in_lists,
            arguments={
                "optim": "adagrad",
                "eval_strategy": "epoch",
                "remove_unused_columns": False,
                "learning_rate": 0.02,
                "per_device_eval_batch_size": 5,
            },
            compute_metrics=lambda its: {"above": float((its.predictions - its.label_ids).sum())},
            **options,
        )

    plain, planned = _compare(make, tmp_path, "data=2", _Predicts, _Pairs)
    assert planned.state.global_step == plain.state.global_step == 12
    assert planned.state.log_history[-2]["eval_above"] == 7


class _Averages(torch.optim.SGD):
    """Is evaluated with the mean of its weights."""

    is_training = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", p.detach().clone())
                mean.lerp_(p.detach(), 0.5)

    def _swap(self, *, is_training: bool) -> None:
        for group in self.param_groups if is_training is not self.is_training else ():
            for p in group["params"]:
                if "mean" in self.state[p]:
                    kept = p.detach().clone()
                    p.data.copy_(self.state[p]["mean"])
                    self.state[p]["mean"].copy_(kept)
        self.is_training = is_training

    def train(self) -> None:
        self._swap(is_training=True)

    def eval(self) -> None:
        self._swap(is_training=False)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_an_optimizer_with_train_and_eval_is_told_of_both(plan: str, tmp_path: Path):
    """Evaluations, and the weights that stay, are of `eval()`; steps go on from those of `train()`."""

    class Changes(transformers.TrainerCallback):
        def on_evaluate(
            self, args: Any, state: Any, control: Any, *, optimizer: Any, **given: Any
        ) -> None:
            optimizer.param_groups[0]["lr"] = 0.05

    def make(kind: Any, folder: Path, **options: Any) -> Any:
        model = _Line()
        optimizer = _Averages([model.a.weight, model.a.bias], lr=0.1)
        return _trainer(
            kind,
            folder,
            model,
            optimizers=(optimizer, None),
            callbacks=[Changes()],
            arguments={"eval_strategy": "epoch"},
            **options,
        )

    _compare(make, tmp_path, plan)


class _Uneven:
    """Gives batches itself: of 4, 4, and the rest."""

    def __init__(self, data: list[dict[str, Any]]) -> None:
        self.data, self.begun = data, 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.begun += 1
        order = torch.randperm(11, generator=torch.Generator().manual_seed(self.begun)).tolist()
        for places in (order[:4], order[4:8], order[8:]):
            yield {
                key: torch.stack([self.data[place][key] for place in places])
                for key in ("x", "labels")
            }


class _Iterates:
    def get_train_dataloader(self) -> Any:
        return _Uneven(self.train_dataset)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_loader_that_is_only_iterable_keeps_its_batches(tmp_path: Path):
    """Each batch of it is a step, in each epoch anew; a batch that can't be cut, and an iterator, are refused."""

    def make(kind: Any, folder: Path, **options: Any) -> Any:
        return _trainer(kind, folder, _Line(), **options)

    plain, planned = _compare(make, tmp_path, "data=2", _Iterates)
    assert planned.state.global_step == plain.state.global_step == 6

    once = type(
        "Once",
        (_kinds()[1],),
        {"get_train_dataloader": lambda self: iter(_Uneven(self.train_dataset))},
    )
    with pytest.raises(UsageError, match="can be read once"):
        _trainer(once, tmp_path, _Line(), plan="single", arguments={"max_steps": 2}).train()
    with pytest.raises(RankFailed, match=r"batches of \[4\] samples for a step, more than 2"):
        _trainer(
            _kinds(_Iterates)[1],
            tmp_path,
            _Line(),
            plan="single",
            arguments={"per_device_train_batch_size": 2},
        ).train()


def _no(*args: Any, **given: Any) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    "method",
    [
        "training_step",
        "get_batch_samples",
        "_prepare_inputs",
        "_clip_grad_norm",
        "_get_grad_norm",
        "_wrap_model",
        "compute_loss_context_manager",
        "_track_num_input_tokens",
        "_load_rng_state",
    ],
)
def test_a_method_that_is_not_called_is_refused_by_name(method: str, tmp_path: Path):
    _, ours = _kinds(type("Mine", (), {method: _no}))
    with pytest.raises(
        UsageError, match=rf"Ours overrides {method}, which is not called here: use \w+"
    ):
        _trainer(ours, tmp_path, _Line(), plan="single")


def test_hooks_of_an_optimizer_and_what_is_between_micro_batches_are_refused(tmp_path: Path):
    class Between(transformers.TrainerCallback):
        on_substep_end = _no

    class Hooked:
        def create_optimizer(self, *args: Any) -> Any:
            made = super().create_optimizer(*args)  # type: ignore[misc]
            made.register_step_post_hook(_no)
            return made

    _, ours = _kinds()
    with pytest.raises(UsageError, match=r"Between\.on_substep_end"):
        _trainer(
            ours,
            tmp_path,
            _Line(),
            callbacks=[Between()],
            arguments={"gradient_accumulation_steps": 2},
        )
    with pytest.raises(UsageError, match="has step hooks"):
        _trainer(_kinds(Hooked)[1], tmp_path, _Line(), plan="single").train()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("event", "act", "message"),
    [
        (
            "on_step_end",
            lambda model, optimizer: model.a.weight.data.clamp_(-0.1, 0.1),
            "written to 'a.weight'",
        ),
        (
            "on_pre_optimizer_step",
            lambda model, optimizer: model.a.weight.grad,
            "looks at a gradient",
        ),
        (
            "on_pre_optimizer_step",
            lambda model, optimizer: optimizer.param_groups[0].update(lr=1.0),
            "made it already",
        ),
        (
            "on_pre_optimizer_step",
            lambda model, optimizer: model.a.weight.norm(),
            "updated it already",
        ),
        (
            "on_train_begin",
            lambda model, optimizer: model.a.register_forward_hook(_no),
            "hooks were registered",
        ),
        (
            "on_step_end",
            lambda model, optimizer: optimizer.state[model.a.weight]["exp_avg"].zero_(),
            "optimizer's state",
        ),
        (
            "on_step_end",
            lambda model, optimizer: model.never.requires_grad_(True),
            "'never' was frozen",
        ),
        (
            "on_step_end",
            lambda model, optimizer: optimizer.add_param_group({"params": [model.never]}),
            "other parameters",
        ),
    ],
)
def test_what_ranks_can_t_follow_is_refused(event: str, act: Any, message: str, tmp_path: Path):
    """In the step in which a callback does it."""

    def call(
        self: Any, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **given: Any
    ) -> None:
        act(model, optimizer)

    callback = type("Acts", (transformers.TrainerCallback,), {event: call})
    with pytest.raises(UsageError, match=message):
        _trainer(_kinds()[1], tmp_path, _Line(), callbacks=[callback()], plan="single").train()


def test_a_checkpoint_takes_the_place_of_another_runs(tmp_path: Path):
    """A second run in the output directory leaves the files of the first, and a resumed one may be resumed again."""
    from paceline.runs.folder import checkpoint_of
    from paceline.transformers.checkpoints import bring, keep

    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    for name in ("first", "second"):
        saved = checkpoint_of(tmp_path / name, 3)
        saved.mkdir(parents=True)
        (saved / "weights").write_text(name)
        (saved / name).touch()
        keep(tmp_path / name, checkpoint, step=3, frozen='{"names": []}', plateau=None)
    assert (checkpoint_of(tmp_path / "first", 3) / "weights").read_text() == "first"
    for _ in range(2):  # the first time the script was killed before its next checkpoint
        bring(checkpoint, tmp_path / "resumed", step=3, model=_Line(), plateau=None)
    resumed = checkpoint_of(tmp_path / "resumed", 3)
    assert {path.name: path.read_text() for path in resumed.iterdir()} == {
        "weights": "second",
        "second": "",
    }


def test_a_figure_that_no_evaluation_gives_costs_no_steps(tmp_path: Path):
    """It is refused after a checkpoint is saved, from which a corrected script goes on."""
    _, ours = _kinds()
    arguments = {"eval_strategy": "epoch", "metric_for_best_model": "f1", "num_train_epochs": 1}
    with pytest.raises(
        UsageError, match=r"among the figures of the evaluation: .*eval_F1.*; checkpoint-3 is saved"
    ):
        _trainer(
            ours,
            tmp_path,
            _Line(),
            arguments=arguments,
            plan="single",
            compute_metrics=lambda its: {"F1": 1.0},
        ).train()
    again = _trainer(
        ours,
        tmp_path,
        _Line(),
        arguments=arguments | {"num_train_epochs": 2, "eval_strategy": "no"},
        plan="single",
    )
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6 and [entry["step"] for entry in again.state.log_history][
        -2:
    ] == [6, 6]


class _Full:
    """Has memory for four samples."""

    def log(self, *args: Any, **given: Any) -> None:
        if self._train_batch_size > 4:  # type: ignore[attr-defined]
            raise RuntimeError("CUDA out of memory.")
        super().log(*args, **given)  # type: ignore[misc]


def test_a_batch_that_fits_is_found(tmp_path: Path):
    trainer = _trainer(
        _kinds(_Full)[1],
        tmp_path,
        _Line(),
        plan="single",
        arguments={"auto_find_batch_size": True, "per_device_train_batch_size": 5, "max_steps": 1},
    )
    trainer.train()
    assert trainer.state.train_batch_size == trainer._train_batch_size == 4


class _Interrupted:
    """Is asked to stop, as by SIGTERM, after step 2: it saves then, and Trainer takes the step that it has begun."""

    def log(self, *args: Any, **given: Any) -> None:
        super().log(*args, **given)  # type: ignore[misc]
        if self.state.global_step == 2:  # type: ignore[attr-defined]
            manager = next(
                each.jit_manager
                for each in self.callback_handler.callbacks  # type: ignore[attr-defined]
                if hasattr(each, "jit_manager")
            )
            manager.is_checkpoint_requested = True


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_goes_on_with_other_batches(tmp_path: Path):
    """As Trainer goes on: from the step that it had come to. Tokens are counted."""

    def make(kind: Any, folder: Path, **options: Any) -> Any:
        first = _trainer(
            kind,
            folder,
            _Line(),
            arguments={"enable_jit_checkpoint": True, "include_num_input_tokens_seen": "all"},
            **options,
        )
        first.train()
        assert first.state.global_step == 3 and first.state.num_input_tokens_seen == 3 * 6 * 3
        trainer = _trainer(
            _kinds()["plan" in options],
            folder,
            _Line(),
            arguments={"per_device_train_batch_size": 9},
            **options,
        )
        trained = trainer.train
        trainer.train = lambda: trained(resume_from_checkpoint=str(folder / "checkpoint-2"))
        return trainer

    _compare(make, tmp_path, "data=2", _Interrupted)


@pytest.mark.slow
def test_noise_of_embeddings_is_for_plans_with_whole_ones(tmp_path: Path):
    from test_transformers_trainer import _model, _trainer

    _, ours = _kinds()
    arguments = {
        "neftune_noise_alpha": 5.0,
        "max_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
    }
    losses = []
    for noise in (5.0, None):
        noisy = _trainer(
            ours,
            tmp_path,
            _model(),
            plan="data=2",
            arguments=arguments | {"neftune_noise_alpha": noise},
        )
        noisy.train()
        losses.append(noisy.state.log_history[0]["loss"])
    assert losses[0] != losses[1]
    with pytest.raises(UsageError, match="whole embedding"):
        _trainer(ours, tmp_path, _model(), plan="shard=2", arguments=arguments).train()


@pytest.mark.slow
def test_experts_are_fine_tuned_with_their_balancing_loss(tmp_path: Path):
    """By TRL's trainer, whose loss of experts asks over how many micro-batches it is averaged."""
    trl, datasets, tokenizers = needed("trl"), needed("datasets"), needed("tokenizers")
    from paceline.transformers import SFTTrainer

    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number + 2 for number in range(62)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(
            tokenizers.models.WordLevel(vocabulary, unk_token="<pad>")
        ),
        pad_token="<pad>",
        eos_token="<eos>",
    )

    def loss(kind: Any, **options: Any) -> float:
        transformers.set_seed(0)
        model = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=32,
                moe_intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                eos_token_id=1,
                pad_token_id=0,
            )
        )
        data = datasets.Dataset.from_dict({"input_ids": [[5, 9, 7, 21, 33]] * 16})
        trainer = kind(
            model,
            args=trl.SFTConfig(
                str(tmp_path),
                max_steps=2,
                report_to=[],
                use_cpu=True,
                bf16=False,
                save_strategy="no",
            ),
            processing_class=tokenizer,
            train_dataset=data,
            **options,
        )
        return float(trainer.train().training_loss)

    assert loss(SFTTrainer, plan="data=2") == pytest.approx(loss(trl.SFTTrainer), abs=1e-4)
