"""What each job is, and why a trainer's figures differ from one device's. A reason is shown only where they do."""

from __future__ import annotations

DESCRIPTIONS = {
    "short": "45 samples in global batches of 16, so the last batch of an epoch has 13 samples. Three epochs, SGD with "
    "momentum.",
    "ignored": "48 samples of six targets each. Targets of -100 are ignored, and the ranks get unequal numbers of "
    "counted targets. One device divides by the number of counted targets in the whole batch.",
    "custom": "A step makes two forward passes. Its loss adds the distance between both outputs, and a penalty on the "
    "gradient of the output with respect to the input (`torch.autograd.grad` with `create_graph=True`). "
    "Lightning runs it with manual optimization and Transformers through `compute_loss`. Paceline's script "
    "uses a `Job`, which has no field for a step: its module returns both outputs and the gradient, and its "
    "loss uses these.",
    "idle": "The model has four experts, and each sample names its expert. The last expert gets one sample in every "
    "other batch, so it is idle on one rank or on both. The optimizer is AdamW with weight decay. On one "
    "device an expert without samples has no gradient, and AdamW does not update it.",
    "batchnorm": "A BatchNorm follows the first layer. One device computes its statistics over 16 samples, a rank over "
    "8. PyTorch's `SyncBatchNorm` computes them over all ranks. It refuses to run on CPUs, so this page "
    "can't show how large the difference is on GPUs. GroupNorm does not couple the samples of a batch. A "
    "model with GroupNorm is another model, so the row does not count as a mended job. One device trains "
    "that model, too.",
    "resume": "48 shuffled samples, three steps an epoch, AdamW. A first launch ends after step {stop_after}, one step "
    "into the second epoch, and leaves a checkpoint. A second launch continues to the end. The result is "
    "compared with the same trainer's uninterrupted run on two ranks.",
}

_PADDED = (
    "`DistributedSampler` repeats the first sample of its order so that both ranks get the same number of "
    "samples. The last batch has 14 samples instead of 13, and one sample counts twice in each epoch."
)
_DROPPED = (
    "`DistributedSampler` leaves out a sample so that both ranks get the same number of samples. The last "
    "batch has 12 samples instead of 13."
)
_FILLED = (
    "`even_batches` fills the second rank's last batch with the first samples of the data. The last batch has "
    "16 samples instead of 13, and three samples count twice in each epoch."
)
_UNEVEN = (
    "In the last batch, one rank has 8 samples and the other 5. Each rank divides by its own number, and the "
    "gradients are averaged. Each of the 5 samples then has more weight than each of the 8."
)
_RANK_MEANS = (
    "Each rank divides by its own count, and the gradients are averaged. A target on a rank with few "
    "targets then has more weight than a target on a rank with many."
)
_UNUSED = (
    "DistributedDataParallel waits for a gradient of every parameter, and a rank has no gradient for its idle "
    "expert. `find_unused_parameters` is off by default, and the error names it."
)
_RANK_STATISTICS = "Each rank normalises by the statistics of its own 8 samples."
_ONLY_GPUS = "`SyncBatchNorm` is not written for CPUs."
_NO_PLACE = (
    "The tutorial's checkpoint has the weights, the optimizer and the epoch, but not the position in the "
    "epoch. The second launch starts the second epoch again and takes its first batch twice."
)

REASONS = {
    (
        "Paceline",
        "ignored",
        "scalar",
    ): "Paceline treats a scalar loss as the mean over samples, but this loss is not that mean. For such losses "
    "Paceline's documentation asks for `(sum, count)`. `paceline verify` fails the job with that advice, and "
    "`paceline train` says before it starts that cutting the batch changes this job.",
    ("DDP", "short", ""): _PADDED,
    ("DDP", "short", "drop_last"): _DROPPED,
    ("DDP", "ignored", ""): _RANK_MEANS,
    ("DDP", "idle", ""): _UNUSED,
    ("DDP", "batchnorm", ""): _RANK_STATISTICS,
    ("DDP", "batchnorm", "sync_batchnorm"): _ONLY_GPUS,
    ("DDP", "resume", ""): _NO_PLACE,
    ("Accelerate", "short", ""): _FILLED,
    ("Accelerate", "short", "uneven_batches"): _UNEVEN,
    ("Accelerate", "ignored", ""): _RANK_MEANS,
    ("Accelerate", "idle", ""): _UNUSED,
    ("Accelerate", "batchnorm", ""): _RANK_STATISTICS,
    ("Accelerate", "batchnorm", "sync_batchnorm"): _ONLY_GPUS,
    (
        "Accelerate",
        "resume",
        "",
    ): "The sampler's random state is not in the checkpoint. The second launch continues in the order of the first "
    "epoch, and each later epoch takes the order of the epoch before it.",
    (
        "Accelerate",
        "resume",
        "seedable",
    ): "The order follows from the number of the epoch. The second launch counts epochs from 0, so it continues in "
    "the order of the first epoch.",
    ("Lightning", "short", ""): _PADDED,
    ("Lightning", "ignored", ""): _RANK_MEANS,
    ("Lightning", "idle", ""): _UNUSED,
    ("Lightning", "batchnorm", ""): _RANK_STATISTICS,
    ("Lightning", "batchnorm", "sync_batchnorm"): _ONLY_GPUS,
    (
        "Lightning",
        "resume",
        "",
    ): "Lightning counts the completed batches of the epoch, but the loader starts at its first batch. The run takes "
    "the first batch of the epoch twice and never takes the last one. A warning says so, and asks for a loader "
    "with `state_dict` and `load_state_dict`.",
    ("Transformers", "short", ""): _FILLED,
    ("Transformers", "short", "uneven_batches"): _UNEVEN,
    (
        "Transformers",
        "ignored",
        "",
    ): f"{_RANK_MEANS} Trainer counts the targets of all ranks and passes the number to a model that takes "
    "`num_items_in_batch`. A module that returns a mean does not use it.",
    ("Transformers", "batchnorm", ""): _RANK_STATISTICS,
    ("Transformers", "batchnorm", "sync_batchnorm"): _ONLY_GPUS,
    ("DeepSpeed", "short", ""): _PADDED,
    (
        "DeepSpeed",
        "short",
        "drop_last",
    ): "DeepSpeed leaves out every last batch, because its ranks would have fewer than 8 samples.",
    ("DeepSpeed", "ignored", ""): _RANK_MEANS,
    (
        "DeepSpeed",
        "custom",
        "",
    ): "DeepSpeed observes the backward pass through the engine's outputs. It takes `torch.autograd.grad` for a "
    "backward pass that did not go through the engine.",
    (
        "DeepSpeed",
        "custom",
        "zero_1",
    ): "The step fails in the reduction of gradients. The job with ignored labels runs with this setting.",
    (
        "DeepSpeed",
        "idle",
        "",
    ): "Without ZeRO, DeepSpeed makes a gradient of zeros for a parameter that has none. AdamW then moves the idle "
    "expert by its momentum and its weight decay. One device with gradients of zeros gets the same weights.",
    ("DeepSpeed", "batchnorm", ""): _RANK_STATISTICS,
    ("DeepSpeed", "batchnorm", "sync_batchnorm"): _ONLY_GPUS,
    ("Keras", "short", ""): _PADDED,
    ("Keras", "short", "drop_last"): _DROPPED,
    ("Keras", "ignored", ""): _RANK_MEANS,
    ("Keras", "idle", ""): _UNUSED,
    (
        "Keras",
        "batchnorm",
        "",
    ): "The guide's loop calls `model(inputs)`, which Keras treats as inference. The layer then normalises by its "
    "running statistics and never changes them, on any number of devices. In the comparison, the one device trains "
    "with `training=True`, as Keras's `fit` does.",
    ("Keras", "batchnorm", "in_training"): _RANK_STATISTICS,
    (
        "Keras",
        "batchnorm",
        "synchronized",
    ): "Keras has this option only with the TensorFlow backend.",
    (
        "Keras",
        "resume",
        "",
    ): f"The guide saves nothing, so the script follows PyTorch's tutorial on checkpoints. {_NO_PLACE}",
}

NOTES: dict[tuple[str, str], str] = {
    (
        "Transformers",
        "idle",
    ): "Trainer sets `find_unused_parameters=True` for a module that is not one of its own.",
    (
        "DeepSpeed",
        "resume",
    ): "The tutorial leaves it to the user to advance the loader (`dataloader_to_step`), so the script skips the "
    "completed batches. The loader uses the same permutation in every epoch.",
}
