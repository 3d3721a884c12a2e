"""What each source of published measurements means by its figures, and which program they come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.models import DecoderSize

FlopsOf = Callable[[DecoderSize, float, int], float]


def model_flops(size: DecoderSize, flops: float, tokens: int) -> float:
    """Without recomputation."""
    return flops


def with_recomputation(size: DecoderSize, flops: float, tokens: int) -> float:
    """Narayanan et al. 2021: a fourth pass through the layers, none through the head."""
    s, h, layers = size.sequence, size.hidden, size.layers
    return 96 * tokens * layers * h**2 * (1 + s / (6 * h) + size.vocab / (16 * layers * h))


def eight_per_parameter(size: DecoderSize, flops: float, tokens: int) -> float:
    """BLOOM's: eight a parameter and token."""
    return 8.0 * tokens * size.num_parameters


@dataclass(frozen=True)
class Source:
    """The conventions of one source.

    programs: pattern of a row's "zero_stage|precision|notes" to a training program; the first that matches.
    precision, recompute: where a row says nothing; a precision of "" makes such rows skipped.
    recomputes, virtuals: what is open then, and chosen as a planner would.
    zero: stage of sharding where a row says nothing; 0 for none.
    memory_unit: bytes of one in `memory_gib`. is_device_memory: see `rows.Case`.
    heads: by width, where a row says nothing: those of the source's other rows.
    devices_per_port: that share one way to their host.
    names_sequence: whether rows with sequence parallelism say so.
    """

    programs: Mapping[str, str]
    counted_flops: FlopsOf = model_flops
    precision: str = "bf16"
    recompute: str = "none"
    recomputes: tuple[str, ...] = ()
    virtuals: tuple[int, ...] = (1,)
    zero: int = 0
    vocab: int = 50257
    heads: Mapping[int, int] = field(default_factory=dict)
    sequence: int | None = None
    memory_unit: float = 2**30
    is_device_memory: bool = True
    names_sequence: bool = False
    devices_per_port: int = 2
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def program(self, row: Mapping[str, str]) -> str:
        text = f"{row['zero_stage']}|{row['precision']}|{row['notes']}|{row['hardware']}"
        return next(name for pattern, name in self.programs.items() if re.search(pattern, text))

    def model(self, name: str) -> Mapping[str, Any]:
        known = {**self.models, **MODELS}
        return next(
            (sizes for pattern, sizes in known.items() if re.search(pattern, name, re.I)), {}
        )

    def device(self, hardware: str) -> str:
        return self.nodes(hardware)[0][1]

    def nodes(self, hardware: str) -> list[tuple[int, str]]:
        """(how many nodes, accelerator), in rank order; 0 for as many as needed."""
        mixed = re.findall(r"(\d+) nodes? (\w+)", hardware)
        if len(mixed) > 1:
            return [(int(count), name) for count, name in mixed]
        for pattern, name in DEVICES.items():
            if re.search(pattern, hardware):
                return [(0, name)]
        return []


DEVICES = {
    "GB300": "GB300",
    "GB200": "GB200",
    "B300": "B300",
    "B200": "B200",
    "H200": "H200",
    "H100": "H100",
    r"A100.*40": "A100-40",
    "A100|A800": "A100-80",
    r"V100.*16": "V100-16",
    "V100": "V100",
    "T4": "T4",
    "P100": "P100",
    "K80": "K80",
    "TPU": "TPUv4",
    "4090": "RTX4090",
    "3090": "RTX3090",
    "A10": "A10",
}

# Public configurations of models that rows name without their dimensions.
MODELS: Mapping[str, Mapping[str, Any]] = {
    r"GPT 1\.3B": {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 50304},
    r"llama.?2.?7b": {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "ffn": 11008,
        "vocab": 32000,
        "form": "llama",
    },
    r"llama.?2.?13b": {
        "layers": 40,
        "hidden": 5120,
        "heads": 40,
        "ffn": 13824,
        "vocab": 32000,
        "form": "llama",
    },
    r"llama.?2.?34b": {
        "layers": 48,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 22016,
        "vocab": 32000,
        "form": "llama",
    },
    r"llama.?2.?70b": {
        "layers": 80,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 28672,
        "vocab": 32000,
        "form": "llama",
    },
    r"llama.?3.*\b8b": {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "vocab": 128256,
        "form": "llama",
    },
    r"llama.?3.*\b70b": {
        "layers": 80,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 28672,
        "vocab": 128256,
        "form": "llama",
    },
    r"llama.?3.*405b": {
        "layers": 126,
        "hidden": 16384,
        "heads": 128,
        "kv_heads": 8,
        "ffn": 53248,
        "vocab": 128256,
        "form": "llama",
    },
    r"minGPT-175B|GPT-?3.?175B": {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 50257},
    r"GPT2-large": {"layers": 36, "hidden": 1280, "heads": 20, "vocab": 50257},
}

# Its TFLOP/s follow from its times with sequences of 1024 and recomputation: 280 TFLOP a step of the 2B model.
_MEGATRON_2020 = Source({"": "megatron-lm"}, recompute="full", vocab=51200, sequence=1024)
_MEGATRON_2021 = Source(
    {"": "megatron-lm"},
    counted_flops=with_recomputation,
    recompute="full",
    vocab=51200,
    sequence=2048,
)
_MEGATRON_2022 = Source(
    {"": "megatron-lm-2022"},
    recompute="selective",
    vocab=51200,
    names_sequence=True,
    is_device_memory=False,
)
_CORE = Source(
    {"": "megatron-core"},
    recomputes=("selective", "full"),
    virtuals=(1, 2, 3, 4, 6),
    zero=1,
    is_device_memory=False,
)
_BRIDGE = replace(_CORE, precision="")
_COMPILED = {"[Cc]ompile": "torchtitan", "": "torchtitan-eager"}
SOURCES: dict[str, Source] = {
    "vtrain": Source({"": "megatron-deepspeed"}),
    "mpt": Source(
        {"PURE": "llm-foundry-pure", "": "llm-foundry"}, zero=3, models={"MPT": {"tied": True}}
    ),
    "bloom": Source(
        {"": "bloom"},
        counted_flops=eight_per_parameter,
        recompute="full",
        memory_unit=1e9,
        vocab=250880,
        heads={14400: 96, 13824: 96, 14336: 64, 13312: 64, 12288: 64},
    ),
    "bs1b3": Source({"": "bloom"}, recompute="full", memory_unit=1e9, zero=1),
    "megSC21t1": _MEGATRON_2021,
    "megJan21": _MEGATRON_2021,
    "mtnlg": _MEGATRON_2021,
    "meg2020": _MEGATRON_2020,
    "megSC21t2": Source(
        {r"^3": "deepspeed-zero3", "": "megatron-lm"},
        counted_flops=with_recomputation,
        recompute="full",
        vocab=51200,
    ),
    "dsazure": Source(
        {"": "deepspeed-zero3"}, counted_flops=with_recomputation, recompute="full", zero=3
    ),
    "megSeqPar": _MEGATRON_2022,
    "megMFU22": _MEGATRON_2022,
    "megSeqParMem": _MEGATRON_2022,
    "megH100": _CORE,
    "megH100strong": _CORE,
    "mbridge": _BRIDGE,
    "nemo2407": _BRIDGE,
    "nemo2412": _BRIDGE,
    "nemo2504": _BRIDGE,
    "nemoCP": _BRIDGE,
    "megascale": replace(_CORE, programs={"MegaScale": "megatron-core", "": "megatron-lm-2022"}),
    "llama3": Source(
        {"": "megatron-core"}, recomputes=("selective", "full"), virtuals=(1, 2, 4, 8), zero=2
    ),
    "amp": Source({"": "amp"}, recompute="full", models={"TransGAN": {"hidden": 0}}),
    "alpa": Source({"": "megatron-lm"}, recompute="full", memory_unit=1e9, is_device_memory=False),
    "zerobubble": Source(
        {"": "megatron-lm-2022"}, memory_unit=1e9, is_device_memory=False, vocab=51200, zero=1
    ),
    "titan": Source(_COMPILED, zero=3, recompute="selective", is_device_memory=False),
    "titanA100": Source(_COMPILED, zero=3, recompute="selective", is_device_memory=False),
    "titan405": Source(_COMPILED, zero=3, recompute="full", is_device_memory=False),
    "automodel": Source({"": "torchtitan"}, zero=3, is_device_memory=False),
    "fms": Source(_COMPILED, zero=3, recompute="selective"),
    "fsdp": Source({"": "llm-foundry"}, zero=3, recompute="full"),
    "nanotron": Source({"": "torchtitan"}, zero=1),
    "dstune": Source({"": "llm-foundry"}, sequence=1024),
    "tfbench": Source({"": "tensorflow"}),
    "horovod": Source({"": "tensorflow"}),
}
