"""One run in each logger, read back through its own client."""

from __future__ import annotations

import http.server
import json
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conditions import until
from later import needed

import paceline as pl
from paceline.base.errors import MissingPackage, UsageError
from paceline.callbacks.loggers import loggers_of
from paceline.callbacks.loggers.mlflow import MLflow

pytestmark = [pytest.mark.filterwarnings("ignore")]

SAMPLES = [(torch.tensor([float(number)]), torch.tensor([2.0 * number])) for number in range(-6, 6)]


class Shows(pl.Callback):
    """Logs a number, text and a picture after each evaluation."""

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        run.log(
            {
                "half": evaluation.step / 2,
                "note": f"at {evaluation.step}",
                "picture": torch.rand(3, 4, 5),
            }
        )


def job() -> pl.Job:
    return pl.Job(
        model=lambda: torch.nn.Linear(1, 1),
        data=SAMPLES,
        loss=F.mse_loss,
        batch=4,
        epochs=4,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        validation=SAMPLES,
        callbacks=[Shows()],
    )


def train(run: Path, log: str) -> tuple[dict[int, float], dict[int, float]]:
    """Train in two runs, the second under two ranks. Returns the losses and the validation losses by step."""
    pl.train(job(), "single", run=run, log=log, steps=6)
    result = pl.train(job(), "data=2", run=run, log=log, resume=True)
    history = result.history
    return (
        {line["step"]: line["loss"] for line in history if "loss" in line},
        {line["step"]: line["validation_loss"] for line in history if "validation_loss" in line},
    )


def assert_curves(
    losses: list[tuple[int, float]],
    validation: list[tuple[int, float]],
    expected: tuple[dict[int, float], dict[int, float]],
) -> None:
    """Each step once, in order, with its figure."""
    for curve, figures in zip((losses, validation), expected, strict=True):
        assert [step for step, _ in curve] == sorted(figures)
        assert [value for _, value in curve] == pytest.approx(
            [figures[step] for step in sorted(figures)], rel=1e-5
        )


def test_tensorboard(tmp_path: Path):
    accumulator = needed("tensorboard.backend.event_processing.event_accumulator", "tensorboard")
    expected = train(tmp_path / "run", f"tensorboard:{tmp_path / 'events'}")
    events = accumulator.EventAccumulator(
        str(tmp_path / "events"), size_guidance={"scalars": 0, "images": 0}
    ).Reload()
    assert_curves(
        [(e.step, e.value) for e in events.Scalars("loss")],
        [(e.step, e.value) for e in events.Scalars("validation_loss")],
        expected,
    )
    assert [(e.step, e.value) for e in events.Scalars("half")] == [
        (3, 1.5),
        (6, 3.0),
        (9, 4.5),
        (12, 6.0),
    ]
    assert [(e.step, e.width, e.height) for e in events.Images("picture")] == [
        (s, 5, 4) for s in (3, 6, 9, 12)
    ]
    assert b"at 12" in events.Tensors("note/text_summary")[-1].tensor_proto.string_val[0]
    assert (tmp_path / "run" / "logged.jsonl").read_text().count('"note"') == 4


def test_tensorboard_takes_the_address_of_a_bucket(monkeypatch: pytest.MonkeyPatch):
    """As its writer has it, with both slashes."""
    needed("tensorboard")
    from torch.utils import tensorboard

    addresses: list[str] = []

    class Writer:
        def __init__(self, address: str) -> None:
            addresses.append(address)

        def add_text(self, *words: str) -> None: ...

    monkeypatch.setattr(tensorboard, "SummaryWriter", Writer)
    [logger] = loggers_of("tensorboard:gs://bucket/run")
    logger.begin(SimpleNamespace(), {})
    assert addresses == ["gs://bucket/run"]


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    """A tracking server of its own, with its database in a file."""
    needed("mlflow")
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store, log = f"sqlite:///{tmp_path / 'mlflow.db'}", (tmp_path / "server.log").open("w")
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--workers",
            "1",
            "--backend-store-uri",
            store,
            "--artifacts-destination",
            str(tmp_path / "artifacts"),
        ],
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        until(lambda: answers(port, server), tell=(tmp_path / "server.log").read_text)
        yield f"http://127.0.0.1:{port}"
    finally:
        import os

        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
        log.close()


def answers(port: int, server: subprocess.Popen[bytes]) -> bool:
    import urllib.request

    assert server.poll() is None
    with suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30).close()
        return True
    return False


@pytest.mark.slow
def test_mlflow(tmp_path: Path, mlflow_server: str):
    from mlflow import MlflowClient

    expected = train(tmp_path / "run", f"mlflow:{mlflow_server}")
    client = MlflowClient(mlflow_server)
    (run,) = client.search_runs([client.get_experiment_by_name("paceline").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["batch"] == "4"
    curves = [
        [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in ("loss", "validation_loss")
    ]
    assert_curves(*curves, expected)
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"note", "picture"}


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """MLflow's client would try for four minutes, before the first step and whatever signal comes."""
    needed("mlflow")
    import socket

    monkeypatch.setattr("paceline.callbacks.loggers.mlflow.ANSWER_S", 0.2)
    with socket.socket() as silent, socket.socket() as closed:
        for each in (silent, closed):
            each.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (silent.getsockname()[1], closed.getsockname()[1]):
            with pytest.raises(UsageError, match=f"no server answers at http://127.0.0.1:{port}: "):
                pl.train(
                    job(), "single", run=tmp_path / "run", log=f"mlflow:http://127.0.0.1:{port}"
                )
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        with pytest.raises(UsageError, match="no server answers"):
            pl.train(job(), "single", run=tmp_path / "run", log="mlflow")
    assert not (tmp_path / "run").exists()


class Tracking(http.server.ThreadingHTTPServer):
    """What MLflow's client needs of a tracking server."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.num_refused = 0
        self.state = "well"
        self.ends = threading.Event()
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(http.server.BaseHTTPRequestHandler):
    server: Tracking

    def do_GET(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if self.server.state != "well":
            self.server.num_refused += 1
            if self.server.state == "silent":
                self.server.ends.wait()
            self.send_error(503)
            return
        self.server.steps += [
            metric["step"] for metric in body.get("metrics", ()) if metric["key"] == "loss"
        ]
        answer = json.dumps(
            {
                "experiment": {"experiment_id": "1", "name": "paceline"},
                "run": {"info": {"run_id": "r", "artifact_uri": "mlflow-artifacts:/1/r"}},
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, *words: object) -> None:
        pass


@pytest.mark.sweep(1)
@pytest.mark.parametrize("state", ["silent", "failing", "gone"])
def test_a_server_that_dies_ends_no_run(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """MLflow's client would try for four minutes a call. Figures wait for a server that comes back."""
    needed("mlflow")
    monkeypatch.setattr("paceline.callbacks.loggers.mlflow.ANSWER_S", 200.0)
    for name in ("TIMEOUT", "MAX_RETRIES"):
        monkeypatch.setenv(
            f"MLFLOW_HTTP_REQUEST_{name}", ""
        )  # so that what the run sets is taken back
        monkeypatch.delenv(f"MLFLOW_HTTP_REQUEST_{name}")
    server = Tracking()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    class Dies(pl.Callback):
        def on_evaluation(self, run: pl.RunHandle, evaluation: pl.EvaluationReport) -> None:
            if evaluation.step == 3:
                server.state = state
                monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
                if state == "gone":
                    server.shutdown()
                    server.server_close()
            if evaluation.step == 12 and state == "failing":
                server.state = "well"

    log = f"mlflow:http://127.0.0.1:{server.server_port}"
    try:
        result = pl.train(
            replace(job(), callbacks=[Shows(), Dies()]), "single", run=tmp_path / "run", log=log
        )
    finally:
        server.ends.set()
        server.shutdown()
        thread.join()
        server.server_close()
    assert result["steps"] == 12 and server.num_refused <= 3
    errors = capfd.readouterr().err
    assert "warning: --log mlflow: the image picture of step 3 is lost: " in errors
    assert ("figures and the status finished are lost" in errors) == (state != "failing")
    if state == "failing":
        assert server.steps == list(range(1, 13))


@pytest.mark.parametrize(
    "name",
    [
        "acc@1",
        "f1 (macro)",
        "top5%",
        "val/acc",
        "a//b",
        "../x",
        "/abs",
        "é",
        "x" * 300,
        "",
        "a/./b",
        ".",
        "a:b",
    ],
)
def test_a_metric_may_have_any_name_in_mlflow(name: str):
    """MLflow refuses other signs, and the run would end with its first evaluation."""
    validate = needed("mlflow.utils.validation", "mlflow")._validate_metric_name
    logger, logged = MLflow(), []
    logger.client = SimpleNamespace(log_batch=lambda run_id, metrics: logged.extend(metrics))
    logger.kept, logger.sent_s = [], time.monotonic()
    logger.scalars(1, {name: 0.5})
    logger.flush()
    (metric,) = logged
    validate(metric.key)
    assert len(metric.key) <= 250 and metric.value == 0.5


def records(path: Path) -> Iterator[Any]:
    """What an offline run of Weights & Biases holds: its own messages, in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""  # after the name and version of the format
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # of a block, and padding
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def records_of_runs(folder: Path, number: int) -> list[Any]:
    """The client's own process writes the last of a run's file after the client has closed it."""

    def all_of_them() -> list[Any]:
        read = [record for path in sorted(folder.rglob("*.wandb")) for record in records(path)]
        ended = sum(record.WhichOneof("record_type") == "exit" for record in read)
        return read if ended == number else []

    return until(all_of_them)


def rows_of(all_records: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in all_records
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    needed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.mark.slow
@pytest.mark.usefixtures("wandb_offline")
def test_wandb_keeps_figures_that_come_late(tmp_path: Path):
    """Its client drops a row of an earlier step. A resumed run goes on behind all rows."""
    for steps in ((1, 3, 1, 2, 3), (4, 6, 5)):
        (logger,) = loggers_of("wandb")
        logger.begin(SimpleNamespace(folder=tmp_path), {})
        for step in steps:
            logger.scalars(step, {"late": step / 2})
        logger.finish("finished")

    rows = rows_of(records_of_runs(tmp_path, 2))
    assert [(row["step"], row["late"]) for row in rows] == [
        (step, step / 2) for step in (1, 3, 1, 2, 3, 4, 6, 5)
    ]
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers))


@pytest.mark.slow
@pytest.mark.usefixtures("wandb_offline")
def test_wandb_offline(tmp_path: Path):
    """Two files, of one run: the second goes on in the first one's."""
    expected = train(tmp_path / "run", "wandb:project")
    all_records = records_of_runs(tmp_path / "run", 2)
    runs = [record.run for record in all_records if record.WhichOneof("record_type") == "run"]
    assert {(run.project, run.display_name) for run in runs} == {("project", "run")}
    assert len({run.run_id for run in runs}) == 1 and [
        record.exit.exit_code
        for record in all_records
        if record.WhichOneof("record_type") == "exit"
    ] == [0, 0]
    rows = rows_of(all_records)
    assert_curves(
        *[
            [(row["step"], row[name]) for row in rows if name in row]
            for name in ("loss", "validation_loss")
        ],
        expected,
    )
    assert [row["step"] for row in rows if "half" in row] == [3, 6, 9, 12]


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    needed("trackio", "trackio pillow")
    from trackio.sqlite_storage import SQLiteStorage

    expected = train(tmp_path / "run", "trackio:project")
    assert SQLiteStorage.get_runs("project") == ["run"]
    rows = SQLiteStorage.get_logs("project", "run")
    assert_curves(
        *[
            [(row["step"], row[name]) for row in rows if name in row]
            for name in ("loss", "validation_loss")
        ],
        expected,
    )
    assert [(row["step"], row["note"]) for row in rows if "note" in row] == [
        (s, f"at {s}") for s in (3, 6, 9, 12)
    ]


def test_kinds_of_loggers_are_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match="did you mean 'tensorboard'"):
        loggers_of("tensorbord")
    with pytest.raises(UsageError, match="twice"):
        loggers_of(["wandb:a", "wandb:b"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingPackage, match=r"pip install -e '\.\[trackio\]' in Paceline's checkout"
    ):
        loggers_of("trackio")
