"""A LightningModule as a job: its methods are the computation, the optimizer and the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import signature
from itertools import takewhile
from typing import Any

from paceline.base.errors import JobError, TrainingError
from paceline.job.job import Job
from paceline.job.phases import monitored

_HINT = "`paceline docs coming-from` names the page on what a job has in its place"
# Methods that are called here, or that no training needs.
_KNOWN = {
    *("forward", "configure_optimizers", "training_step", "validation_step", "test_step"),
    *("predict_step", "train_dataloader", "val_dataloader", "test_dataloader"),
    "predict_dataloader",
}
_logged: dict[str, Any] = {}  # by the step of a module that runs


def from_lightning(build: Callable[[], Any], **fields: Any) -> Job:
    """Return the job of a LightningModule: `training_step` is its `compute`, `validation_step` its
    own, and what they log are figures. `configure_optimizers` gives optimizer and schedule.

    Args:
        build: Builds the module: its class, or a function without arguments. It is called once for
            the optimizer, and then wherever the model is needed.
        fields: Further fields of `Job`, such as `data`, `epochs`, `validation` and `clip`.

    Raises:
        JobError: the module has hooks that would not be called, or optimizers that a job can't have.
    """
    if own := sorted(
        {"model", "compute", "validation_step", "optimizer", "lr_schedule"} & fields.keys()
    ):
        raise JobError(
            f"from_lightning takes {', '.join(own)} from the module, and is given it as a field, too",
            hint=f"leave it out, or change the job: dataclasses.replace(job, {own[0]}=...)",
        )
    job = Job(model=build, compute=_Step("training_step"), optimizer=lambda _: None, **fields)
    trainer = _Absent(
        "trainer",
        estimated_stepping_batches=job.total_steps,
        max_epochs=job.epochs,
        max_steps=job.steps,
    )

    def built() -> Any:
        module = build()
        module.trainer, module.log = trainer, _log
        return module

    module = built()
    if problems := list(_problems(module)):
        raise JobError("; ".join(problems), hint=_HINT)
    if job.validation is None and "val_dataloader" in _names(_users(module)):
        raise JobError(
            f"{type(module).__name__}.val_dataloader is not called",
            hint="validation=, see " + _HINT,
        )
    is_validated = job.validation is not None and "validation_step" in _names(_users(module))
    return replace(
        job,
        model=built,
        validation_step=_Step("validation_step") if is_validated else None,
        **_optimized(module, job),
    )


class _Step:
    """A step of a module as a function of the module and a batch."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: Any, batch: Any) -> Any:
        _logged.clear()
        step = getattr(module, self.name)
        takes_index = len(signature(step).parameters) > 1
        loss = step(batch, *[_Absent("batch_idx")] * takes_index)
        figures = dict(_logged)
        if isinstance(loss, Mapping):
            loss = loss.get("loss", loss.get("val_loss"))
        loss = figures.get("val_loss") if loss is None else loss
        if loss is None:
            raise JobError(f"{self.name} returns no loss", hint=_HINT)
        return loss, figures


def _log(name: str, value: Any, *_: Any, **__: Any) -> None:
    """Note a figure in place of a module's `log`, which its `log_dict` also calls."""
    _logged[name] = value.detach() if hasattr(value, "detach") else value


class _Absent:
    """Stands for what only Lightning's Trainer has: of it, all but these attributes is refused."""

    def __init__(self, name: str, **known: Any) -> None:
        vars(self).update(known, _name=name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy asks for such names
            raise AttributeError(name)
        return self._refuse(f".{name}")

    def _refuse(self, use: Any = "", *_: Any) -> Any:
        of = use if isinstance(use, str) else ""
        raise TrainingError(f"the module uses {self._name}{of}, which no plan has", hint=_HINT)

    __eq__ = __lt__ = __gt__ = __mod__ = __add__ = __index__ = __bool__ = _refuse


def _optimized(module: Any, job: Job) -> dict[str, Any]:
    """Return optimizer and schedule of a job from what `configure_optimizers` returns.

    Raises:
        JobError: there are several, or the schedule follows epochs of a stream.
    """
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    from paceline.job.remade import Recipe, remade_schedule

    given = module.configure_optimizers()
    if not isinstance(given, Mapping):
        several = given if isinstance(given, tuple | list) else [given]
        optimizers, schedules = several if isinstance(several[0], list) else (several, [])
        schedules = schedules if isinstance(schedules, list | tuple) else [schedules]
        if len(optimizers) != 1 or len(schedules) > 1:
            raise JobError(
                f"configure_optimizers returns {len(optimizers)} optimizers and {len(schedules)} schedules",
                hint='models={"net": build} and optimizers={...} with a step of your own, see `paceline docs own-step`',
            )
        given = {"optimizer": optimizers[0], "lr_scheduler": next(iter(schedules), None)}
    fields = {"optimizer": Recipe.of(given["optimizer"], module)}
    planned = given.get("lr_scheduler")
    if planned is None:
        return fields
    planned = planned if isinstance(planned, Mapping) else {"scheduler": planned}
    schedule, every = planned["scheduler"], planned.get("frequency", 1)

    def remade(optimizer: Any) -> Any:
        return remade_schedule(schedule, optimizer)

    if isinstance(schedule, ReduceLROnPlateau):
        monitor = planned.get("monitor", given.get("monitor"))
        if monitor is None or every != 1 or planned.get("interval", "epoch") != "epoch":
            raise JobError(
                f"a ReduceLROnPlateau moves at each evaluation by a figure, and is given monitor={monitor!r}, "
                f"frequency={every} and interval={planned.get('interval', 'epoch')!r}",
                hint='{"scheduler": ..., "monitor": "val_loss"}; or leave it out, and give the job lr_schedule=',
            )
        return fields | {"lr_schedule": monitored(monitor, remade)}
    if planned.get("interval", "epoch") == "epoch":
        if job.steps_per_epoch is None:
            raise JobError(
                "the schedule follows epochs, and a stream has no known ones",
                hint='{"scheduler": ..., "interval": "step"}',
            )
        every *= job.steps_per_epoch
    schedule.__class__ = type("Every", (_Every, type(schedule)), {"every": every})
    return fields | {"lr_schedule": remade}


class _Every:
    """A schedule that moves once in so many steps."""

    every: int
    steps_taken = 0

    def step(self) -> None:
        self.steps_taken += 1
        if self.steps_taken % self.every == 0:
            super().step()  # type: ignore[misc]


def _problems(module: Any) -> Iterator[str]:
    """Yield a message for everything that Lightning would do with a module and nobody does here."""
    name = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        yield f"{name} makes its own updates (automatic_optimization): a job has training_step= for them"
    hooks = _names(filter(_is_of_library, type(module).__mro__)) - _KNOWN
    yield from (
        f"{name}.{hook} is not called"
        for hook in sorted(hooks & _names(_users(module)))
        if not hook.startswith("_")
    )


def _users(module: Any) -> list[type]:
    """Return the classes of a module that are not Lightning's own."""
    return list(takewhile(lambda kind: not _is_of_library(kind), type(module).__mro__))


def _names(kinds: Iterable[type]) -> set[str]:
    return {name for kind in kinds for name in vars(kind)}


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
