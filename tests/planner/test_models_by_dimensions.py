"""Profiles by dimensions agree with what the modules themselves do on fake tensors."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import paceline as pl
from benchmarks.models import (
    Decoder,
    DecoderSize,
    Formats,
    Kernels,
    decoder_profile,
    program,
    program_names,
)
from benchmarks.models.convnet import ConvNet
from benchmarks.models.convolution import ConvNetSize, convnet_profile
from benchmarks.models.decoder import next_token_loss
from benchmarks.models.flops import backward_flops, forward_flops
from paceline.base.errors import ClusterError, JobError
from paceline.model.cost.profile import Profile
from paceline.model.cost.trace import profile_job

GPT = DecoderSize(2, 64, 4, 256, 96, sequence=128)
LLAMA = DecoderSize(3, 64, 4, 160, 96, sequence=128, kv_heads=2, form="llama")


def traced_decoder(size: DecoderSize) -> Profile:
    tokens = torch.zeros(16, size.sequence, dtype=torch.long)
    return profile_job(
        pl.Job(
            model=lambda: Decoder(size),
            data=TensorDataset(tokens, tokens),
            loss=next_token_loss,
            optimizer=lambda named: torch.optim.AdamW(named),
            batch=8,
            steps=1,
        )
    )


def traced_net(size: ConvNetSize) -> Profile:
    images = torch.zeros(16, 3, size.side, size.side)
    return profile_job(
        pl.Job(
            model=lambda: ConvNet(size),
            data=TensorDataset(images, torch.zeros(16, dtype=torch.long)),
            loss=F.cross_entropy,
            optimizer=lambda named: torch.optim.SGD(named),
            batch=8,
            steps=1,
        )
    )


def kept_bytes(profile: Profile) -> float:
    return sum(s.kept_bytes.per_sample * s.repeat for s in profile.segments)


def moved_bytes(profile: Profile) -> float:
    return sum(
        (work.moved_bytes.per_sample + work.function_bytes.per_sample) * s.repeat
        for s in profile.segments
        for work in (s.forward, s.backward)
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(GPT, id="gpt", marks=pytest.mark.slow),
        pytest.param(LLAMA, id="llama"),
        pytest.param(DecoderSize(2, 64, 4, 256, 96, sequence=64, tied=True), id="tied"),
    ],
)
def test_a_decoder_by_dimensions_is_the_module(size: DecoderSize):
    """FLOPs and parameters are the traced ones, kept activations within 1 %, bytes moved within 6 %."""
    traced, described = traced_decoder(size), decoder_profile(size)

    assert forward_flops(described) == forward_flops(traced)
    assert backward_flops(described) == backward_flops(traced)
    assert described.parameter_bytes == traced.parameter_bytes == 4 * size.num_parameters
    assert kept_bytes(described) == pytest.approx(kept_bytes(traced), rel=0.01)
    assert moved_bytes(described) == pytest.approx(moved_bytes(traced), rel=0.06)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(replace(GPT, lora_rank=4), id="gpt"),
        pytest.param(replace(LLAMA, lora_rank=3), id="llama", marks=pytest.mark.slow),
    ],
)
def test_adapters_by_dimensions_are_the_modules(size: DecoderSize):
    """A layer is the traced one: operators, FLOPs, kept activations; bytes moved within 3 %. Only adapters have
    gradients and state. The first layer alone is priced with gradients of its input that it does not need."""
    traced, described = traced_decoder(size), decoder_profile(size)
    layer = described.segments[1]
    last = [segment for segment in traced.segments if segment.unit][-1]
    joined = size.hidden + 2 * size.kv_width

    assert forward_flops(described) == forward_flops(traced)
    assert backward_flops(described) - backward_flops(traced) == (
        2 * size.sequence * size.hidden * (joined + size.lora_rank)
    )
    assert layer.backward.flops == last.backward.flops
    assert (layer.forward.operators, layer.backward.operators) == (
        last.forward.operators,
        last.backward.operators,
    )
    assert layer.kept_bytes.per_sample == last.kept_bytes.per_sample
    for work, counted in ((layer.forward, last.forward), (layer.backward, last.backward)):
        assert work.function_bytes.per_sample == pytest.approx(
            counted.function_bytes.per_sample + counted.moved_bytes.per_sample, rel=0.03
        )
    assert described.parameter_bytes == traced.parameter_bytes == 4 * size.num_parameters
    for profile in (traced, described):
        assert (
            sum(p.gradient_bytes * p.count for p in profile.parameters)
            == 4 * size.layers * size.adapters_per_layer
        )
        assert sum(p.state_bytes * p.count for p in profile.parameters) == pytest.approx(
            8 * size.layers * size.adapters_per_layer, rel=0.002
        )  # and AdamW's counters of steps


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "size",
    [ConvNetSize((1, 2), 8, 10, 64), ConvNetSize((2, 2), 8, 10, 64, "bottleneck")],
    ids=["basic", "bottleneck"],
)
def test_a_residual_net_by_dimensions_is_the_module(size: ConvNetSize):
    """FLOPs and parameters are the traced ones; kept activations are within 12 %."""
    traced, described = traced_net(size), convnet_profile(size)

    assert forward_flops(described) == forward_flops(traced)
    assert backward_flops(described) == backward_flops(traced)
    assert described.parameter_bytes == traced.parameter_bytes
    assert kept_bytes(described) == pytest.approx(kept_bytes(traced), rel=0.12)


def test_known_models_have_their_parameters():
    """Llama 3.1's largest, and ResNet-50."""
    assert (
        DecoderSize(
            126, 16384, 128, 53248, 128256, sequence=8192, kv_heads=8, form="llama"
        ).num_parameters
        == 405_853_388_800
    )
    assert (
        convnet_profile(ConvNetSize((3, 4, 6, 3), form="bottleneck")).parameter_bytes
        == 4 * 25_557_032
    )


def test_a_layer_counts_once_however_many_there_are():
    """126 layers take as many values as one, and their sums are of all."""
    single, many = (
        decoder_profile(DecoderSize(layers, 64, 4, 256, 96, sequence=128)) for layers in (1, 126)
    )

    assert len(many.segments) == len(single.segments)
    assert many.segments[1].repeat == 126
    products = sum(p.flops for p in single.segments[1].forward.products)
    assert forward_flops(many) - forward_flops(single) == 125 * products


def test_megatrons_activations():
    """16-bit, dropout: s b h (34 + 5 a s / h) bytes a layer, as Korthikanti et al. 2022 count them, within 1 %."""
    size = DecoderSize(1, 1024, 16, 4096, 96, sequence=2048)
    layer = decoder_profile(
        size, Formats(activation=2), Kernels(attention="plain", dropout=True)
    ).segments[1]

    assert layer.kept_bytes.at(1) == pytest.approx(
        2048 * 1024 * (34 + 5 * 16 * 2048 / 1024), rel=0.01
    )
    assert layer.core is not None
    assert layer.core.kept_bytes.at(1) == 5 * 16 * 2048**2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "layers=0"),
        ({"lora_rank": -1}, "lora_rank=-1"),
        ({"heads": 3}, "don't divide"),
        ({"kv_heads": 3}, "don't divide"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(wrong: dict[str, int], message: str):
    """Each is named."""
    given = {"layers": 1, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 96, "sequence": 8}
    with pytest.raises(JobError, match=message):
        DecoderSize(**{**given, **wrong})


def test_training_programs_are_found_by_name():
    """All figures are numbers, and an unknown name is refused."""
    for name in program_names():
        known = program(name)
        assert known.name == name
        assert all(
            isinstance(getattr(known, f.name), float | int)
            for f in fields(known)
            if f.name not in ("name", "attention", "kernels", "formats", "fitted_on")
        )
    with pytest.raises(ClusterError, match="unknown training program 'megatron'"):
        program("megatron")
