"""What a profile says, against figures counted by hand."""

import random
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import IterableDataset, TensorDataset

from benchmarks.models.flops import backward_flops, forward_flops
from paceline.base.errors import JobError
from paceline.base.fork import in_a_fork
from paceline.job import Job
from paceline.model.cost import recorder
from paceline.model.cost.trace import profile_job

WIDTH, BATCH, FLOAT = 16, 8, 4


def make_job(model, *, inputs=None, targets=None, loss=F.mse_loss, **fields) -> Job:
    inputs = torch.ones(32, WIDTH) if inputs is None else inputs
    targets = torch.ones(32, WIDTH) if targets is None else targets
    fields = {
        "optimizer": lambda named: torch.optim.AdamW(named),
        "steps": 1,
        "batch": BATCH,
        **fields,
    }
    return Job(model=model, data=TensorDataset(inputs, targets), loss=loss, **fields)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def test_flops_and_parameters_are_those_of_the_layers():
    """Two flops a weight and sample forward; backward twice that, but for the first layer's input."""
    profile = profile_job(make_job(two_layers))
    weights = 4 * WIDTH * WIDTH

    assert profile.notes == ()
    assert forward_flops(profile) == 2 * 2 * weights
    assert backward_flops(profile) == 2 * weights + 4 * weights
    assert [p.name for p in profile.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert profile.units == ("0", "2")
    assert profile.parameter_bytes == FLOAT * (2 * weights + 5 * WIDTH)


def test_a_float64_job_is_profiled_on_fake_tensors():
    """Its weights take twice as many bytes; one that two layers share is counted once."""

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        model[2].weight = model[0].weight
        return model

    narrow, wide = (
        profile_job(make_job(tied, precision=precision)) for precision in ("float32", "float64")
    )

    assert wide.notes == ()
    assert (
        wide.parameter_bytes
        == 2 * narrow.parameter_bytes
        == 2 * FLOAT * (WIDTH * WIDTH + 2 * WIDTH)
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x[:, None])[0][:, 0]


def test_recurrent_layers_of_a_float64_job_are_profiled_on_fake_tensors():
    """Their parameters are listed a second time."""
    profile = profile_job(make_job(Recurrent, precision="float64"))

    assert profile.notes == ()


def test_kept_activations_are_what_backward_needs():
    """Each layer's output is alive at the end of forward; the ReLU keeps its own output and no second copy."""
    kept = {
        segment.unit: segment.kept_bytes for segment in profile_job(make_job(two_layers)).segments
    }

    assert kept["0"].at(BATCH) == BATCH * 4 * WIDTH * FLOAT
    assert kept["2"].at(BATCH) == BATCH * WIDTH * FLOAT


def test_every_gradient_is_completed_once_in_its_layer():
    """Backward makes a layer's gradients in the layer's own segment."""
    made = {
        segment.unit: set(segment.gradients)
        for segment in profile_job(make_job(two_layers)).segments
    }

    assert made["0"] == {"0.weight", "0.bias"}
    assert made["2"] == {"2.weight", "2.bias"}


def test_units_that_follow_each_other_are_told_apart():
    """Nothing lies between two layers, forward or backward."""
    chain = profile_job(
        make_job(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
    )
    product = 2 * WIDTH * WIDTH

    assert {s.unit: s.backward.flops.per_sample for s in chain.segments if s.unit} == {
        "0": product,
        "1": 2 * product,
        "2": 2 * product,
    }


def test_gradients_are_no_activations():
    """A layer's backward holds its weight's gradient, which is counted apart."""
    profile = profile_job(
        make_job(lambda: nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH)))
    )

    assert all(
        segment.backward_peak_bytes.at(2) < 64 * WIDTH * WIDTH * FLOAT
        for segment in profile.segments
    )


def test_the_update_counted_is_not_the_first():
    """Momentum: the buffer times 0.9 (2 transfers), plus the gradient (3), and the parameter's own sum (3)."""
    profile = profile_job(
        make_job(two_layers, optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9))
    )

    assert profile.update.moved_bytes.fixed == 8 * profile.parameter_bytes


class Adapted(nn.Module):
    """A frozen layer and what is trained beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x):
        seen.append(isinstance(x, FakeTensor))
        return self.base(x) + self.up(self.down(x))


seen: list[bool] = []


def test_adapters_on_a_base_that_is_there():
    """It is not run for real and stays as it is; its weights have no gradient, no state and no product for them."""
    bases = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    kept = [base.weight.clone() for base in bases]
    profile = profile_job(make_job(lambda: nn.Sequential(*map(Adapted, bases))))

    assert profile.notes == () and all(seen)
    assert all(torch.equal(base.weight, weight) for base, weight in zip(bases, kept, strict=True))
    frozen = [p for p in profile.parameters if ".base." in p.name]
    assert len(frozen) == 6 and not any(
        p.trainable or p.gradient_bytes or p.state_bytes for p in frozen
    )
    adapter, layer = 2 * WIDTH * 4, 2 * WIDTH * WIDTH
    assert [s.backward.flops.per_sample for s in profile.segments if s.unit] == [
        3 * adapter,
        4 * adapter + layer,
        4 * adapter + layer,
    ]  # nothing goes back to the first layer's input


class Halves(nn.Module):
    """Half of a sample, then the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH // 2, WIDTH, batch_first=True)

    def forward(self, x):
        return self.lstm(x.view(len(x), 2, WIDTH // 2))[0][:, -1]


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_recurrent_layers_multiply(precision: str):
    """Four gates at each of two places, of the input and of the state; gradients of weights take as much again."""
    profile = profile_job(replace(make_job(Halves), precision=precision))
    flops = 2 * 2 * 4 * WIDTH * (WIDTH // 2 + WIDTH)

    assert forward_flops(profile) == flops
    assert (
        flops < backward_flops(profile) <= 2 * flops
    )  # inputs and first states may need no gradients
    products = [product for segment in profile.segments for product in segment.forward.products]
    assert sum(product.flops for product in products) == flops


def test_recurrent_layers_keep_a_workspace():
    """The kernel's own memory is in no fake tensor: 8 MiB of 64 steps, 8 samples and 256 values, as measured."""
    job = make_job(
        lambda: Steps(nn.LSTM(256, 256, batch_first=True)),
        inputs=torch.ones(8, 64, 256),
        targets=torch.ones(8, 64, 256),
    )

    kept = sum(segment.kept_bytes.at(8) for segment in profile_job(job).segments)
    assert (
        8_220_672 * 0.98 < kept < 8_220_672 + 4 * 8 * 64 * 256 * FLOAT
    )  # and its output, and what the loss keeps


class Steps(nn.Module):
    """The outputs of a recurrent layer without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def test_the_update_is_run_once():
    """It is the same for any number of samples, and under autocast: a profile in another precision takes it over."""
    built = []

    def optimizer(named):
        built.append(True)
        return torch.optim.AdamW(named)

    job = make_job(two_layers, optimizer=optimizer)
    profile = profile_job(job)
    assert len(built) == 1
    other = profile_job(replace(job, precision="bf16"), like=profile)
    assert len(built) == 1

    alone = profile_job(replace(job, precision="bf16"))
    assert (other.update, other.update_peak_bytes, other.parameters, other.segments) == (
        alone.update,
        alone.update_peak_bytes,
        alone.parameters,
        alone.segments,
    )


@pytest.mark.parametrize(
    "kernel",
    ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"],
)
def test_heads_that_share_keys_are_counted_as_if_each_had_its_own(kernel: str):
    """On whichever device: the kernels read them so."""
    query, shared, full = (torch.empty(2, heads, 5, 4, device="meta") for heads in (6, 2, 6))
    for name, first in (
        (f"_scaled_dot_product_{kernel}", ()),
        (f"_scaled_dot_product_{kernel}_backward", (query,)),
    ):
        formula = recorder._FORMULAS[getattr(torch.ops.aten, name)]
        products = 5 if first else 2
        assert formula(*first, query, shared, shared, out_val=None) == formula(
            *first, query, full, full, out_val=None
        )
        assert (
            formula(*first, query, shared, shared, out_val=None) == products * 2 * 2 * 6 * 5 * 5 * 4
        )


def test_attention_on_the_cpu_is_counted():
    """Its two products of 2 T T D flops a head, which torch's own counter takes for free."""
    heads, places, width = 2, 8, 4

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return F.scaled_dot_product_attention(x * self.scale, x, x)

    shape = (32, heads, places, width)
    profile = profile_job(make_job(Attention, inputs=torch.ones(shape), targets=torch.ones(shape)))

    assert forward_flops(profile) == heads * 2 * 2 * places * places * width


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        (lambda named: torch.optim.SGD(named, lr=0.1), 0),
        (lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9), 1),
        (lambda named: torch.optim.AdamW(named), 2),
    ],
)
def test_optimizer_state_is_that_of_the_jobs_optimizer(optimizer, factor):
    """No state for plain SGD, one copy for momentum, two (and a step count) for Adam."""
    profile = profile_job(make_job(two_layers, optimizer=optimizer))

    assert profile.notes == ()
    for parameter in profile.parameters:
        assert 0 <= parameter.state_bytes - factor * parameter.num_bytes <= 8


def test_frozen_parameters_have_neither_gradient_nor_state():
    """Only what is trained is counted."""

    def half_frozen():
        model = two_layers()
        model[0].requires_grad_(False)
        return model

    first, *_, last = profile_job(make_job(half_frozen)).parameters

    assert (first.trainable, first.gradient_bytes, first.state_bytes) == (False, 0, 0)
    assert last.gradient_bytes == last.num_bytes


def test_bf16_halves_what_products_keep():
    """Under autocast a linear layer's output is bfloat16, its weight stays float32."""
    wide, half = (
        profile_job(make_job(two_layers, precision=precision)) for precision in ("float32", "bf16")
    )

    assert half.segments[0].output_bytes.at(BATCH) == wide.segments[0].output_bytes.at(BATCH) / 2
    assert half.parameter_bytes == wide.parameter_bytes


def test_a_large_model_costs_no_memory():
    """A layer of 64 GiB is profiled in a process that is allowed 16 GiB of address space above its own."""
    side = 2**17
    job = make_job(
        lambda: nn.Linear(side, side, bias=False),
        batch=2,
        inputs=torch.ones(2, side),
        targets=torch.ones(2, side),
    )

    def limited() -> tuple[bool, int]:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 16 * 2**30,) * 2)
        profile = profile_job(job)
        return profile.notes == (), profile.parameter_bytes

    assert in_a_fork(limited) == (True, 64 * 2**30)


def test_random_generators_are_left_alone():
    """Profiling draws numbers (dropout, initial weights, the data's own) and puts everything back."""

    class Noisy(TensorDataset):
        def __getitem__(self, index):
            random.random(), np.random.rand(), torch.rand(1)
            return super().__getitem__(index)

    job = make_job(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()))
    job = replace(job, data=Noisy(*job.data.tensors))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    profile_job(job)

    assert (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    ) == before


def test_a_module_made_outside_keeps_no_trace():
    """A job that hands out one and the same module finds it without gradients, hooks or changed buffers."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    profile_job(make_job(lambda: model))

    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


class ByValue(nn.Linear):
    """Looks at a value: fake tensors have none."""

    def forward(self, x):
        return super().forward(x if float(x.sum()) > 0 else -x)


def test_a_model_that_needs_values_is_run_for_real():
    """The figures are those of the plain layer, and the notes say how they came about."""
    rough = profile_job(make_job(lambda: ByValue(WIDTH, WIDTH)))
    plain = profile_job(make_job(lambda: nn.Linear(WIDTH, WIDTH)))

    assert rough.notes
    assert "fake" in rough.notes[0]
    assert forward_flops(rough) == forward_flops(plain)
    assert rough.parameters == plain.parameters


def test_a_model_that_fails_is_priced_by_its_parameters():
    """What is wrong with it comes to light when it is trained."""
    profile = profile_job(make_job(lambda: nn.Linear(WIDTH + 1, WIDTH)))

    assert len(profile.notes) == 3
    assert forward_flops(profile) == 2 * (WIDTH + 2) * WIDTH


def test_an_iterator_is_not_read():
    """Samples that can be read only once are left to the training."""

    class Once(IterableDataset):
        read = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.read += 1
            return torch.ones(WIDTH), torch.ones(WIDTH)

    data = Once()
    profile = profile_job(replace(make_job(two_layers), data=data))

    assert data.read == 0
    assert profile.notes


def test_a_model_that_is_no_module_is_refused():
    """The message says what came instead."""
    with pytest.raises(JobError, match="model returned int"):
        profile_job(make_job(lambda: 3))
