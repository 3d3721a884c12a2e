"""The MLflow logger: a run of an experiment on a tracking server."""

from __future__ import annotations

import http.client
import math
import os
import posixpath
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paceline.base.errors import UsageError, printable
from paceline.callbacks.loggers.logger import Logger, Status
from paceline.job.callback import RunHandle

if TYPE_CHECKING:
    from PIL.Image import Image

_BATCH = 500  # metrics sent at a time; the server accepts 1000
# Seconds for which a metric is kept back at most, while steps come in and the server answers.
_KEPT_S = 5.0
_LOST_S = 60.0  # seconds before a server that did not answer is tried again
ANSWER_S = 10.0  # seconds in which a server must answer; MLflow's client tries for minutes
_LONGEST_NAME = 250


class MLflow(Logger):
    """Logs to an experiment of MLflow: MLFLOW_EXPERIMENT_NAME, otherwise "paceline".

    where: the tracking server's address; by default MLFLOW_TRACKING_URI, otherwise MLflow's own
    default.
    """

    kind = "mlflow"
    lost_s = -math.inf  # time at which the server last failed to answer

    def check(self) -> None:
        """Check that a server answers at the address.

        Raises:
            UsageError: no server answers at the address.
        """
        address = self.where or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not address.startswith(("http://", "https://")):
            return
        try:
            urllib.request.urlopen(address, timeout=ANSWER_S).close()
        # The server is there, although it refuses.
        except (urllib.error.HTTPError, http.client.HTTPException, ssl.SSLError):
            return
        except OSError as error:
            reason = getattr(error, "reason", error)
            if not isinstance(reason, ssl.SSLError):
                shown = re.sub("//[^/@]*@", "//", address)  # it may hold a password
                raise UsageError(
                    f"--log mlflow: no server answers at {shown}: {reason}",
                    hint="start it, name another with --log mlflow:URI, or leave --log out",
                ) from error

    def begin(self, run: RunHandle, facts: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        self.client: Any = MlflowClient(tracking_uri=self.where)
        self.kept: list[Any] = []
        self.sent_s = time.monotonic()
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{ANSWER_S:.0f}")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        if self.run_id is not None:
            self.client.update_run(self.run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "paceline")
        experiment = self.client.get_experiment_by_name(name)
        number = (
            experiment.experiment_id
            if experiment is not None
            else self.client.create_experiment(name)
        )
        self.run_id = self.client.create_run(number, run_name=run.folder.name).info.run_id
        for fact, value in facts.items():
            self.client.log_param(self.run_id, fact, value)

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(1000 * time.time())
        self.kept += [
            Metric(_name(name), float(value), now_ms, step) for name, value in figures.items()
        ]
        if time.monotonic() - self.sent_s > _KEPT_S:
            self.flush()

    def text(self, step: int, name: str, text: str) -> None:
        self._send(
            f"the text {name} of step {step} is lost",
            lambda: self.client.log_text(self.run_id, text, f"{_name(name)}/step-{step}.txt"),
        )

    def image(self, step: int, name: str, image: Image) -> None:
        self._send(
            f"the image {name} of step {step} is lost",
            lambda: self.client.log_image(self.run_id, image, f"{_name(name)}/step-{step}.png"),
        )

    def flush(self) -> None:
        while (
            self.kept
            and not self._is_lost()
            and self._send(
                f"{len(self.kept)} figures are kept for later",
                lambda: self.client.log_batch(self.run_id, metrics=self.kept[:_BATCH]),
            )
        ):
            self.kept = self.kept[_BATCH:]
        self.sent_s = time.monotonic()

    def finish(self, status: Status) -> None:
        self.lost_s = -math.inf
        self.flush()
        lost = f"{len(self.kept)} figures and the status {status} are lost"
        self._send(
            lost,
            lambda: self.client.set_terminated(
                self.run_id,
                status={"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[
                    status
                ],
            ),
        )

    def _is_lost(self) -> bool:
        return time.monotonic() - self.lost_s < _LOST_S

    def _send(self, otherwise: str, act: Callable[[], Any]) -> bool:
        """Send something to the server, and return whether the server accepted it.

        A server that does not answer never ends a run, and is tried again after a while.

        otherwise: the consequence if the server does not accept it; it is printed.
        """
        from mlflow.exceptions import MlflowException

        reason = "it gave no answer before"
        if not self._is_lost():
            try:
                act()
                return True
            except (MlflowException, OSError) as error:
                self.lost_s, reason = time.monotonic(), str(error)
        print(
            printable(f"warning: --log mlflow: {otherwise}: {reason}"), file=sys.stderr, flush=True
        )
        return False


def _name(name: str) -> str:
    """Return a name in the form that MLflow accepts: letters, digits and some signs, as a normal
    relative path.
    """
    path = posixpath.normpath(re.sub(r"[^\w\-. :/]", "-", name))
    return re.sub(r"^[./]+", "", path)[:_LONGEST_NAME].rstrip("/") or "-"
