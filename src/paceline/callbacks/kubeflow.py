"""Reports a run's progress to Kubeflow Trainer, which shows it in `kubectl get trainjob`.

A TrainJob whose feature TrainJobStatus is on gives its pods an address, a certificate and a token,
each by a variable. Source of the protocol: Kubeflow Trainer 2.2, "TrainJob progress and metrics".
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.job.callback import Callback, EvaluationReport, StepReport

if TYPE_CHECKING:
    from paceline.job.callback import RunHandle

URL, CERTIFICATE, TOKEN = (
    "KUBEFLOW_TRAINER_SERVER_URL",
    "KUBEFLOW_TRAINER_SERVER_CA_CERT",
    "KUBEFLOW_TRAINER_SERVER_TOKEN",
)
PERIOD_S = 5.0  # seconds between two reports at least, as Kubeflow asks
TIMEOUT_S = 5.0
MOST_METRICS, MOST_LETTERS, MOST_SECONDS = (
    256,
    64,
    2**31 - 1,
)  # the resource's own limits; it refuses a report with more as a whole
_LATEST_STEPS = 20  # whose mean time gives the time left


class KubeflowProgress(Callback):
    """Reports progress, the time left, and the last figures. Reports that can't be sent are left
    out, so a run never waits for them.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.url, self.certificate, self.token = (
            environ[URL],
            environ.get(CERTIFICATE),
            environ.get(TOKEN),
        )
        self._metrics: dict[str, float] = {}
        self._step_s: list[float] = []
        self._told_s = float("-inf")
        self._sending: threading.Thread | None = None

    def on_step(self, run: RunHandle, step: StepReport) -> None:
        self._step_s = [*self._step_s[-_LATEST_STEPS:], step.step_s]
        if step.loss is not None:
            self._metrics["loss"] = step.loss
        if time.monotonic() >= self._told_s + PERIOD_S:
            self._tell(self._status(run, step.step))

    def on_evaluation(self, run: RunHandle, evaluation: EvaluationReport) -> None:
        self._metrics |= evaluation.figures

    def on_end(self, run: RunHandle, result: Any) -> None:
        self._wait()  # otherwise the last status would be left out
        self._tell(
            {
                **self._status(run, run.step),
                "progressPercentage": 100,
                "estimatedRemainingSeconds": 0,
            }
        )
        self._wait()

    def _wait(self) -> None:
        """Wait for a status that is being sent, for as long as sending may take."""
        if self._sending is not None:
            self._sending.join(TIMEOUT_S + 1)

    def _status(self, run: RunHandle, step: int) -> dict[str, Any]:
        metrics = [
            {"name": name, "value": str(value)}
            for name, value in self._metrics.items()
            if 1 <= len(name) <= MOST_LETTERS
        ]
        status: dict[str, Any] = {
            "lastUpdatedTime": datetime.now(UTC).isoformat(),
            "metrics": metrics[:MOST_METRICS],
        }
        if run.total_steps:
            left_s = (run.total_steps - step) * sum(self._step_s) / max(1, len(self._step_s))
            status |= {
                "progressPercentage": min(100, 100 * step // run.total_steps),
                "estimatedRemainingSeconds": round(min(max(left_s, 0.0), MOST_SECONDS)),
            }
        return status

    def _tell(self, status: Mapping[str, Any]) -> None:
        """Send a status on another thread, unless the last one is still being sent."""
        if self._sending is not None and self._sending.is_alive():
            return
        self._told_s = time.monotonic()
        self._sending = threading.Thread(target=self._send, args=(status,), daemon=True)
        self._sending.start()

    def _send(self, status: Mapping[str, Any]) -> None:
        try:
            token = (
                Path(self.token).read_text().strip() if self.token else ""
            )  # read each time, because the cluster renews it
            request = urllib.request.Request(
                self.url,
                json.dumps({"trainerStatus": status}).encode(),
                method="POST",
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            )
            trusted = (
                ssl.create_default_context(cafile=self.certificate) if self.certificate else None
            )
            urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trusted).close()
        except (OSError, ValueError, HTTPException):
            pass
