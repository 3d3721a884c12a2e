"""`torch_private/modules.py`: what modules hold, and how they are converted and called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch_private.modules import (
    BACKWARD_HOOKS,
    CONTENTS,
    FORWARD_HOOKS,
    HOOKS,
    BatchNorm,
    BatchOrInstanceNorm,
    convert_module,
    has_global_backward_hooks,
    has_hooks,
    is_compiled_in_place,
    own_buffers,
    own_modules,
    own_parameters,
    replace_size_check,
    replaced_apply,
    set_own_modules,
    share_contents,
)


def test_modules_keep_what_they_hold_in_dicts():
    """What is written there is what the module computes with."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    linear, norm = model
    assert own_parameters(model) == {} and [*own_modules(model)] == ["0", "1"]
    assert own_parameters(linear) == dict(linear.named_parameters(recurse=False))
    assert own_buffers(norm) == dict(norm.named_buffers(recurse=False))
    assert own_parameters(nn.Linear(2, 2, bias=False))["bias"] is None
    own_parameters(linear)["weight"] = weight = nn.Parameter(torch.zeros(2, 2))
    own_buffers(norm)["running_mean"] = mean = torch.ones(2)
    assert linear.weight is weight and norm.running_mean is mean
    assert {*CONTENTS, *HOOKS} <= vars(linear).keys()
    set_own_modules(model, {"0": linear})
    assert len(model) == 1 and [*model.children()] == [linear]


def test_modules_share_what_they_hold():
    """What is put into the one is in the other, and saved like there."""
    one, other = nn.Module(), nn.Sequential(nn.Linear(2, 2))
    share_contents(one, other)
    one.register_buffer("count", torch.zeros(1), persistent=False)
    other.weight = nn.Parameter(torch.zeros(2))
    other[0] = nn.Linear(2, 2, bias=False)
    assert dict(one.named_parameters()) == dict(other.named_parameters())
    assert dict(other.named_buffers()) == {"count": one.count}
    assert one.state_dict().keys() == other.state_dict().keys() == {"weight", "0.weight"}


@pytest.mark.parametrize(
    ("register", "kinds"),
    [
        ("register_forward_hook", FORWARD_HOOKS),
        ("register_forward_pre_hook", FORWARD_HOOKS),
        ("register_full_backward_hook", BACKWARD_HOOKS),
        ("register_full_backward_pre_hook", BACKWARD_HOOKS),
    ],
)
def test_hooks_are_found(register: str, kinds: tuple[str, ...]):
    module = nn.Linear(2, 2)
    assert not has_hooks(module)
    handle = getattr(module, register)(lambda *args: None)
    others = BACKWARD_HOOKS if kinds is FORWARD_HOOKS else FORWARD_HOOKS
    assert has_hooks(module) and has_hooks(module, kinds) and not has_hooks(module, others)
    handle.remove()
    assert not has_hooks(module)


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ],
)
def test_backward_hooks_of_all_modules_are_found(register: Callable[..., Any]):
    assert not has_global_backward_hooks()
    handle = register(lambda *args: None)
    assert has_global_backward_hooks()
    handle.remove()
    assert not has_global_backward_hooks()


def test_a_module_that_is_compiled_in_place_is_known():
    module = nn.Linear(2, 2)
    assert not is_compiled_in_place(module)
    module.compile(backend="eager")
    assert is_compiled_in_place(module)


def test_norms_are_of_these_classes():
    norms = nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2)
    assert [isinstance(norm, BatchNorm) for norm in norms] == [True, True, True, False]
    assert all(isinstance(norm, BatchOrInstanceNorm) for norm in norms)
    assert not isinstance(nn.LayerNorm(2), BatchOrInstanceNorm)


def test_conversions_can_be_replaced():
    """Those of each module that is reached, by any of the functions that convert."""
    model, seen = nn.Sequential(nn.Linear(2, 2)), []

    def apply(
        plain: Callable[..., Any], module: nn.Module, convert: Any, recurse: bool = True
    ) -> Any:
        seen.append(type(module))
        return plain(module, convert, recurse)

    with replaced_apply(apply):
        for convert in (model.double, lambda: model.to(torch.float32), model.cpu):
            seen.clear()
            assert convert() is model
            assert seen == [nn.Sequential, nn.Linear]
        convert_module(model[0], lambda tensor: tensor.double())
    assert model[0].weight.dtype == torch.float64 and seen[-1] is nn.Linear
    seen.clear()
    model.float()
    assert not seen and model[0].weight.dtype == torch.float32


def test_batch_norm_asks_whether_it_has_enough_values(monkeypatch: pytest.MonkeyPatch):
    """A rank with one sample of a batch would be refused."""
    check = nn.functional._verify_batch_size
    monkeypatch.setattr(nn.functional, "_verify_batch_size", check)  # put back at the end
    norm, x = nn.BatchNorm1d(2), torch.ones(1, 2)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(x)
    sizes: list[Any] = []
    replace_size_check(lambda plain, size: sizes.append(tuple(size)))
    norm(x)
    assert sizes == [(1, 2)]
    replace_size_check(lambda plain, size: check(size))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(x)
