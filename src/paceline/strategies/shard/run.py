"""Sharded replicas: each rank holds a part of every parameter, its gradient and its optimizer state (FSDP2).

The three stages of ZeRO (Rajbhandari et al. 2020) are three settings of when FSDP2 gathers and reduces:

    zero  parameters between forward and backward   gradients between micro-batches
    1     whole                                     whole, reduced once an update
    2     whole                                     sharded, reduced every micro-batch
    3     sharded, gathered unit by unit            sharded, reduced every micro-batch
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.strategies.units import find_units

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from paceline.plan import Plan
    from paceline.strategies.mesh import Mesh


IMPORTS: tuple[str, ...] = ("torch.distributed.fsdp", "torch.distributed.tensor")


def is_active(plan: Plan) -> bool:
    return plan.axes.shard > 1


def prepare(model: nn.Module, *, plan: Plan, mesh: Mesh) -> Sharding:
    """Shard every unit and what is left at the root along dim 0."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    device = next(model.parameters()).device.type
    along = DeviceMesh.from_group(mesh.group("shard"), device, mesh_dim_names=("shard",))
    resharded = plan.sync.zero == 3
    for unit in find_units(model).values():
        fully_shard(unit, mesh=along, reshard_after_forward=resharded)
    fully_shard(model, mesh=along, reshard_after_forward=resharded)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums: the loss is already divided by the whole window's count.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return Sharding(model, zero=plan.sync.zero)  # type: ignore[arg-type]


class Sharding:
    """Tells FSDP2 before each micro-batch what to keep whole after it."""

    def __init__(self, root: FSDPModule, *, zero: int) -> None:
        self.root, self.zero = root, zero

    def begin(self, *, last: bool) -> None:
        self.root.set_is_last_backward(last)
        self.root.set_reshard_after_backward(last or self.zero == 3)
        self.root.set_requires_gradient_sync(last or self.zero > 1)

    def finish(self) -> None:
        """Nothing is left to wait for: FSDP2 ends its reductions in backward."""
