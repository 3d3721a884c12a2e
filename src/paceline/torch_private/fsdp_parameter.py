"""FSDP2's class of a parameter. Importing this file imports torch.distributed.fsdp.

Private names: `torch.distributed.fsdp._fully_shard._fsdp_param` with `FSDPParam`. Tested with torch
2.11 and 2.13.

`paceline/strategies/shard/gathers.py` overrides three of its methods. If they change, units can be
gathered in one dtype, by FSDP2's `MixedPrecisionPolicy`.
"""

from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
