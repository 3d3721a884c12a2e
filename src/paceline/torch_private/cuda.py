"""CUDA in forks.

Private names: `torch.cuda._is_in_bad_fork`. Tested with torch 2.11 and 2.13, without GPUs.

If torch drops it, a fork can try `torch.cuda.init` instead, which starts CUDA where it works.
"""

import torch


def is_in_bad_fork() -> bool:
    """Whether this process is a fork of one that had used CUDA, which is of no use in it then."""
    return torch.cuda._is_in_bad_fork()
