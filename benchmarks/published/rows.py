"""Rows of a file of published measurements, as jobs, plans and clusters, with the conventions of each source.

Figures that a row lacks come from its source's convention (`sources.py`) or from the model's public configuration. A
row with something that a plan can't express is skipped, with the reason.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from benchmarks.models import DecoderSize, Formats, Kernels, Program, decoder_profile, program
from benchmarks.models.convolution import convnet_profile
from benchmarks.models.flops import forward_flops
from benchmarks.published.nets import NETS
from benchmarks.published.sources import SOURCES, Source
from paceline.base.errors import PacelineError
from paceline.cluster.catalogue import accelerator
from paceline.cluster.catalogue import link as known_link
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Nodes, described, link_of
from paceline.cluster.links import Link, Network
from paceline.job import Precision
from paceline.model.cost.profile import Profile
from paceline.strategies.plan import Plan

GIB = 2**30
VOCAB_MULTIPLE = 128  # that all of these programs round the vocabulary up to
# NeMo's and Megatron Bridge's recipes for measurements put adapters beside the joined queries, keys and values alone
# (`target_modules = ["linear_qkv"]`); their rank is 8 in NeMo's.
LORA_RANK = 8
# Plans compete in groups of rows that are equal in these.
GROUP = ("model", "layers", "hidden", "heads", "seq", "hardware", "n_devices", "global_batch")
Row = dict[str, str]


class Skipped(Exception):
    """A row that is not predicted, and why."""


@dataclass(frozen=True)
class Case:
    """A row that can be predicted.

    plans: what the row says; more than one where it leaves choices out, which are then the planner's.
    step_s: measured; None for a row about memory alone. memory_bytes: measured on the fullest rank, None if not given.
    is_device_memory: whether that is what the device has given away, not what tensors take.
    fits: False for a row that ran out of memory. flops: of the model a step, all devices, without recomputation.
    """

    row_id: str
    source: str
    profile: Profile
    plans: tuple[Plan, ...]
    cluster: Cluster
    batch: int
    precision: Precision
    software: Program
    step_s: float | None
    memory_bytes: float | None
    is_device_memory: bool
    fits: bool
    flops: float
    group: tuple[str, ...]


def read(path: Path) -> Iterator[Case | tuple[str, str, str]]:
    """Cases, or (source, row, reason) of a row that is skipped."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            source = row["row_id"].partition("-")[0]
            try:
                yield case(row, source)
            except Skipped as reason:
                yield source, row["row_id"], str(reason)
            except PacelineError as error:
                yield source, row["row_id"], f"refused: {str(error).splitlines()[0]}"


def case(row: Row, source_name: str) -> Case:
    """A row as something to predict.

    Raises:
        Skipped: it can't be.
        PacelineError: its numbers make no plan.
    """
    source = SOURCES.get(source_name)
    if source is None:
        raise Skipped("nothing is known of this source's conventions")
    _check(row, source)
    precision = _precision(row, source)
    trains = _program(row, source)
    num_devices = _whole(row, "n_devices")
    if not num_devices:
        raise Skipped("it states no number of devices")
    cluster = _cluster(row, source, num_devices)
    batch = _whole(row, "global_batch")
    if batch is None:
        raise Skipped("it states no global batch")
    net = NETS.get(re.sub(r"[ -]", "", row["model"].lower()))
    size: DecoderSize | None = None
    if net is not None:
        profile = convnet_profile(net, trains.formats)
        plans: tuple[Plan, ...] = (_image_plan(row, num_devices, cluster),)
        flops = 3.0 * batch * forward_flops(profile)
    else:
        size = _size(row, source)
        profile = _profile(size, trains.formats, trains.kernels)
        plans = tuple(_plans(row, source, size, num_devices, batch))
        passes = (
            4.0 if size.lora_rank else 6.0
        )  # FLOPs a token and parameter: frozen weights need no gradients
        flops = (
            batch
            * size.sequence
            * (passes * size.num_parameters + 12 * size.layers * size.hidden * size.sequence)
        )
    if not plans:
        raise Skipped("no plan has its numbers")
    step_s, fits = _measured(row, source, size, num_devices, batch, flops)
    memory = float(row["memory_gib"]) if row.get("memory_gib") else None
    return Case(
        row["row_id"],
        source_name,
        profile,
        plans,
        cluster,
        batch,
        precision,
        trains,
        step_s,
        memory and memory * source.memory_unit,
        source.is_device_memory,
        fits,
        flops,
        tuple(row[name] for name in GROUP),
    )


def _whole(row: Row, name: str) -> int | None:
    return round(float(row[name])) if re.fullmatch(r"[\d.]+(e\d+)?", row.get(name) or "") else None


def _check(row: Row, source: Source) -> None:
    text = f"{row['model']} {row['notes']}".lower()
    if (_whole(row, "cp") or 1) > 1:
        raise Skipped("context parallelism: a plan has no such axis")
    if re.search(r"\bep \d|moe|deepseek|mixtral|a3b|a22b|gpt.oss|nemotron.?3|kimi", text):
        raise Skipped("experts: a plan has no such axis")
    if row["metric"] not in METRICS:
        raise Skipped(f"{row['metric']}: not a step's time or memory")


def _precision(row: Row, source: Source) -> Precision:
    text = row["precision"].lower() or source.precision
    if not text:
        raise Skipped("it states no precision, and its source's are of several")
    if "fp4" in text:
        raise Skipped("fp4: a job has no such precision")
    if "fp8" in text:
        return "fp8"
    return "float32" if "32" in text and "16" not in text else "bf16"


METRICS = (
    "iteration_time",
    "tokens_per_s_per_gpu",
    "tokens_per_s",
    "samples_per_s_per_gpu",
    "samples_per_s",
    "images_per_s",
    "achieved_tflops_per_gpu",
    "model_tflops_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "feasible",
    "activation_memory_per_gpu",
)


def _measured(
    row: Row, source: Source, size: DecoderSize | None, num_devices: int, batch: int, flops: float
) -> tuple[float | None, bool]:
    """Seconds of a step, from whichever metric a row has, and whether it ran."""
    metric, unit = row["metric"], row["unit"]
    if metric == "feasible":
        return None, "oom" not in row["value"].lower()
    if metric == "activation_memory_per_gpu":
        return None, True
    try:
        value = float(row["value"])
    except ValueError:
        raise Skipped(f"its value is '{row['value']}', not a number") from None
    tokens = batch * (size.sequence if size else 1)
    if metric == "iteration_time":
        if unit not in ("s", "ms"):
            raise Skipped(f"a time in '{unit}'")
        return value / (1e3 if unit == "ms" else 1.0), True
    if metric == "tokens_per_s_per_gpu":
        return tokens / (value * num_devices), True
    if metric == "tokens_per_s":
        return tokens / value, True
    if metric == "samples_per_s_per_gpu":
        return batch / (value * num_devices), True
    if metric in ("samples_per_s", "images_per_s"):
        return batch / value, True
    if size is None:
        raise Skipped(f"{metric} of a convolutional net")
    counted = source.counted_flops(size, flops, tokens)
    if metric == "mfu":
        peak = accelerator(source.device(row["hardware"])).bf16_flops_per_s
        return flops / (value / 100 * peak * num_devices), True
    if metric == "model_tflops_per_gpu":
        counted = flops
    return counted / (value * 1e12 * num_devices), True


@lru_cache(maxsize=4096)
def _profile(size: DecoderSize, formats: Formats, kernels: Kernels) -> Profile:
    return decoder_profile(size, formats, kernels)


def _size(row: Row, source: Source) -> DecoderSize:
    known = source.model(row["model"])
    given = {
        name: _whole(row, name) or known.get(name)
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
    }
    form = known.get("form") or (
        "llama" if re.search(r"llama|mistral|qwen", row["model"].lower()) else "gpt"
    )
    hidden = given["hidden"]
    if not hidden:
        raise Skipped("its dimensions are neither stated nor public here")
    vocab = given["vocab"] or source.vocab
    params = float(row["params"]) if row.get("params") else None
    if not given["layers"]:
        if not params:
            raise Skipped("it states neither layers nor parameters")
        given["layers"] = round((params - vocab * hidden) / (12 * hidden**2))
    heads = given["heads"] or source.heads.get(hidden) or max(1, hidden // 128)
    while hidden % heads:
        heads -= 1
    sequence = given["seq"] or source.sequence
    if not sequence:
        raise Skipped("it states no sequence length")
    tied = known.get("tied", form == "gpt")
    vocab = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return DecoderSize(
        int(given["layers"]),
        int(hidden),
        int(heads),
        int(given["ffn"] or 4 * hidden),
        int(vocab),
        int(sequence),
        int(given["kv_heads"] or heads),
        form,
        bool(tied),
        lora_rank=LORA_RANK
        if re.search(r"\blora\b", f"{row['model']} {row['notes']}", re.I)
        else 0,
    )


def _program(row: Row, source: Source) -> Program:
    trains = program(source.program(row))
    text = row["recompute"]
    if "sequence-parallel" in text:
        return replace(trains, sequence_parallel=True)
    if text and source.names_sequence:
        return replace(trains, sequence_parallel=False)
    return trains


def _recompute(row: Row, source: Source) -> str:
    text = row["recompute"].lower()
    if "selective" in text:
        return "selective"
    if "full" in text or "rematerialisation" in text:
        return "full"
    return "none" if text else source.recompute


def _plans(
    row: Row, source: Source, size: DecoderSize, num_devices: int, batch: int
) -> Iterator[Plan]:
    """Every plan that a row may mean."""
    tensor, pipeline = _whole(row, "tp"), _whole(row, "pp")
    if tensor is None or pipeline is None:
        together = re.search(r"model-parallel size (\d+)", row["notes"])
        if together:  # tensor ranks fill a node first (Narayanan et al. 2021, section 5.4)
            tensor, pipeline = min(int(together[1]), 8), max(1, int(together[1]) // 8)
        elif num_devices > 8 and not row["dp"] and not row["fsdp"]:
            raise Skipped("it states no axes")
    tensor, pipeline = tensor or 1, pipeline or 1
    replicas = num_devices // (tensor * pipeline)
    if replicas * tensor * pipeline != num_devices:
        raise Skipped("its axes don't multiply to its devices")
    stated = _whole(row, "micro_batch")
    virtuals = [_whole(row, "vpp")] if row.get("vpp") else source.virtuals if pipeline > 1 else [1]
    recomputes = (
        [_recompute(row, source)]
        if row["recompute"] or not source.recomputes
        else source.recomputes
    )
    zero = _whole(row, "zero_stage")
    shard = _whole(row, "fsdp") or (replicas if (source.zero if zero is None else zero) else 1)
    zero = zero or source.zero or 3
    shard = min(shard, replicas)
    if replicas % shard:
        raise Skipped("its shards don't divide its replicas")
    for micro in [stated] if stated else [m for m in (1, 2, 4, 8) if batch // replicas % m == 0]:
        count = max(1, round(batch / (replicas * (micro or 1))))
        for virtual in virtuals:
            for recompute in recomputes:
                values: dict[str, object] = {
                    "recompute": recompute,
                    "tensor": tensor,
                    "data": replicas // shard,
                }
                if shard > 1:
                    values |= {"shard": shard, "zero": zero}
                if pipeline > 1:
                    values |= {"pipeline": pipeline, "microbatches": count}
                    if (virtual or 1) > 1:
                        if size.layers < pipeline * (virtual or 1) - 2:
                            continue
                        values |= {"schedule": "interleaved", "virtual": virtual}
                    elif "ZB" in row["notes"] or "zero-bubble" in row["notes"].lower():
                        values |= {"schedule": "zero-bubble"}
                else:
                    values |= {"microbatches": count}
                yield Plan.of(**values)


def _image_plan(row: Row, num_devices: int, cluster: Cluster) -> Plan:
    """TensorFlow's replicas, or its parameter servers: in a node its host is one; across nodes each node has one,
    unless the notes say how many there are."""
    kind = row["notes"].partition("variable_update=")[2]
    if num_devices == 1 or not kind or kind.startswith("replicated"):
        return Plan.of(data=num_devices)
    servers = -(-num_devices // len(cluster.nodes[0].devices))
    named = rf"{re.escape(row['model'])}(?:\(bs{row['micro_batch']}\))? (\d+) PS"
    if servers == 8 and (stated := re.search(named, kind)):
        servers = int(stated[1])
    return Plan.of(servers=servers, workers=num_devices, colocate="yes" if servers > 1 else "no")


def _cluster(row: Row, source: Source, num_devices: int) -> Cluster:
    each = _whole(row, "devices_per_node")
    kinds = source.nodes(row["hardware"])
    if not kinds:
        raise Skipped(f"nothing is known of its hardware, '{row['hardware']}'")
    node_groups = []
    for count, name in kinds:
        known = accelerator(name)
        in_a_node = min(each or known.devices_per_node, num_devices)
        inside = _stated(row["intra_bw"], name, 1) or link_of(known_link(known.link))
        across = _stated(row["inter_bw"], name, in_a_node) or link_of(known_link(known.network))
        nodes = count or -(-num_devices // in_a_node)
        node_groups.append(
            Nodes(
                nodes,
                (described(known),) * in_a_node,
                Network(inside, across, in_a_node, max(1, in_a_node // source.devices_per_port)),
            )
        )
    return Cluster.of(tuple(node_groups))


def _stated(text: str, name: str, devices_per_node: int) -> Link | None:
    """A link's share for each device, from words such as "1600 Gbps/node RoCE" or "170 Gb/s (V100) / 50 (T4)"."""
    if "Gb" not in text and "Omni-Path" not in text:
        return None
    if "Omni-Path" in text:
        return link_of(known_link("omnipath-50"))
    if not re.search(r"\d", text):
        return None
    device_match = re.search(rf"([\d.]+)(?: Gb/s)? \({name[:4].rstrip('-')}", text)
    number = float((device_match or re.search(r"[\d.]+", text))[1 if device_match else 0])  # type: ignore[index]
    bytes_per_s = number * 1e9 / 8
    if "/GPU" not in text:
        bytes_per_s /= devices_per_node
    return Link(bytes_per_s * 0.85, 1e-5 if "RoCE" in text or "Gbps" in text else 3e-5)
