"""An optimizer's step hooks, kernels and the mark that it has stepped, and schedules of schedules.

Private names: `Optimizer._optimizer_step_pre_hooks`, `Optimizer._optimizer_step_post_hooks`,
`Optimizer._opt_called`, `torch.utils._foreach_utils` with `_get_foreach_kernels_supported_devices`
and `_get_fused_kernels_supported_devices`, `LRScheduler._last_lr`, `SequentialLR._schedulers`.
Tested with torch 2.11 and 2.13.

Without `_opt_called`, schedules warn where another rank runs the optimizer: then find what their
`step` looks at. Without the lists of devices, leave the choice of kernels to torch.
"""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils import _foreach_utils as kernels

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
STEPPED = "_opt_called"
LAST_RATES = "_last_lr"  # in a schedule's state


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks are registered on an optimizer's step."""
    return any(getattr(optimizer, hooks) for hooks in STEP_HOOKS)


def mark_stepped(optimizer: Any) -> None:
    """Let schedules find that the optimizer has taken a step, which others have taken for it."""
    optimizer._opt_called = True


def has_both_kernels(device: str) -> bool:
    """Whether torch has foreach and fused kernels for a type of device."""
    return (
        device in kernels._get_foreach_kernels_supported_devices()
        and device in kernels._get_fused_kernels_supported_devices()
    )


def schedules_in(schedule: Any) -> Sequence[Any]:
    """Return the schedules of which a schedule is made; none if it is a single one."""
    return getattr(schedule, "_schedulers", ())
