"""predict computes in the precision of the job, puts rows together, and refuses what it can't before it computes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import paceline
from paceline.base.errors import PacelineError, UsageError
from paceline.job.file import JobFile

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


def predicted(
    tmp_path: Path, precision: str, inputs: numpy.ndarray
) -> tuple[numpy.ndarray, torch.Tensor]:
    """What predict writes for these inputs, and what the trained weights make of them in float64."""
    (tmp_path / "job.py").write_text(FILE)
    run = tmp_path / "run"
    paceline.train(
        JobFile(tmp_path / "job.py", settings={"precision": precision}),
        "single",
        devices="cpu:0",
        run=run,
    )
    numpy.savez(tmp_path / "in.npz", x=inputs, place=PLACES)
    paceline.predict(run, tmp_path / "in.npz", devices="cpu:0")
    weights = {
        name: weight.double() for name, weight in load_file(run / "model.safetensors").items()
    }
    first = F.linear(
        torch.from_numpy(inputs).double(), weights["first.weight"], weights["first.bias"]
    )
    summed = first + weights["rows.weight"][torch.from_numpy(PLACES).long()]
    return numpy.load(run / "predictions.npy"), F.linear(
        summed, weights["last.weight"], weights["last.bias"]
    )


@pytest.mark.sweep(1)
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


ODD = """
import torch
import paceline as pl

class Odd(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.last = kind, torch.nn.Embedding(9, 2) if kind == "tokens" else torch.nn.Linear(3, 2)
        self.recurrent = torch.nn.GRU(3, 2, num_layers=2, batch_first=True) if kind == "state" else None

    def forward(self, x):
        output = self.last(x).sum(1) if self.kind == "tokens" else self.last(x)
        if self.training:
            return output + self.recurrent(x[:, None])[1][-1] if self.recurrent else output
        return {"state": lambda: (output, self.recurrent(x[:, None])[1]), "mean": lambda: output.mean(0),
                "loss": lambda: {"loss": output.sum(), "logits": output}, "nothing": lambda: None,
                "both": lambda: {"logits": output, "class": output.argmax(1)}}.get(self.kind, lambda: output)()

def job(kind: str = "plain"):
    tokens = kind == "tokens"
    data = [(torch.tensor([i % 9, 2, 1]) if tokens else torch.full((3,), i / 9), torch.zeros(2)) for i in range(8)]
    loss = torch.nn.functional.mse_loss
    kept = {"compute": lambda model, batch: loss(model(batch[0]), batch[1])} if kind == "computed" else {"loss": loss}
    return pl.Job(model=lambda: Odd(kind), data=data, batch=4, steps=1, precision="float64", **kept,
                  optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
"""


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run whose model gives outputs of that kind when it is evaluated."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "job.py").write_text(ODD)

    def run(kind: str) -> Path:
        if not (folder / kind).exists():
            paceline.train(
                JobFile(folder / "job.py", settings={"kind": kind}),
                "single",
                devices="cpu:0",
                run=folder / kind,
            )
        return folder / kind

    return run


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("kind", "samples", "plan", "message"),
    [
        (
            "state",
            4,
            "single",
            r"output\.1 is \[2, 3, 2\] for 3 samples|output\.1 is \[2, 4, 2\] for 4 samples",
        ),
        (
            "state",
            2,
            "single",
            r"output\.1 is \[2, 3, 2\] for 3 samples",
        ),  # as many layers as samples
        ("state", 4, "data=2", r"output\.1 is \[2, 3, 2\]"),
        ("state", 1, "data=2", r"output\.1 is \[2, "),
        ("mean", 9, "single", "output is .* it has no row for each"),
        ("mean", 2, "data=2", "it has no row for each"),
        ("loss", 4, "single", r"output\.loss is \[\] for"),
        ("nothing", 4, "single", "is NoneType and holds no tensors"),
    ],
)
def test_outputs_without_a_row_a_sample_are_refused(
    run_of: Callable[[str], Path], tmp_path: Path, kind: str, samples: int, plan: str, message: str
):
    """The state of an RNN and the mean of a batch depend on how the samples are cut: they can't be put together."""
    numpy.save(tmp_path / "in.npy", numpy.ones((samples, 3)))
    with pytest.raises(PacelineError, match=message):
        paceline.predict(run_of(kind), tmp_path / "in.npy", plan)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "tensor=2"])
def test_a_job_with_compute_predicts_by_its_model(
    run_of: Callable[[str], Path], tmp_path: Path, plan: str
):
    """Inputs in a file are not the batches of `compute`."""
    numpy.save(tmp_path / "in.npy", inputs := numpy.random.default_rng(0).random((5, 3)))
    paceline.predict(run_of("computed"), tmp_path / "in.npy", plan, output=tmp_path / "out.npy")
    weights = load_file(run_of("computed") / "model.safetensors")
    expected = F.linear(torch.from_numpy(inputs), weights["last.weight"], weights["last.bias"])
    numpy.testing.assert_allclose(numpy.load(tmp_path / "out.npy"), expected.numpy(), rtol=1e-14)


@pytest.mark.slow
def test_several_outputs_fit_one_file_of_numpy(run_of: Callable[[str], Path], tmp_path: Path):
    """Whole numbers stay whole."""
    numpy.save(tmp_path / "in.npy", numpy.ones((5, 3)))
    for plan in ("single", "data=2", "tensor=2"):
        outcome = paceline.predict(
            run_of("both"), tmp_path / "in.npy", plan, output=tmp_path / "out.npz"
        )
        assert outcome["shapes"] == {"output.logits": [5, 2], "output.class": [5]}
        outputs = numpy.load(tmp_path / "out.npz")
        assert outputs["output.class"].dtype == numpy.int64
        assert (outputs["output.class"] == outputs["output.logits"].argmax(1)).all()
    with pytest.raises(
        PacelineError, match=r"can't write 2 outputs to .*out\.npy, which holds one"
    ):
        paceline.predict(run_of("both"), tmp_path / "in.npy", "single", output=tmp_path / "out.npy")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("in.npy", r"in\.npy is the input: outputs would take its place"),
        ("link.npy", "is the input"),
        ("out.csv", "can't write outputs to .*out.csv"),
        ("out", "can't write outputs to"),
        ("nowhere/out.npy", "there is no folder .*nowhere"),
        ("folder.npy", "it is a folder"),
        ("RUN/model.safetensors", "is the trained model"),
        (None, "is the input"),
    ],
)
def test_an_output_that_would_destroy_or_can_not_be_written_is_refused_first(
    run_of: Callable[[str], Path], tmp_path: Path, output: str | None, message: str
):
    """Before any rank starts. Without --output, the outputs of an earlier prediction may be the input."""
    run, given = run_of("plain"), tmp_path / "in.npy"
    if output is None:
        given = run / "predictions.npy"
    numpy.save(given, numpy.ones((5, 3)))
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "link.npy").symlink_to(given)
    path = output and (run / "model.safetensors" if output.startswith("RUN") else tmp_path / output)
    with pytest.raises(UsageError, match=message):
        paceline.predict(run, given, "single", output=path)
    assert numpy.load(given).shape == (5, 3)


def test_a_run_folder_that_can_not_be_written_is_said(
    run_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ranks leave their outputs there."""
    run = run_of("plain")
    numpy.save(tmp_path / "in.npy", numpy.ones((5, 3)))
    monkeypatch.setattr(
        "os.access", lambda path, mode, access=os.access: path != run and access(path, mode)
    )
    with pytest.raises(UsageError, match="Permission denied"):
        paceline.predict(run, tmp_path / "in.npy", "single", output=tmp_path / "out.npy")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "text",
    [
        "\ufeff0,1,2\n3,4,5.5\n",
        "a,b,c\n0,1,2\n3,4,5.5\n",
        "0;1;2\n3;4;5.5\n",
        '# a note\n"x"\t"y"\t"z"\n0\t1\t2\n3\t4\t5.5',
        '\ufeff"a";"b";"c"\r\n0;1;2\r\n\r\n3;4;5.5\r\n',
    ],
)
def test_csv_as_spreadsheets_write_it(run_of: Callable[[str], Path], tmp_path: Path, text: str):
    """With a byte-order mark, a row of names, semicolons or tabs."""
    (tmp_path / "in.csv").write_text(text)
    numpy.save(tmp_path / "in.npy", numpy.array([[0, 1, 2], [3, 4, 5.5]]))
    outputs = []
    for name in ("in.csv", "in.npy"):
        paceline.predict(run_of("plain"), tmp_path / name, "single", output=tmp_path / "out.npy")
        outputs.append(numpy.load(tmp_path / "out.npy"))
    numpy.testing.assert_array_equal(*outputs)


def test_csv_holds_token_ids_where_the_job_has_them(run_of: Callable[[str], Path], tmp_path: Path):
    """A text has no dtype: the job's own samples say it."""
    (tmp_path / "in.csv").write_text("0,1,2\n8,3,3\n")
    outcome = paceline.predict(run_of("tokens"), tmp_path / "in.csv", "data=2")
    assert outcome["shapes"] == {"output": [2, 2]}
    for text, message in (
        ("0.5,1,2\n", "the file has numbers that are not whole"),
        ("1,x\n", "rows of as many"),
        ("1,5;2\n", "rows of as many numbers"),
        ("1,2\n3\n", "rows of as many numbers"),
    ):
        (tmp_path / "in.csv").write_text(text)
        with pytest.raises(PacelineError) as caught:
            paceline.predict(run_of("tokens"), tmp_path / "in.csv", "single")
        assert message in f"{caught.value} {caught.value.hint}"


@pytest.mark.slow
def test_a_job_file_that_was_edited_since_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """The model and the data that are read are no longer the run's; so is a file beside it that it imports."""
    (tmp_path / "own_rows.py").write_text("COUNT = 4\n")
    text = ODD.replace("range(8)", "range(COUNT)").replace("batch=4", "batch=4, validation=data")
    (tmp_path / "job.py").write_text(f"from own_rows import COUNT\n{text}")
    run = tmp_path / "run"
    paceline.train(JobFile(tmp_path / "job.py"), "single", devices="cpu:0", run=run)
    numpy.save(tmp_path / "in.npy", numpy.ones((1, 3)))
    verbs = (
        lambda: paceline.evaluate(run),
        lambda: paceline.predict(run, tmp_path / "in.npy"),
        lambda: paceline.open(run),
    )
    for edited in ("", "own_rows.py", "job.py"):
        if edited:
            with (tmp_path / edited).open("a") as file:
                file.write("# another line\n")
        for verb in verbs:
            capfd.readouterr()
            verb()
            said = capfd.readouterr().err
            assert ("changed since" in said) == bool(edited)
            assert f"{tmp_path / edited}" in said or not edited
