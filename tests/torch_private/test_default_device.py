"""`torch_private/default_device.py`: where tensors are made that name no device."""

from __future__ import annotations

from typing import Any

import torch

from paceline.torch_private.default_device import DeviceContext, device_constructors


def test_constructors_get_the_device():
    with DeviceContext(torch.device("meta")):
        assert torch.ones(1).device.type == torch.tensor([1]).device.type == "meta"
        assert torch.ones(1, device="cpu").device.type == "cpu"
    assert torch.ones(1).device.type == "cpu"


def test_a_subclass_sees_each_constructor():
    seen: list[Any] = []

    class Watched(DeviceContext):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    with Watched(torch.device("meta")):
        assert torch.randn(2).device.type == torch.randperm(3).device.type == "meta"
    assert [func for func in seen if func in device_constructors()] == [torch.randn, torch.randperm]


def test_constructors_are_those_that_take_a_device():
    constructors = device_constructors()
    assert {torch.randn, torch.rand, torch.randint, torch.randperm, torch.zeros} <= constructors
    assert torch.bernoulli not in constructors and torch.rand_like not in constructors
