"""`torch_private/fake_tensors.py`: tensors without values, and what they refuse."""

from __future__ import annotations

import logging

import pytest
import torch

from paceline.torch_private.fake_tensors import (
    LOGGER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    detect_fake_mode,
    is_fake,
)


def test_fake_tensors_have_shapes_and_devices_alone():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = torch.ones(10**6, 10**6, device="cuda")
        y = (x.sum(0) + torch.ones(1, device="cuda")).to(torch.bfloat16)
    assert isinstance(y, FakeTensor) and is_fake(y) and not is_fake(torch.ones(1))
    assert (y.shape, y.device.type, y.dtype) == ((10**6,), "cuda", torch.bfloat16)
    assert detect_fake_mode([y]) is mode and detect_fake_mode([torch.ones(1)]) is None
    assert detect_fake_mode() is None
    with mode:
        assert detect_fake_mode() is mode


def test_real_tensors_become_fake_ones():
    mode, weight = FakeTensorMode(), torch.nn.Parameter(torch.ones(2, 3))
    fake = mode.from_tensor(weight)
    assert isinstance(fake, FakeTensor) and isinstance(fake, torch.nn.Parameter)
    assert fake.shape == (2, 3) and fake.requires_grad


def test_values_are_refused_by_these_exceptions():
    with FakeTensorMode() as mode:
        x = torch.ones(3)
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
        with pytest.raises(DynamicOutputShapeException):
            x.nonzero()
    assert mode.shape_env is None


def test_real_tensors_are_refused_unless_allowed():
    with FakeTensorMode(), pytest.raises(Exception, match="convert all Tensors to FakeTensors"):
        torch.ops.aten.add.Tensor(torch.ones(1), REAL)


REAL = torch.ones(1)


def test_a_failed_operator_is_told_to_the_logger(caplog: pytest.LogCaptureFixture):
    with (
        caplog.at_level(logging.DEBUG, logger=LOGGER.name),
        FakeTensorMode(),
        pytest.raises(RuntimeError),
    ):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert {record.name for record in caplog.records} <= {LOGGER.name}
    assert LOGGER.name == "torch._subclasses.fake_tensor"
