"""Who is compared: each trainer's script, the pages it follows, the order in which it takes samples, its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.trainers.jobs import BATCH, JOBS, RANKS
from benchmarks.trainers.one_device import Order, in_sequence
from paceline.job.order import Order as PacelineOrder

AS_DOCUMENTED = ""
OTHER_JOB = "group_norm"  # a setting that changes the model, and so does not mend the job


def permuted_by_epoch(samples: int, epoch: int) -> list[int]:
    """DistributedSampler with its seed of 0 and `set_epoch`."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)).tolist()


def permuted_once(samples: int, epoch: int) -> list[int]:
    """DistributedSampler with its seed of 0, without `set_epoch`."""
    return permuted_by_epoch(samples, 0)


def permuted_by_paceline(samples: int, epoch: int) -> list[int]:
    return PacelineOrder(samples, BATCH, seed=0).indices(epoch, range(samples))


@dataclass(frozen=True)
class Contender:
    """A trainer.

    Args:
        module: its script in this package.
        distribution: the installed package that the version is read from.
        pages: of its documentation that the script follows.
        order: in which one device takes the samples, to do the same work.
        settings: by job, what is tried besides the job as documented: the script's name for it, and in words.
        in_sequence: settings under which samples are taken in sequence.
        num_processes: that run the script: the ranks, or the one that starts them.
    """

    module: str
    distribution: str
    pages: str
    order: Order = in_sequence
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    in_sequence: tuple[str, ...] = ()
    num_processes: int = RANKS

    def order_under(self, setting: str) -> Order:
        return in_sequence if setting in self.in_sequence else self.order


SYNC = {"sync_batchnorm": "`SyncBatchNorm.convert_sync_batchnorm(model)`"}
GROUP_NORM = {OTHER_JOB: "GroupNorm in BatchNorm's place"}
FIND_UNUSED = {"find_unused_parameters": "`find_unused_parameters=True`"}
WEIGHED = {"weighed": "by hand: no padding, and each rank's sum divided by the count of all ranks"}
COUNTED = {"weighed": "by hand: each rank's sum divided by the count of all ranks"}

CONTENDERS = {
    "Paceline": Contender(
        "with_paceline",
        "paceline",
        "README, `docs/running.md`",
        permuted_by_paceline,
        {
            "ignored": {"scalar": "a loss that returns a mean"},
            "batchnorm": {"place": "`place=2`", "tensor": "`tensor=2`", **GROUP_NORM},
        },
        num_processes=1,
    ),
    "DDP": Contender(
        "with_ddp",
        "torch",
        "Getting Started with Distributed Data Parallel; Saving and Loading a General Checkpoint",
        settings={
            "short": {"drop_last": "`DistributedSampler(drop_last=True)`", **WEIGHED},
            "ignored": COUNTED,
            "idle": FIND_UNUSED,
            "batchnorm": {**SYNC, **GROUP_NORM},
            "resume": {"skip": "by hand: the batches of the epoch that are done are skipped"},
        },
    ),
    "Accelerate": Contender(
        "with_accelerate",
        "accelerate",
        "Add Accelerate to your code; Gradient accumulation; Checkpointing",
        settings={
            "short": {
                "uneven_batches": "`even_batches=False`",
                "counted": "`even_batches=False` and the recipe for samples of variable size",
            },
            "ignored": {"counted": "the recipe for samples of variable size"},
            "idle": {
                "find_unused_parameters": "`DistributedDataParallelKwargs(find_unused_parameters=True)`"
            },
            "batchnorm": {**SYNC, **GROUP_NORM},
            "resume": {
                "seedable": "`use_seedable_sampler=True`",
                "seedable_epoch": "`use_seedable_sampler=True`, and `set_epoch(epoch)` on each loader",
            },
        },
    ),
    "Lightning": Contender(
        "with_lightning",
        "lightning",
        "Train a model (basic); Manual Optimization; GPU training (Intermediate); "
        "Saving and loading checkpoints (basic)",
        permuted_by_epoch,
        {
            "short": WEIGHED,
            "ignored": COUNTED,
            "idle": {"find_unused_parameters": '`strategy="ddp_find_unused_parameters_true"`'},
            "batchnorm": {"sync_batchnorm": "`sync_batchnorm=True`", **GROUP_NORM},
            "resume": {"stateful": "a loader with `state_dict` and `load_state_dict`"},
        },
        in_sequence=("weighed",),
    ),
    "Transformers": Contender(
        "with_transformers",
        "transformers",
        "Trainer; Subclassing Trainer methods",
        settings={
            "short": {
                "uneven_batches": '`accelerator_config={"even_batches": False}`',
                "counted": "`even_batches` off and a `compute_loss_func` with `num_items_in_batch`",
            },
            "ignored": {
                "counted": "a `compute_loss_func` with `num_items_in_batch`",
                "accepting": "a module that takes `num_items_in_batch`, as Transformers' own do",
            },
            "batchnorm": {**SYNC, **GROUP_NORM},
        },
    ),
    "DeepSpeed": Contender(
        "with_deepspeed",
        "deepspeed",
        "Getting Started; CIFAR-10 Tutorial",
        permuted_once,
        {
            "short": {"drop_last": '`"dataloader_drop_last": true`', **WEIGHED},
            "ignored": COUNTED,
            "custom": {
                "zero_1": "ZeRO stage 1",
                "module": "by hand: the step calls `engine.module`",
            },
            "batchnorm": {**SYNC, **GROUP_NORM},
        },
        in_sequence=("weighed",),
    ),
    "Keras": Contender(
        "with_keras",
        "keras",
        "Multi-GPU distributed training with PyTorch",
        settings={
            "short": {"drop_last": "`DistributedSampler(drop_last=True)`", **WEIGHED},
            "ignored": COUNTED,
            "idle": FIND_UNUSED,
            "batchnorm": {
                "in_training": "`model(inputs, training=True)`",
                "synchronized": "`BatchNormalization(synchronized=True)`",
                **GROUP_NORM,
            },
            "resume": {"skip": "by hand: the batches of the epoch that are done are skipped"},
        },
    ),
}

# Every run there is, in the page's order: trainer, job, setting.
RUNS = [
    (name, job, setting)
    for name, contender in CONTENDERS.items()
    for job in JOBS
    for setting in [AS_DOCUMENTED, *contender.settings.get(job, {})]
]
