"""Linear layers that multiply in float8, by torchao."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from paceline.base.errors import JobError, with_extra
from paceline.torch_private.modules import has_hooks

MULTIPLE = 16  # of a layer's sides; torchao's rule for float8 products
_NATIVE = (8, 9)  # NVIDIA's first architecture with float8 products


def in_float8(model: nn.Module) -> nn.Module:
    """Replace a model's linear layers by torchao's float8 layers, in place. Parameters and their
    names stay the same.

    Each row has its own scale (torchao's recipe rowwise_with_gw_hp). One scale for a whole tensor,
    which is torchao's default, would depend on the samples that a rank has. float8 in the gradient
    of a weight would depend on them too, so that gradient is computed in bf16. Devices without
    float8 products emulate them.

    Raises:
        JobError: torchao is not installed, or no layer fits.
    """
    layer = _layer()
    from torchao.float8.float8_linear_utils import swap_linear_layers

    reasons = left_in_bf16(model)
    if not any(
        isinstance(module, nn.Linear) and path not in reasons
        for path, module in model.named_modules()
    ):
        why = "; ".join(f"'{path}' {reason}" for path, reason in reasons.items()) or "it has none"
        raise JobError(
            f'precision="fp8" and no linear layer of the model can multiply in float8: {why}',
            hint=f'sides that are multiples of {MULTIPLE}, or precision="bf16"',
        )
    return swap_linear_layers(
        model, layer.from_float, module_filter_fn=lambda module, path: path not in reasons
    )


def left_in_bf16(model: nn.Module) -> dict[str, str]:
    """Return the linear layers that don't multiply in float8: the reason by name."""
    return {
        path: reason
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and (reason := _reason(module)) is not None
    }


def _reason(module: nn.Linear) -> str | None:
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return f"has sides of {module.in_features} and {module.out_features}, not multiples of {MULTIPLE}"
    if type(module) is not nn.Linear and not type(module).__module__.startswith(
        ("torchao.", __name__)
    ):
        return f"is a {type(module).__name__}"
    if has_hooks(module) and type(module) is nn.Linear:  # they would be lost
        return "has hooks"
    return None


@cache
def _layer() -> Any:
    try:
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    except ImportError as error:
        raise JobError(
            f'precision="fp8" needs torchao, which can\'t be imported ({error})',
            hint=with_extra("fp8"),
        ) from error

    class Float8Rows(Float8Linear):
        """torchao's layer, except for autocast and emulation: torchao has them on GPUs and for all
        devices alike.
        """

        @classmethod
        def from_float(cls, module: nn.Linear) -> Any:
            return super().from_float(module, config=_settings(True)[0])

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            kind = input.device.type
            if torch.is_autocast_enabled(kind):
                input = input.to(torch.get_autocast_dtype(kind))
            config, products = _settings_on(input.device)
            output = matmul_with_hp_or_float8_args.apply(input, self.weight.t(), products, config)
            return output if self.bias is None else output + self.bias.to(output.dtype)

    return Float8Rows


@torch.compiler.assume_constant_result  # torch.compile can't trace questions to the driver
def _settings_on(device: torch.device) -> tuple[Any, Any]:
    return _settings(_is_native(device))


@cache
def _settings(is_native: bool) -> tuple[Any, Any]:
    """Return torchao's configuration of a layer, and of its products."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = replace(
        Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=not is_native
    )
    with torch.device("meta"):
        return config, Float8Linear(MULTIPLE, MULTIPLE, bias=False, config=config).linear_mm_config


@cache
def _is_native(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and (torch.cuda.get_device_capability(device) >= _NATIVE)
    )
