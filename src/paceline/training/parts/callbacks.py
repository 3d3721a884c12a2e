"""Callbacks of a run, as its ranks hear of them: events go to them, and what they ask for becomes due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.base.errors import CallbackError
from paceline.checkpoint.read import Checkpoint
from paceline.training.control import RunControl
from paceline.training.run import RankRun, RunPart


class Callbacks(RunPart):
    """Tells callbacks of the run's start, its steps and its end; other parts tell them of theirs through `tell`."""

    def __init__(self, run: RankRun) -> None:
        self.run = run
        self.control: RunControl | None = None
        # Gives callbacks the weights while ranks wait; see `saves.Saves.export_weights`.
        self.obey: Callable[[dict[str, Any]], dict[str, Any]] = lambda order: {}

    def has(self, hook: str) -> bool:
        return self.control is not None and self.control.has(hook)

    @property
    def want_attention(self) -> bool:
        return self.control is not None and self.control.wants_attention

    def restored(self, checkpoint: Checkpoint | None) -> None:
        """Let callbacks know that the first step is next."""
        run = self.run
        if run.settings.controller is None:
            return
        self.control = RunControl(
            run.context,
            run.settings.controller,
            lambda order: self.obey(order),
            run.keep_alive,
            run.num_ranks,
        )
        states = checkpoint.document.get("callbacks") if checkpoint is not None else None
        self._ask({"event": "start", "callbacks": states, "keeps": run.is_copied})

    def counted(self) -> None:
        if self.control is not None:
            self.control.tell()

    def finished(self) -> None:
        if self.control is not None:
            self._ask({"event": "end"})

    def tell(self, hook: str, event: str, **values: Any) -> None:
        """Let callbacks hear of an event, if one has the hook, and do what they ask for. Collective."""
        if self.has(hook):
            self._ask({"event": event, **values})

    def states(self) -> Mapping[str, Any]:
        """Ask for the callbacks' state, which rank 0 alone gets, as "callbacks"; pass the answer to `heed` once it is
        saved. Collective."""
        if not self.has("state_dict"):
            return {}
        assert self.control is not None
        return self.control.ask({"event": "state", "step": self.run.step})

    def states_here(self) -> Any:
        """Return the state of callbacks that are in this process, which is rank 0; None otherwise."""
        return self.control.states_here() if self.control is not None else None

    def take(self) -> None:
        """Heed what callbacks asked for while ranks went on. Collective."""
        assert self.control is not None
        self.heed(self.control.take())

    def heed(self, answer: Mapping[str, Any]) -> None:
        """Note what callbacks ask for.

        Raises:
            CallbackError: one of them failed.
        """
        if answer.get("failed"):
            raise CallbackError(answer["failed"], heard=self.run.context.rank != 0)
        self.run.ended = self.run.ended if self.run.ended is not None else answer.get("stop")
        self.run.due |= {name for name in ("evaluate", "save") if answer.get(name)}

    def _ask(self, event: Mapping[str, Any]) -> None:
        assert self.control is not None
        self.heed(self.control.ask({**event, "step": self.run.step}))
