"""Every random operator of torch has a mean, is told to drop nothing, or is named where plans are compared.

GPUs reach operators that no CPU test calls, so torch's own list is gone through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.model import randomness
from paceline.model.randomness import WithoutRandomness

# They have no mean, or none that an element could hold: `verify` names them, and draws them.
NAMED = {
    "_fill_mem_eff_dropout_mask_",
    "_fused_dropout",
    "cauchy_",
    "multinomial",
    "random",
    "random_",
}
# Made by torch's compilers out of operators that write in place; a model is not compiled where plans are compared.
COMPILED = {
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "normal_functional",
    "rrelu_with_noise_functional",
    "uniform",
}
# torch takes them apart into others before any device sees them.
COMPOSED = {
    "_nested_tensor_softmax_with_shape",
    "alpha_dropout",
    "alpha_dropout_",
    "dropout",
    "dropout_",
    "feature_alpha_dropout",
    "feature_alpha_dropout_",
    "feature_dropout",
    "feature_dropout_",
    "rrelu",
    "rrelu_",
}
# They draw through operators that are in this list themselves.
UNTAGGED = {"_no_grad_normal_", "_no_grad_uniform_"}


def operators() -> Iterator[tuple[str, Any]]:
    """torch's own, by name."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        packet = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
        overload = (
            getattr(packet, schema.overload_name or "default", None) if packet is not None else None
        )
        if isinstance(overload, torch._ops.OpOverload):
            yield name, overload


def unknown(named_operators: Iterator[tuple[str, Any]]) -> set[str]:
    """Random operators of which nobody has decided what becomes of them."""
    known = (
        NAMED | COMPILED | COMPOSED | UNTAGGED | set(randomness._MEANS) | set(randomness._HARMLESS)
    )
    names = set()
    for name, operator in named_operators:
        arguments = {argument.name for argument in operator._schema.arguments}
        is_random = torch.Tag.nondeterministic_seeded in operator.tags or "generator" in arguments
        if is_random and name not in known and randomness._drop_argument(operator) is None:
            names.add(name)
    return names


def test_no_random_operator_is_overlooked():
    assert unknown(operators()) == set()


def test_an_operator_without_a_mean_is_found(monkeypatch: pytest.MonkeyPatch):
    """A GPU's dropout was one: no CPU calls it."""
    monkeypatch.delitem(randomness._MEANS, "native_dropout")
    assert unknown(operators()) == {"native_dropout"}


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "bernoulli": lambda: torch.bernoulli(torch.full((20_000,), 0.3)),
    "bernoulli_": lambda: torch.empty(20_000).bernoulli_(0.3),
    "binomial": lambda: torch.binomial(torch.full((20_000,), 5.0), torch.full((20_000,), 0.3)),
    "dirichlet": lambda: torch._sample_dirichlet(torch.tensor([1.0, 2.0, 3.0]).expand(20_000, 3))[
        :, 1
    ],
    "exponential_": lambda: torch.empty(20_000).exponential_(2.0),
    "gamma": lambda: torch._standard_gamma(torch.full((20_000,), 3.0)),
    "geometric_": lambda: torch.empty(20_000).geometric_(0.3),
    "log_normal_": lambda: torch.empty(20_000).log_normal_(0.5, 0.25),
    "normal of tensors": lambda: torch.normal(
        torch.full((20_000,), 2.0), torch.full((20_000,), 0.5)
    ),
    "normal of a mean": lambda: torch.normal(torch.full((20_000,), 2.0), 0.5),
    "normal of a deviation": lambda: torch.normal(2.0, torch.full((20_000,), 0.5)),
    "normal of a size": lambda: torch.normal(2.0, 0.5, (20_000,)),
    "normal_": lambda: torch.empty(20_000).normal_(1.0, 0.5),
    "poisson": lambda: torch.poisson(torch.full((20_000,), 3.0)),
    "rand": lambda: torch.rand(20_000),
    "rand_like": lambda: torch.rand_like(torch.empty(20_000)),
    "randint": lambda: torch.randint(3, 8, (20_000,)).float() + 0.5,
    "randn": lambda: torch.randn(20_000),
    "randn_like": lambda: torch.randn_like(torch.empty(20_000)),
    "rrelu": lambda: F.rrelu(torch.full((20_000,), -1.0), 0.1, 0.5, training=True),
    "rrelu_": lambda: F.rrelu(torch.full((20_000,), -1.0), 0.1, 0.5, training=True, inplace=True),
    "uniform_": lambda: torch.empty(20_000).uniform_(1.0, 2.0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_mean_is_that_of_the_draws(name: str):
    torch.manual_seed(0)
    drawn = DRAWS[name]()
    with WithoutRandomness() as random:
        mean = DRAWS[name]()

    assert random.off and not random.left_on
    assert mean.dtype == drawn.dtype and mean.shape == drawn.shape and mean.unique().numel() == 1
    assert (
        float(drawn.mean()) == pytest.approx(float(mean[0]), abs=0.05)
        and drawn.unique().numel() > 1
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_leaky_slope_goes_back_as_it_went_forth(dtype: torch.dtype):
    """The gradient of a randomised ReLU is its mean slope, too, in the dtype of its input."""
    x = torch.tensor([-2.0, 3.0], requires_grad=True, dtype=dtype)
    with WithoutRandomness():
        y = F.rrelu(x, 0.1, 0.5, training=True)
        y.sum().backward()
    assert y.dtype == dtype and y.tolist() == pytest.approx([-0.6, 3.0], rel=0.01)
    assert x.grad is not None and x.grad.tolist() == pytest.approx([0.3, 1.0], rel=0.01)


def test_what_has_no_mean_is_named():
    with WithoutRandomness() as random:
        torch.multinomial(torch.ones(4), 1)
    assert random.left_on == {"multinomial"}
