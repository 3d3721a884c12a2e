"""A job on which searches are tested: some steps of a millisecond, and failures to order."""

JOB = """
import os, signal, time
from typing import Annotated, Literal
import torch
import paceline as pl

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(48, 4, generator=generator)
samples = [(x, x.sum() + 0.1 * x[0]) for x in inputs]

def model(width):
    act = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}[pl.choice("net.act", ["relu", "tanh"])]()
    print("built", width, type(act).__name__)
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, width), act, torch.nn.Linear(width, 1))

def loss(output, target):
    return ((output[:, 0] - target) ** 2).mean()

def job(lr: Annotated[float, pl.Log(1e-4, 1e-1)] = 1e-2, width: Annotated[int, pl.Range(2, 16)] = 8,
        epochs: int = 3, pause_s: float = 0.0, fails: Literal["no", "nan", "error", "dies"] = "no") -> pl.Job:
    def judged(output, target):
        time.sleep(pause_s)
        if fails == "error":
            raise ValueError("no such luck")
        if fails == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(output, target) * (float("nan") if fails == "nan" else 1.0)

    return pl.Job(model=lambda: model(width), data=samples[:32], validation=samples[32:40], test=samples[40:],
                  loss=judged, optimizer=lambda named: torch.optim.AdamW(named, lr=lr), batch=8, epochs=epochs,
                  metrics={"worst": lambda output, target: (output[:, 0] - target).abs().mean()})
"""
WORKS = {"fails": "no"}
