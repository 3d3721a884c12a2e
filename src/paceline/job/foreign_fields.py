"""What is said where a field of a job is given a value of another tool: what to write in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LIGHTNING = "docs/from-lightning.md shows both side by side"
_OPTIMIZER = "optimizer must be a function of the (name, parameter) pairs"


def problems(job: Any) -> Iterator[str]:
    """What is wrong with the fields of a job that hold values of other tools, in words."""
    if _is_lightning(job.model) and (not isinstance(job.model, type) or job.loss is None):
        yield ("model is a LightningModule: a job takes what its methods compute as fields, loss= for what "
               f"training_step returns and optimizer= for what configure_optimizers returns; {LIGHTNING}")
    if getattr(job.optimizer, "__name__", "") == "configure_optimizers":
        yield f"{_OPTIMIZER}, and configure_optimizers knows a model's own; {LIGHTNING}"
    elif hasattr(job.optimizer, "param_groups"):
        kind = type(job.optimizer).__name__
        yield f"{_OPTIMIZER} that are trained, such as lambda named: {kind}(named, lr=1e-3), not the {kind} itself"
    elif isinstance(job.optimizer, tuple | list | dict):
        yield f"{_OPTIMIZER}, got a {type(job.optimizer).__name__}; {_SEVERAL}"
    elif of_keras(job.optimizer):
        yield f"{_OPTIMIZER}: {keras_optimizer(job.optimizer)}"
    if of_keras(job.loss):
        yield ("loss is one of Keras, which takes (target, output), and a job's takes (output, target): give "
               "loss=lambda output, target: keras_loss(target, output)")
    for name, metric in job.metrics.items() if isinstance(job.metrics, dict) else ():
        if of_keras(metric):
            yield (f"metric '{name}' is one of Keras, which takes (target, output) and may keep a state: give a "
                   "function (output, target) -> a mean over dim-0 samples, or (sum, count)")
    if hasattr(job.data, "train_dataloader"):
        yield f"data is a {type(job.data).__name__}: give data=module.train_dataloader()"
    if hasattr(job.validation, "val_dataloader"):
        yield f"validation is a {type(job.validation).__name__}: give validation=module.val_dataloader()"


def optimizer_hint(returned: object) -> str:
    """What a job's `optimizer` may return in place of something that is no optimizer of torch."""
    if of_keras(returned):
        return keras_optimizer(returned)
    if hasattr(returned, "configure_optimizers"):
        return LIGHTNING
    if isinstance(returned, tuple | list | dict):
        return _SEVERAL
    return "return one of torch.optim, or a subclass of torch.optim.Optimizer"


def model_hint(returned: object) -> str:
    """What a job's `model` may return in place of something that is no module."""
    if returned is None:
        return "the function must return the module that it builds"
    if isinstance(returned, type):
        return f"call it: model=lambda: {returned.__name__}(...)"
    return "model= builds one module; several by name are models={...} with a step of your own, see docs/own-step.md"


_SEVERAL = ("a job has one optimizer of torch, whose parameter groups may differ in learning rate and weight decay; "
            "several by name: models={\"net\": build} and optimizers={...}, see docs/own-step.md")


def keras_optimizer(optimizer: object) -> str:
    """The optimizer of torch that is meant by one of Keras, in a sentence."""
    import torch

    kind = (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__
    name = {"Nadam": "NAdam"}.get(kind, kind)
    meant = name if hasattr(torch.optim, name) else "AdamW"
    return (f"{kind} of Keras updates variables of Keras; torch's is lambda named: torch.optim.{meant}(named, lr=...), "
            "and pl.keras.fit takes a compiled Keras model with its optimizer")


def of_keras(value: object) -> bool:
    """Whether it is a class, an object or a function that Keras itself defines."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return isinstance(module, str) and module.partition(".")[0] in ("keras", "tf_keras", "tensorflow")


def _is_lightning(model: object) -> bool:
    return hasattr(model, "training_step") and hasattr(model, "configure_optimizers")
