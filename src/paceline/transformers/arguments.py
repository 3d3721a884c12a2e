"""Check a Trainer's arguments: refuse those that contradict a plan or are not honoured, and name
those without effect.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from paceline.base.errors import UsageError
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.plan import Plan

# Arguments that are refused unless they have their default values, each with the reason.
_REFUSED = {
    "fsdp": 'the plan says how a model is sharded: plan="shard=N"',
    "deepspeed": 'the plan says how a model is sharded: plan="shard=N"',
    "parallelism_config": 'the plan says how a model is split: plan="tensor=N" and its like',
    "ddp_find_unused_parameters": "replicas are not DistributedDataParallel; unused parameters are found by themselves",
    "ddp_static_graph": "replicas are not DistributedDataParallel",
    "torch_compile": 'compiling belongs to the plan: plan="... compile=blocks"',
    "torch_empty_cache_steps": "ranks keep the allocator's cache",
    "ignore_data_skip": "a resumed run goes on where the data was left",
    "full_determinism": 'the plan says so: plan="... deterministic=yes"',
    "debug": "its hooks would look at a model that is not trained here",
}
_WITHOUT_EFFECT = (
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp_backend",
    "ddp_timeout",
    "eval_accumulation_steps",
    "eval_use_gather_object",
    "average_tokens_across_devices",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context",
    "dataloader_in_order",
    "logging_nan_inf_filter",
    "save_on_each_node",
    "log_on_each_node",
)
# Optimizers that step in hooks of backward, or need the whole model.
_OPTIMIZERS = (
    "galore",
    "apollo",
    "lomo",
    "layerwise",
)
_SCHEDULES = ("greedy",)
_METHODS = {  # methods that are not called, and what to use instead
    "training_step": "compute_loss",
    "get_batch_samples": "a data collator",
    "_prepare_inputs": "a data collator",
    "_prepare_input": "a data collator",
    "_prepare_context_parallel_inputs": "a data collator",
    "compute_loss_context_manager": "compute_loss",
    "autocast_smart_context_manager": "bf16 or fp16",
    "_clip_grad_norm": "max_grad_norm",
    "_get_grad_norm": "a callback that reads the log",
    "_wrap_model": "model_init",
    "_run_epoch": "callbacks",
    "_inner_training_loop": "callbacks",
    "_prepare_for_training": "create_optimizer or create_scheduler",
    "evaluation_loop": "compute_metrics",
    "_track_num_input_tokens": "include_num_input_tokens_seen",
    "_load_optimizer_and_scheduler": "callbacks",
    "_load_rng_state": "callbacks",
    "_load_scaler": "callbacks",
}
# Events and methods that are called between steps.
_STEP_EVENTS = (
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
)
_AT_STEPS = (
    "log",
    "_maybe_log_save_evaluate",
    "_get_learning_rate",
)
_LIBRARIES = ("paceline", "transformers", "trl", "builtins")


def refuse(trainer: Any) -> None:
    """Refuse everything that would not be done; the error lists all of it.

    Raises:
        UsageError: an argument, callback or overridden method that is not honoured.
    """
    _raise(
        [
            *_arguments(trainer.args),
            *_methods(trainer),
            *_callbacks(trainer),
        ]
    )


def refuse_model(trainer: Any) -> None:
    """Refuse a model that a plan can't distribute.

    Raises:
        UsageError: the model is already placed on devices, cut, or quantized.
    """
    model, problems = trainer.model, list[str]()
    if len(set(getattr(model, "hf_device_map", None) or {})) > 1:
        problems.append(
            "the model was loaded with a device_map: the plan says where its parts lie; load it without"
        )
    if getattr(model, "is_distributed_loading_by_transformers", False):
        problems.append(
            "the model was sharded when it was loaded: the plan does that; load it without distributed_config"
        )
    if getattr(model, "is_quantized", False):
        problems.append("the model is quantized, which plans have not been tried with")
    _raise(problems)


def _raise(problems: list[str]) -> None:
    if problems:
        raise UsageError(
            "; ".join(problems),
            hint="`paceline docs transformers` names the page on what this Trainer takes",
        )


def refuse_plan(trainer: Any, plan: Plan) -> None:
    """Refuse a plan under which the Trainer can't work.

    Raises:
        UsageError: servers update the weights, although each update must be reported by the rank
            that makes it. Or predictions or noise are to be generated, and no rank has the whole
            model.
    """
    if not updates_on_ranks(plan):
        raise UsageError(
            f"under the plan '{plan}' servers update the weights, and a Trainer's ranks must do so",
            hint=f"plan='data={plan.replicas}' trains as many replicas; a Job can train under servers",
        )
    is_cut = plan.axes.num_ranks(lambda axis: not axis.copies_weights) > 1
    if getattr(trainer.args, "predict_with_generate", False) and is_cut:
        raise UsageError(
            f"predict_with_generate=True needs the whole model on each rank, and the plan is '{plan}'",
            hint="plan='data=N', or evaluate the loss and generate after training",
        )
    if trainer.args.neftune_noise_alpha is not None and is_cut:
        raise UsageError(
            f"neftune_noise_alpha={trainer.args.neftune_noise_alpha}: its hook needs the whole embedding "
            f"on each rank, and the plan is '{plan}'",
            hint="plan='data=N'",
        )


def updates_on_ranks(plan: Plan) -> bool:
    """Whether the ranks that compute gradients also update weights."""
    return not ActivePlan(plan).keeps_weights_elsewhere


def name_idle(args: Any) -> None:
    """Print a line about arguments that have no effect."""
    idle = [name for name in _WITHOUT_EFFECT if _is_set(args, name)]
    if idle:
        print(f"without effect under a plan: {', '.join(idle)}", file=sys.stderr, flush=True)


def _is_set(arguments: Any, name: str) -> bool:
    # A field's default is an attribute of its class.
    value, default = getattr(arguments, name, None), getattr(type(arguments), name, None)
    return value not in (None, False, "", [], {}, default) or (value is False and default is True)


def _arguments(arguments: Any) -> Iterator[str]:
    for name, why in _REFUSED.items():
        if _is_set(arguments, name):
            yield f"{name}={getattr(arguments, name)!r}: {why}"
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
        if _home(trainer, name) not in _LIBRARIES:
            yield f"{type(trainer).__name__} overrides {name}, which is not called here: use {instead}"


def _home(trainer: Any, name: str) -> str:
    """Return the package that defines a method; "" if it is set on the trainer itself."""
    if name in vars(trainer):
        return ""
    home = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), object)
    return home.__module__.partition(".")[0]


def _callbacks(trainer: Any) -> Iterator[str]:
    for callback in trainer.callback_handler.callbacks:
        if (
            trainer.args.gradient_accumulation_steps > 1
            and _is_of_user(callback)
            and overrides(callback, "on_substep_end")
        ):
            yield (
                f"{type(callback).__name__}.on_substep_end: the plan says how a batch is cut, and ranks don't stop "
                "between micro-batches; use on_step_end"
            )


def _is_of_user(callback: Any) -> bool:
    return not type(callback).__module__.startswith("transformers.")


def overrides(callback: Any, event: str) -> bool:
    """Whether a callback overrides an event's method."""
    from transformers import TrainerCallback

    return getattr(type(callback), event, None) is not getattr(TrainerCallback, event, None)


def must_wait(trainer: Any) -> bool:
    """Whether ranks must wait at each step, because code may need something of them there.

    Such code is a user's callback, an overridden method that is called there, or Trainer itself.
    """
    args = trainer.args
    if (
        args.enable_jit_checkpoint
        or args.include_num_input_tokens_seen != "no"
        or any(_home(trainer, name) not in _LIBRARIES for name in _AT_STEPS)
    ):
        return True
    return any(
        _is_of_user(callback) and any(overrides(callback, event) for event in _STEP_EVENTS)
        for callback in trainer.callback_handler.callbacks
    )
