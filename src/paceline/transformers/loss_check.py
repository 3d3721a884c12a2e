"""Check that the loss of a Trainer's script is a mean, which it must be if a plan cuts batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.base.errors import PlanRefused
from paceline.job.compute import computed
from paceline.proof.reference_loop import rows
from paceline.proof.tolerances import exact_mean
from paceline.torch_private.fake_tensors import detect_fake_mode
from paceline.training.loss import read_tally
from paceline.training.metrics import unlike_its_parts
from paceline.transformers.cuts import batch_size

# micro-batches of a run that are checked; the labels of one may have equal weights by chance
_LOOKED_AT = 4
_MOST = 0.02  # greatest difference that is left to rounding; no model runs in between


class MeanCheck:
    """Compares the loss of some micro-batches with the losses of their parts. No model runs for it.

    Args:
        name: Of the function that computes the loss.
    """

    def __init__(self, trainer: Any, name: str, precision: str) -> None:
        self.trainer, self.name, self.near = trainer, name, min(exact_mean(precision), _MOST)
        self.looks_left = _LOOKED_AT

    def looked_at(self, loss_of: Callable[[Any, Any], Any], model: Any, batch: Any) -> Any:
        """Return the loss of a batch. Check it if it is one of the first under a plan that cuts batches.

        Args:
            loss_of: Returns a loss as `compute` does.

        Raises:
            PlanRefused: the parts give another loss.
        """
        plan = self.trainer._plan_in_use
        is_cut = plan is not None and (plan.replicas > 1 or plan.num_microbatches > 1)
        is_step = model.training and detect_fake_mode() is None
        if not (is_cut and is_step and self.looks_left > 0) or (samples := batch_size(batch)) < 2:
            return loss_of(model, batch)
        outputs: list[Any] = []
        hook = model.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            loss = loss_of(model, batch)
        finally:
            hook.remove()
        if len(outputs) == 1:
            self._look(loss_of, model, batch, outputs[0], samples)
        return loss

    @torch.no_grad()
    def _look(self, loss_of: Any, model: Any, batch: Any, output: Any, samples: int) -> None:
        self.looks_left -= 1

        def tally(part: range) -> tuple[float, float]:
            replayed = _Replayed(model, rows(output, part, samples))
            output_of_part = loss_of(replayed, rows(batch, part, samples))
            loss = read_tally(computed(output_of_part, None), samples=len(part))
            return float(loss.total), float(loss.count)

        try:
            words = unlike_its_parts(tally, samples, near=self.near)
        except Exception:  # the user's code does not only run the model once
            self.looks_left = 0
            return
        if words:
            raise PlanRefused(
                f"{self.name} is no mean over its labels or samples: {words}. Class weights do this, as torch "
                f"divides by the sum of the weights. Under '{self.trainer._plan_in_use}' a batch is computed in "
                "parts",
                hint="divide by what counts in every part alike: torch.nn.CrossEntropyLoss(weight=..., "
                'reduction="sum")(...) / num_items_in_batch, or / len(labels). plan="single" and tensor=N '
                "compute the loss as it is",
            )


class _Replayed:
    """A model that has already run: each call returns that output again."""

    def __init__(self, model: torch.nn.Module, output: Any) -> None:
        self._model, self._output = model, output

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
