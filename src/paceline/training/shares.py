"""Finds the fewest samples that a rank gets at once, and refuses plans if the model can't be
trained on so few.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from paceline.base.errors import PlanRefused
from paceline.base.streams import kept_streams
from paceline.job import Job
from paceline.job.order import Order
from paceline.model.casts import autocast
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.batch_norm.cost import joins_statistics
from paceline.strategies.plan import Plan
from paceline.torch_private.modules import BatchOrInstanceNorm
from paceline.training.feed import DataShard, example_batch, is_stream
from paceline.training.prepare import build_in_files, build_model


def smallest_cut(order: Order, steps: int, part: DataShard) -> tuple[int, int]:
    """Return the fewest samples of any rank's micro-batch in so many steps, and of any window.

    A rank that gets no samples runs the window's first sample.
    """
    counts = {order.window(0).count, order.fewest(steps)}
    cuts = [
        len(cut)
        for count in counts
        for replica in range(len(part.shares))
        for cut in DataShard(part.shares, replica, part.num_microbatches).cuts(count)
    ]
    return max(1, min(cuts)), min(counts)


def refuse_single_samples(
    job: Job, plan: Plan, shares: tuple[int, ...], device: torch.device
) -> None:
    """Refuse a plan that cuts a window down to single samples, for a model that fails on one, as
    BatchNorm does.

    Raises:
        PlanRefused: it names the smallest micro-batch.
    """
    if is_stream(job.data) or job.total_steps is None or joins_statistics(plan):
        return
    part = DataShard(shares, 0, plan.num_microbatches)
    order = Order.of(job)
    fewest, window = smallest_cut(order, job.total_steps, part)
    if fewest > 1 or window == 1:  # in the second case one device also gets a single sample
        return
    with kept_streams():
        # The whole model may be too large for a device.
        holds_parts = ActivePlan(plan).holds_parts
        run_device = torch.device("cpu") if holds_parts else device
        mapped, model = (
            build_in_files(job, run_device) if holds_parts else (None, build_model(job, run_device))
        )
        if not any(isinstance(module, BatchOrInstanceNorm) for module in model.modules()):
            return
        batch = example_batch(job, 1).to(run_device, job.input_dtype)
        try:
            with (
                torch.no_grad(),
                autocast(job, run_device),
                mapped.running() if mapped is not None else nullcontext(),
            ):
                batch.call(model.train())
        except Exception as error:
            if not isinstance(error, ValueError) or "more than 1" not in str(error):
                return  # another failure shows in the first step, or concerns only this trial
            raise PlanRefused(
                f"'{plan}' cuts a window of {window} samples into micro-batches of which the smallest has 1, and the "
                f"model can't be trained on one sample: {error}",
                hint="drop_last=True, a batch that leaves no short last window, GroupNorm in place of BatchNorm, or a "
                "plan with fewer replicas and micro-batches",
            ) from error
