"""Transformers' Trainer, whose training and evaluation run under a plan."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainingArguments
from transformers.trainer import logger
from transformers.trainer_utils import SaveStrategy, TrainOutput

from paceline.api.plan_choice import is_auto
from paceline.api.train import TrainRequest
from paceline.base.errors import OutOfMemory, UsageError
from paceline.base.fork import cuda_left_alone, forks_can_use_cuda
from paceline.job import Job
from paceline.launch.hosts.environment import current
from paceline.launch.process.subprocess_call import in_a_fresh_process
from paceline.planner.resolve import resolve
from paceline.strategies.plan import Plan
from paceline.training.logged import means
from paceline.transformers import arguments, checkpoints
from paceline.transformers.devices import bring_to_cpu, use_cpu
from paceline.transformers.experiment import EpochPlace, LoaderStream, evaluation_of, job_of
from paceline.transformers.launched import stand_alone
from paceline.transformers.lent import Lent
from paceline.transformers.optimizers import follows_evaluations
from paceline.transformers.session import Session, serve

if TYPE_CHECKING:
    from transformers import Trainer as _AnyTrainer
else:
    _AnyTrainer = object  # a Trainer comes after it among the bases of a class

_PLAN = "PACELINE_PLAN"


class PlannedTraining(_AnyTrainer):
    """A base class with which a Trainer trains and evaluates under a plan; it must come before the
    Trainer among the bases.

    Callbacks, logs, checkpoints and metrics stay in the process that calls `train`. Ranks, which it
    starts, take the steps. `self.model` and `self.optimizer` have the current weights and state
    whenever a callback or an overridden method looks at them. Changes that these make to options
    and schedule also apply on ranks.

    Args:
        plan: A plan or its text; by default the environment's PACELINE_PLAN, else one replica for
            each process that a launcher has started, else the fastest plan that fits.
        devices: Names such as "cpu:0,cpu:1"; by default this machine's GPUs, else one CPU rank per
            core.
        run: Folder of the run's own files; by default a new one in the output directory, which is
            then in `self.run_dir`.

    Raises:
        UsageError: an argument contradicts a plan or is not honoured.
    """

    control: Any
    lr_scheduler: Any
    preprocess_logits_for_metrics: Any
    _created_lr_scheduler: bool
    run_dir: Path

    def __init__(
        self,
        *args: Any,
        plan: Any = None,
        devices: str | None = None,
        run: str | Path | None = None,
        **options: Any,
    ) -> None:
        num_launched = stand_alone()
        self.plan: str | Plan | None = (
            plan
            if plan is not None
            else os.environ.get(_PLAN, None if num_launched is None else f"data={num_launched}")
        )
        self.devices, self.run = devices, run
        self._session: Session | None = None
        self._lent: Lent | None = None
        self._plan_in_use: Plan | None = None
        self._weights_step: int | None = None  # step of the weights in this process
        self._saved_step: int | None = None  # step of the checkpoint in the run folder
        self._counted = 0.0  # operations that ranks have reported
        self._frozen: str | None = None  # the record of weights that are in no checkpoint
        training_args = options.get("args") or next(
            (each for each in args if isinstance(each, TrainingArguments)), None
        )
        if training_args is not None:
            use_cpu(training_args)
        with cuda_left_alone():
            super().__init__(*args, **options)
        if self.args.device.type != "cpu":  # it has made them
            use_cpu(self.args)
            self.create_accelerator_and_postprocess()
        bring_to_cpu(self.model)
        self.current_gradient_accumulation_steps = (
            1  # a micro-batch on a rank is told of its own labels alone
        )
        arguments.refuse(self)
        arguments.name_idle(self.args)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for ranks in a process that is no fork of this one.

        It leaves out the event handlers and the connections to ranks.
        """
        state = vars(self) | {"_session": None, "_lent": None}
        del state["callback_handler"]
        return state

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        """Switch autocast off, because nothing is computed in this process."""
        made: dict[str, Any] = super()._build_accelerator_args(**options)
        return made | {"mixed_precision": "no"}

    # --- Training -----------------------------------------------------------------------------------------------

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train under the plan, with events, logs and checkpoints in Trainer's order."""
        arguments.refuse(self)  # callbacks may have been added
        arguments.refuse_model(self)
        if args.auto_find_batch_size:
            self._update_auto_batch_size(batch_size)
        loader = self.get_train_dataloader()
        epochs, steps_per_epoch, _, num_samples, _, batches, steps = (
            self.set_initial_training_values(args, loader)
        )
        self._init_training_state(steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        job = job_of(self, loader, steps=steps)
        self.create_scheduler(num_training_steps=steps)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        began_s = time.time()
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self.state.global_step
        self._tr_loss, self._total_loss_scalar = torch.tensor(0.0, dtype=torch.float64), 0.0
        self._globalstep_last_logged = self.state.global_step
        logger.info(f"***** Running training *****\n  Total optimization steps = {steps:,}")
        with (
            self._ranks(job, resume_from_checkpoint)
            if self.state.global_step < steps
            else nullcontext()
        ):
            self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
            if args.eval_on_start:
                self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
            _Progress(
                self,
                steps=steps,
                steps_per_epoch=steps_per_epoch,
                batches=batches,
                trial=trial,
                ignore_keys=ignore_keys_for_eval,
                began_s=began_s,
            ).run()
            self.store_flos()
            self._bring_weights()
        output: TrainOutput = self._finalize_training(trial, num_samples, began_s)
        return output

    @contextmanager
    def _ranks(self, job: Job, resume_from_checkpoint: str | None) -> Iterator[None]:
        """Run ranks that train for this trainer inside the context."""
        request = TrainRequest.of(job, None, self._named_plan(job), devices=self.devices)
        if is_auto(self.plan) and not arguments.updates_on_ranks(plan := request.resolved.plan):
            request = TrainRequest.of(job, None, f"data={plan.replicas}", devices=self.devices)
        run_dir = self.run_dir = (
            Path(self.run) if self.run is not None else _new_run_dir(Path(self.args.output_dir))
        )
        step = self.state.global_step
        if resume_from_checkpoint is not None:
            checkpoints.bring(
                Path(resume_from_checkpoint),
                run_dir,
                step=step,
                model=self.model,
                plateau=self.lr_scheduler if follows_evaluations(self) else None,
            )
        arguments.refuse_plan(self, request.resolved.plan)
        self._counted, self._weights_step, self._plan_in_use, self._frozen = (
            0.0,
            step,
            request.resolved.plan,
            None,
        )
        self._saved_step = step if resume_from_checkpoint is not None else None
        workers = 0 if isinstance(job.data, LoaderStream) else self.args.dataloader_num_workers
        session = Session(
            self,
            lambda follow: request.train(
                run_dir,
                follow=follow,
                resume=resume_from_checkpoint is not None,
                keep=lambda: False,
                loader_workers=workers,
                restarts=0,
            ),  # new ranks would ask the script for what it has said
            world_size=request.resolved.plan.world_size,
            step=step,
        )
        with self._at_work(session):
            assert session.options is not None
            self._lent = Lent(
                self.model,
                self.optimizer,
                None if follows_evaluations(self) else self.lr_scheduler,
                bring=self._bring_weights,
                read_state=self._read_state,
            )
            try:
                with self._lent.lent(session.options):
                    yield
            finally:
                self._lent = None

    def _named_plan(self, job: Job) -> str | Plan | None:
        """Return the plan as it was given, or find the fastest one in a fresh process if forks of
        this one can't try plans.
        """
        if not is_auto(self.plan) or forks_can_use_cuda():
            return self.plan
        devices = self.devices
        named: str = in_a_fresh_process(
            lambda _: str(TrainRequest.of(job, None, None, devices=devices).resolved.plan)
        )
        return named

    @contextmanager
    def _at_work(self, session: Session) -> Iterator[None]:
        self._session = session
        try:
            yield
            session.end()
        except BaseException as error:
            session.abandon()
            if (
                self.args.auto_find_batch_size
                and getattr(error, "exit_code", None) == OutOfMemory.exit_code
            ):
                raise RuntimeError(
                    "CUDA out of memory."
                ) from error  # Trainer tries again with a smaller batch
            raise
        finally:
            self._session = None

    @contextmanager
    def _evaluating(self, loader: Any) -> Iterator[None]:
        """Run ranks that evaluate inside the context: those that train, else others under the same
        plan.
        """
        if self._session is not None:
            yield
            return
        arguments.refuse_model(self)
        job = evaluation_of(self, loader)
        plan: Any = self._plan_in_use or (Plan() if is_auto(self.plan) else self.plan)
        resolved = resolve(job, plan, devices=self.devices, environment=current())
        arguments.refuse_plan(self, resolved.plan)
        self._weights_step = self.state.global_step
        with self._at_work(
            Session(
                self,
                lambda follow: serve(job, resolved, follow),
                world_size=resolved.plan.world_size,
                step=self.state.global_step,
            )
        ):
            yield

    def store_flos(self) -> None:
        """Add the operations that ranks have counted since the last call, if the ranks wait."""
        if self._session is not None and self._session.is_waiting:
            counted = self._session.counts()["operations"]
            self.state.total_flos += counted - self._counted
            self._counted = counted

    def _bring_weights(self) -> None:
        """Load the weights that ranks have now into `self.model`."""
        session, step = self._session, self.state.global_step
        if session is None or self._lent is None or self._weights_step == step:
            return
        with self._lent.being_filled():
            self._save_ranks(session)
            checkpoints.load_weights(self.model, self.run_dir)
        self._weights_step = step

    def _tell_changes(self) -> None:
        """Tell ranks what code has changed here."""
        assert self._session is not None and self._lent is not None
        told = self._lent.changes()
        if told is not None:
            self._session.change(told)

    def _save_ranks(self, session: Session) -> None:
        """Let ranks save a checkpoint of this step in the run folder, and delete the one before
        it.
        """
        step = self.state.global_step
        if self._saved_step != step:
            self._tell_changes()
            session.save()
            if self._saved_step is not None:
                checkpoints.drop(self.run_dir, step=self._saved_step)
            self._saved_step = step

    def _read_state(self) -> dict[Any, dict[str, Any]]:
        """Return the optimizer state that ranks have now, by parameter."""
        self._bring_weights()
        return checkpoints.optimizer_state(self.model, self.run_dir, step=self.state.global_step)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Do the same as Trainer, but save a checkpoint before an error about a missing metric."""
        try:
            is_best: bool = super()._determine_best_metric(metrics, trial)
        except KeyError as error:
            self._save_checkpoint(self.model, trial)
            raise UsageError(
                f"metric_for_best_model={self.args.metric_for_best_model!r} is not among the figures of "
                f"the evaluation: {', '.join(metrics)}; checkpoint-{self.state.global_step} is saved",
                hint="name one of them, and go on with resume_from_checkpoint=True",
            ) from error
        return is_best

    # --- Checkpoints --------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Do the same as Trainer; during training, save the current weights."""
        self._bring_weights()
        super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._session is not None:
            self._save_ranks(self._session)
        if self._frozen is None:
            self._frozen = checkpoints.frozen_record(self.model)
        checkpoints.keep(
            self.run_dir,
            Path(output_dir),
            step=self.state.global_step,
            frozen=self._frozen,
            plateau=self.lr_scheduler if follows_evaluations(self) else None,
        )

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the scaler's state is in the run's checkpoint."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the seed and the step fix the random streams."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return inputs as they are: each rank brings its own to its device."""
        return inputs

    # --- Evaluation ---------------------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> Any:
        """Run Trainer's own loop on the ranks that train, or on ranks that are started for it."""
        if not self.accelerator._models:
            self.accelerator._models.append(self.model)  # nothing is to be prepared here
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):
            self.model.to(torch.float16 if self.args.fp16_full_eval else torch.bfloat16)
        with self._evaluating(dataloader):
            prepare, self.preprocess_logits_for_metrics = (
                self.preprocess_logits_for_metrics,
                None,
            )  # ranks do it
            self.prediction_step = self._told_prediction_step
            try:
                return super().evaluation_loop(dataloader, *args, **options)
            finally:
                self.preprocess_logits_for_metrics = prepare
                del self.prediction_step

    def _told_prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return loss, logits and labels of a batch; each rank computes its part by
        `prediction_step`.
        """
        assert self._session is not None
        answers = self._session.evaluate(
            dict(inputs), prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys
        )
        sums: dict[str, list[Any]] = {}
        for name, figure in (item for answer in answers for item in answer["figures"].items()):
            sums.setdefault(name, []).append(figure)
        if sums:
            self.log(
                means({name: [*map(sum, zip(*each, strict=True))] for name, each in sums.items()})
            )
        weight = sum(answer["weight"] for answer in answers)
        loss = (
            None
            if answers[0]["loss"] is None
            else torch.tensor(
                sum(answer["loss"] * answer["weight"] for answer in answers) / max(weight, 1),
                dtype=torch.float32,
            )
        )
        return loss, *(
            _joined([answer[name] for answer in answers]) for name in ("logits", "labels")
        )


class Trainer(PlannedTraining, transformers.Trainer):
    """`transformers.Trainer` under a plan; see `PlannedTraining`."""


@dataclass
class _Progress:
    """Follows the ranks step by step and triggers Trainer's events as its own loop does."""

    trainer: Any
    steps: int
    steps_per_epoch: int
    batches: int
    trial: Any
    ignore_keys: list[str] | None
    began_s: float
    gradient_norm: float | None = None
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        self.waits_each_step = arguments.must_wait(self.trainer)

    def run(self) -> None:
        """Follow the ranks until the last step, or until a callback stops the training."""
        trainer = self.trainer
        args, state, handler = trainer.args, trainer.state, trainer.callback_handler
        while state.global_step < self.steps and not trainer.control.should_training_stop:
            trainer.control = handler.on_epoch_begin(args, state, trainer.control)
            place = None
            while place is None or not (place.is_last or state.global_step == self.steps):
                place = self._step()
                if trainer.control.should_training_stop:
                    break
                if trainer.control.should_epoch_stop:
                    raise UsageError(
                        "a callback set should_epoch_stop: an epoch under a plan has its samples once",
                        hint="should_training_stop ends the run",
                    )
            trainer.control = handler.on_epoch_end(args, state, trainer.control)
            self._log_save_evaluate(place.epoch)

    def _step(self) -> EpochPlace:
        trainer, session, lent = self.trainer, self.trainer._session, self.trainer._lent
        args, state, handler = trainer.args, trainer.state, trainer.callback_handler
        trainer.control = handler.on_step_begin(args, state, trainer.control)
        if session.is_waiting:
            trainer._tell_changes()
            session.go(self._next_pause(state.global_step))
        report = session.next_step()
        trainer._tr_loss += report["loss"]
        if report["figures"]:
            trainer.log(report["figures"])
        self.gradient_norm = report["grad_norm"]
        with lent.updating() if self.waits_each_step else nullcontext():
            trainer.control = handler.on_pre_optimizer_step(args, state, trainer.control)
        trainer.control = handler.on_optimizer_step(args, state, trainer.control)
        self.learning_rate = trainer._get_learning_rate()
        lent.step(report["options"], is_skipped=report["grad_norm"] is None)
        state.global_step += 1
        if args.include_num_input_tokens_seen != "no":
            state.num_input_tokens_seen = (
                trainer._initial_num_input_tokens_seen + session.counts()["tokens"]
            )
        place = report["place"] or self._place(state.global_step)
        state.epoch = (
            place.epoch
            + min(place.step * args.gradient_accumulation_steps, self.batches) / self.batches
        )
        trainer.control = handler.on_step_end(args, state, trainer.control)
        self._log_save_evaluate(place.epoch)
        return place

    def _place(self, step: int) -> EpochPlace:
        """Return the place of a step in data whose length is known."""
        epoch, before = divmod(step - 1, self.steps_per_epoch)
        return EpochPlace(epoch, before + 1, before + 1 == self.steps_per_epoch)

    def _log_save_evaluate(self, epoch: int) -> None:
        trainer = self.trainer
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            self.gradient_norm,
            trainer.model,
            self.trial,
            epoch,
            self.ignore_keys,
            self.began_s,
            learning_rate=self.learning_rate,
        )

    def _next_pause(self, step: int) -> int:
        """Return the step after which ranks wait: the next one at which this process may need
        something of them.
        """
        args, state = self.trainer.args, self.trainer.state
        if self.waits_each_step:
            return step + 1
        pauses = [self.steps, (step // self.steps_per_epoch + 1) * self.steps_per_epoch]
        for strategy, every in (
            (args.eval_strategy, state.eval_steps),
            (args.save_strategy, state.save_steps),
        ):
            if strategy == SaveStrategy.STEPS.value and every:
                pauses.append((step // every + 1) * every)
        return int(min(pauses))


def _joined(parts: list[Any]) -> Any:
    """Join parts of a batch: tensors, padded on the right to the longest, in tuples and
    mappings.
    """
    from transformers.trainer_pt_utils import nested_concat

    joined = parts[0]
    for part in parts[1:] if joined is not None else ():
        joined = nested_concat(joined, part, padding_index=-100)
    return joined


def _new_run_dir(output_dir: Path) -> Path:
    """Return a new run folder. Its first character keeps it out of what Trainer pushes to the
    Hub.
    """
    return output_dir / "_runs" / f"{datetime.now():%Y%m%d-%H%M%S-%f}"
