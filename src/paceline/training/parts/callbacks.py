"""Callbacks of a run, as its ranks hear of them: events go to them, and what they ask for becomes due.

Rank 0 talks to the process that controls the run, and all ranks learn its answer. None of this is a
collective: ranks that wait for a callback wait at the store, each for its own message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paceline.base.errors import CallbackError
from paceline.base.waiting import waiting
from paceline.checkpoint.read import Checkpoint
from paceline.launch.process.heartbeats import signs_of_life
from paceline.training.run import RankRun, RunPart
from paceline.training.settings import Answer

_TELL_EVERY_S = 0.05


class Callbacks(RunPart):
    """Tells callbacks of the run's start, its steps and its end; other parts tell them of theirs through `tell`.

    While this rank waits for callbacks, it keeps the run alive. If callbacks run in this process, another thread does.
    """

    def __init__(self, run: RankRun) -> None:
        self.run, self.context, self.controller = run, run.context, run.settings.controller
        # Gives callbacks the weights while ranks wait; see `saves.Saves.export_weights`. Collective.
        self.obey: Callable[[dict[str, Any]], dict[str, Any]] = lambda order: {}
        self._num_words, self._told_s = 0, 0.0
        self._pending: Answer = {}

    def has(self, hook: str) -> bool:
        return self.controller is not None and hook in self.controller.hooks

    @property
    def want_attention(self) -> bool:
        """Whether callbacks requested something of rank 0 while ranks continued. Other ranks never
        know.
        """
        line = self.context.line
        if self.controller is not None and self.context.rank == 0 and line is not None:
            while (message := line.hear(0)) is not None:
                self._add(message.value)
        return bool(self._pending)

    def restored(self, checkpoint: Checkpoint | None) -> None:
        """Let callbacks know that the first step is next."""
        if self.controller is not None:
            states = checkpoint.document.get("callbacks") if checkpoint is not None else None
            self._ask({"event": "start", "callbacks": states, "keeps": self.run.is_copied})

    def counted(self) -> None:
        """Report that a step is in metrics.jsonl. Only rank 0 reports, not after every step, and it
        never waits.
        """
        if self.controller is None or self.context.rank:
            return
        line = self.context.line
        if line is None:
            self._add(self.controller.on_report())
        elif (now_s := time.monotonic()) - self._told_s > _TELL_EVERY_S and line.is_writable:
            self._told_s = now_s
            line.report(None)

    def finished(self) -> None:
        if self.controller is not None:
            self._ask({"event": "end"})

    def tell(self, hook: str, event: str, **values: Any) -> None:
        """Let callbacks hear of an event, if one has the hook, and do what they ask for. Collective."""
        if self.has(hook):
            self._ask({"event": event, **values})

    def states(self) -> Mapping[str, Any]:
        """Ask for the callbacks' state, which rank 0 alone gets, as "callbacks"; pass the answer to `heed` once it is
        saved. Collective."""
        return self._answer({"event": "state"}) if self.has("state_dict") else {}

    def states_here(self) -> Any:
        """Return the state of callbacks that are in this process, which is rank 0; None otherwise."""
        if self.controller is None or self.context.line is not None:
            return None
        return self.controller.states()

    def take(self) -> None:
        """Heed what callbacks asked for while ranks went on, after the same step on all ranks. Collective."""
        self.heed(self._hear() if self.context.rank else self._say_pending())

    def heed(self, answer: Mapping[str, Any]) -> None:
        """Note what callbacks ask for.

        Raises:
            CallbackError: one of them failed.
        """
        if answer.get("failed"):
            raise CallbackError(answer["failed"], heard=self.context.rank != 0)
        self.run.ended = self.run.ended if self.run.ended is not None else answer.get("stop")
        self.run.due |= {name for name in ("evaluate", "save") if answer.get(name)}

    def _ask(self, event: Mapping[str, Any]) -> None:
        self.heed(self._answer(event))

    def _answer(self, event: Mapping[str, Any]) -> Answer:
        """Wait until callbacks have been told of an event, and do what they request meanwhile.

        All ranks call this at the same points, and get the same answer.
        """
        if self.context.rank:
            while "do" in (word := self._hear()):
                self.obey(word)
            return word
        answer = self._ask_controller({**event, "step": self.run.step})
        states = answer.pop("callbacks", None)
        self._add(answer)
        return self._say_pending() | {"callbacks": states}

    def _add(self, answer: Answer | None) -> None:
        for name, value in (answer or {}).items():
            if value:
                self._pending[name] = self._pending.get(name) or value

    def _ask_controller(self, event: dict[str, Any]) -> Answer:
        """Ask the controller on rank 0. The rank carries out the controller's orders before the
        answer comes.
        """
        line, timeout_s, controller = self.context.line, self.context.timeout_s, self.controller
        assert controller is not None
        sign_every_s = timeout_s / 8
        if line is None:
            with (
                waiting,
                signs_of_life(self._give_sign, every_s=sign_every_s),
                signs_of_life(partial(controller.tell_slow, timeout_s), every_s=timeout_s),
            ):
                return controller.on_question(event, self._obey)
        line.question(event)
        while True:
            with waiting:
                while (message := line.hear(sign_every_s)) is None:
                    self._give_sign()
            if message.kind == "order":
                self._add(message.value)
            elif "do" in message.value:
                line.question(self._obey(message.value))
            else:
                return dict(message.value)

    def _give_sign(self) -> None:
        """Give a sign of life, because a callback may take long."""
        self.context.beat("callback")
        self.run.keep_alive()

    def _obey(self, order: dict[str, Any]) -> Any:
        self._say(order)
        return self.obey(order)

    # --- Rank 0's word to the others --------------------------------------------------------------------------------

    def _key(self) -> str:
        self._num_words += 1
        return f"control/{self.context.attempt}/{self._num_words}"

    def _say_pending(self) -> Answer:
        answer, self._pending = self._pending, {}
        self._say(answer)
        return answer

    def _say(self, word: dict[str, Any]) -> None:
        if self.run.num_ranks > 1:
            assert self.context.store is not None
            self.context.store.set(self._key(), json.dumps(word))

    def _hear(self) -> dict[str, Any]:
        word: dict[str, Any] = json.loads(self.context.hear(self._key(), "callback"))
        return word
