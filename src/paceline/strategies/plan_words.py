"""Words of other tools, and the plan keys that mean the same."""

from __future__ import annotations

import re

_REPLICAS = "'data=N' is N replicas of the model"
_SHARDED = "'shard=N' splits parameters, gradients and optimizer state over N replicas"
_TENSOR = "'tensor=N' splits each layer over N devices"
_PIPELINE = "'pipeline=N' puts consecutive stages of the model on N devices"
_SERVERS = "'servers=S workers=W' has S parameter servers and W workers"
_RECOMPUTE = "'recompute=full' or 'recompute=selective' computes activations again in backward"
_LOCAL = "'local=H data=N' lets N replicas take H steps between their meetings"

# By the other tool's word in lower case, without separators.
_MEANT = {
    **dict.fromkeys(
        (
            "ddp",
            "dp",
            "dataparallel",
            "distributeddataparallel",
            "replicate",
            "dpreplicate",
            "mirrored",
            "horovod",
            "replicas",
        ),
        _REPLICAS,
    ),
    **dict.fromkeys(
        (
            "fsdp",
            "fsdp1",
            "fsdp2",
            "fullyshard",
            "fullysharded",
            "fullyshardeddataparallel",
            "sdp",
            "dpshard",
            "zero3",
            "zeros3",
            "deepspeed",
        ),
        _SHARDED,
    ),
    "zero1": "'shard=N zero=1' splits the optimizer's state over N replicas",
    "zero2": "'shard=N zero=2' splits the optimizer's state and gradients over N replicas",
    **dict.fromkeys(
        ("hsdp", "hybridshard"),
        "'data=N shard=M' is N groups of M replicas that share parameters, "
        "gradients and optimizer state",
    ),
    **dict.fromkeys(("tp", "tensor", "tensormodel"), _TENSOR),
    **dict.fromkeys(("pp", "pipe", "pipelinemodel"), _PIPELINE),
    **dict.fromkeys(
        ("mp", "model"),
        f"{_TENSOR}, {_PIPELINE}, and 'place=N' puts modules on N devices",
    ),
    **dict.fromkeys(("ps", "parameterserver"), _SERVERS),
    **dict.fromkeys(
        ("megatron", "megatronlm", "3d"),
        f"{_TENSOR}, {_PIPELINE}, and {_REPLICAS}; the three multiply",
    ),
    **dict.fromkeys(("devicemap", "naive", "naivemp"), "'place=N' puts modules on N devices"),
    **dict.fromkeys(
        ("cp", "context", "ulysses", "ringattention"),
        "no plan key cuts attention's sequence yet; 'tensor=N' cuts the sequence between its split layers",
    ),
    **dict.fromkeys(
        ("sp", "sequence"),
        "there is no key for it: 'tensor=N' cuts the sequence between its split layers by itself",
    ),
    **dict.fromkeys(
        ("ep", "expert", "experts"),
        "no plan key cuts experts yet; 'shard=N' splits their weights as all others",
    ),
    **dict.fromkeys(
        ("vp", "vpp", "virtualpipelinemodel"),
        "'pipeline=N schedule=interleaved virtual=V' gives each of N devices V stages",
    ),
    **dict.fromkeys(
        ("ga", "gas", "gradientaccumulation", "gradientaccumulationsteps", "accum", "gradaccum"),
        "'microbatches=M' cuts a step into M micro-batches; the job's batch stays the same",
    ),
    **dict.fromkeys(
        ("gradientcheckpointing", "activationcheckpointing", "checkpointing", "ac", "remat"),
        _RECOMPUTE,
    ),
    **dict.fromkeys(("torchcompile", "inductor"), "'compile=blocks' compiles each repeated block"),
    **dict.fromkeys(("diloco", "localsgd"), _LOCAL),
    **dict.fromkeys(
        ("offload", "cpuoffload"),
        "no plan key offloads yet; 'shard=N' and 'recompute=full' need less memory",
    ),
    **dict.fromkeys(
        ("nproc", "nprocpernode", "worldsize", "gpus", "devices", "numprocesses"),
        f"{_REPLICAS}; the number of ranks follows from a plan's axes",
    ),
}


def meant(word: str) -> str | None:
    """Return a sentence with the plan key for another tool's word; None for an unknown word.

    >>> meant("FSDP")
    "'shard=N' splits parameters, gradients and optimizer state over N replicas"
    >>> meant("tp_size") == meant("tensor-parallel")
    True
    """
    plain = re.sub(r"[^a-z0-9]", "", word.lower())
    shorter = re.sub(r"(parallel(ism)?)?(size|degree)?$", "", plain)
    return _MEANT.get(plain) or _MEANT.get(shorter)
