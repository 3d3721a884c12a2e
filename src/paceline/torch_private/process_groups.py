"""Process groups that are made without `init_process_group`.

Private names: `ProcessGroupGloo._Options`, `_devices` and `_timeout` of options,
`ProcessGroup._set_default_backend`, `ProcessGroup._register_backend`. Tested with torch 2.11 and
2.13, without GPUs.

If torch changes `_register_backend`, CPU ranks can exchange their messages over gloo alone.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def gloo_on_loopback(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group on this host's loopback interface."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return an NCCL group."""
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, size, options)


def send_over(group: Any, gloo: dist.ProcessGroupGloo) -> None:
    """Let a group send the messages of CPU tensors over gloo."""
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
