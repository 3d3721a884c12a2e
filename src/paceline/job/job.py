"""The experiment: model, data, loss, optimizer, global batch and length.

A job knows no hardware and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from paceline.base.errors import JobError
from paceline.job import compute as computations
from paceline.job import foreign_fields, given_data, named_fields
from paceline.job.callback import Callback
from paceline.job.loaders import Loading
from paceline.job.losses import OwnLoss
from paceline.job.own_step import FollowerModel
from paceline.job.phases import FIGURES, BatchSizes, Collates, Phases, StepWindows, windows_of
from paceline.job.pretrained import Weights

if TYPE_CHECKING:
    import torch

Precision = Literal["float32", "tf32", "bf16", "fp16", "fp8", "float64"]
# Names of the torch dtypes that forwards compute in under autocast; the weights are float32.
AUTOCAST: Mapping[Precision, str] = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """An experiment, which is the same on any number of devices.

    Args:
        model: Builds the `torch.nn.Module`; it is called whenever a module is needed, with the seed
            already set.
        data: A torch dataset (or any sequence); an item is (input, target), or an input alone: a
            tensor, a mapping or a dataclass, which then is its own target. A tuple input is passed
            as *args, a mapping or a dataclass as **kwargs. An iterable dataset works with `steps`
            or a finite stream. A `DataLoader`, a Hugging Face `Dataset`, and arrays or tensors (x,
            y) are taken apart into the fields that they mean; see docs/data.md.
        loss: (output, target) -> a scalar, the mean over the samples along dim 0; or (sum, count)
            for anything else (ignored targets, tokens). The whole window's count normalises once.
            None takes the model's own: `output.loss`, weighted by its tokens where the batch has
            'labels' of tokens.
        compute: (model, batch) -> the loss of a batch as the loop's loader gives it, in place of
            `loss`: a scalar or (sum, count), or a pair of that and figures: a mapping of names to
            means over the samples or (sum, count). See docs/job.md.
        optimizer: Builds the optimizer from (name, parameter) pairs.
        models: Names with functions that build a `torch.nn.Module`, in place of `model`; see
            docs/own-step.md.
        optimizers: Names with functions that build an optimizer, or with `paceline.Optimizer`; each
            updates the model of its name, or the parameters that it names.
        training_step: (ctx, batch) -> None, called once an optimizer step; see
            `paceline.StepContext`. By default the loss of the one model, and an update of every
            optimizer.
        followers: Names with `paceline.ema`, `copy_every` or `frozen`: models whose weights follow
            from others'.
        validation_step: (ctx, batch), or with `compute` (model, batch) -> the figures of a batch of
            the validation data: a loss as `loss` returns it, or a mapping of names to such values,
            one of which is "loss". By default what `compute` returns.
        sampler: Draws the indices of an epoch, as torch's samplers do; its length is that of an
            epoch. It must draw the same for an epoch each time: from torch's global generator or
            from its attribute `generator`, which are seeded by the epoch, or by `set_epoch`. By
            default each epoch is another shuffle of all samples.
        sample_weights: A number for each sample, in proportion to which it is drawn, with
            replacement, as `WeightedRandomSampler` does.
        collate: Makes a batch of a list of samples: (input, target), or an input alone. It is
            called for each micro-batch, so padding may depend on the samples in it; samples lie
            along dim 0. By default they are stacked. Phases of it change the length of sequences;
            evaluations use the last one.
        validation_collate: The collate function for `validation` and `test`, if it is another one.
        freeze: Names of parameters that are not trained: a pattern, several, or phases of them by
            step or epoch. A pattern is a name, a module's path, or has wildcards. A frozen
            parameter keeps its optimizer state.
        batch: Samples an optimizer step, over all devices; a `DataLoader`'s own if it is left out;
            or phases of it, `pl.by_step({0: 64, 1000: 128})`.
        epochs: Passes over the data; give either this or `steps`.
        steps: Optimizer steps; give either this or `epochs`.
        precision: "float32"; "tf32" for TF32 matrix products on GPUs; "bf16" for autocast; "fp16"
            for autocast with loss scaling; "fp8" for autocast in bf16 with linear layers in float8,
            by torchao; "float64" for the model and every floating-point input. See
            docs/precision.md.
        lr_schedule: Builds a learning-rate scheduler from the optimizer; stepped once an optimizer
            step, but not in a step that loss scaling skips.
        clip: Greatest global norm of the gradients.
        validation: Dataset that is evaluated at the end of every epoch and of the run, every sample
            once; not empty.
        test: Dataset that a search reads once, at its end, for the winner. Training never does.
        metrics: Names with functions (output, target) -> a mean over dim-0 samples, or (sum,
            count); or with `paceline.whole(f)`, which is given all samples at once.
        init: Pretrained weights in place of the seed's: a state dict, a function that returns one,
            or the path of a safetensors file, of a folder of Transformers, or of a run; or
            `pl.pretrained(...)` of one of these where names differ. Each rank reads the parts that
            it holds. See docs/recipes.md.
        seed: Of initial weights, data order and random layers; at least 0. `pl.like_torch(seed)`
            begins with the weights and the order of a script that seeds torch.
        drop_last: Leave out the short last batch of an epoch.
        callbacks: Objects that watch the run and control it, in the process that started it; see
            docs/callbacks.md.
        parts: Functions that make a part of the run, on each rank: subclasses of `pl.RunPart`, or
            functions of the run that return one; see docs/callbacks.md.

    Raises:
        JobError: a field has a value it can't have; the message names all of them.
    """

    model: Callable[[], Any] = None  # type: ignore[assignment]
    data: Any = field(repr=False)
    optimizer: Callable[[Any], Any] = None  # type: ignore[assignment]
    batch: int = None  # type: ignore[assignment]  # left out where the data says it
    models: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    optimizers: Mapping[str, Any] = field(default_factory=dict)
    training_step: Callable[[Any, Any], None] | None = None
    followers: Mapping[str, FollowerModel] = field(default_factory=dict)
    validation_step: Callable[[Any, Any], Any] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    compute: computations.Compute | None = None
    sampler: Any = None
    sample_weights: Any = field(default=None, repr=False)
    collate: Callable[[list[Any]], Any] | None = None
    validation_collate: Callable[[list[Any]], Any] | None = None
    epochs: int | None = None
    steps: int | None = None
    precision: Precision = "float32"
    lr_schedule: Callable[[Any], Any] | None = None
    clip: float | None = None
    validation: Any = field(default=None, repr=False)
    test: Any = field(default=None, repr=False)
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    init: Any = None
    freeze: Any = ()
    seed: int = 0
    drop_last: bool = False
    loading: Loading | None = None  # how loader workers read, from a `DataLoader` that was given
    callbacks: Sequence[Callback] = ()
    parts: Sequence[Callable[[Any], Any]] = ()

    def __post_init__(self) -> None:
        problems = list(_phase_problems(self))
        if problems:
            raise JobError("\n".join(problems))
        if isinstance(self.batch, Phases):
            object.__setattr__(self, "batch", BatchSizes(self.batch))
        for name, value in given_data.settled(self).items():
            object.__setattr__(self, name, value)
        if isinstance(self.collate, Phases):
            object.__setattr__(self, "collate", Collates(self.collate))
        problems = [*computations.problems(self), *named_fields.problems(self)]
        if self.models and not problems:
            for name, value in named_fields.derived(self).items():
                object.__setattr__(self, name, value)
        problems += [] if problems else _problems(self)
        if problems:
            raise JobError("\n".join(problems))
        for name, value in computations.settled(self).items():
            object.__setattr__(self, name, value)

    @cached_property
    def criterion(self) -> Callable[[Any, Any], Any]:
        """The function (output, target) -> loss: the job's, or the model's own."""
        if self.compute is not None:
            return computations.computed
        return OwnLoss() if self.loss is None else self.loss

    @property
    def evaluation_collate(self) -> Callable[[list[Any]], Any] | None:
        """The collate function of evaluations, which use the training data if there is no
        validation data.
        """
        return (
            self.validation_collate
            if self.validation_collate and self.validation is not None
            else self.collate
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the models and followers; "" of a job's only model."""
        return (*self.models, *self.followers) or ("",)

    @property
    def own_step(self) -> Callable[[Any, Any], None] | None:
        """The step function of a job with named models; None for a job with one model."""
        return (self.training_step or named_fields.default_step(self)) if self.models else None

    @property
    def own_validate(self) -> Callable[[Any, Any], Any] | None:
        """The validation function (ctx, batch) of a job with named models or with `compute`; None
        if the job gives neither that nor a loss.
        """
        if self.compute is not None:
            return computations.validated
        return self.validation_step or (
            named_fields.default_validate(self) if self.models and self.loss is not None else None
        )

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that floating-point inputs are given; None leaves them unchanged."""
        import torch

        return torch.float64 if self.precision == "float64" else None

    @property
    def num_samples(self) -> int | None:
        """The number of samples an epoch; None for a stream of unknown length."""
        return _length(self.data if self.sampler is None else self.sampler)

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of optimizer steps an epoch; None for a stream of unknown length.

        If batches change, it is that of the first epoch.
        """
        return None if self.windows is None else self.windows.first_step(1)

    @property
    def total_steps(self) -> int | None:
        """The number of optimizer steps of the whole job; None if a stream's end decides."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return None if self.windows is None else self.windows.first_step(self.epochs)

    def with_training_only(self) -> Job:
        """Return the job without its evaluations, and without callbacks, which may use the
        evaluations.
        """
        return replace(self, validation=None, validation_step=None, metrics={}, callbacks=())

    @cached_property
    def windows(self) -> StepWindows | None:
        """The windows of the job's steps; None for a stream of unknown length."""
        if self.num_samples is None:
            return None
        return windows_of(self.batch, self.num_samples, drop_last=self.drop_last)


Job.__init__ = foreign_fields.explained(  # type: ignore[method-assign]
    Job.__init__, [each.name for each in fields(Job) if each.init]
)


def _phase_problems(job: Job) -> Iterator[str]:
    if isinstance(job.batch, Phases):
        wrong = [
            value
            for value in job.batch.values
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        if wrong:
            yield f"batch must be a whole number of at least 1 in every phase, got {wrong[0]!r}"
        elif job.drop_last and max(job.batch.values) > (
            _length(job.data if job.sampler is None else job.sampler) or max(job.batch.values)
        ):
            yield f"drop_last leaves nothing in the phase of batch={max(job.batch.values)}: data has fewer samples"
    if isinstance(job.collate, Phases) and not all(map(callable, job.collate.values)):
        yield "collate must be callable in every phase"
    values = job.freeze.values if isinstance(job.freeze, Phases) else (job.freeze,)
    if not all(
        isinstance(value, str)
        or (isinstance(value, Collection) and all(isinstance(p, str) for p in value))
        for value in values
    ):
        yield f"freeze must be patterns of names of parameters, got {job.freeze!r}"
    for name in ("batch", "collate", "freeze"):
        value = getattr(job, name)
        phases = value if isinstance(value, Phases) else getattr(value, "phases", None)
        if isinstance(phases, Phases) and phases.unit == "epoch" and _length(job.data) is None:
            yield f"{name} has phases by epoch, and the data is a stream whose epochs have no known length: by_step"
    for name in (
        "model",
        "data",
        "optimizer",
        "loss",
        "lr_schedule",
        "clip",
        "validation",
        "metrics",
        "precision",
    ):
        if isinstance(getattr(job, name), Phases):
            yield f"{name} can't have phases; batch, collate and freeze can"


def _sampler_problems(job: Job) -> Iterator[str]:
    if not hasattr(job.sampler, "__iter__") or _length(job.sampler) is None:
        yield (
            "sampler must have __iter__ and __len__, as torch.utils.data.Sampler has, got "
            f"{type(job.sampler).__name__}"
        )
    elif hasattr(job.sampler, "num_replicas"):
        yield (
            f"sampler must draw for all devices together, and a {type(job.sampler).__name__} draws one rank's part; "
            "leave it out, each rank takes its own part"
        )
    if _length(job.data) is None:
        yield "sampler draws indices, and the data is a stream"


def _callback_problems(job: Job) -> Iterator[str]:
    if not isinstance(job.callbacks, Sequence) or isinstance(job.callbacks, str):
        yield f"callbacks must be a list of callbacks, got {type(job.callbacks).__name__}"
        return
    for callback in job.callbacks:
        if isinstance(callback, type):
            yield f"callbacks must hold {callback.__name__}(...), a callback, not the class"
        elif not isinstance(callback, Callback):
            yield f"callbacks must hold instances of pl.Callback, got {type(callback).__name__}"
        elif job.callbacks.count(callback) > 1:
            yield f"callbacks holds the same {type(callback).__name__} twice"
        elif (problem := callback.problem(job)) is not None:
            yield problem


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _problems(job: Job) -> Iterator[str]:
    """Yield a message for everything that is wrong with a job's fields."""
    yield from foreign_fields.problems(job)
    for name, may_be_none in (
        ("model", False),
        ("loss", True),
        ("optimizer", False),
        ("collate", True),
        ("validation_collate", True),
    ):
        if (
            not callable(value := getattr(job, name))
            and not (may_be_none and value is None)
            and not (name in ("model", "optimizer") and isinstance(value, tuple | list | dict))
            and not hasattr(value, "param_groups")
        ):
            yield f"{name} must be callable, got {type(value).__name__}"
    if not isinstance(job.model, type) and hasattr(job.model, "named_parameters"):
        yield "model must be a function that builds the module (lambda: Net()), not the module itself"
    if job.lr_schedule is not None and not callable(job.lr_schedule):
        yield f"lr_schedule must be a function of the optimizer, got {type(job.lr_schedule).__name__}"
    for name in ("batch", "epochs", "steps"):
        value = getattr(job, name)
        if (value is not None or name == "batch") and (
            not isinstance(value, int) or isinstance(value, bool) or value < 1
        ):
            yield f"{name} must be a whole number of at least 1, got {value!r}"
    if (job.epochs is None) == (job.steps is None):
        given = "both" if job.epochs is not None else "neither"
        yield f"give either epochs or steps, got {given}"
    if job.precision not in get_args(Precision):
        yield f"precision {job.precision!r} is none of {', '.join(get_args(Precision))}"
    yield from named_fields.clip_problems("clip", job.clip)
    if not isinstance(job.seed, int) or isinstance(job.seed, bool):
        yield f"seed must be a whole number, got {job.seed!r}"
    elif job.seed < 0:
        yield f"seed must be at least 0, got {job.seed}"
    optional = {"validation": job.validation, "test": job.test}
    datasets = {"data": job.data} | {
        name: value for name, value in optional.items() if value is not None
    }
    for name, value in datasets.items():
        if hasattr(value, "batch_sampler"):
            yield (
                f"{name} must be the dataset itself, not a {type(value).__name__} over it; batch= says how it is "
                "cut, collate= takes its collate_fn"
            )
        elif not (hasattr(value, "__getitem__") or hasattr(value, "__iter__")):
            yield f"{name} must be a torch dataset, got {type(value).__name__}"
    if isinstance(job.batch, int) and job.batch >= 1:
        if job.num_samples == 0:
            yield "data has no samples"
        elif job.num_samples is not None and job.steps_per_epoch == 0:
            yield f"drop_last leaves nothing: data has {job.num_samples} samples and batch is {job.batch}"
    if job.sampler is not None:
        yield from _sampler_problems(job)
    if job.init is not None and not job.models:
        yield from Weights.of(job.init).problems()
    for name, value in optional.items():
        if _length(value) == 0:
            yield f"{name} has no samples: leave it out, or give some"
    yield from _callback_problems(job)
    if not isinstance(job.parts, Sequence) or not all(map(callable, job.parts)):
        yield f"parts must be a list of functions of the run, such as subclasses of pl.RunPart, got {job.parts!r}"
    if not isinstance(job.metrics, Mapping) or not all(
        isinstance(name, str) and callable(function) for name, function in job.metrics.items()
    ):
        yield "metrics must map names to functions (output, target)"
    elif taken := FIGURES.intersection(job.metrics):
        yield f"a metric can't be called {' or '.join(map(repr, sorted(taken)))}: every run has a figure of that name"
    elif job.metrics and job.validation is None:
        yield "metrics are computed on the validation data, and there is none: give validation="
