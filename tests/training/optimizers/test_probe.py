"""What an optimizer's update looks at is found out by steps on stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs.optimizers import (
    ByPosition,
    GlobalNorm,
    Hidden,
    Lamb,
    OwnAverages,
    Shampoo,
    StackedNorm,
    Unshared,
    Wrapped,
)
from torch import nn

from paceline.job.named_optimizers import NamedOptimizers
from paceline.job.own_step import Optimizer
from paceline.training.optimizers import probe
from paceline.training.optimizers.gather import deal_out
from paceline.training.optimizers.parts import groups_of, parts_of
from paceline.training.optimizers.probe import Reach, no_optimizer, observe

ELEMENT, TENSOR, PARAMETERS = Reach.ELEMENT, Reach.TENSOR, Reach.PARAMETERS
# Names and shapes only: nobody may need the memory of the real ones.
PARAMETERS_OF_A_MODEL = {
    name: nn.Parameter(torch.empty(shape, device="meta"))
    for name, shape in {
        "embedding.weight": (50_000, 4096),
        "layers.0.weight": (4096, 11_000),
        "layers.0.bias": (11_000,),
        "layers.1.weight": (11_000, 4096),
        "norm.weight": (4096,),
        "scale": (),
        "row.weight": (1, 512),
    }.items()
}
MATRICES = {"embedding.weight", "layers.0.weight", "layers.1.weight", "row.weight"}


def adamw_by_another_name(named: Any) -> torch.optim.Optimizer:
    return type("Renamed", (torch.optim.AdamW,), {})(named, lr=0.1)


def reach_of(optimizer: Any) -> dict[str, Reach]:
    return dict(observe(optimizer, PARAMETERS_OF_A_MODEL).reach)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "optimizer", [adamw_by_another_name, torch.optim.SGD, torch.optim.NAdam, Unshared, OwnAverages]
)
def test_updates_of_single_elements(optimizer: Any) -> None:
    """An optimizer of any name whose updates look at one element is known as such."""
    assert set(reach_of(optimizer).values()) == {ELEMENT}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("optimizer", [Wrapped, Shampoo])
def test_updates_of_whole_matrices_in_a_mixed_optimizer(optimizer: Any) -> None:
    """Matrices are seen whole, vectors element by element."""
    assert {name for name, reach in reach_of(optimizer).items() if reach is TENSOR} == MATRICES
    assert PARAMETERS not in reach_of(optimizer).values()


def test_norms_of_a_tensor_and_of_all() -> None:
    """A norm of each tensor is told from a norm over all of them."""
    assert {name for name, reach in reach_of(Lamb).items() if reach is TENSOR} == set(
        PARAMETERS_OF_A_MODEL
    ) - {"scale"}
    for optimizer in (GlobalNorm, StackedNorm):
        assert set(reach_of(lambda named, kind=optimizer: kind(named, lr=0.1)).values()) == {
            PARAMETERS
        }


def by_name(rest: Any) -> Any:
    """Muon for matrices and another optimizer for the rest, as a step of one's own has them."""
    specs = {
        "matrices": Optimizer(
            lambda named: torch.optim.Muon(named, lr=0.02), parameters=lambda _, p: p.ndim == 2
        ),
        "rest": Optimizer(rest, parameters=lambda _, p: p.ndim != 2),
    }
    return lambda named: NamedOptimizers.of(specs, list(named), ["model"])


def test_optimizers_by_name_are_known_as_their_members_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch are not tried, and a trial finds the same; where one is not of torch, all are tried."""
    sgd = by_name(lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9))
    expected = {name: TENSOR if name in MATRICES else ELEMENT for name in PARAMETERS_OF_A_MODEL}
    with monkeypatch.context() as patch:
        patch.setattr(probe, "known_reach", lambda optimizer: None)
        assert observe(sgd, PARAMETERS_OF_A_MODEL).reach == expected
    assert reach_of(by_name(Lamb))["norm.weight"] is TENSOR
    monkeypatch.setattr(probe, "_observe", lambda trial: pytest.fail("it is tried"))
    known = observe(sgd, PARAMETERS_OF_A_MODEL)
    assert known.reach == expected and not known.needs_closure


def test_a_weight_that_depends_on_another_weight() -> None:
    """Dependence on values is seen as well as dependence on gradients, and so is one that begins after some steps."""

    class Follows(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            self.count = getattr(self, "count", 0) + 1
            first, *rest = (p for group in self.param_groups for p in group["params"])
            with torch.no_grad():
                if self.count == 5:
                    rest[-1].add_(first.mean() * 0.01)

    reach = reach_of(lambda named: Follows(named, lr=0.1))

    assert reach["row.weight"] is PARAMETERS and reach["layers.0.bias"] is ELEMENT


def test_step_hooks_count() -> None:
    """A hook on torch's own optimizer is a part of its update."""

    def normalise(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.div_(p.grad.norm())

    def normalised(named: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(named, lr=0.1)
        optimizer.register_step_pre_hook(normalise)
        return optimizer

    assert reach_of(normalised)["layers.0.bias"] is TENSOR


def test_the_job_is_not_disturbed() -> None:
    """Random streams and the number of threads are as before."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    threads = torch.get_num_threads()

    observe(Lamb, PARAMETERS_OF_A_MODEL)

    assert torch.equal(torch.rand(2), expected) and torch.get_num_threads() == threads


def test_a_function_that_wants_the_real_shapes() -> None:
    """Small models are tried in full where the job's function doesn't take the stand-ins."""

    def picky(named: Any) -> torch.optim.Optimizer:
        named = dict(named)
        assert named["a"].shape == (30, 20)
        return Lamb(named.items())

    assert observe(picky, {"a": nn.Parameter(torch.zeros(30, 20))}).reach == {"a": TENSOR}


def test_where_state_lies() -> None:
    """Attributes that steps change are found, those that state_dict alone knows too, and hidden ones are told."""
    named = observe(OwnAverages, PARAMETERS_OF_A_MODEL)
    assert named.changing == {"averages", "count"} and not named.unnamed and not named.unkept
    assert not observe(Wrapped, PARAMETERS_OF_A_MODEL).unkept
    by_position = observe(ByPosition, PARAMETERS_OF_A_MODEL)
    assert by_position.through_state_dict and not by_position.unkept
    assert "goes on otherwise" in observe(Hidden, PARAMETERS_OF_A_MODEL).unkept


def test_wrapped_optimizers_are_found_once() -> None:
    """By path, in attributes, lists and dicts; shared groups count once."""
    named = list(nn.Linear(2, 2).named_parameters())

    assert list(parts_of(Wrapped(named)).optimizers) == ["", "muon", "others.0"]
    assert list(parts_of(Unshared(named)).optimizers) == ["", "parts.matrices", "parts.rest"]
    assert len(list(groups_of(Wrapped(named)))) == 2 and len(list(groups_of(Unshared(named)))) == 3


def test_owners_are_balanced_by_size() -> None:
    """No rank holds more than another by more than the largest tensor."""
    sizes = {str(i): size for i, size in enumerate([9, 7, 7, 5, 3, 3, 2, 1, 1])}

    owners = deal_out(sizes, 3)

    owned_sizes = [
        sum(size for name, size in sizes.items() if owners[name] == place) for place in range(3)
    ]
    assert max(owned_sizes) - min(owned_sizes) <= 1


def test_several_optimizers_are_refused_with_a_way_out():
    """The message says what a job takes instead."""
    error = no_optimizer([torch.optim.SGD, torch.optim.AdamW])
    assert str(error).startswith("optimizer returned list and not a torch.optim.Optimizer")
    assert "parameter groups" in str(error)
