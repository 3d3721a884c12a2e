"""What ranks did when: the trace, the picture, and the time that is left idle."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.training.trace import TraceRecorder, TraceSpan, chrome_trace, idle_fraction, picture

SPANS = [
    TraceSpan(0, "forward", "0", 10.0, 11.0),
    TraceSpan(1, "forward", "0", 11.0, 12.0),
    TraceSpan(1, "backward", "0", 12.0, 14.0),
]


def test_idle_is_what_nobody_noted():
    """4 of 8 seconds of two ranks."""
    assert idle_fraction(SPANS, world_size=2) == pytest.approx(0.5)
    assert idle_fraction([], world_size=2) == 0.0


def test_a_chrome_trace_starts_at_zero_in_microseconds():
    """One process a rank."""
    events = chrome_trace(SPANS)["traceEvents"]

    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        (0, "forward 0", 0.0, 1e6),
        (1, "forward 0", 1e6, 1e6),
        (1, "backward 0", 2e6, 2e6),
    ]


def test_the_picture_has_a_row_a_rank():
    """Boxes to scale, a time below them, and the idle fraction in words."""
    elements = list(ET.fromstring(picture(SPANS, world_size=2)).iter())
    boxes = [each for each in elements if each.tag.endswith("rect") and len(each)]
    texts = {each.text: each.get("x") for each in elements if each.tag.endswith("text")}

    assert [float(box.get("width")) for box in boxes] == [250.0, 250.0, 500.0]
    assert [box.get("y") for box in boxes] == ["3", "31", "31"]
    assert [texts.get(tick) for tick in ("0 ms", "2000", "4000")] == ["60.00", "560.00", "1060.00"]
    assert "4000.0 ms, idle 50.0 %" in texts


def test_the_picture_has_a_light_and_a_dark_mode():
    """Nothing has a colour of its own: the same class has one in each mode."""
    drawn = picture(SPANS, world_size=2)
    light, dark = drawn.split("@media(prefers-color-scheme:dark)")

    assert "fill=" not in drawn and "white" not in drawn
    for colours in (light, dark):
        assert all(f"{name}{{fill:#" in colours for name in ("rect", "text", ".k0", ".k1", ".on"))


def test_only_the_steps_asked_for_are_noted():
    """A phase ends where the next begins."""
    recorder = TraceRecorder(0, range(1, 2))
    for step in range(3):
        recorder.begin(step)
        for phase in ("input", "forward", "reduce", "optimizer", "end"):
            recorder.phase(phase)
        recorder.add("forward", str(step), 0.0, 1.0)

    assert [(span.what, span.label) for span in recorder.spans] == [
        ("input", ""),
        ("reduce", ""),
        ("optimizer", ""),
        ("forward", "1"),
    ]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "whats"),
    [
        ("data=2", {"forward", "backward"}),
        (
            "pipeline=2 schedule=zero-bubble microbatches=2",
            {"forward", "input gradients", "weight gradients"},
        ),
    ],
)
def test_a_run_is_traced(tmp_path: Path, plan: str, whats: set[str]):
    """All ranks in one trace; nothing of theirs is left beside it."""
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    job = paceline.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
        data=TensorDataset(x, x[:, :3].argmax(1)),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=4,
        steps=4,
    )
    paceline.train(job, plan, devices="cpu:0-1", run=tmp_path, trace=2)

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert {e["cat"] for e in events if e["ph"] == "X"} == whats | {"input", "reduce", "optimizer"}
    assert (tmp_path / "schedule.svg").read_text().startswith("<svg")
    assert not list((tmp_path / "logs").glob("trace*"))
