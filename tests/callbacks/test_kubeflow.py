"""A run tells Kubeflow how far it is, and never waits for it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.callbacks import kubeflow
from paceline.callbacks.loggers import of_cluster
from paceline.job.callback import EvaluationReport, StepReport


@pytest.fixture
def server() -> Iterator[Any]:
    """What a server of Kubeflow was sent, on `told`; its address, on `url`."""
    told: list[tuple[str | None, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.append((self.headers["Authorization"], json.loads(body)["trainerStatus"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *words: Any) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield SimpleNamespace(told=told, url=f"http://127.0.0.1:{listening.server_port}/status")
    listening.shutdown()
    listening.server_close()


def step(number: int, *, step_s: float = 2.0) -> StepReport:
    return StepReport(number, 0, 8 * number, 1 / number, 0.1, step_s)


def run(folder: Path, total_steps: int | None = 200) -> Any:
    return SimpleNamespace(folder=folder, total_steps=total_steps, step=0)


def test_progress_time_left_and_figures(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The time left follows the latest steps. The token is read anew each time."""
    monkeypatch.setattr(kubeflow, "PERIOD_S", 0.0)
    token = tmp_path / "token"
    [teller] = of_cluster({kubeflow.URL: server.url, kubeflow.TOKEN: str(token)})
    for number, word in ((1, "first"), (50, "second")):
        token.write_text(word)
        teller.on_step(run(tmp_path), step(number))
        teller._sending.join()
    teller.on_evaluation(run(tmp_path), EvaluationReport(50, 0, 0.25, {"accuracy": 0.9}))
    for number in range(51, 101):
        teller.on_step(run(tmp_path), step(number))
        teller._sending.join()
    teller.on_end(run(tmp_path), None)
    first, second, *_, last_step, end = server.told
    assert first[0] == "Bearer first" and second[0] == "Bearer second"
    assert first[1]["progressPercentage"] == 0 and first[1]["estimatedRemainingSeconds"] == 398
    assert (
        last_step[1]["progressPercentage"] == 50
        and last_step[1]["estimatedRemainingSeconds"] == 200
    )
    assert {"name": "accuracy", "value": "0.9"} in last_step[1]["metrics"]
    assert (end[1]["progressPercentage"], end[1]["estimatedRemainingSeconds"]) == (100, 0)


def test_it_is_told_now_and_then(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kubeflow, "PERIOD_S", 1000.0)
    [teller] = of_cluster({kubeflow.URL: server.url})
    for number in range(1, 200):
        teller.on_step(run(tmp_path, None), step(number))
    teller._sending.join()
    assert len(server.told) == 1 and "progressPercentage" not in server.told[0][1]


def test_a_server_that_is_not_there_does_no_harm(tmp_path: Path):
    [teller] = of_cluster(
        {kubeflow.URL: "http://127.0.0.1:9/status", kubeflow.TOKEN: str(tmp_path / "none")}
    )
    teller.on_step(run(tmp_path), step(1))
    teller.on_end(run(tmp_path), None)


def test_outside_of_a_cluster_nobody_is_told():
    assert of_cluster({}) == []


def test_the_last_status_is_sent_after_a_slow_one(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An earlier one that is still under way does not take its place."""
    [teller] = of_cluster({kubeflow.URL: server.url})
    send = teller._send

    def slowly(status: Any) -> None:
        time.sleep(0.2)
        send(status)

    monkeypatch.setattr(teller, "_send", slowly)
    teller.on_step(run(tmp_path), step(1))
    teller.on_end(run(tmp_path), None)
    assert [status["progressPercentage"] for _, status in server.told] == [0, 100]


def test_a_status_keeps_the_limits_of_the_resource(server: Any, tmp_path: Path):
    """The server refuses a status as a whole if one of its values is out of bounds."""
    [teller] = of_cluster({kubeflow.URL: server.url})
    names = ["x" * 65, "", *(f"metric {number}" for number in range(300))]
    teller.on_evaluation(run(tmp_path), EvaluationReport(1, 0, 0.25, dict.fromkeys(names, 0.5)))
    status = teller._status(run(tmp_path, 10), 11)
    assert len(status["metrics"]) == 256 and all(
        1 <= len(metric["name"]) <= 64 for metric in status["metrics"]
    )
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)
    teller.on_step(run(tmp_path, 2**40), step(1, step_s=1e6))
    teller._sending.join()
    assert server.told[-1][1]["estimatedRemainingSeconds"] == 2**31 - 1


def test_what_is_no_answer_ends_nothing(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        [teller] = of_cluster({kubeflow.URL: f"http://127.0.0.1:{listening.getsockname()[1]}/"})
        teller._tell({})
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"what?\r\n\r\n")
        teller._sending.join()
