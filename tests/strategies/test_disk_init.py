"""Models that are built in files have the weights of models built in memory, and need no memory for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from paceline.base.streams import seed_streams
from paceline.launch.process.memory_use import reset_peak, resident_peak_bytes
from paceline.strategies import disk_init
from paceline.strategies.disk_init import MappedTensors, NoDiskForTensors


def conv_net() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.ConvTranspose2d(8, 4, 2),
        nn.Flatten(),
        nn.Linear(7, 5),
    )
    return net.to(memory_format=torch.channels_last)


class Odd(nn.Module):
    """Values that depend on values, on other generators, on order, on what was there before; ties and aliases."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        torch.rand(17)  # drawn for nothing
        self.embed = nn.Embedding(40, 6, padding_idx=3)
        self.scaled = nn.Parameter(torch.randn(7, 6) * 0.02)
        self.orthogonal = nn.init.orthogonal_(nn.Parameter(torch.empty(9, 6)))
        self.truncated = nn.init.trunc_normal_(
            nn.Parameter(torch.empty(9, 600)), std=0.5, a=-0.3, b=0.4
        )
        self.sparse = nn.init.sparse_(nn.Parameter(torch.empty(9, 6)), 0.5)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 6), nn.Dropout(rate)) for rate in rates)
        )
        self.numbers = nn.Parameter(torch.from_numpy(np.random.normal(size=(4, 5))))
        self.copied = nn.Parameter(torch.tensor(np.random.random((4, 5)), dtype=torch.float32))
        self.largest = nn.Parameter(self.scaled.detach().max() * torch.ones(11))
        self.head = nn.Linear(6, 40, bias=False)
        self.head.weight = self.embed.weight
        flat = torch.randn(30)
        self.first, self.second = nn.Parameter(flat[:10]), nn.Parameter(flat[10:].view(4, 5).t())
        flat.mul_(2)  # seen by both
        self.wide = nn.Parameter(torch.zeros(()).expand(4, 4).clone().fill_diagonal_(2))
        self.waves = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.small = nn.Parameter(torch.randn(4, 3).bfloat16())
        self.register_buffer("places", torch.arange(12.0).outer(torch.ones(3)), persistent=False)
        self.register_buffer("mask", torch.ones(9, 9, dtype=torch.bool).tril())
        self.register_buffer("seen", self.scaled.detach())  # the parameter's own elements
        self.plain = torch.randn(5)
        self.normed = parametrizations.orthogonal(nn.Linear(4, 4))
        self.weighted = parametrizations.weight_norm(nn.Linear(4, 4))
        self.last = nn.Linear(3, 3)  # after all of the above, whose draws it depends on


def hugging(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers as hf

        small: dict[str, Any] = {
            "vocab_size": 30,
            "hidden_size": 12,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 20,
            "max_position_embeddings": 16,
        }
        if kind == "gpt2":
            return hf.GPT2LMHeadModel(
                hf.GPT2Config(
                    n_embd=12,
                    n_layer=2,
                    n_head=2,
                    vocab_size=30,
                    n_positions=8,
                    bos_token_id=1,
                    eos_token_id=2,
                )
            )
        if kind == "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**small, num_key_value_heads=1))
        if kind == "bert":
            return hf.BertForMaskedLM(hf.BertConfig(**small))
        return hf.ViTForImageClassification(hf.ViTConfig(**small, image_size=8, patch_size=4))

    return make


def keras() -> nn.Module:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]
    )


MODELS = {
    "odd": Odd,
    "conv": conv_net,
    "lstm": lambda: nn.LSTM(6, 5, 2, bidirectional=True),
    "transformer": lambda: nn.Transformer(12, 2, 2, 2, 20, batch_first=True),
    "double": lambda: Odd().double(),
    "keras": keras,
    **{kind: hugging(kind) for kind in ("gpt2", "llama", "bert", "vit")},
}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(
        [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    )


def built(make: Callable[[], nn.Module]) -> nn.Module:
    seed_streams(5, "model")
    return make()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_whole_build(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, in files and brought back from them, strides and ties with them; and so is what is drawn next."""
    monkeypatch.setattr(disk_init, "LEAST_BYTES", 1)
    whole, next_draws = built(MODELS[name]), (torch.rand(3), np.random.random(3))
    mapped = MappedTensors(resident_bytes=100)
    with mapped.building():
        model = built(MODELS[name])
    draws = (torch.rand(3), np.random.random(3))
    is_mapped = [mapped.holds(tensor) for tensor in tensors_of(model).values()]
    assert sum(is_mapped) >= 0.7 * len(is_mapped)

    for _ in range(2):
        tensors = tensors_of(model)
        for tensor_name, expected in tensors_of(whole).items():
            assert torch.equal(tensors[tensor_name], expected), tensor_name
            assert tensors[tensor_name].stride() == expected.stride(), tensor_name
            assert tensors[tensor_name].requires_grad == expected.requires_grad
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in whole.named_parameters()]
        assert torch.equal(draws[0], next_draws[0]) and np.array_equal(draws[1], next_draws[1])
        mapped.bring_in(tensors.values())
        assert not any(mapped.holds(tensor) for tensor in tensors.values())
    if name == "odd":
        with torch.no_grad():
            model.scaled += 1
        assert torch.equal(model.seen, model.scaled)


def deep(side: int, weights: Path) -> nn.Module:
    """16 layers of side x side, of which the default takes 16 MiB, and one of 4 times as much."""
    return nn.Sequential(
        *(nn.Linear(side, side, bias=False) for _ in range(16)),
        nn.Linear(side, 4 * side, bias=False),
    )


def rewritten(side: int, weights: Path) -> nn.Module:
    """Written again when all of it is there, as Transformers does, layer by layer and by values."""
    model = deep(side, weights)
    with torch.no_grad():
        for p in model.parameters():
            nn.init.trunc_normal_(p, std=0.02)
        for p in model.parameters():
            p.mul_(0.5)
    return model


def temporary(side: int, weights: Path) -> nn.Module:
    """Made of values that are not needed after."""
    return nn.ParameterList(
        [nn.Parameter((torch.randn(side, side) * 0.02).double().float()) for _ in range(20)]
    )


def read_by_torch(side: int, weights: Path) -> nn.Module:
    model = deep(side, weights)
    model.load_state_dict(torch.load(weights))
    return model


def read_by_safetensors(side: int, weights: Path) -> nn.Module:
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = deep(side, weights)
    model.load_state_dict(load_file(weights.with_suffix(".safetensors")), assign=True)
    return model


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("make", "side"),
    [
        (rewritten, 1024),
        (read_by_torch, 1024),
        *(
            pytest.param(make, 2048, marks=pytest.mark.slow)
            for make in (deep, rewritten, temporary, read_by_torch, read_by_safetensors)
        ),
    ],
)
def test_a_whole_model_is_never_in_memory(
    make: Callable[[int, Path], nn.Module], side: int, tmp_path: Path, run_ranks: Callable[..., Any]
) -> None:
    """Of 320 MiB (80 with the smaller side) no more than the largest tensor, what is let in at a time and what is held;
    running it, too."""
    weights, largest = tmp_path / "weights.pt", 16 * side**2
    if make in (read_by_torch, read_by_safetensors):
        from safetensors.torch import save_file

        torch.save(deep(side, weights).state_dict(), weights)
        save_file(torch.load(weights), weights.with_suffix(".safetensors"))

    def body(context: Any) -> list[int]:
        mapped = MappedTensors(resident_bytes=largest // 2)
        nn.Linear(300, 300)(torch.ones(2, 300))  # what the first use of torch takes
        with mapped.building():
            torch.randn(300, 300)
        peaks = []
        reset_peak()
        before = resident_peak_bytes()
        with mapped.building():
            model = built(lambda: make(side, weights))
        peaks.append(resident_peak_bytes() - before)
        assert mapped.in_memory_bytes(model.parameters()) == 0
        parameters = list(model.parameters())
        reset_peak()
        with mapped.running(), torch.no_grad():
            for p in parameters:
                p.sum()
        peaks.append(resident_peak_bytes() - before)
        mapped.bring_in(parameters[:4])
        parameters.clear()
        del model, p
        reset_peak()
        peaks.append(resident_peak_bytes() - before)
        return peaks

    build, use, _ = run_ranks(body, 1)[0]
    assert build < 2.8 * largest
    assert use < 1.7 * largest


def test_what_was_not_made_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's memory is numpy's."""
    mapped = MappedTensors()
    with mapped.building():
        model = nn.ParameterList([torch.from_numpy(np.ones((512, 512))), torch.ones(512, 512)])
    assert mapped.in_memory_bytes(model.parameters()) == 512 * 512 * 8


def test_nothing_is_left(nothing_left: Path) -> None:
    """Not even while the tensors are there."""
    mapped = MappedTensors()
    with mapped.building():
        tensor = torch.ones(512, 512)
    assert mapped.holds(tensor)
    assert not list(nothing_left.iterdir())


def test_a_folder_in_memory_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is taken, and if there is none the error says what to do."""
    monkeypatch.setattr(
        disk_init,
        "_file_system",
        lambda folder: "ext4" if folder == Path("/var/tmp") else "tmpfs",
    )
    assert MappedTensors().folder == Path("/var/tmp")
    monkeypatch.setattr(disk_init, "_file_system", lambda folder: "tmpfs")
    with pytest.raises(NoDiskForTensors, match="are in memory or can't be written to; TMPDIR"):
        MappedTensors()
    assert disk_init._file_system(Path("/proc/self")) == "tmpfs"


def test_a_full_disk_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a signal when the tensor is written."""

    def full(descriptor: int, start: int, count: int) -> None:
        raise OSError(28, "No space left on device")

    mapped = MappedTensors()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"), mapped.building():
        torch.ones(512, 512)
