"""The test data of a search is read once, although a node may be lost meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from paceline.launch.process.messages import Message
from paceline.runs import folder
from paceline.searches.trials import OWNER, RECORD, TEST
from paceline.searches.winner import read_test_data


class LosesNodes:
    """A pool of nodes with a slot each, of which the first ones are lost with what they run."""

    def __init__(self, num_nodes: int, num_lost: int) -> None:
        self.nodes, self.num_lost = [[number] for number in range(num_nodes)], num_lost
        self.names = ["cpu:0"] * num_nodes
        self.started = 0

    @property
    def free(self) -> list[int]:
        return [slot for node in self.nodes for slot in node]

    def start(self, payload: Any, slots: Any, **options: Any) -> int:
        self.started += 1
        return self.started

    def wait(self, timeout_s: float) -> list[Message]:
        if self.started <= self.num_lost:
            del self.nodes[0]
            return [Message(self.started, "lost", 0)]
        return [Message(self.started, "end", 0, {"loss": 0.5})]


def winner_in(run_dir: Path) -> optuna.Study:
    study = optuna.create_study()
    trial = study.ask()
    trial.set_user_attr(RECORD, {"plan": "single", "params": {}})
    trial.set_user_attr(OWNER, f"host:{run_dir}")
    study.tell(trial, 1.0)
    model = run_dir / "trials" / "0" / folder.MODEL
    model.parent.mkdir(parents=True)
    model.touch()
    return study


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_node_that_is_lost_leaves_the_test_data_to_another(
    num_lost: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """If none is left, a line says that the data was not read."""
    study, pool, job = winner_in(tmp_path), LosesNodes(2, num_lost), SimpleNamespace(test=[1])
    read_test_data(study, pool, job, memory=None)  # type: ignore[arg-type]
    if num_lost == 1:
        assert study.user_attrs[TEST] == {"trial": 0, "loss": 0.5}
    else:
        assert TEST not in study.user_attrs
        assert "was not read: no node with 1 devices is left" in capsys.readouterr().err
