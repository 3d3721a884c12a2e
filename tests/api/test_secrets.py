"""Passwords are neither kept nor printed, and names can't drive the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.base.errors import PacelineError, printable, without_secrets
from tests.commands import Command

JOB = """
import torch, paceline as pl
from torch.utils.data import TensorDataset

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("\\x1b[2Jlayer", torch.nn.Linear(4, 1))

    def forward(self, x):
        return self._modules["\\x1b[2Jlayer"](x)

def job(api_key: str = "", lr: float = 0.01):
    inputs = torch.randn(16, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return pl.Job(model=Net, data=data, loss=torch.nn.functional.mse_loss, batch=8, steps=2, validation=data,
                  metrics={"\\x1b[31mred": lambda output, target: (output - target).abs().mean()},
                  optimizer=lambda named: torch.optim.SGD(named, lr=lr))
"""


def test_no_file_and_no_line_holds_a_password(tmp_path: Path):
    """A URL's and an option's, and no line of a terminal holds an escape."""
    (tmp_path / "job.py").write_text(JOB)
    run = tmp_path / "run"
    train = Command(
        [
            "train",
            str(tmp_path / "job.py"),
            "--run",
            str(run),
            "--set",
            "api_key=hush1",
            "--plan",
            "single",
        ],
        {"PATH": "/usr/bin:/bin"},
        tmp_path / "command",
    )
    assert train.wait() == 0, train.stderr.read_text()
    assert "api_key=***" in json.loads((run / "origin.json").read_text())["command"]
    said = train.stderr.read_text() + train.stdout.read_text()
    assert "\x1b" not in said and "\\x1b[31mred" in said
    search = Command(
        [
            "search",
            str(tmp_path / "job.py"),
            "--trials",
            "1",
            "--vary",
            "lr=0.1..0.2",
            "--run",
            str(tmp_path / "study"),
            "--storage",
            "nosuchdb+nodriver://me:hush2@host/name",
        ],
        {"PATH": "/usr/bin:/bin"},
        tmp_path / "search",
    )
    assert search.wait() != 0
    said += search.stderr.read_text()
    assert "nosuchdb+nodriver://me:***@host/name" in said
    kept = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name not in ("job.json", "job.py")
    ]
    assert "hush" not in said and not [path for path in kept if b"hush" in path.read_bytes()]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p@w@h/db", "postgresql://u:***@h/db"),
        ("redis://:p@h", "redis://:***@h"),
        ("https://h/p:q@r", "https://h/p:q@r"),
        ("a\x1b]0;title\x07b", "a\\x1b]0;title\\x07b"),
        ("a\x9b31m", "a\\x9b31m"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("over\rwritten", "over\\x0dwritten"),
    ],
)
def test_what_is_printed(text: str, shown: str):
    assert printable(text) == shown
    assert str(PacelineError(text, hint=text)) == f"{shown}\n\nhint: {shown}"


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("train job.py --set password=x --set lr=1", "train job.py --set password=*** --set lr=1"),
        ("--hf-token x --log mlflow:http://u:p@h", "--hf-token *** --log mlflow:http://u:***@h"),
        ("--set max_tokens=5 --set monkey=1", "--set max_tokens=5 --set monkey=1"),
    ],
)
def test_what_is_kept_of_a_command(command: str, kept: str):
    assert without_secrets(command) == kept
