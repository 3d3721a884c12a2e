"""The loop of `handwritten` with FSDP2, as torch's own tutorial has it: a unit is a block with parameters."""

from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.contenders.handwritten import loaded, main
from paceline.model.units import find_units


def sharded(model: nn.Module) -> nn.Module:
    for unit in find_units(model).values():
        fully_shard(unit)
    return fully_shard(model)


if __name__ == "__main__":
    main(loaded, sharded)
