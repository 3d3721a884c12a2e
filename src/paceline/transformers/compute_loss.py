"""A Trainer's `compute_loss` and `prediction_step` as a job's `compute`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from paceline.job.losses import IGNORED, OwnLoss
from paceline.torch_private.fake_tensors import detect_fake_mode


class ComputeLoss:
    """A job's `compute`: the loss of a batch by the Trainer's `compute_loss`, as (sum, count by
    Trainer's rule), with the figures that it logs.

    The method gets the number of labels of its own micro-batch. It therefore returns a mean over
    them, whether it divides by that number or averages by itself. While it runs, the trainer's model
    is the one of the rank.

    A batch that is a tuple has the arguments of the Trainer's `prediction_step`. The result then is
    that of this method, and the figures.
    """

    def __init__(self, trainer: Any) -> None:
        import transformers

        self.trainer, self.own = trainer, OwnLoss()
        self.is_models = (
            type(trainer).compute_loss is transformers.Trainer.compute_loss
            and trainer.compute_loss_func is None
            and trainer.label_smoother is None
        )

    def __call__(self, model: Any, batch: Any) -> Any:
        if isinstance(batch, tuple):
            with self._on_rank(model) as figures:
                return self.trainer.prediction_step(model, *batch), figures
        with self._on_rank(model) as figures:
            loss = (self._of_model if self.is_models else self._of_method)(model, batch)
        return (loss, figures) if figures else loss

    @contextmanager
    def _on_rank(self, model: Any) -> Iterator[dict[str, Any]]:
        """Let the trainer have this model, and log into the dictionary that is returned."""
        own, figures = vars(self.trainer), dict[str, Any]()
        before = {name: own[name] for name in ("model", "log") if name in own}
        own.update(model=model, log=lambda logs, *_, **__: figures.update(logs))
        try:
            yield figures
        finally:
            del own["log"]
            own.update(before)

    def _of_method(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Return the loss of a method or function of the script, or of smoothed labels."""
        count = count_items(self.trainer, batch)
        items = None if count is None else count.clamp(min=1)
        loss = self.trainer.compute_loss(model, dict(batch), num_items_in_batch=items)
        # A mean over nothing may be NaN.
        return loss if count is None else (torch.where(count > 0, loss * count, 0), count)

    def _of_model(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Return the model's own loss, which may be the first item of a tuple.

        Trainer counts the labels that it believes the loss to be a mean over. GPT-2's loss leaves out
        each sample's first label, but Trainer counts these labels, too (transformers 5.23), and so
        divides by more.
        """
        _, output = self.trainer.compute_loss(model, dict(batch), return_outputs=True)
        if isinstance(output, tuple | list):
            output = dict(zip(("loss", "logits"), output, strict=False))
        loss, count = output["loss"], count_items(self.trainer, batch)
        labels: Any = batch.get("labels")
        of_labels = getattr(output.get("logits"), "shape", (0,))[:-1]
        if detect_fake_mode() is None:
            loss = self.own(output, batch)
        elif getattr(labels, "shape", None) == of_labels:
            # A graph is recorded, in which no value tells what the loss is a mean over.
            kept = _kept(self.trainer, labels).ne(IGNORED).sum()
            loss = torch.where(kept > 0, loss * kept, 0), kept
        return loss if count is None or not isinstance(loss, tuple) else (loss[0], count)


def count_items(trainer: Any, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the number of labels that count, by Trainer's rule; None if samples count instead."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        return None
    counted = trainer._get_num_items_in_batch([dict(batch)], labels.device)
    if counted is None and trainer.label_smoother is not None:
        counted = _kept(trainer, labels).ne(IGNORED).sum()
    return counted if isinstance(counted, torch.Tensor) else None


def _kept(trainer: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the labels that a loss of the model's class is over."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    model = trainer.model
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return labels[..., 1:] if type(model).__name__ in CAUSAL.values() else labels
