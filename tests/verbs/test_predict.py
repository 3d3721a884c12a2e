"""predict computes in the precision of the job, whatever the floats of its input file are."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import paceline
from paceline.jobfile import JobFile

FILE = """
import torch
import paceline as pl

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rows, self.last = torch.nn.Linear(3, 3), torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2)

    def forward(self, x, place):
        assert place.dtype == torch.int32, place.dtype
        return self.last(self.first(x) + self.rows(place))

data = [({"x": torch.full((3,), i / 9), "place": torch.tensor(i % 5, dtype=torch.int32)}, torch.zeros(2))
        for i in range(8)]
def job(precision: str = "float64"):
    return pl.Job(model=Net, data=data, batch=4, steps=1, precision=precision, loss=torch.nn.functional.mse_loss,
                  optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
"""
PLACES = numpy.array([0, 4, 2], dtype=numpy.int32)


def predicted(tmp_path: Path, precision: str, inputs: numpy.ndarray) -> tuple[numpy.ndarray, torch.Tensor]:
    """What predict writes for these inputs, and what the trained weights make of them in float64."""
    (tmp_path / "job.py").write_text(FILE)
    run = tmp_path / "run"
    paceline.train(JobFile(tmp_path / "job.py", settings={"precision": precision}), "single", devices="cpu:0", run=run)
    numpy.savez(tmp_path / "in.npz", x=inputs, place=PLACES)
    paceline.predict(run, tmp_path / "in.npz", devices="cpu:0")
    weights = {name: weight.double() for name, weight in load_file(run / "model.safetensors").items()}
    first = F.linear(torch.from_numpy(inputs).double(), weights["first.weight"], weights["first.bias"])
    summed = first + weights["rows.weight"][torch.from_numpy(PLACES).long()]
    return numpy.load(run / "predictions.npy"), F.linear(summed, weights["last.weight"], weights["last.bias"])


@pytest.mark.parametrize("dtype", [numpy.float64, numpy.float32, numpy.float16])
def test_a_float64_job_predicts_in_float64(tmp_path: Path, dtype: type):
    """No digit of its inputs is lost, integers stay integers, and outputs have all digits too."""
    inputs = (numpy.random.default_rng(0).random((3, 3)) / 3).astype(dtype)
    actual, expected = predicted(tmp_path, "float64", inputs)
    assert actual.dtype == numpy.float64
    numpy.testing.assert_allclose(actual, expected.numpy(), rtol=1e-14)


def test_a_float32_job_takes_float64_inputs_for_float32(tmp_path: Path):
    actual, expected = predicted(tmp_path, "float32", numpy.random.default_rng(0).random((3, 3)))
    assert actual.dtype == numpy.float32
    numpy.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5)
