"""Values of other tools in a job's fields are refused with what to write in their place."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.base.errors import JobError
from paceline.job import Job
from paceline.job.foreign_fields import present_name
from paceline.training.optimizers.probe import no_optimizer


class Lit(nn.Module):
    """As a LightningModule."""

    def training_step(self, batch: Any) -> Any: ...
    def configure_optimizers(self) -> Any: ...


def of_keras(name: str) -> Any:
    """As a class of Keras."""
    return type(
        name, (), {"__module__": "keras.src.some", "__call__": lambda self, y_true, y_pred: 0.0}
    )


FIELDS: dict[str, Any] = {
    "model": nn.Module,
    "data": [(0, 0)] * 10,
    "loss": max,
    "optimizer": list,
    "batch": 4,
    "steps": 1,
}
PARAMETER = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": Lit()}, "model is a LightningModule"),
        ({"model": Lit, "loss": None}, "paceline docs coming-from"),
        ({"optimizer": Lit().configure_optimizers}, "configure_optimizers knows a model's own"),
        (
            {"optimizer": torch.optim.AdamW([PARAMETER])},
            "such as lambda named: AdamW(named, lr=1e-3), not the AdamW",
        ),
        (
            {"optimizer": [max, min]},
            "optimizer must be a function of the (name, parameter) pairs, got a list",
        ),
        ({"optimizer": of_keras("Adam")()}, "lambda named: torch.optim.Adam(named, lr=...)"),
        ({"optimizer": of_keras("Nadam")()}, "torch.optim.NAdam(named"),
        ({"optimizer": of_keras("Lion")()}, "torch.optim.AdamW"),
        (
            {"loss": of_keras("MeanSquaredError")()},
            "loss=lambda output, target: keras_loss(target, output)",
        ),
        (
            {"metrics": {"f1": of_keras("F1Score")()}, "validation": [(0, 0)]},
            "metric 'f1' is one of Keras",
        ),
        ({"data": SimpleNamespace(train_dataloader=list)}, "data=module.train_dataloader()"),
        (
            {"validation": SimpleNamespace(val_dataloader=list)},
            "validation=module.val_dataloader()",
        ),
        ({"batch_size": 4}, "no field 'batch_size', did you mean 'batch'"),
        ({"lr": 0.1}, "learning rate is the optimizer's"),
        ({"gradient_accumulation_steps": 4}, "microbatches=4"),
        ({"training_step": max}, "with model=, compute= takes (model, batch)"),
        ({"optimiser": None}, "did you mean 'optimizer'"),
        ({"precision": torch.float16}, "torch.float16 is none of float32, tf32, bf16, fp16"),
        ({"model": [nn.Identity]}, "model is a list"),
        ({"loss": nn.MSELoss}, "give MSELoss()"),
    ],
)
def test_what_to_write_instead(changes: dict[str, Any], message: str):
    """A job that is made says the field and the replacement."""
    with pytest.raises(JobError) as caught:
        Job(**{**FIELDS, **changes})
    assert message in str(caught.value)


def test_several_foreign_names_have_a_line_each():
    with pytest.raises(JobError) as caught:
        Job(**FIELDS, nets=nn.Identity, batch_size=4, lr=0.1)
    lines, hint = caught.value.args[0].splitlines(), str(caught.value.hint)
    assert [line[:25] for line in lines] == [
        "a job has no field 'nets'",
        "a job has no field 'batch",
        "a job has no field 'lr', ",
    ]
    assert "paceline docs coming-from" in hint


def test_an_optimizer_in_place_of_its_function_is_said_once():
    with pytest.raises(JobError) as caught:
        Job(**FIELDS | {"optimizer": torch.optim.AdamW([PARAMETER])})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (of_keras("Adam")(), "torch.optim.Adam(named"),
        ([1, 2], "parameter groups"),
        (Lit(), "paceline docs coming-from"),
        (None, "return one of torch.optim"),
    ],
)
def test_an_optimizer_function_that_returns_something_else(returned: Any, message: str):
    """The hint says what the function is to return."""
    assert message in str(no_optimizer(returned).hint)


def test_what_is_no_value_of_another_tool_is_taken():
    """Functions of the user, and a Lightning module whose loss the job gives, are no mistake."""
    Job(**{**FIELDS, "model": Lit})
    Job(
        **{
            **FIELDS,
            "optimizer": torch.optim.AdamW,
            "loss": lambda output, target: of_keras("Loss")()(target, output),
        }
    )


def build(*given: Any) -> Any:
    raise AssertionError


SEVERAL = {
    **{name: value for name, value in FIELDS.items() if name not in ("model", "loss", "optimizer")},
    "models": {"net": build},
    "optimizers": {"net": build},
}


@pytest.mark.parametrize(
    ("fields", "earlier", "note"),
    [
        (FIELDS, {"weights": [1.0] * 10}, "Job: weights= is now sample_weights="),
        (SEVERAL, {"step": max}, "Job: step= is now training_step="),
        (
            SEVERAL,
            {"step": max, "validate": min, "validation": [(0, 0)]},
            "Job: step= is now training_step=, validate= is now validation_step=",
        ),
    ],
)
def test_earlier_names_of_fields_are_taken_with_one_note(
    fields: dict[str, Any], earlier: dict[str, Any], note: str
):
    """The note says the line of the job, and the job is the same as by the present names."""
    present = {present_name(name): value for name, value in earlier.items()}
    with pytest.warns(FutureWarning) as noted:
        job = Job(**{**fields, **earlier})
    assert [(str(each.message), each.filename) for each in noted] == [(note, __file__)]

    expected = Job(**{**fields, **present})
    assert (job.training_step, job.validation_step) == (
        expected.training_step,
        expected.validation_step,
    )
    assert list(job.sampler.weights if job.sampler else ()) == list(
        expected.sampler.weights if expected.sampler else ()
    )


def test_a_field_is_not_given_by_both_names():
    with pytest.raises(JobError, match="both names of a field: step= is now training_step="):
        replace(Job(**SEVERAL, training_step=max), step=min)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("step", "training_step"),
        ("step.environment.place", "training_step.environment.place"),
        ("validate.best", "validation_step.best"),
        ("training_step.count", "training_step.count"),
        ("loss.step", "loss.step"),
        ("metrics.step", "metrics.step"),
    ],
)
def test_names_in_checkpoints_of_earlier_versions(stored: str, name: str):
    assert present_name(stored) == name
