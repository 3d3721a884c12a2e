"""A rank's side of a run's callbacks. Rank 0 talks to the process that controls the run, and all
ranks learn its answer.

None of this is a collective: ranks that wait for a callback wait at the store, each for its own
message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from paceline.base.waiting import waiting
from paceline.launch.process.context import RankContext
from paceline.launch.process.heartbeats import signs_of_life

Answer = dict[
    str, Any
]  # `Requests` as a mapping; "callbacks" has their state, if the ranks asked for it
_TELL_EVERY_S = 0.05


class Controlling(Protocol):
    """The object that controls a run; `callbacks.controller.RunController`.

    hooks: methods that its callbacks have.
    """

    @property
    def hooks(self) -> frozenset[str]: ...
    def on_report(self) -> Answer | None: ...
    def on_question(
        self, event: Mapping[str, Any], exchange: Callable[[dict[str, Any]], Any]
    ) -> Answer: ...
    def states(self) -> list[dict[str, Any]]: ...
    def tell_slow(self, after_s: float) -> None: ...


class RunControl:
    """One rank's part in a controlled run.

    Args:
        do: Carries out an order on a rank; collective if it needs to be.
        meanwhile: Called repeatedly while this rank waits for callbacks. If callbacks run in this
            process, another thread calls it.
        num_ranks: Ranks that take part.
    """

    def __init__(
        self,
        context: RankContext,
        controller: Controlling,
        do: Callable[[dict[str, Any]], Any],
        meanwhile: Callable[[], None],
        num_ranks: int,
    ) -> None:
        self.context, self.controller, self.do, self.meanwhile = context, controller, do, meanwhile
        self.num_ranks = num_ranks
        self._num_words, self._told_s = 0, 0.0
        self._pending: Answer = {}

    def has(self, hook: str) -> bool:
        return hook in self.controller.hooks

    @property
    def wants_attention(self) -> bool:
        """Whether callbacks requested something of rank 0 while ranks continued. Other ranks never
        know.
        """
        if self.context.rank == 0 and self.context.line is not None:
            while (message := self.context.line.hear(0)) is not None:
                self._add(message.value)
        return bool(self._pending)

    def tell(self) -> None:
        """Report that a step is in metrics.jsonl. Only rank 0 reports, not after every step, and it
        never waits.
        """
        if self.context.rank:
            return
        line = self.context.line
        if line is None:
            self._add(self.controller.on_report())
        elif (now_s := time.monotonic()) - self._told_s > _TELL_EVERY_S and line.is_writable:
            self._told_s = now_s
            line.report(None)

    def ask(self, event: Mapping[str, Any]) -> Answer:
        """Wait until callbacks have been told of an event, and do what they request meanwhile.

        All ranks call this at the same points, and get the same answer.
        """
        if self.context.rank:
            while "do" in (word := self._hear()):
                self.do(word)
            return word
        answer = self._ask_controller(event)
        states = answer.pop("callbacks", None)
        self._add(answer)
        answer, self._pending = self._pending, {}
        self._say(answer)
        return answer | {"callbacks": states}

    def states_here(self) -> Any:
        """Return the state of callbacks that are in this process; None if they are in another one."""
        return self.controller.states() if self.context.line is None else None

    def take(self) -> Answer:
        """Return what callbacks requested while ranks continued. All ranks call this after the same
        step.
        """
        if self.context.rank:
            return self._hear()
        answer, self._pending = self._pending, {}
        self._say(answer)
        return answer

    def _add(self, answer: Answer | None) -> None:
        for name, value in (answer or {}).items():
            if value:
                self._pending[name] = self._pending.get(name) or value

    def _ask_controller(self, event: Mapping[str, Any]) -> Answer:
        """Ask the controller on rank 0. The rank carries out the controller's orders before the
        answer comes.
        """
        line = self.context.line
        if line is None:
            timeout_s = self.context.timeout_s
            with (
                waiting,
                signs_of_life(self._give_sign, every_s=self._sign_every_s),
                signs_of_life(partial(self.controller.tell_slow, timeout_s), every_s=timeout_s),
            ):
                return self.controller.on_question(event, self._obey)
        line.question(dict(event))
        while True:
            with waiting:
                while (message := line.hear(self._sign_every_s)) is None:
                    self._give_sign()
            if message.kind == "order":
                self._add(message.value)
            elif "do" in message.value:
                line.question(self._obey(message.value))
            else:
                return dict(message.value)

    @property
    def _sign_every_s(self) -> float:
        return self.context.timeout_s / 8

    def _give_sign(self) -> None:
        """Give a sign of life, because a callback may take long."""
        self.context.beat("callback")
        self.meanwhile()

    def _obey(self, order: dict[str, Any]) -> Any:
        self._say(order)
        return self.do(order)

    # --- Rank 0's word to the others --------------------------------------------------------------------------------

    def _key(self) -> str:
        self._num_words += 1
        return f"control/{self.context.attempt}/{self._num_words}"

    def _say(self, word: dict[str, Any]) -> None:
        if self.num_ranks > 1:
            assert self.context.store is not None
            self.context.store.set(self._key(), json.dumps(word))

    def _hear(self) -> dict[str, Any]:
        word: dict[str, Any] = json.loads(self.context.hear(self._key(), "callback"))
        return word
