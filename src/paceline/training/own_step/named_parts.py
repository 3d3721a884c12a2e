"""Treats a job with several models as one job for each. Every model is prepared by itself, like a
job's only model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from paceline.base.errors import JobError
from paceline.base.nested import map_tensors, tensors_in
from paceline.cluster.devices import Device
from paceline.job import Job
from paceline.job.named_fields import init_of
from paceline.job.named_models import NamedModels, build_named_model
from paceline.job.named_optimizers import NamedOptimizers
from paceline.job.own_step import spec
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.compose import prepare
from paceline.strategies.layout import Extent, Layout, Report
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.strategies.state_tensors import SavedState, StateTensor
from paceline.strategies.synchroniser import Synchroniser
from paceline.training.attributes import ChangingAttributes
from paceline.training.freezing import freeze_throughout
from paceline.training.initial import load_initial
from paceline.training.own_step.recorded import Recorded, recorded_apart, refuse_to_split
from paceline.training.prepare import Prepared, prepare_job

TRIED_SAMPLES = 8


@dataclass(frozen=True)
class ModelPart:
    """One of the job's models on this rank, or a follower. A job's only model has the name ""."""

    name: str
    layout: Layout
    synchronisers: Sequence[Synchroniser]  # of its gradients

    @property
    def prefix(self) -> str:
        """What the names of its parameters among those of all models begin with; "" of a job's only model."""
        return f"{self.name}." if self.name else ""


class NamedLayouts:
    """This rank's parts of several models; see `Layout`. The models run one at a time, by name."""

    has_output, output_place = True, 0

    def __init__(self, layouts: Mapping[str, Layout], models: NamedModels) -> None:
        self.layouts = dict(layouts)
        self.module: nn.Module = NamedModels(
            {name: layout.module for name, layout in layouts.items()}, models.followers
        )
        self.owned = frozenset(
            f"{name}.{key}" for name, layout in layouts.items() for key in layout.owned
        )
        self.owned_buffers = frozenset(
            f"{name}.{key}" for name, layout in layouts.items() for key in layout.owned_buffers
        )
        self.extents: dict[str, Extent] = {
            f"{name}.{key}": extent
            for name, layout in layouts.items()
            for key, extent in layout.extents.items()
        }
        lines = tuple(
            f"{name}: {line}" for name, layout in layouts.items() for line in layout.report.lines
        )
        documents = {
            name: dict(layout.report.document)
            for name, layout in layouts.items()
            if layout.report.document
        }
        self.report = Report(lines, documents)

    @property
    def meets_in_forward(self) -> bool:
        return any(layout.meets_in_forward for layout in self.layouts.values())

    def let_go(self) -> None:
        """Do nothing, because each layout has already let go of the parameters that it doesn't
        hold.
        """

    def run(self, batches: Any, work: Any) -> None:
        raise AssertionError("models by name are run one by one")

    def forward(self, batch: Any) -> Any:
        raise AssertionError("models by name are run one by one")

    def finish(self) -> None:
        for layout in self.layouts.values():
            layout.finish()


class _OfPart(Synchroniser):
    """A synchroniser that uses the names that parameters have among those of all models."""

    def __init__(self, synchroniser: Synchroniser, prefix: str) -> None:
        self.inner, self.prefix = synchroniser, prefix

    def begin(self, *, last: bool) -> None:
        self.inner.begin(last=last)

    def unused(self) -> set[str]:
        return {self.prefix + name for name in self.inner.unused()}

    def finish(self) -> None:
        self.inner.finish()

    @property
    def sent_bytes(self) -> float:
        return self.inner.sent_bytes

    def kept(self) -> Iterator[StateTensor]:
        for kept in self.inner.kept():
            yield replace(
                kept,
                name=_stored_name(kept.name, self.prefix),
                like=self.prefix + kept.like if kept.like else "",
            )

    def restore(self, saved: SavedState) -> list[str]:
        return self.inner.restore(_SavedOfPart(saved, self.prefix))

    def end_evaluation(self) -> None:
        self.inner.end_evaluation()

    def hold(self) -> None:
        self.inner.hold()

    def collect(self, *, on: bool) -> None:
        self.inner.collect(on=on)


def _stored_name(name: str, prefix: str) -> str:
    """Return the name under which a strategy saves a value of a parameter: KIND/NAME or
    KIND/REPLICA/NAME.

    The model's name is put before the parameter's.
    """
    kind, slash, parameter = name.rpartition("/")
    return f"{kind}{slash}{prefix}{parameter}"


class _SavedOfPart:
    """The part of a checkpoint that strategies have saved for one model; see `SavedState`."""

    def __init__(self, saved: SavedState, prefix: str) -> None:
        self.saved, self.prefix = saved, prefix

    def __contains__(self, name: object) -> bool:
        return _stored_name(str(name), self.prefix) in self.saved

    def replicas(self, kind: str) -> int:
        return self.saved.replicas(kind)

    def read(self, name: str, like: str = "") -> torch.Tensor:
        return self.saved.read(_stored_name(name, self.prefix), self.prefix + like if like else "")


class _OnlyModel:
    """Builds one of a job's models, or a follower."""

    def __init__(self, job: Job, name: str) -> None:
        self.job, self.name = job, name

    def needs_training(self, model: nn.Module) -> bool:
        """Whether it is a mistake if this model has no trainable parameters. It is not for a
        follower or a model with buffers only.
        """
        return self.name not in self.job.followers and any(True for _ in model.parameters())

    def __call__(self) -> nn.Module:
        model = build_named_model(self.name, self.job.models, self.job.followers, self.job.seed)
        could_be_trained = any(p.requires_grad for p in model.parameters())
        freeze_throughout(self.job, model, prefix=f"{self.name}.")
        if could_be_trained and not any(p.requires_grad for p in model.parameters()):
            raise JobError(
                f"freeze leaves nothing of '{self.name}' to train in the whole run",
                hint=f'a model that is not trained is a follower: followers={{"{self.name}": '
                "pl.frozen(build)}, without its optimizer",
            )
        return model


def job_of(job: Job, name: str, trial: Callable[[], Recorded]) -> Job:
    """Return a job with only this model, for code that looks at one model. Its loss depends on
    every output.

    trial: gives what the job's step does, which is tried at the first request.
    """

    def build(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        full_names = [(f"{name}.{key}", p) for key, p in named]
        if name in job.followers:
            return torch.optim.SGD(p for _, p in full_names)
        return NamedOptimizers.of(
            {key: spec(each) for key, each in job.optimizers.items()},
            full_names,
            job.models,
            of_all=False,
        )

    def inputs(places: Sequence[int]) -> tuple[Any, torch.Tensor]:
        """Return the inputs with which the step calls the model, for any number of samples. Inputs that are not
        per sample are given whole.
        """
        model_inputs, rows = trial().inputs[name], torch.tensor(places)
        if name in trial().uncut:
            return model_inputs, rows
        return map_tensors(lambda tensor: tensor[rows % len(tensor)], model_inputs), rows

    return Job(
        model=_OnlyModel(job, name),
        data=range(TRIED_SAMPLES),
        collate=inputs,
        loss=_of_every_output,
        optimizer=build,
        batch=job.batch,
        steps=1,
        precision=job.precision,
        seed=job.seed,
    )


def _of_every_output(output: Any, target: Any) -> torch.Tensor:
    means = [tensor.mean() for tensor in tensors_in(output) if tensor.is_floating_point()]
    return sum(means[1:], means[0])


def prepare_models(
    job: Job, *, plan: Plan, mesh: Mesh, device: torch.device, devices: Sequence[Device] = ()
) -> tuple[Prepared, dict[str, ModelPart]]:
    """Build the job's models and followers and let this rank hold its part of each. Collective.

    The only model of a job has the name "".
    """
    if job.own_step is None:
        only = prepare_job(job, plan=plan, mesh=mesh, device=device, devices=devices)
        return only, {"": ModelPart("", only.layout, only.synchronisers)}
    trial = cache(partial(recorded_apart, job, TRIED_SAMPLES))
    if plan.splits_model:
        refuse_to_split(job, plan, trial())
    each = {
        name: prepare_job(
            job_of(job, name, trial),
            plan=plan,
            mesh=mesh,
            device=device,
            devices=devices,
            models="one",
        )
        for name in job.model_names
    }
    models = NamedModels({name: prepared.model for name, prepared in each.items()}, job.followers)
    parts = {
        name: ModelPart(
            name, prepared.layout, [_OfPart(s, f"{name}.") for s in prepared.synchronisers]
        )
        for name, prepared in each.items()
    }
    layouts = NamedLayouts({name: part.layout for name, part in parts.items()}, models)
    together = Prepared(
        models,
        layouts,
        [
            *(synchroniser for part in parts.values() for synchroniser in part.synchronisers),
            *prepare(layouts.module, active=ActivePlan(plan), mesh=mesh, models="all"),
        ],
        ChangingAttributes(models),
    )
    return together, parts


def load_models(
    job: Job,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    extents: Mapping[str, Extent],
) -> None:
    """Replace the seed's weights by those that the job gives, also in followers.

    Args:
        model: All models.
        parameters: Those that this rank holds, of all models.
        extents: As for `load_initial`.

    Raises:
        JobError: there are no weights for a model, or their names or shapes are not its own.
    """
    for name in job.model_names:
        init, prefix = init_of(job, name), f"{name}." if name else ""
        if init is None:
            continue
        held = {k.removeprefix(prefix): p for k, p in parameters.items() if k.startswith(prefix)}
        places = {key: extents[prefix + key] for key in held if prefix + key in extents}
        try:
            load_initial(init, model.get_submodule(name), held, places)
        except JobError as error:
            if not name:
                raise
            raise JobError(f"'{name}': {error.args[0]}", hint=error.hint) from error
