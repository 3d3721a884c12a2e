"""A Trainer's arguments that contradict a plan or are not honoured: refused, or named where they change nothing."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from paceline.errors import UsageError
from paceline.plans import Plan
from paceline.strategies.compose import active
from paceline.transformers.rank import generates

# Why an argument is refused where it is not what it is by default.
_REFUSED = {
    "fsdp": "the plan says how a model is sharded: plan=\"shard=N\"",
    "deepspeed": "the plan says how a model is sharded: plan=\"shard=N\"",
    "parallelism_config": "the plan says how a model is split: plan=\"tensor=N\" and its like",
    "ddp_find_unused_parameters": "replicas are not DistributedDataParallel; unused parameters are found by themselves",
    "ddp_static_graph": "replicas are not DistributedDataParallel",
    "torch_compile": "compiling belongs to the plan: plan=\"... compile=blocks\"",
    "auto_find_batch_size": "the batch is part of the experiment; plan=\"... accumulate=K\" takes it in smaller pieces",
    "neftune_noise_alpha": "its noise is drawn outside of the streams that ranks share",
    "bf16_full_eval": "weights are evaluated as they are trained",
    "fp16_full_eval": "weights are evaluated as they are trained",
    "torch_empty_cache_steps": "ranks keep the allocator's cache",
    "ignore_data_skip": "a resumed run goes on where the data was left",
    "full_determinism": "the plan says so: plan=\"... deterministic=yes\"",
    "debug": "its hooks would look at a model that is not trained here",
    "enable_jit_checkpoint": "ranks save a checkpoint when they are asked to stop",
}
_WITHOUT_EFFECT = ("ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_backend", "ddp_timeout",
                   "eval_accumulation_steps", "eval_use_gather_object", "average_tokens_across_devices",
                   "dataloader_persistent_workers",
                   "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
                   "logging_nan_inf_filter", "save_on_each_node", "log_on_each_node")
_OPTIMIZERS = ("galore", "apollo", "lomo", "layerwise")  # they step in hooks of backward, or see the whole model
_SCHEDULES = ("greedy",)
_EVENTS = ("on_pre_optimizer_step", "on_substep_end")
_METHODS = {"training_step": "compute_loss", "get_batch_samples": "a data collator", "_run_epoch": "callbacks",
            "evaluation_loop": "compute_metrics", "_inner_training_loop": "callbacks"}


def refuse(trainer: Any) -> None:
    """Refuse what would not be done, all at once.

    Raises:
        UsageError: an argument, callback or overridden method that is not honoured.
    """
    problems = [*_arguments(trainer.args), *_methods(trainer), *_callbacks(trainer), *_model(trainer.model)]
    if problems:
        raise UsageError("; ".join(problems), hint="docs/transformers.md lists what this Trainer takes")


def refuse_plan(trainer: Any, plan: Plan) -> None:
    """
    Raises:
        UsageError: servers update the weights, and Trainer is told of each update by the rank that makes it. Or
            predictions are to be generated, and no rank has the whole model.
    """
    if not updates_on_ranks(plan):
        raise UsageError(f"under the plan '{plan}' servers update the weights, and a Trainer's ranks must do so",
                         hint=f"plan='data={plan.replicas}' trains as many replicas; a Job can train under servers")
    if generates(trainer) and plan.axes.num_ranks(lambda axis: not axis.copies_weights) > 1:
        raise UsageError(f"predict_with_generate=True needs the whole model on each rank, and the plan is '{plan}'",
                         hint="plan='data=N', or evaluate the loss and generate after training")


def updates_on_ranks(plan: Plan) -> bool:
    """Whether the ranks that compute gradients also update weights."""
    return not any(strategy.keeps_weights_elsewhere for strategy in active(plan))


def name_idle(args: Any) -> None:
    """A line about arguments that change nothing."""
    idle = [name for name in _WITHOUT_EFFECT if _is_set(args, name)]
    if idle:
        print(f"without effect under a plan: {', '.join(idle)}", file=sys.stderr, flush=True)


def _default(arguments: Any, name: str) -> Any:
    field = next((field for field in dataclasses.fields(arguments) if field.name == name), None)
    return None if field is None or field.default is dataclasses.MISSING else field.default


def _is_set(arguments: Any, name: str) -> bool:
    value = getattr(arguments, name, None)
    return value not in (None, False, "", [], {}, _default(arguments, name)) or (
        value is False and _default(arguments, name) is True)


def _arguments(arguments: Any) -> Iterator[str]:
    for name, why in _REFUSED.items():
        if _is_set(arguments, name):
            yield f"{name}={getattr(arguments, name)!r}: {why}"
    if str(getattr(arguments, "include_num_input_tokens_seen", "no")) not in ("no", "False"):
        yield "include_num_input_tokens_seen: batches are made on ranks, and their tokens are not counted"
    if arguments.train_sampling_strategy == "batch_rebalance":
        yield "train_sampling_strategy='batch_rebalance': it draws for a number of devices; use 'group_by_length'"
    optimizer, schedule = _text(arguments.optim), _text(arguments.lr_scheduler_type)
    if any(part in optimizer for part in _OPTIMIZERS):
        yield f"optim={optimizer!r}: it updates parameters within the backward, before ranks have met"
    if schedule in _SCHEDULES:
        yield f"lr_scheduler_type={schedule!r}: it follows the loss of single steps; use 'reduce_lr_on_plateau'"


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _methods(trainer: Any) -> Iterator[str]:
    for name, instead in _METHODS.items():
        home = next(kind for kind in type(trainer).__mro__ if name in vars(kind))
        if home.__module__.partition(".")[0] not in ("paceline", "transformers", "trl"):
            yield f"{home.__name__} overrides {name}, which is not called here: use {instead}"


def _callbacks(trainer: Any) -> Iterator[str]:
    for callback in trainer.callback_handler.callbacks:
        for event in _EVENTS:
            if _is_of_user(callback) and overrides(callback, event):
                yield (f"{type(callback).__name__}.{event}: callbacks run in this process, between steps; use "
                       "on_step_end")


def _is_of_user(callback: Any) -> bool:
    return not type(callback).__module__.startswith("transformers.")


def overrides(callback: Any, event: str) -> bool:
    """Whether a callback does something at an event."""
    from transformers import TrainerCallback

    return getattr(type(callback), event, None) is not getattr(TrainerCallback, event, None)


def must_wait(trainer: Any, events: tuple[str, ...]) -> bool:
    """Whether a callback of the user's does something at one of these events, so that ranks wait for it there."""
    return any(_is_of_user(callback) and any(overrides(callback, event) for event in events)
               for callback in trainer.callback_handler.callbacks)


def _model(model: Any) -> Iterator[str]:
    if len(set(getattr(model, "hf_device_map", None) or {})) > 1:
        yield "the model was loaded with a device_map: the plan says where its parts lie; load it without"
    if getattr(model, "is_distributed_loading_by_transformers", False):
        yield "the model was sharded when it was loaded: the plan does that; load it without distributed_config"
    if getattr(model, "is_quantized", False):
        yield "the model is quantized, which plans have not been tried with"
