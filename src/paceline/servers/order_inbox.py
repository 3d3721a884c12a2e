"""The orders that a worker has from the coordinator, and when it asks for the weights that they need."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from paceline.base.waiting import waiting
from paceline.servers.lazy_weights import WeightArrivals
from paceline.servers.wire import Connection, WireError

_QUICK = 0.1  # of a step: weights that come in less time are worth being fresher by a step


class OrderInbox:
    """Orders as they come in. Weights of the next one are asked for as soon as this step's are all there.

    Where later weights may be fresher and come quickly, they are asked for when their step begins.

    asks: whether weights are asked for at all, and not by whoever takes the steps.
    takes_any: whether weights of any version from the order's on will do.
    alive: called when the coordinator gives a sign of life while its next order is waited for.
    """

    def __init__(
        self,
        control: Connection,
        arrivals: WeightArrivals,
        *,
        takes_any: bool,
        alive: Callable[[], None],
    ) -> None:
        self.control, self.arrivals = control, arrivals
        self.takes_any, self.alive = takes_any, alive
        self.asks = True
        self.is_waiting = False
        self.changed = threading.Condition()
        self.sums: dict[int, list[float]] = {}  # of meetings within steps
        self.orders: deque[dict[str, Any]] = deque()
        self.losses: dict[int, float] = {}  # of steps, for whoever looks on
        self.error: WireError | None = None
        self.is_settled = True
        self.fetched_s = time.perf_counter()  # when the last step began
        self.step_s = 0.0  # how long one takes

    def listen(self) -> None:
        """Hear the coordinator on a thread of its own until it is gone."""
        threading.Thread(target=self._listen, name="paceline-orders", daemon=True).start()

    def next(self) -> dict[str, Any]:
        """Wait for an order.

        Raises:
            WireError: there will be none.
        """
        with self.changed:
            self.is_waiting = True
            self._wait_for(lambda: bool(self.orders))
            self.is_waiting = False
            # From here on the order's weights are this step's, and not yet all there.
            self.is_settled = False
            return self.orders.popleft()

    def loss(self, step: int) -> float:
        """Wait to hear of a step's loss, over all its parts."""
        with self.changed:
            self._wait_for(lambda: step in self.losses)
            return self.losses.pop(step)

    def met(self, number: int) -> list[float]:
        """Wait for the sums of a meeting within a step."""
        with self.changed:
            self.is_waiting = True
            self._wait_for(lambda: number in self.sums)
            self.is_waiting = False
            return self.sums.pop(number)

    def _wait_for(self, is_there: Callable[[], bool]) -> None:
        with waiting:
            self.changed.wait_for(lambda: is_there() or self.error is not None)
        if not is_there():
            assert self.error is not None
            raise self.error

    def fetch(self, order: dict[str, Any]) -> None:
        """An order's weights are this step's from now on."""
        with self.changed:
            self._ask(order)
            self.arrivals.begin()
            if self.arrivals.settled == self.arrivals.begun:  # they were there already
                self.settled()
            now_s = time.perf_counter()
            self.step_s, self.fetched_s = now_s - self.fetched_s, now_s

    def settled(self) -> None:
        """All weights of this step are there."""
        with self.changed:
            self.is_settled = True
            if self.orders and self._asks_early():
                self._ask(self.orders[0])

    def _asks_early(self) -> bool:
        return self.asks and (
            not self.takes_any or self.is_waiting or self.arrivals.pull_s > _QUICK * self.step_s
        )

    def _ask(self, order: dict[str, Any]) -> None:
        if order.get("version", -1) > self.arrivals.requested_version:
            self.arrivals.ask(order["version"])

    def _listen(self) -> None:
        try:
            while True:
                order = self.control.receive_message()
                with self.changed:
                    if "alive" in order:
                        if self.is_waiting:
                            self.alive()
                    elif "met" in order:
                        self.sums[order["met"]] = order["values"]
                    elif "made" in order:
                        self.losses[order["made"]] = order["loss"]
                    else:
                        self.orders.append(order)
                        if self.is_settled and len(self.orders) == 1 and self._asks_early():
                            self._ask(order)
                    self.changed.notify_all()
        except WireError as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()
