"""The computation that a job brings: a function of the model and a batch that gives the loss.

Inside, every job is a module and a function of its output. The module of such a job computes the
loss of a batch; the function takes it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.job.phases import Collates

Compute = Callable[[Any, Any], Any]  # (model, batch) -> a loss, or a loss and figures


@dataclass(frozen=True)
class WholeBatch:
    """Makes a batch whole: the module's one argument, as a loop's loader gives it, and no target."""

    collate: Callable[[list[Any]], Any] | None  # None stacks samples, as torch does

    def __call__(self, items: list[Any]) -> tuple[Any, None]:
        from torch.utils.data import default_collate

        return _alone((self.collate or default_collate)(items))

    @property
    def of_stacked(self) -> Callable[[Any], tuple[Any, None]] | None:
        """This makes it of a batch that torch has stacked, if nothing else is done with samples."""
        return _alone if self.collate is None else None


def _alone(batch: Any) -> tuple[Any, None]:
    return (batch,), None


@dataclass(frozen=True)
class BatchLossBuilder:
    """Builds a job's model as a module that computes the loss of a batch."""

    build: Callable[[], Any]
    compute: Compute
    validate: Compute | None

    def __call__(self) -> Any:
        from torch import nn

        from paceline.job.batch_loss import BatchLoss, computing

        model = self.build()
        if not isinstance(model, nn.Module):
            return model  # whoever needs a module refuses it
        # The builder may be a wrapper around another one of these.
        return BatchLoss(computing(model), self.compute, self.validate)


def computed(output: Any, target: None) -> Any:
    """Return the loss in what a computation gave."""
    return output[0] if _has_figures(output) else output


def computed_figures(output: Any) -> Mapping[str, Any]:
    """Return the figures in what a computation gave, by name."""
    figures: Mapping[str, Any] = output[1] if _has_figures(output) else {}
    return figures


def validated(ctx: Any, batch: Any) -> Mapping[str, Any]:
    """Return the figures of a batch of the validation data by name, as a job's `validation_step` does."""
    output: Any = ctx.run("", batch)
    if isinstance(output, Mapping):
        return output
    return {**computed_figures(output), "loss": computed(output, None)}


def _has_figures(output: Any) -> bool:
    return isinstance(output, tuple | list) and len(output) == 2 and isinstance(output[1], Mapping)


def settled(job: Any) -> dict[str, Any]:
    """Return the fields of a job that follow from its `compute`, in place of those that it has."""
    if job.compute is None:
        return {}
    build = job.model.build if isinstance(job.model, BatchLossBuilder) else job.model
    fields: dict[str, Any] = {"model": BatchLossBuilder(build, job.compute, job.validation_step)}
    fields["collate"] = _whole(job.collate)
    if job.validation_collate is not None:
        fields["validation_collate"] = _whole(job.validation_collate)
    return fields


def _whole(collate: Any) -> Any:
    if isinstance(collate, Collates):
        return Collates(replace(collate.phases, values=tuple(map(_whole, collate.phases.values))))
    return collate if isinstance(collate, WholeBatch) else WholeBatch(collate)


def problems(job: Any) -> Iterator[str]:
    """Yield a message for everything that is wrong with the fields of a job with `compute`."""
    if job.compute is None:
        return
    if not callable(job.compute):
        yield f"compute must be a function (model, batch), got {type(job.compute).__name__}"
    if job.loss is not None:
        yield (
            "give either loss or compute, got both: loss= is for items (input, target), and compute= returns "
            "the loss of a batch, whatever that is"
        )
    if job.models:
        yield (
            "compute is for one model, model=; several models by name take a training_step=, in which "
            "ctx.backward(name, batch, loss) does as compute does"
        )
    if job.metrics:
        yield (
            "metrics are functions (output, target), and a batch of compute= has no target: return "
            '(loss, {"accuracy": value}) from compute, or from validation_step=(model, batch)'
        )
    if job.validation_step is not None and job.validation is None:
        yield "validation_step= measures validation data, and there is none: give validation="


def alone(job: Any) -> Any:
    """Return the job with its model by itself, which takes inputs, in place of its computation."""
    if job.compute is None:
        return job
    build = job.model

    def build_alone() -> Any:
        from paceline.job.batch_loss import computing

        return computing(build())

    return replace(
        job.with_training_only(),
        compute=None,
        loss=computed,  # nobody asks for it
        model=build_alone,
        collate=None,
        validation_collate=None,
    )
