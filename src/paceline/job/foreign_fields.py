"""Messages for a job that is given a field or a value of another tool: they say what to write in
its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from paceline.base.errors import JobError, nearest

LIGHTNING = "`paceline docs coming-from` names the page that shows both side by side"
_OTHER_NAMES = (
    "`paceline docs coming-from` shows a job beside loops of other tools. The learning rate is the optimizer's, and "
    'devices and micro-batches are not the job\'s: pl.train(job, "data=2 microbatches=4", devices="cuda:0-1")'
)
# Names of fields in version 0.2, whose jobs and checkpoints go on working.
EARLIER = {"step": "training_step", "validate": "validation_step", "weights": "sample_weights"}
_OPTIMIZER = "optimizer must be a function of the (name, parameter) pairs"


def explained(init: Callable[..., None], fields: list[str]) -> Callable[..., None]:
    """Wrap the constructor of a job so that it explains what to write in place of a field that a
    job doesn't have. It takes earlier names, and warns of them.

    Raises, when the job is made:
        JobError: a field is unknown, or given by both of its names.
    """

    @wraps(init)
    def explaining(job: Any, *args: Any, **given: Any) -> None:
        if earlier := [name for name in EARLIER if name in given]:
            words = ", ".join(f"{name}= is now {EARLIER[name]}=" for name in earlier)
            if any(given.get(EARLIER[name]) is not None for name in earlier):
                raise JobError(f"a job is given both names of a field: {words}")
            warnings.warn(f"Job: {words}", FutureWarning, stacklevel=2)
            given |= {EARLIER[name]: given.pop(name) for name in earlier}
        if unknown := [name for name in given if name not in fields]:
            raise JobError(
                "\n".join(
                    f"a job has no field '{name}', {nearest(name, fields)}" for name in unknown
                ),
                hint=_OTHER_NAMES,
            )
        init(job, *args, **given)

    return explaining


def present_name(stored: str) -> str:
    """Return the name of a field, or of a value in one, in a checkpoint of any version."""
    field, dot, rest = stored.partition(".")
    return EARLIER.get(field, field) + dot + rest


def problems(job: Any) -> Iterator[str]:
    """Yield a message for each field of a job that holds a value of another tool."""
    has_loss = job.loss is not None or job.compute is not None
    if _is_lightning(job.model) and (not isinstance(job.model, type) or not has_loss):
        yield (
            f"model is a LightningModule: pl.from_lightning(build, data=...) makes a job of it; {LIGHTNING}"
        )
    if getattr(job.optimizer, "__name__", "") == "configure_optimizers":
        yield f"{_OPTIMIZER}, and configure_optimizers knows a model's own; {LIGHTNING}"
    elif hasattr(job.optimizer, "param_groups"):
        kind = type(job.optimizer).__name__
        yield f"{_OPTIMIZER} that are trained, such as lambda named: {kind}(named, lr=1e-3), not the {kind} itself"
    elif isinstance(job.optimizer, tuple | list | dict):
        yield f"{_OPTIMIZER}, got a {type(job.optimizer).__name__}; {_SEVERAL}"
    elif of_keras(job.optimizer):
        yield f"{_OPTIMIZER}: {keras_optimizer(job.optimizer)}"
    if isinstance(job.model, list | tuple | dict):
        yield f"model is a {type(job.model).__name__}: {_MODELS}"
    if (
        isinstance(job.loss, type)
        and hasattr(job.loss, "named_parameters")
        and not of_keras(job.loss)
    ):
        name = job.loss.__name__
        yield f"loss must be a function (output, target), and {name} is a class: give {name}()"
    if of_keras(job.loss):
        yield (
            "loss is one of Keras, which takes (target, output), and a job's takes (output, target): give "
            "loss=lambda output, target: keras_loss(target, output)"
        )
    for name, metric in job.metrics.items() if isinstance(job.metrics, dict) else ():
        if of_keras(metric):
            yield (
                f"metric '{name}' is one of Keras, which takes (target, output) and may keep a state: give a "
                "function (output, target) -> a mean over dim-0 samples, or (sum, count)"
            )
    if hasattr(job.data, "train_dataloader"):
        yield f"data is a {type(job.data).__name__}: give data=module.train_dataloader()"
    if hasattr(job.validation, "val_dataloader"):
        yield f"validation is a {type(job.validation).__name__}: give validation=module.val_dataloader()"


def optimizer_hint(returned: object) -> str:
    """Say what a job's `optimizer` may return in place of a value that is no optimizer of torch."""
    if of_keras(returned):
        return keras_optimizer(returned)
    if hasattr(returned, "configure_optimizers"):
        return LIGHTNING
    if isinstance(returned, tuple | list | dict):
        return _SEVERAL
    return "return one of torch.optim, or a subclass of torch.optim.Optimizer"


def model_hint(returned: object) -> str:
    """Say what a job's `model` may return in place of a value that is no module."""
    if returned is None:
        return "the function must return the module that it builds"
    if isinstance(returned, type):
        return f"call it: model=lambda: {returned.__name__}(...)"
    return _MODELS


_MODELS = (
    "model= builds one module; several by name are models={...} with a step of your own, "
    "see `paceline docs own-step`"
)
_SEVERAL = (
    "a job has one optimizer of torch, whose parameter groups may differ in learning rate and weight decay; "
    'several by name: models={"net": build} and optimizers={...}, see `paceline docs own-step`'
)


def keras_optimizer(optimizer: object) -> str:
    """Name the optimizer of torch that corresponds to one of Keras, in a sentence."""
    import torch

    kind = (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__
    name = {"Nadam": "NAdam"}.get(kind, kind)
    meant = name if hasattr(torch.optim, name) else "AdamW"
    return (
        f"{kind} of Keras updates variables of Keras; torch's is lambda named: torch.optim.{meant}(named, lr=...), "
        "and pl.keras.fit takes a compiled Keras model with its optimizer"
    )


def of_keras(value: object) -> bool:
    """Whether a value is a class, an object or a function that Keras itself defines."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return isinstance(module, str) and module.partition(".")[0] in (
        "keras",
        "tf_keras",
        "tensorflow",
    )


def _is_lightning(model: object) -> bool:
    return hasattr(model, "training_step") and hasattr(model, "configure_optimizers")
