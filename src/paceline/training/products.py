"""Sets how GPUs multiply float32 matrices while a job runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.base.logs import logger
from paceline.job import Job
from paceline.launch.process.context import RankContext


@contextmanager
def float32_products(job: Job, context: RankContext) -> Iterator[None]:
    """Let GPUs compute float32 matrix products and convolutions of cuDNN in TF32 inside the block,
    if precision="tf32".

    With any other precision torch's switches stay unchanged: products in float32, cuDNN's
    convolutions in TF32, unless the job's file sets them otherwise.
    """
    if job.precision != "tf32":
        yield
        return
    if context.device.type != "cuda":
        if context.rank == 0:
            logger.warning(
                'precision="tf32" computes in float32 on a %s device: GPUs alone have TF32',
                context.device.type,
            )
        yield
        return
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:  # the process may run other jobs later
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
