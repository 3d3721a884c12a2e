"""When a job's followers move, and how far."""

from __future__ import annotations

import torch

import paceline as pl
from paceline.runtime.follow import follow


def test_followers_move_after_the_steps_that_they_name():
    """An average moves after each step, a copy after each third one, a frozen one never; buffers are copied."""
    followers = {"average": pl.ema("net", 0.75), "copy": pl.copy_every("net", 3), "still": pl.frozen("net")}
    held = {f"{name}.w": torch.zeros(2, dtype=torch.float64) for name in ("net", *followers)}
    buffers = {f"{name}.count": torch.tensor(0) for name in ("net", *followers)}
    average, copied = 0.0, 0
    for step in range(1, 8):
        held["net.w"].fill_(step)
        buffers["net.count"].fill_(step)
        follow(followers, held, buffers, step)
        average, copied = 0.75 * average + 0.25 * step, step if step % 3 == 0 else copied
        assert held["average.w"].tolist() == [average] * 2
        assert held["copy.w"].tolist() == [copied] * 2
        assert held["still.w"].tolist() == [0.0] * 2
        assert [int(buffers[f"{name}.count"]) for name in followers] == [step, copied, 0]
