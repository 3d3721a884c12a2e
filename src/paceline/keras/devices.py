"""On which device a Keras model computes in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import torch
from keras.src.backend.torch.core import get_device

from paceline.base.errors import UsageError
from paceline.cluster.devices import Device
from paceline.keras.state import variables


def name_of(device: Device) -> str:
    """As torch and Keras have it."""
    return str(device) if device.kind == "cuda" else device.kind


def refuse_other_kinds() -> None:
    """
    Raises:
        UsageError: Keras has its tensors on a device on which no rank computes, such as a Mac's GPU.
    """
    if (kind := torch.device(get_device()).type) not in ("cpu", "cuda"):
        raise UsageError(
            f"Keras has its tensors on {kind!r}, on which ranks don't compute, and forks of a process "
            "that uses it may fail",
            hint="set KERAS_TORCH_DEVICE=cpu before keras is imported",
        )


@contextmanager
def on_device(model: Any, device: str) -> Iterator[None]:
    """While the model is on this device, and Keras makes its tensors there. It goes back afterwards."""
    home = str(torch.empty(0, device=get_device()).device)  # with its index
    gpu = torch.cuda.device(device) if device.startswith("cuda") else nullcontext()
    with gpu, keras.device(torch.device(device).type):  # Keras asks for "cuda", without a number
        _move_model(model, device)
        try:
            yield
        finally:
            _move_model(model, home)


def where(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """While Keras makes its tensors where this one is: on the CPU or this process's GPU."""
    device = "cuda" if tensor.is_cuda else "cpu"
    return nullcontext() if device == str(get_device()) else keras.device(device)


def move(model_variables: Iterable[keras.Variable], device: torch.device) -> None:
    """Bring variables to the device."""
    for variable in model_variables:
        if variable._value.device != device:
            variable._value.data = variable._value.data.to(device)


def _move_model(model: Any, device: str) -> None:
    """The model's parameters and buffers, its metrics and its optimizers' variables."""
    model.to(device)
    move(variables(model), torch.device(device))
