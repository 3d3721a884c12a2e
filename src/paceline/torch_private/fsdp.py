"""FSDP2's groups of parameters.

Private names: `FSDPModule._get_fsdp_state`, `FSDPState._fsdp_param_groups` (2.13),
`FSDPState._fsdp_param_group` (2.11), `FSDPState._root_post_backward_final_callback`,
`FSDPParam._unsharded_param`. The attributes of groups and parameters have no underscore, but their
classes are private, too. Tested with torch 2.11 and 2.13.

Without the final callback, a backward of which nobody knows whether it is the last one must reduce
its gradients, so that each micro-batch sends messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def groups_of(module: FSDPModule) -> list[Any]:
    """Return FSDP2's groups of the module's own parameters.

    In torch 2.11 a module has at most one.
    """
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def end_backward(module: FSDPModule) -> None:
    """Reduce gradients and free gathered weights, as FSDP2 does at the end of a backward."""
    module._get_fsdp_state()._root_post_backward_final_callback()


def was_gathered(parameter: Any) -> bool:
    """Whether a parameter of a group has memory for the gathered tensor."""
    return hasattr(parameter, "_unsharded_param")
