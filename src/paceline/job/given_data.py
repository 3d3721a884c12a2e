"""Conversion of data as scripts have it to the fields that a job uses: a data set, a sampler, a
collate function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.base.errors import JobError
from paceline.job import loaders
from paceline.job.arrays import as_arrays
from paceline.job.groups import DrawnGroups, GroupSizes
from paceline.job.phases import BatchSizes
from paceline.job.script_order import ScriptOrder, TorchSeed, begun

Changes = dict[str, Any]
_EVALUATED = ("validation", "test")


def settled(job: Any) -> Changes:
    """Return the fields that replace those that a job was given. If a job needs no change, there
    are none.

    Raises:
        JobError: two fields contradict each other, or the data can't be converted.
    """
    changes: Changes = {}
    if loaders.is_loader(job.data):
        changes.update(_of_loader(job))
    else:
        changes.update(_changed(job, "data", job.collate))
        if (
            job.sampler is not None
            and not isinstance(job.sampler, ScriptOrder)
            and loaders.draws_groups(job.sampler, job.seed)
        ):
            changes.update(_of_batch_sampler(job, changes.get("data", job.data)))
    for name in _EVALUATED:
        changes.update(_evaluated(job, name, changes.get("collate", job.collate)))
    reading_order = getattr(changes.get("data", job.data), "reading_order", None)
    batch = changes.get("batch", job.batch)
    if (
        reading_order is not None
        and job.sample_weights is None
        and changes.get("sampler", job.sampler) is None
        and batch
    ):
        changes["sampler"] = reading_order(batch)  # a data set that knows in which order it is read
    if job.sample_weights is not None:
        changes.update(_weighted(job, changes))
    if isinstance(job.seed, TorchSeed):
        data, sampler = (changes.get(name, getattr(job, name)) for name in ("data", "sampler"))
        changes.update(begun(job, data, sampler))
    if isinstance(groups := changes.get("sampler", job.sampler), DrawnGroups):
        changes.update(_grouped(job, groups, changes))
    elif isinstance(batch, GroupSizes):  # another job's
        changes["batch"] = int(batch)
    return changes


def _of_loader(job: Any) -> Changes:
    fields = loaders.training_fields(job.data)
    for name, value in (("sampler", job.sampler), ("batch", job.batch), ("collate", job.collate)):
        loader_value = fields.get(name)
        if value is None or (loader_value is None and name != "sampler"):
            fields[name] = loader_value if value is None else value
        elif value != loader_value:
            shown = f"{value} and {loader_value}" if name == "batch" else "two of them"
            raise JobError(
                f"{name} is given, and data is a DataLoader that has its own: {shown}",
                hint=f"leave {name}= out, or give data=loader.dataset",
            )
    if fields["batch"] is None and not isinstance(fields["sampler"], DrawnGroups):
        fields.pop("batch")
    fields["drop_last"] = fields["drop_last"] or job.drop_last
    changed = _changed(job, "data", fields["collate"], value=fields["data"])
    return {**fields, "data": loaders.opened(changed["data"], job.data)}


def _of_batch_sampler(job: Any, data: Any) -> Changes:
    """Return the fields that replace those of a job whose `sampler` draws groups."""
    fields = loaders.fields_of_groups(job.sampler, data)
    if job.batch is not None and fields["batch"] not in (None, job.batch):
        raise JobError(
            f"batch is {job.batch}, and the sampler draws batches of {fields['batch']}",
            hint="leave batch= out: the batch sampler says it",
        )
    if fields["batch"] is None:
        fields.pop("batch")
    return {**fields, "drop_last": fields["drop_last"] or job.drop_last}


def _evaluated(job: Any, name: str, collate: Callable[..., Any] | None) -> Changes:
    value = getattr(job, name)
    if value is None:
        return {}
    if not loaders.is_loader(value):
        return _changed(job, name, collate)
    data, loader_collate = loaders.evaluated(value, name=name)
    changes: Changes = {
        name: loaders.opened(_changed(job, name, loader_collate, value=data)[name], value)
    }
    if loader_collate is collate:
        return changes
    from torch.utils.data import default_collate

    loader_collate = loader_collate or default_collate
    if job.validation_collate not in (None, loader_collate):
        raise JobError(
            f"validation_collate is given, and {name} is a DataLoader that has its own collate_fn",
            hint=f"leave one of them out: {name}=loader.dataset has none",
        )
    return {**changes, "validation_collate": loader_collate}


def _changed(
    job: Any, name: str, collate: Callable[..., Any] | None, *, value: Any = None
) -> Changes:
    """Return the field with its arrays or its Hugging Face data set as a data set of tensors; else
    no change.
    """
    given = getattr(job, name) if value is None else value
    package, kind = type(given).__module__.partition(".")[0], type(given).__name__
    if package == "datasets" and isinstance(given, Mapping):
        raise JobError(
            f"{name} is a {kind} with the splits {', '.join(map(str, given))}, and it is to be one of them",
            hint=f"{name}=dataset[{next(iter(given), 'train')!r}]",
        )
    if package == "datasets" and kind in ("Dataset", "IterableDataset"):
        if collate is None and _format(given) is None:
            return {name: given.with_format("torch")}
        return {} if value is None else {name: given}
    arrays = as_arrays(given, name=name)
    return {name: arrays} if arrays is not None else {} if value is None else {name: given}


def _format(dataset: Any) -> str | None:
    """Return the format in which a Hugging Face data set gives its columns; None for Python's lists
    and numbers.
    """
    known = getattr(dataset, "format", None)
    if isinstance(known, Mapping):
        return known.get("type")
    return getattr(getattr(dataset, "_formatting", None), "format_type", None)


def _weighted(job: Any, changes: Changes) -> Changes:
    """Return the sampler for a job's `sample_weights`: it draws as many samples as there are, with
    replacement.
    """
    from torch.utils.data import WeightedRandomSampler

    if changes.get("sampler", job.sampler) is not None:
        raise JobError(
            "sample_weights draws the samples, and so does the sampler: give one of them",
            hint="sample_weights= is WeightedRandomSampler(weights, len(data)) as the sampler",
        )
    try:
        weights, size = (
            [float(weight) for weight in job.sample_weights],
            len(changes.get("data", job.data)),
        )
    except (TypeError, ValueError) as error:
        raise JobError(
            f"sample_weights must be a number for each sample of data that has a length: {error}"
        ) from error
    if len(weights) != size:
        raise JobError(
            f"sample_weights has {len(weights)} numbers, and data has {size} samples",
            hint="a number for each sample; class balance is 1 / (samples of its class)",
        )
    if not all(0 <= weight < float("inf") for weight in weights) or not sum(weights):
        raise JobError("sample_weights must be at least 0, finite, and not all 0")
    return {"sampler": WeightedRandomSampler(weights, size), "sample_weights": None}


def _grouped(job: Any, groups: DrawnGroups, changes: Changes) -> Changes:
    """Return the batch of a job whose steps are the groups of a batch sampler."""
    if changes.get("drop_last", job.drop_last):
        raise JobError(
            "drop_last leaves out a short last batch, and here a batch sampler makes the batches",
            hint="leave drop_last= out: what the batch sampler does not draw is left out",
        )
    batch = changes.get("batch", job.batch)
    if isinstance(batch, GroupSizes) and batch.groups is groups and batch.seed == job.seed:
        return {}
    sizes = GroupSizes(groups, job.seed)
    if batch is not None and not isinstance(batch, GroupSizes):
        shown = "in phases" if isinstance(batch, BatchSizes) else batch
        raise JobError(
            f"batch is {shown}, and the batch sampler draws {sizes}",
            hint="leave batch= out: each group is a step",
        )
    return {"batch": sizes}
