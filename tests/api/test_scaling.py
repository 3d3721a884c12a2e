"""`scale`: the best plan on each number of devices, as a table, a document and a drawing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conditions import calls_of
from later import needed
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.api.scaling import Scaling, parse_counts
from paceline.base.errors import ClusterError, PacelineError, UsageError

WIDTH = 64


def _net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 3))


class Moody(nn.Module):
    """Its course depends on values, so that it can't be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x if float(x.sum()) > 0 else -x)


def _job(model: Any = _net, batch: int = 32) -> paceline.Job:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    return paceline.Job(
        model=model,
        data=TensorDataset(x, x.argmax(1) % 3),
        loss=F.cross_entropy,
        batch=batch,
        optimizer=lambda named: torch.optim.AdamW(named),
        epochs=1,
    )


@pytest.fixture(scope="module")
def scaling() -> Scaling:
    return paceline.scale(_job(Moody), "8xH100", "1..96")


def test_every_number_of_devices_has_a_line(scaling: Scaling):
    """Efficiency is against the fewest devices; where the batch is smaller than the replicas, that is said."""
    document = json.loads(json.dumps(scaling.to_dict()))
    assert [row["devices"] for row in document["points"]] == [1, 2, 4, 8, 16, 32, 64, 96]
    assert document["batch"] == 32 and document["points"][0]["efficiency"] == 1.0
    for row in document["points"][:6]:
        assert row["efficiency"] == pytest.approx(
            row["samples_per_s"] / row["devices"] / document["points"][0]["samples_per_s"]
        )
        assert row["step_s_low"] < row["step_s"] < row["step_s_high"]
    assert all(
        row["plan"] is None and "batch of 32 samples" in row["problem"]
        for row in document["points"][6:]
    )
    lines = scaling.describe().splitlines()
    assert "strong scaling" in lines[0] and max(map(len, lines)) <= 100 and len(lines) >= 4 + 8


@pytest.mark.slow
def test_nothing_fits(tmp_path: Path):
    """Each line says by how much, and there is nothing to draw."""
    file = tmp_path / "small.toml"
    file.write_text('[[nodes]]\ndevices = ["4xH100"]\nmemory = "900MB"\n')
    none = paceline.scale(_job(Moody), str(file), "1..4")
    assert all(
        "nothing fits" in point.problem and "MiB more" in point.problem for point in none.points
    )
    needed("matplotlib")
    with pytest.raises(PacelineError, match="nothing fits on any number"):
        none.plot(tmp_path / "none.png")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("suffix", "head"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_it_is_drawn(scaling: Scaling, tmp_path: Path, suffix: str, head: bytes):
    """As an image or as lines, in a folder that need not be there."""
    needed("matplotlib")
    drawn = scaling.plot(tmp_path / "plots" / f"scale{suffix}")
    assert drawn.read_bytes().startswith(head)


def test_what_can_not_be_drawn(scaling: Scaling, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Another suffix, a folder that is a file, and without matplotlib."""
    needed("matplotlib")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"can't draw to .*scale\.png: File exists"):
        scaling.plot(tmp_path / "file" / "scale.png")
    with pytest.raises(
        UsageError, match=r"can't draw to scale\.pdf\n\nhint: a file that ends in \.png or \.svg"
    ):
        scaling.plot("scale.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        PacelineError,
        match=r"drawing needs the package 'matplotlib', which is not installed\n\n"
        r"hint: pip install -e '\.\[plot\]' in Paceline's checkout$",
    ):
        scaling.plot("scale.png")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "count"), [(100, 8), pytest.param(100_000, 18, marks=pytest.mark.slow)]
)
def test_a_hundred_thousand_devices_take_little_work(most: int, count: int):
    """18 numbers of devices, with pipelines; the model is looked at once."""
    scalings: list[Scaling] = []
    work = calls_of(lambda: scalings.append(paceline.scale(_job(), "8xH100", f"1..{most}")))
    [scaling] = scalings
    assert work < 6_000_000
    assert scaling.points[-1].num_devices == most and len(scaling.points) == count


@pytest.mark.parametrize("text", ["8", "4..2", "0..4", "1..x", "1..10000000"])
def test_counts_that_can_not_be_read(text: str):
    with pytest.raises(UsageError, match="can't read the numbers of devices"):
        parse_counts(text)


def test_devices_that_are_here_are_as_many_as_they_are(tmp_path: Path):
    """So are nodes of several kinds; devices that don't fill nodes are said to."""
    file = tmp_path / "mixed.toml"
    file.write_text('[[nodes]]\ndevices = ["4xH100"]\n[[nodes]]\ndevices = ["4xA100"]\n')
    for cluster in ("2xcpu", str(file)):
        with pytest.raises(ClusterError, match="more or fewer devices"):
            paceline.scale(_job(), cluster, "1..4")
    point = paceline.scale(_job(Moody), "8xH100", "12..12").points[0]
    assert point.problem == "12 devices don't fill nodes of 8"
