"""Loggers, callbacks and the progress line get the figures of `run.log`, as those of all ranks."""

from __future__ import annotations

import json

import pytest
from called import call
from later import needed

from tests.attached.scripts import ATTACHED, OWN, lines, told

SEEN = ATTACHED.replace(
    "run = pl.attach(model, optimizer, loader,",
    """
from paceline.callbacks.loggers.logger import Logger


class Seen(Logger):
    kind = "seen"

    def begin(self, run, facts):
        self.seen = []

    def scalars(self, step, figures):
        self.seen += [(step, name, value) for name, value in figures.items()]

    def finish(self, status):
        with open(os.environ["TOLD"] + ".seen", "w") as file:
            json.dump(self.seen, file)

    def text(self, step, name, text):
        pass

    image = text


run = pl.attach(model, optimizer, loader, callbacks=[Seen()],""",
).replace(
    "run.log(loss=loss)",
    "run.log(loss=loss, first=x[:, 0].mean(), odd=float('nan') if run.step == 2 else 1.0)",
)
JOINED = [1, 2, 4, 8]  # steps after which ranks join figures


def seen(tmp_path, plan):
    """Return the losses of a run, and what its logger was given by `run.log`, in order."""
    attached = told(tmp_path, SEEN, plan)
    return lines(attached["run"], "loss"), [
        (step, name, value)
        for step, name, value in json.loads((tmp_path / "told.json.seen").read_text())
        if name == "loss" or name.startswith("train_")
    ]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "data=2", "data=3"])
def test_a_logger_gets_the_figures_of_all_rows_of_a_step(tmp_path, plan):
    """The last batch has two rows, so that a rank of three has none of it."""
    (tmp_path / "own").mkdir()
    own = told(
        tmp_path / "own",
        OWN.replace("losses.append", "rows.append(x[:, 0].mean().item())\n        losses.append"),
    )

    losses, given = seen(tmp_path, plan)

    figures = {(step, name): value for step, name, value in given}
    assert len(figures) == len(given)  # each once
    for name, expected in {"train_loss": own["losses"], "train_first": own["rows"]}.items():
        assert [figures[step, name] for step in range(1, 9)] == pytest.approx(expected, rel=1e-12)
    assert [step for step, name in figures if name == "train_odd"] == [1, 2, 4, 5, 6, 7, 8]
    # They come when they are joined; a step comes at once.
    joined = [min(j for j in JOINED if j >= s) if plan != "single" else s for s in range(1, 9)]
    order = (
        [step for step, name, _ in given if name == "loss"],
        [
            (step, next(s for s, name, _ in reversed(given[:place]) if name == "loss"))
            for place, (step, name, _) in enumerate(given)
            if name == "train_loss"
        ],
    )
    assert order == ([*range(1, 9)], list(zip(range(1, 9), joined, strict=True)))
    assert losses == pytest.approx(own["losses"], rel=1e-12)


@pytest.mark.slow
def test_a_command_logs_a_script_s_figures(tmp_path, monkeypatch):
    accumulator = needed("tensorboard.backend.event_processing.event_accumulator", "tensorboard")
    monkeypatch.setenv("TOLD", str(tmp_path / "told.json"))
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(ATTACHED)

    ran = call("run", "--plan", "data=2", "--run", run, "--log", "tensorboard", script)

    assert ran.exit_code == 0, ran.stderr
    events = accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    written = [(e.step, e.value) for e in events.Reload().Scalars("train_loss")]
    logged = [figures["loss"] for figures in lines(run, "logged")]
    assert [step for step, _ in written] == [*range(1, 9)]
    assert [value for _, value in written] == pytest.approx(logged, rel=1e-6)


@pytest.mark.slow
def test_the_progress_line_has_the_latest_figures(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("paceline.training.display.FIRST_PLAIN_S", 0.0)  # after each step

    told(tmp_path, ATTACHED.replace("loss=loss", "loss=loss, number=run.step"), "data=2")

    shown = [line for line in capfd.readouterr().err.splitlines() if " samples/s " in line]
    latest = [line.partition("number ")[2].partition(" ")[0] for line in shown]
    assert latest == ["", "0", "1", "1", "3", "3", "3", "3"]
    assert all(line.count("loss") == 1 for line in shown)
