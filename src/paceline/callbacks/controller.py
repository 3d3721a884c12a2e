"""Tells callbacks what happens in a run, and tells ranks what callbacks request."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import CallbackError, UsageError, in_words
from paceline.callbacks.images import image_of, is_picture
from paceline.job.callback import (
    Callback,
    CheckpointReport,
    EpochReport,
    EvaluationReport,
    Requests,
    RunHandle,
    StepReport,
    all_hooks,
    hooks_of,
)
from paceline.launch.process.failure import traced
from paceline.launch.process.messages import RanksGone
from paceline.runs.documents import rows
from paceline.runs.folder import LOGGED, METRICS, checkpoints_of
from paceline.runs.metrics import read_history

if TYPE_CHECKING:
    import torch

    from paceline.job import Job

# Makes the ranks do something while they wait, and returns the result.
Exchange = Callable[[dict[str, Any]], Any]

_REMEMBERED_ANSWERS = 256
_RAISED = (
    Exception,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
)  # by callbacks: each of them ends the run as failed


class RunController:
    """The callbacks of one run, in the process that controls it.

    Steps are read from `metrics.jsonl`, which rank 0 writes anyway. So no rank waits for a slow
    callback, and no step is lost. If ranks wait for an answer, rank 0 asks for it, and
    `on_question` first reads the steps until then.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        job: Job,
        *,
        plan: str,
        folder: Path,
        save_every: int | None = None,
    ) -> None:
        self.callbacks, hooks = tuple(callbacks), all_hooks(callbacks)
        self.hooks = (
            hooks | {"on_evaluation"} if "on_epoch" in hooks else hooks
        )  # `on_epoch` receives the epoch's evaluation
        self.run = RunHandle(
            job, plan, folder, job.total_steps, save_every, _read_history=read_history
        )
        self.run._log = self._log
        # The error that a callback raised. From then on callbacks are told nothing more.
        self.error: BaseException | None = None
        self._failure = self._running = ""
        self._initial: list[dict[str, Any]] | None = None
        self._offset = 0
        self._samples = 0
        self._epoch_loss: dict[int, tuple[float, int]] = {}  # sum over samples, and their number
        self._evaluation: EvaluationReport | None = None
        self._latest_calls: dict[
            tuple[int, str], int
        ] = {}  # the last step or epoch of which a callback was told
        self._answers: dict[
            tuple[str, int, int | None], dict[str, Any]
        ] = {}  # by event, step and epoch
        # Requests that were sent while ranks continued, with the step after which they were sent.
        self._sent: list[tuple[int, Requests]] = []
        self._handlers = {
            "start": self._start,
            "epoch": self._epoch,
            "evaluation": self._evaluated,
            "save": self._saved,
        }

    # --- Heard from rank 0 ------------------------------------------------------------------------------------------

    def on_report(self) -> dict[str, Any] | None:
        """Tell callbacks of new steps. Returns what callbacks requested of the ranks since the last
        report; None if nothing.
        """
        self._read_steps()
        if not self.run._requests:
            return None
        self._sent.append((self.run.step, self.run._requests))
        return self._taken_requests()

    def on_question(self, event: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
        """Answer ranks that wait after a step.

        Returns what callbacks request of the ranks, and under "callbacks" the callbacks' state if
        the ranks ask for it.

        event: {"event": "start", "evaluation", "epoch", "save", "state" or "end", "step", ...}.
        """
        kind = event["event"]
        if kind != "start":
            self._read_steps()
        place = kind, event["step"], event.get("epoch")
        if (
            place in self._answers
        ):  # ranks that continue from a copy repeat the questions of their predecessors
            return dict(self._answers[place])
        answer: dict[str, Any] = {}
        self.run._weights = lambda: self._read_weights(exchange)
        try:
            if kind == "state":
                answer["callbacks"] = self.states()
            elif self.error is None and kind in self._handlers:
                self._handlers[kind](event)
        finally:
            self.run._weights = None
        answer |= self._taken_requests()
        if kind not in ("start", "end"):
            self._answers[place] = dict(answer)
            while len(self._answers) > _REMEMBERED_ANSWERS:
                del self._answers[next(iter(self._answers))]
        return answer

    def _taken_requests(self) -> dict[str, Any]:
        requests, self.run._requests = self.run._requests, Requests()
        return requests.to_dict()

    def _start(self, event: Mapping[str, Any]) -> None:
        """Prepare callbacks for ranks that begin, or begin again.

        Callbacks with state go back to their state at that step, and are told again of what
        follows. Other callbacks are told of nothing twice. If ranks continue from a copy of their
        state, callbacks were already told of what follows, so those with state keep it, and are
        told of nothing twice either.
        """
        self.run.step, is_again = event["step"], self._initial is not None
        self.run.restarts += is_again
        if self._initial is None:
            self._initial = self.states()
        keeps = is_again and event.get("keeps")
        if keeps:
            self._send_again(event["step"])
        else:
            self._answers.clear()
            self._restore(event.get("callbacks"), step=event["step"], is_again=is_again)
        self._epoch_loss, self._samples, self._offset, self._evaluation = {}, 0, 0, None
        if keeps:
            self._read_steps()  # the previous ranks may have taken steps of which nobody was told
        else:
            for line in self._new_lines():
                self._count(line)
        self._call("on_start")
        self.states()  # a state that can't be saved is refused now, not after an hour

    def _send_again(self, step: int) -> None:
        """Repeat the requests that the previous ranks may not have carried out.

        step: the step after which the ranks continue.
        """
        for sent_step, requests in self._sent:
            lasting = {"stop": requests.stop, "failed": requests.failed}
            self.run._requests.add(requests.to_dict() if sent_step >= step else lasting)
        self._sent.clear()

    def _restore(self, saved: list[dict[str, Any]] | None, *, step: int, is_again: bool) -> None:
        saved_states = list(
            saved if saved is not None else (self._initial or []) if is_again else []
        )
        for callback in self.callbacks:
            if "state_dict" not in hooks_of(callback):
                continue
            kind = type(callback).__name__
            state = next((entry for entry in saved_states if entry["kind"] == kind), None)
            if state is not None:
                saved_states.remove(state)
                self._protected(callback, "load_state_dict", state["state"])
            elif saved is not None:
                print(
                    f"note: the checkpoint holds no state of the callback {kind}, which starts anew",
                    file=sys.stderr,
                )
            # A callback was told of exactly what its state contains.
            windows = self.run.job.windows
            epochs = windows.epoch(step) if windows is not None else 0
            self._latest_calls |= {
                (id(callback), hook): epochs - 1 if hook == "on_epoch" else step
                for hook in hooks_of(callback)
            }
        for entry in saved_states if saved is not None else ():
            print(
                f"note: the checkpoint holds the state of a callback {entry['kind']}, which this run does not have",
                file=sys.stderr,
            )

    def _epoch(self, event: Mapping[str, Any]) -> None:
        total, count = self._epoch_loss.get(event["epoch"], (0.0, 0))
        evaluation = (
            self._evaluation
            if self._evaluation and self._evaluation.step == event["step"]
            else None
        )
        report = EpochReport(
            event["epoch"],
            event["step"],
            event["samples"],
            total / count if count else None,
            evaluation,
        )
        self._call("on_epoch", report, number=report.epoch)

    def _evaluated(self, event: Mapping[str, Any]) -> None:
        self._evaluation = EvaluationReport(
            event["step"], event["epoch"], event["validation_loss"], event["metrics"]
        )
        self._call("on_evaluation", self._evaluation, number=self._evaluation.step)

    def _saved(self, event: Mapping[str, Any]) -> None:
        self._call(
            "on_save", CheckpointReport(event["step"], Path(event["path"])), number=event["step"]
        )

    # --- Steps ------------------------------------------------------------------------------------------------------

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        """Yield complete lines of metrics.jsonl that were not read before."""
        path = self.run.folder / METRICS
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        before, self._offset = self._offset, self._offset + data.rfind(b"\n") + 1
        yield from rows(data, path, after=before)

    def _count(self, line: Mapping[str, Any]) -> bool:
        """Add the loss of a step to its epoch's loss. Returns whether the line is a step's."""
        if "loss" not in line or "samples" not in line:
            return False
        count, self._samples = line["samples"] - self._samples, line["samples"]
        if line["loss"] is not None:
            total, before = self._epoch_loss.get(line["epoch"], (0.0, 0))
            self._epoch_loss[line["epoch"]] = total + line["loss"] * count, before + count
        return True

    def _read_steps(self) -> None:
        for line in self._new_lines():
            step, figures = line["step"], line.get("logged")
            if self._count(line):
                self.run.step, self.run.epoch, figures = step, line["epoch"], line.get("metrics")
                report = StepReport(
                    step,
                    line["epoch"],
                    line["samples"],
                    line["loss"],
                    line.get("lr"),
                    line.get("step_s", 0.0),
                    line,
                )
                self._call("on_step", report, number=step)
            if figures:
                self._call("on_figures", step, figures, number=step)

    # --- Callbacks --------------------------------------------------------------------------------------------------

    def _call(self, hook: str, *values: Any, number: int | None = None) -> None:
        """Call every callback that has the hook and was not told of this before.

        number: number of the step or the epoch.
        """
        for callback in self.callbacks:
            if self.error is not None:
                return
            if hook not in hooks_of(callback):
                continue
            if number is not None:
                if number <= self._latest_calls.get((id(callback), hook), -1):
                    continue
                self._latest_calls[id(callback), hook] = number
            self._protected(callback, hook, self.run, *values)

    def _protected(self, callback: Callback, method: str, *values: Any) -> Any:
        """Call a method of a callback. An error that it raises ends the run."""
        self._running = f"{type(callback).__name__}.{method}"
        try:
            return getattr(callback, method)(*values)
        except RanksGone:
            raise
        except _RAISED as error:
            self._fail(callback, method, error)
            return None
        finally:
            self._running = ""

    def tell_slow(self, after_s: float) -> None:
        """Warn that a callback has not returned. This is called after so many seconds, and each
        time that as many have passed again.
        """
        if running := self._running:
            print(
                f"warning: {running} has not returned, and callbacks have had {after_s:g} s for what follows step "
                f"{self.run.step}; ranks that need their answer wait",
                file=sys.stderr,
                flush=True,
            )

    def _fail(self, callback: Callback, method: str, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self._failure = (
                f"{traced(error)}the callback {type(callback).__name__} failed in {method} after step "
                f"{self.run.step}: {in_words(error)}"
            )
        self.run._requests.failed = self._failure

    def states(self) -> list[dict[str, Any]]:
        """Return the callbacks' states for a checkpoint or a copy."""
        states = []
        for callback in self.callbacks:
            if "state_dict" in hooks_of(callback):
                state = self._protected(callback, "state_dict")
                try:
                    states.append(
                        {"kind": type(callback).__name__, "state": json.loads(json.dumps(state))}
                    )
                except TypeError as error:
                    self._fail(callback, "state_dict", error)
        return states

    def failure(self) -> CallbackError:
        steps = checkpoints_of(self.run.folder)
        return CallbackError(
            self._failure,
            hint="a checkpoint is saved: the same command with --run "
            f"{self.run.folder} --resume goes on after step {max(steps)}"
            if steps
            else None,
        )

    def raise_failure(self) -> None:
        """Raise the failure of a callback, if there was one.

        Raises:
            CallbackError: a callback has failed; its cause is the error that the callback raised.
        """
        if self.error is not None:
            raise self.failure() from self.error

    def _log(self, values: Mapping[str, Any]) -> None:
        """Log values: numbers and text go to `logged.jsonl`. All values, also pictures, go to
        callbacks with `on_log`.

        Raises:
            UsageError: a value is neither a number, a text nor a picture.
        """
        if "step" in values:
            raise UsageError(
                "run.log: 'step' is the step that the values are logged for", hint="another name"
            )
        figures: dict[str, Any] = {}
        pictures: dict[str, Any] = {}
        for name, value in values.items():
            if is_picture(value):
                if "on_log" in self.hooks:
                    pictures[name] = image_of(value)
            elif isinstance(value, str | int | float):
                figures[name] = value
            elif getattr(value, "ndim", None) == 0:
                figures[name] = value.item()
            else:
                raise UsageError(
                    f"run.log: {name!r} is a {type(value).__name__}",
                    hint="numbers, text, arrays of two or three dims, and figures can be logged",
                )
        if figures:
            with (self.run.folder / LOGGED).open("a") as file:
                file.write(json.dumps({"step": self.run.step, **figures}) + "\n")
        self._call("on_log", self.run.step, {**figures, **pictures})

    # --- Weights and the end ----------------------------------------------------------------------------------------

    def _read_weights(self, exchange: Exchange) -> dict[str, torch.Tensor]:
        from paceline.checkpoint.assemble import whole_state
        from paceline.checkpoint.read import open_checkpoint

        written = exchange({"do": "weights"})
        checkpoint = open_checkpoint(Path(written["path"]), checksums=False)
        try:
            return whole_state(checkpoint)
        finally:
            if written["is_temporary"]:
                shutil.rmtree(Path(written["path"]).parent.parent, ignore_errors=True)

    def ended(self, result: Any) -> None:
        """Tell callbacks that the run is done.

        Raises:
            CallbackError: a callback failed, now or before.
        """
        self.raise_failure()
        self.run._weights = result.state_dict
        self._call("on_end", result)
        self.run._weights = None
        self.raise_failure()

    def failed(self, error: BaseException) -> None:
        """Tell callbacks that the run ended before it was done. Errors that they raise now are
        printed and change nothing.
        """
        for callback in self.callbacks:
            if "on_failure" in hooks_of(callback):
                try:
                    callback.on_failure(self.run, error)
                except _RAISED as second:
                    print(
                        f"warning: the callback {type(callback).__name__} failed in on_failure: {in_words(second)}",
                        file=sys.stderr,
                    )


@contextmanager
def controlled(controller: RunController | None, *, speaks: bool) -> Iterator[None]:
    """Tell callbacks if the run inside this block fails. If a callback raised an error, that error
    is the reason.

    speaks: whether this process is the one that controls the run.

    Raises:
        CallbackError: a callback failed.
    """
    try:
        yield
    except BaseException as error:
        if controller is not None and speaks:
            controller.failed(controller.error or error)
            controller.raise_failure()
        raise
