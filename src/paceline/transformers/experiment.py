"""A Trainer's parts as a job: its model, data in its order, loss, optimizer, schedule and length."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.utils.data import IterableDataset, Subset

from paceline.errors import UsageError
from paceline.job import Job, Precision
from paceline.job.losses import IGNORED, OwnLoss
from paceline.proof.plain import rows
from paceline.transformers.copies import copied
from paceline.transformers.means import MeanCheck
from paceline.transformers.optimizers import Recipe, follows_evaluations, schedule_of

_NO_LIMIT = sys.float_info.max  # Trainer reports the norm of gradients that it doesn't clip, too


def job_of(trainer: Any, loader: Any, *, steps: int) -> Job:
    """The experiment that a Trainer describes. loader: what its `get_train_dataloader` made."""
    args, sampler = trainer.args, None
    is_stream = isinstance(loader.dataset, IterableDataset)
    if not is_stream:
        drawn, batch = _sampler(loader), args.per_device_train_batch_size
        sampler = EpochSampler(drawn, len(loader) * batch if args.dataloader_drop_last else len(drawn), seed=args.seed)
    prefix = OwnLossModel.PREFIX if computes_own_loss(trainer) else ""
    return Job(
        **_parts(trainer, loader), sampler=sampler, steps=steps,
        optimizer=Recipe.of(trainer.optimizer, trainer.model, prefix=prefix),
        lr_schedule=None if follows_evaluations(trainer) else (
            lambda optimizer: schedule_of(trainer, optimizer, steps=steps)),
        batch=_batch(args),
        clip=args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else _NO_LIMIT,
        drop_last=is_stream and args.dataloader_drop_last)


def evaluation_of(trainer: Any, loader: Any) -> Job:
    """A job to evaluate with, never to train. loader: what `get_eval_dataloader` made."""
    parts, batch = _parts(trainer, loader), _batch(trainer.args)
    data = parts["data"]
    if not isinstance(data, IterableDataset) and 0 < len(data) < batch:  # a plan wants a sample for each replica
        parts["data"] = Subset(data, [place % len(data) for place in range(batch)])
    return Job(**parts, optimizer=torch.optim.SGD, batch=batch, steps=1)


def _parts(trainer: Any, loader: Any) -> dict[str, Any]:
    """What training and evaluation have in common."""
    separates = separates_labels(trainer)
    loss = (CallersLoss() if computes_own_loss(trainer) else SeparateLoss(trainer) if separates else
            None if trainer._loss_shifts_labels or not trainer.model_accepts_loss_kwargs else ModelsLoss(trainer))
    data = loader.dataset
    if isinstance(data, IterableDataset):
        data = CountedStream(data, batch=_batch(trainer.args), drop_last=trainer.args.dataloader_drop_last)
    return {"model": ModelOf(trainer), "data": data, "collate": Collated(loader.collate_fn, separates),
            "loss": loss, "precision": precision_of(trainer.args), "seed": trainer.args.seed}


def _batch(args: Any) -> int:
    """The global batch: the number of devices is not part of the experiment."""
    size: int = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return size


def precision_of(args: Any) -> Precision:
    """Of the forwards; weights keep the model's own dtype."""
    if args.fp16:
        return "fp16"
    return "bf16" if args.bf16 else "tf32" if args.tf32 else "float32"


def _sampler(loader: Any) -> Any:
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if sampler is None:
        raise UsageError(f"the training data is drawn by a {type(loader.batch_sampler).__name__}, which draws batches",
                         hint="a global batch is cut by the plan: give a sampler that draws one sample at a time")
    return sampler


@dataclass(frozen=True)
class EpochPlace:
    """Where a step lies: in which epoch, as which step of it from 1 on, and whether it is the last one."""

    epoch: int
    step: int
    is_last: bool


class CountedStream(IterableDataset[Any]):
    """An iterable data set that knows how long each epoch was before it gives an epoch's last sample."""

    def __init__(self, data: Any, *, batch: int, drop_last: bool) -> None:
        self.data, self.batch, self.drop_last = data, batch, drop_last
        self._lengths: list[int] = []  # of the epochs that ended, in samples

    def __iter__(self) -> Iterator[Any]:
        count, latest = 0, None
        for sample in self.data:
            if count:
                yield latest
            latest, count = sample, count + 1
        self._lengths.append(count)
        if count:
            yield latest

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)

    def place(self, step: int) -> EpochPlace:
        """Of a step of the run, from 1 on, whose samples were read."""
        for epoch, length in enumerate(self._lengths):
            whole, rest = divmod(length, self.batch)
            steps = whole + (1 if rest and not self.drop_last else 0)
            if step <= steps:
                return EpochPlace(epoch, step, step == steps)
            step -= steps
        return EpochPlace(len(self._lengths), step, False)


class EpochSampler:
    """A sampler of torch, drawn for each epoch as Trainer draws it on one device.

    Accelerate seeds random samplers by the epoch and `data_seed`. Others draw from torch's global generator; here it
    is seeded once, and epochs before are drawn again, which equals Trainer as long as nothing else draws.

    length: of an epoch, without what a last short batch would leave out. seed: that Trainer gives the generator.
    """

    def __init__(self, sampler: Any, length: int, *, seed: int) -> None:
        self.sampler, self.length, self.seed, self.epoch = sampler, length, seed, 0

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
            return islice(iter(self.sampler), self.length)
        drawn: Iterable[int] = ()
        torch.manual_seed(self.seed)
        for _ in range(self.epoch + 1):
            torch.empty((), dtype=torch.int64).random_()  # as a DataLoader does for its workers
            drawn = list(self.sampler)
        return islice(iter(drawn), self.length)


class ModelOf:
    """Builds a rank's own copy of a Trainer's model. In a fake mode it gives the model itself: real tensors must not
    be copied there.

    A rank is a fork, which has the frozen weights in memory that it shares with the others until it writes there.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.process = trainer, os.getpid()

    def __call__(self) -> torch.nn.Module:
        from torch._guards import detect_fake_mode

        trainer = self.trainer
        model = trainer.model if detect_fake_mode() is not None else copied(
            trainer.model, shares_frozen=os.getpid() != self.process)
        model.train()
        return OwnLossModel(trainer, model) if computes_own_loss(trainer) else model


def computes_own_loss(trainer: Any) -> bool:
    """Whether a subclass says how the loss comes about, running the model itself."""
    import transformers

    return type(trainer).compute_loss is not transformers.Trainer.compute_loss


def frozen_names(trainer: Any) -> list[str]:
    """Weights that are not trained, by their names on ranks."""
    prefix = OwnLossModel.PREFIX if computes_own_loss(trainer) else ""
    return [prefix + name for name, parameter in trainer.model.named_parameters() if not parameter.requires_grad]


def separates_labels(trainer: Any) -> bool:
    """Whether the loss is computed from the outputs and labels, which the model then isn't given."""
    return trainer.compute_loss_func is not None or trainer.label_smoother is not None


@dataclass(frozen=True)
class Collated:
    """The Trainer's collator; with the labels as the target if the model isn't given them."""

    collate: Callable[[list[Any]], Any]
    separates: bool

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        if not self.separates or "labels" not in batch:
            return batch
        return {key: value for key, value in batch.items() if key != "labels"}, batch


def count_items(trainer: Any, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Labels that count, by Trainer's rule; None where samples do."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        return None
    counted = trainer._get_num_items_in_batch([dict(batch)], labels.device)
    if counted is None and trainer.label_smoother is not None:
        counted = (labels[..., 1:] if _shifts(trainer) else labels).ne(IGNORED).sum()
    return counted if isinstance(counted, torch.Tensor) else None


def _shifts(trainer: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    return type(model).__name__ in CAUSAL.values()


class ModelsLoss:
    """(output, batch) -> the model's own loss, as (sum, count by Trainer's rule).

    Trainer counts the labels that it thinks the loss is over. Of GPT-2, whose loss does without each sample's first
    label, it counts these, too (transformers 5.23), and so divides by more.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.loss = trainer, OwnLoss()

    def __call__(self, output: Any, batch: Mapping[str, Any]) -> Any:
        loss = self.loss(output, batch)
        count = count_items(self.trainer, batch) if isinstance(loss, tuple) else None
        return loss if count is None else (loss[0], count)


class SeparateLoss:
    """(output, batch) -> the loss of `compute_loss_func` or of label smoothing, as (sum, count).

    Each is given the number of labels of its own micro-batch and so returns a mean over them, whether it divides by
    that number or averages by itself.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.mean = MeanCheck(trainer, "compute_loss_func", precision_of(trainer.args))

    def __call__(self, output: Any, batch: Mapping[str, Any]) -> Any:
        trainer, count = self.trainer, count_items(self.trainer, batch)
        if count is not None and not count:
            return _nothing(output), count
        if trainer.compute_loss_func is None:
            loss = trainer.label_smoother(output, batch.get("labels"), shift_labels=_shifts(trainer))
        else:
            loss = self._given(output, batch, count)
            if _is_training(loss) and self.mean.is_due(samples := _samples(batch)):
                self.mean.look(loss, samples, lambda part: self._of_part(output, batch, part, samples))
        return loss if count is None else (loss * count, count)

    def _given(self, output: Any, batch: Mapping[str, Any], count: torch.Tensor | None) -> Any:
        return self.trainer.compute_loss_func(output, batch.get("labels"), num_items_in_batch=count)

    def _of_part(self, output: Any, batch: Mapping[str, Any], part: range, samples: int) -> tuple[Any, Any]:
        cut = rows(batch, part, samples)
        count = count_items(self.trainer, cut)
        return self._given(rows(output, part, samples), cut, count), count


def _samples(batch: Mapping[str, Any]) -> int:
    return next((len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim), 0)


def _is_training(loss: Any) -> bool:
    """Whether a loss is of a step, and not of a trial without values."""
    return isinstance(loss, torch.Tensor) and loss.requires_grad and detect_fake_mode() is None


def _nothing(output: Any) -> torch.Tensor:
    """The sum of no elements of the output: without effect, but with a gradient."""
    logits = output["logits"] if isinstance(output, Mapping) else output[0]
    return logits.flatten()[:0].sum()


class _Replayed:
    """A model that has run: returns what it returned."""

    def __init__(self, model: torch.nn.Module, output: Any) -> None:
        self._model, self._output = model, output

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class OwnLossModel(torch.nn.Module):
    """A model whose forward is a Trainer's `compute_loss`: it returns the loss, what that is a mean over, and outputs
    if they are wanted."""

    PREFIX = "model."
    wants_outputs = False

    def __init__(self, trainer: Any, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self._trainer = model, [trainer]  # not a module, and not to be copied
        self._mean = MeanCheck(trainer, f"compute_loss of {type(trainer).__name__}", precision_of(trainer.args))

    def forward(self, **inputs: Any) -> dict[str, Any]:
        (trainer,) = self._trainer
        count, seen, samples = count_items(trainer, inputs), list[Any](), _samples(inputs)
        handle = (self.model.register_forward_hook(lambda model, args, output: seen.append(output))
                  if self._mean.is_due(samples) else None)
        try:
            made = type(trainer).compute_loss(trainer, self.model, dict(inputs), return_outputs=self.wants_outputs,
                                              num_items_in_batch=count)
        finally:
            if handle is not None:
                handle.remove()
        loss, outputs = made if self.wants_outputs else (made, {})
        if len(seen) == 1 and _is_training(loss):
            self._mean.look(loss, samples, lambda part: self._of_part(inputs, seen[0], part, samples))
        named = outputs if isinstance(outputs, Mapping) else {f"output {i}": item for i, item in enumerate(outputs)}
        return {**{key: item for key, item in named.items() if key != "loss"}, "loss": loss,
                **({} if count is None else {"count": count})}

    def _of_part(self, inputs: Mapping[str, Any], output: Any, part: range, samples: int) -> tuple[Any, Any]:
        """What `compute_loss` makes of some samples, and what that is a mean over; the model does not run again."""
        (trainer,) = self._trainer
        cut = rows(inputs, part, samples)
        count = count_items(trainer, cut)
        return type(trainer).compute_loss(trainer, _Replayed(self.model, rows(output, part, samples)), dict(cut),
                                          num_items_in_batch=count), count

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnLossModel:
        return OwnLossModel(self._trainer[0], copy.deepcopy(self.model, memo))


class CallersLoss:
    """The loss that `OwnLossModel` computed, as (sum, count) where labels count."""

    def __call__(self, output: Mapping[str, Any], batch: Any) -> Any:
        if "count" not in output:
            return output["loss"]
        count = output["count"]
        return (output["loss"] * count if count else output["loss"].new_zeros(())), count
