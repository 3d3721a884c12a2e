"""What each job is, and why a trainer's figures differ from one device's. A reason is shown only where they do."""

from __future__ import annotations

DESCRIPTIONS = {
    "short": "45 samples in global batches of 16: the last batch of an epoch has 13 samples. Three epochs, SGD with "
             "momentum.",
    "ignored": "48 samples of six targets each. A target of -100 is not counted, and the ranks get unequal numbers of "
               "those that are. One device divides by the count of the whole batch.",
    "custom": "A step makes two forward passes. Its loss adds the distance between both outputs, and a penalty on the "
              "slope of the output by the input (`torch.autograd.grad` with `create_graph=True`). Lightning runs it "
              "with manual optimization and Transformers through `compute_loss`. For Paceline it is written as a "
              "module that returns both outputs and the slope, and a loss of them, since a `Job` takes no step.",
    "idle": "Four experts; each sample names its own. The last expert gets one sample in every other batch, so it is "
            "idle on one rank or on both. AdamW with weight decay: on one device an expert without samples has no "
            "gradient, and AdamW leaves it alone.",
    "batchnorm": "A BatchNorm after the first layer. One device takes its statistics over 16 samples, a rank over 8. "
                 "PyTorch's `SyncBatchNorm` takes them over all ranks; it refuses to run on CPUs, so this page can't "
                 "show how near it comes on GPUs. GroupNorm does not couple the samples of a batch. It is another "
                 "model, so it does not count as a mended job; one device trains that model too.",
    "resume": "48 shuffled samples, three steps an epoch, AdamW. A first launch ends after step {stop_after}, one step "
              "into the second epoch, and leaves a checkpoint; a second launch goes on to the end. They are compared "
              "with the same trainer's run on two ranks that was not stopped.",
}

_PADDED = ("`DistributedSampler` repeats the first sample of its order so that both ranks get equally many. The last "
           "batch has 14 samples for 13, and one sample counts twice in each epoch.")
_DROPPED = ("`DistributedSampler` leaves out a sample so that both ranks get equally many. The last batch has 12 "
            "samples for 13.")
_FILLED = ("`even_batches` fills the second rank's last batch with the first samples of the data. The last batch has "
           "16 samples for 13, and three samples count twice in each epoch.")
_UNEVEN = ("The ranks have 8 and 5 samples in the last batch, each rank divides by its own number, and the gradients "
           "are averaged: one of the 5 weighs more than one of the 8.")
_RANK_MEANS = ("Each rank divides by its own count, and the gradients are averaged: a target on a rank with few of "
               "them weighs more than one on a rank with many.")
_UNUSED = ("DistributedDataParallel waits for a gradient of every parameter, and a rank has none for its idle expert. "
           "`find_unused_parameters` is off by default; the error names it.")
_RANK_STATISTICS = "Each rank normalises by the statistics of its own 8 samples."
_ONLY_GPUS = "`SyncBatchNorm` is not written for CPUs."
_NO_PLACE = ("The tutorial's checkpoint has the weights, the optimizer and the epoch, and not the place in the epoch. "
             "The second launch begins the second epoch anew and takes its first batch once more.")

REASONS = {
    ("Paceline", "ignored", "scalar"):
        "Paceline takes a scalar loss as the mean over samples, which this one is not. Its documentation asks for "
        "`(sum, count)` here, and `paceline verify` refuses the job with that advice; `paceline train` notes "
        "before it starts that cutting the batch changes this job.",
    ("Paceline", "batchnorm", ""):
        f"{_RANK_STATISTICS} Paceline has no synchronised BatchNorm. `paceline train` says before the first step that "
        "samples are coupled, and the documentation advises GroupNorm or a plan that splits the model, not the batch.",
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
    ("Accelerate", "resume", ""):
        "The sampler's own random state is not in the checkpoint. The second launch goes on in the order of the first "
        "epoch, and each later epoch takes the order of the one before it.",
    ("Accelerate", "resume", "seedable"):
        "The order follows from the number of the epoch, and the second launch counts epochs from 0: it goes on in the "
        "order of the first epoch.",
    ("Lightning", "short", ""): _PADDED,
    ("Lightning", "ignored", ""): _RANK_MEANS,
    ("Lightning", "idle", ""): _UNUSED,
    ("Lightning", "batchnorm", ""): _RANK_STATISTICS,
    ("Lightning", "batchnorm", "sync_batchnorm"): _ONLY_GPUS,
    ("Lightning", "resume", ""):
        "Lightning counts the batches of the epoch that are done, but the loader begins at its first batch: that one "
        "is taken twice, and the last one of the epoch never. A warning says so, and asks for a loader with "
        "`state_dict` and `load_state_dict`.",
    ("Transformers", "short", ""): _FILLED,
    ("Transformers", "short", "uneven_batches"): _UNEVEN,
    ("Transformers", "ignored", ""):
        f"{_RANK_MEANS} Trainer counts the targets of all ranks, and gives the number to a model that takes "
        "`num_items_in_batch`; a module that returns a mean does not use it.",
    ("Transformers", "batchnorm", ""): _RANK_STATISTICS,
    ("Transformers", "batchnorm", "sync_batchnorm"): _ONLY_GPUS,
    ("DeepSpeed", "short", ""): _PADDED,
    ("DeepSpeed", "short", "drop_last"):
        "Every last batch is left out: its ranks would have less than 8 samples.",
    ("DeepSpeed", "ignored", ""): _RANK_MEANS,
    ("DeepSpeed", "custom", ""):
        "DeepSpeed watches the backward pass through the engine's outputs, and takes `torch.autograd.grad` for a "
        "backward pass that it was not told of.",
    ("DeepSpeed", "custom", "zero_1"):
        "The step fails inside the reduction of gradients. The job with ignored labels runs under this setting.",
    ("DeepSpeed", "idle", ""):
        "Without ZeRO, DeepSpeed makes a gradient of zeros for a parameter that has none. AdamW then moves the idle "
        "expert by its momentum and its weight decay. One device that is given zeros gets the same weights.",
    ("DeepSpeed", "batchnorm", ""): _RANK_STATISTICS,
    ("DeepSpeed", "batchnorm", "sync_batchnorm"): _ONLY_GPUS,
    ("Keras", "short", ""): _PADDED,
    ("Keras", "short", "drop_last"): _DROPPED,
    ("Keras", "ignored", ""): _RANK_MEANS,
    ("Keras", "idle", ""): _UNUSED,
    ("Keras", "batchnorm", ""):
        "The guide's loop calls `model(inputs)`, which Keras takes for inference: the layer normalises by its running "
        "statistics and never changes them, on any number of devices. One device here trains with `training=True`, as "
        "Keras's `fit` does.",
    ("Keras", "batchnorm", "in_training"): _RANK_STATISTICS,
    ("Keras", "batchnorm", "synchronized"): "Keras offers it with the TensorFlow backend alone.",
    ("Keras", "resume", ""):
        f"The guide saves nothing; PyTorch's tutorial on checkpoints is followed. {_NO_PLACE}",
}

NOTES: dict[tuple[str, str], str] = {
    ("Transformers", "idle"): "Trainer sets `find_unused_parameters=True` for a module that is not one of its own.",
    ("DeepSpeed", "resume"):
        "Its tutorial leaves it to the user to bring the loader to its place (`dataloader_to_step`); the script skips "
        "the batches that are done. The loader permutes every epoch alike.",
}
