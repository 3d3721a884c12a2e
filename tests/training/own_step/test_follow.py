"""When a job's followers move, and how far."""

from __future__ import annotations

import pytest
import torch

import paceline as pl
from paceline.base.errors import TrainingError
from paceline.training.own_step.followers import follow


def test_followers_move_after_the_steps_that_they_name():
    """An average moves after each step, a copy after each third one, a frozen one never; buffers are copied."""
    followers = {
        "average": pl.ema("net", 0.75),
        "copy": pl.copy_every("net", 3),
        "still": pl.frozen("net"),
    }
    tensors = {f"{name}.w": torch.zeros(2, dtype=torch.float64) for name in ("net", *followers)}
    buffers = {f"{name}.count": torch.tensor(0) for name in ("net", *followers)}
    average, copied = 0.0, 0
    for step in range(1, 8):
        tensors["net.w"].fill_(step)
        buffers["net.count"].fill_(step)
        follow(followers, tensors, buffers, step)
        average, copied = 0.75 * average + 0.25 * step, step if step % 3 == 0 else copied
        assert tensors["average.w"].tolist() == [average] * 2
        assert tensors["copy.w"].tolist() == [copied] * 2
        assert tensors["still.w"].tolist() == [0.0] * 2
        assert [int(buffers[f"{name}.count"]) for name in followers] == [step, copied, 0]


def test_a_momentum_may_be_a_function_of_the_step():
    """The mean of the weights after the third step and every second one that follows; before, nothing moves."""

    def momentum(step: int) -> float:
        return 1.0 if step < 2 or step % 2 else (step - 2) / step

    followers = {"mean": pl.ema("net", momentum)}
    tensors = {f"{name}.w": torch.zeros(1, dtype=torch.float64) for name in ("net", "mean")}
    moved = []
    for step in range(1, 8):
        tensors["net.w"].fill_(step)
        follow(followers, tensors, {}, step)
        moved.append(tensors["mean.w"].item())
    assert moved == [0, 0, 3, 3, 4, 4, 5]
    assert pl.Job(
        models={"net": torch.nn.Module},
        optimizers={"net": torch.optim.SGD},
        followers=followers,
        training_step=lambda ctx, batch: None,
        data=[torch.zeros(1)],
        batch=1,
        steps=1,
    )
    with pytest.raises(TrainingError, match=r"a follower of 'net' .* returned 1.5 for step 3"):
        follow({"mean": pl.ema("net", lambda step: step / 2)}, tensors, {}, 4)
