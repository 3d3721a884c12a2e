"""Train for a Trainer on a rank: take steps up to a pause, then do what the controlling process
orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.codec import receive, send
from paceline.base.errors import PeerLost
from paceline.base.nested import map_tensors
from paceline.base.waiting import waiting
from paceline.checkpoint.write import Writer
from paceline.job.order import Order
from paceline.model.casts import autocast
from paceline.training import state
from paceline.training.feed import DataShard, MicroBatch
from paceline.training.restore import take_over
from paceline.training.stepper import Stepper
from paceline.transformers.compute_loss import count_items
from paceline.transformers.cuts import batch_size, is_cut_by_sample, samples_of
from paceline.transformers.experiment import CountedStream
from paceline.transformers.generation import heard_generation

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.launch.process.context import RankContext
    from paceline.strategies.layout import Layout
    from paceline.strategies.mesh import Mesh

_BEAT_S = 1.0


@dataclass(frozen=True)
class Evaluated:
    """A model on a rank that is evaluated and not trained."""

    job: Job
    model: torch.nn.Module
    layout: Layout
    mesh: Mesh
    device: torch.device
    part: DataShard


class TrainerRank:
    """Observes a run and obeys the controlling process between steps. All ranks get the same
    orders.

    Orders are mappings with the item "do":

        "go": take steps up to "until", or to the end of an epoch of a stream, then wait.
        "evaluate": answer with the loss, its weight in the mean, logits and labels of this rank's
            part of "inputs". "generation", if given, has the options of the model's `generate`
            from now on.
        "save": write a checkpoint and the model by itself into the run folder, without frozen
            weights, because the script has them.
        "count": answer with floating-point operations and input tokens of this rank's samples, as
            Trainer counts them.
        "change": from now on, use the options of the optimizer, the schedule's state, the names of
            frozen weights and the attributes of modules in "told".
        "end": end the run after this step.
        "abandon": leave at once; this may come at any time.
    """

    def __init__(
        self,
        trainer: Any,
        context: RankContext,
        connection: Connection,
        run_dir: Path,
    ) -> None:
        self.trainer, self.context, self.connection = trainer, context, connection
        self.run_dir = run_dir
        self.until, self.is_over = 0, False
        self._writer: Writer | None = None
        self._prepare = trainer.preprocess_logits_for_metrics
        self._operations = 0.0
        trainer.state.num_input_tokens_seen = 0  # only of this rank

    def initial(self, stepper: Any) -> None:
        """Report the options before the first step, and wait for orders."""
        self._say({"options": state.changing_document(stepper, step=0, samples=0)})
        self._obey(stepper, self.context.step - 1)

    def serve(self, evaluated: Evaluated) -> None:
        """Obey orders without training, until the end."""
        self._say({"options": None})
        self._obey(evaluated, 0)

    def samples(self, step: int, batches: list[MicroBatch]) -> None:
        """Count the operations and tokens of this rank's own samples."""
        for batch in batches:
            (inputs,) = batch.input
            if batch.samples and isinstance(inputs, Mapping):
                self._operations += self.trainer.floating_point_ops(inputs)
                self.trainer._track_num_input_tokens(inputs)

    def gradients(self, step: int, stepper: Any) -> None:
        """Do nothing: gradients are not needed here."""

    def weights(self, step: int, stepper: Any, loss: float) -> bool:
        """Report a step, and wait for orders if this rank must pause. Return whether the run ends
        here.
        """
        data = stepper.job.data
        place = data.place(step + 1) if isinstance(data, CountedStream) else None
        if self.context.rank == 0:
            self._say(
                {
                    "step": step + 1,
                    "loss": loss,
                    "grad_norm": stepper.gradient_norm,
                    "figures": stepper.metrics,
                    "place": place,
                    "options": state.changing_document(stepper, step=0, samples=0),
                }
            )
        if (
            step + 1 >= self.until
            or (place is not None and place.is_last)
            or self.connection.poll()
        ):
            self._obey(stepper, step + 1)
        return self.is_over

    def _say(self, value: Any) -> None:
        # The controlling process has no GPU.
        send(self.connection, map_tensors(torch.Tensor.cpu, value))

    def _obey(self, stepper: Any, step: int) -> None:
        while True:
            order = self._next_order()
            match order["do"]:
                case "go":
                    self.until = order["until"]
                    return
                case "evaluate":
                    self._say(self._evaluate(stepper, order))
                case "save":
                    self._save(stepper, step)
                    self._say({"saved": step})
                case "count":
                    is_counted = stepper.mesh.is_first_of_same_loss
                    tokens = self.trainer.state.num_input_tokens_seen
                    self._say(
                        {"operations": self._operations, "tokens": tokens} if is_counted else {}
                    )
                case "change":
                    self._change(stepper, order["told"])
                case "end":
                    self.is_over = True
                    return
                case "abandon":
                    raise PeerLost("the process that controls the run gave it up")

    def _change(self, stepper: Stepper, told: Mapping[str, Any]) -> None:
        if stepper.has_modes and not stepper.trains:
            stepper.set_mode(trains=True)  # its groups tell which weights are in place
        take_over(stepper, told)
        stepper.freezing.held = frozenset(told["frozen"])
        stepper.freezing.refuse_kept(stepper.kept())
        modules = dict(stepper.model.named_modules())
        for name, value in told["attributes"].items():
            path, _, attribute = name.rpartition(".")
            setattr(modules[path], attribute, value)

    def _rest(self, stepper: Stepper | Evaluated) -> None:
        """Put the weights in place that are evaluated and saved; they stay until the next step."""
        if isinstance(stepper, Stepper) and stepper.has_modes and stepper.trains:
            stepper.set_mode(trains=False)

    def _next_order(self) -> dict[str, Any]:
        """Wait for an order and return it, with heartbeats meanwhile, because callbacks may take
        long.
        """
        with waiting:
            while not self.connection.poll(_BEAT_S):
                self.context.beat("callback")
        try:
            order: dict[str, Any] = receive(self.connection)
        except EOFError:
            raise PeerLost("the process that controls the run is gone") from None
        return order

    def _save(self, stepper: Stepper, step: int) -> None:
        context = self.context
        context.beat("save")
        self._rest(stepper)
        if self._writer is None:
            self._writer = Writer(
                self.run_dir,
                rank=context.rank,
                world_size=context.world_size,
                attempt=f"{context.attempt}-trainer",
            )
        frozen = {
            f"parameters/{name}"
            for name, parameter in self.trainer.model.named_parameters()
            if not parameter.requires_grad
        }
        document = state.document(
            stepper, step=step, samples=samples_until(stepper.job, step), left_out=frozen
        )
        # Trainer counts steps, whatever their samples are
        del document["batch"], document["num_samples"]
        pieces = (piece for piece in state.pieces(stepper) if piece.name not in frozen)
        self._writer.save(step, pieces, document, snapshot=False)
        self._writer.wait()
        if context.rank == 0:
            state.export(stepper.model, self.run_dir, step=step)

    def _evaluate(self, stepper: Stepper | Evaluated, order: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate this rank's part of a batch of samples. Collective."""
        inputs, layout, mesh = order["inputs"], stepper.layout, stepper.mesh
        total = batch_size(inputs)
        can_be_cut = is_cut_by_sample(inputs, total)
        (cut,) = (
            replace(stepper.part, num_microbatches=1).cuts(total) if can_be_cut else [range(total)]
        )
        if not cut and not layout.meets_in_forward:
            return {}
        part = samples_of(inputs, cut or range(1)) if can_be_cut else inputs
        if order["generation"] is not None:
            self.trainer._gen_kwargs = heard_generation(order["generation"])
        asked = part, order["prediction_loss_only"], order["ignore_keys"]
        dtype = stepper.job.input_dtype
        batch = MicroBatch((asked,), None, len(cut)).to(stepper.device, dtype)
        self._rest(stepper)
        was_training = stepper.model.training
        stepper.model.eval()
        try:
            with torch.no_grad(), autocast(stepper.job, stepper.device):
                predicted = layout.forward(batch)
        finally:
            stepper.model.train(was_training)
        answers = mesh.is_first_of_same_loss and (can_be_cut or mesh.replica == 0)
        if not cut or not layout.has_output or not answers:
            return {}
        (loss, logits, labels), figures = map_tensors(
            lambda each: each.float() if each.dtype in _HALVES else each, predicted
        )
        if logits is not None and self._prepare is not None:
            logits = self._prepare(logits, labels)
        count = count_items(self.trainer, part)
        weight = len(cut) if count is None else int(count)
        return {
            "loss": None if loss is None else float(loss.double()) if weight else 0.0,
            "weight": weight,
            "logits": logits,
            "labels": labels,
            "figures": {name: (float(each) * len(cut), len(cut)) for name, each in figures.items()},
        }


_HALVES = (torch.float16, torch.bfloat16)  # Accelerate returns outputs of autocast in float32


def samples_until(job: Any, step: int) -> int:
    """Return the number of samples that the steps before this one have used."""
    if job.num_samples is None:
        return int(step * job.batch)
    window = Order.of(job).window(step)
    return int(window.epoch * job.num_samples + window.start)
