"""What a module holds itself, and how torch converts and calls it.

Private names: `Module._parameters`, `Module._buffers`, `Module._modules`,
`Module._non_persistent_buffers_set`, `Module._forward_hooks`, `Module._forward_pre_hooks`,
`Module._backward_hooks`, `Module._backward_pre_hooks`,
`torch.nn.modules.module._global_backward_hooks`,
`torch.nn.modules.module._global_backward_pre_hooks`, `Module._compiled_call_impl`, `Module._apply`,
`torch.nn.modules.batchnorm._BatchNorm`, `torch.nn.modules.batchnorm._NormBase`,
`torch.nn.functional._verify_batch_size`. Tested with torch 2.11 and 2.13.

Many libraries write to the dicts, so that torch hardly changes them. If it does,
`named_parameters(recurse=False)` and its like read them, and `register_parameter` writes. Of the
others, a change shows in that hooks are lost (`HOOKS`), in that conversions of fake models fail
(`replaced_apply`), or in that a rank with one sample is refused (`replace_size_check`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as module_of_torch
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as BatchOrInstanceNorm

CONTENTS = ("_modules", "_parameters", "_buffers")
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)

# The dicts in which a module keeps what is its own, by name; some values are None. Callers may
# change the dicts.
own_modules, own_parameters, own_buffers = map(attrgetter, CONTENTS)


def own_tensors(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return a module's own parameters and buffers, each with its dict and name."""
    return [
        (holder, name, tensor)
        for holder in (own_parameters(module), own_buffers(module))
        for name, tensor in holder.items()
        if tensor is not None
    ]


def set_own_modules(module: nn.Module, modules: dict[str, nn.Module | None]) -> None:
    """Put another dict into the place of `own_modules`."""
    vars(module)["_modules"] = modules


def share_contents(module: nn.Module, other: nn.Module) -> None:
    """Let a module hold what another one holds, now and whatever is put into either of them."""
    for name in (*CONTENTS, "_non_persistent_buffers_set"):
        vars(module)[name] = vars(other)[name]


def has_hooks(module: nn.Module, kinds: tuple[str, ...] = HOOKS) -> bool:
    """Whether hooks of some of these kinds are registered on a module."""
    return any(getattr(module, kind) for kind in kinds)


def has_global_backward_hooks() -> bool:
    """Whether backward hooks are registered for all modules."""
    return bool(
        module_of_torch._global_backward_hooks or module_of_torch._global_backward_pre_hooks
    )


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `Module.compile` was called, after which calls do not run the module's code."""
    return module._compiled_call_impl is not None


def convert_module(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Convert a module's parameters and buffers, as `Module.to` does, in the module's own way."""
    module._apply(convert)


@contextmanager
def replaced_apply(apply: Callable[..., nn.Module]) -> Iterator[None]:
    """Let `apply(plain, module, convert, recurse=True)` convert modules in `Module.to` and its like.

    plain: torch's own conversion, with the same arguments.
    """
    plain = nn.Module._apply
    nn.Module._apply = lambda *args, **options: apply(plain, *args, **options)  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]


def replace_size_check(check: Callable[[Callable[..., None], Any], None]) -> None:
    """Let `check(plain, size)` run in the place of batch norm's check of its input's size.

    plain: torch's own check, which refuses one value per channel.
    """
    plain = functional._verify_batch_size  # type: ignore[attr-defined]
    functional._verify_batch_size = lambda size: check(plain, size)  # type: ignore[attr-defined]
