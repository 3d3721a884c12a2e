"""How steps are cut into updates: a turn is the work for one update."""

from __future__ import annotations

from paceline.base.errors import PlanRefused
from paceline.job.order import Order
from paceline.job.phases import ChangingBatch
from paceline.strategies.server.keys import Servers


class UpdateOrder:
    """The turns of a run, counted from 0 over all steps.

    Without staleness a turn is a step, at which all workers work. With it each worker's part of a step's window is a
    turn and an update of its own; a window of fewer samples than workers has as many parts as samples.

    width: turns of a step whose window is long enough. is_stale: whether a part of a step is an update of its own.
    """

    def __init__(self, order: Order, sync: Servers) -> None:
        self.order = order
        self.is_stale = sync.staleness != 0
        self.width = sync.workers if self.is_stale else 1
        if self.width == 1:
            return
        if isinstance(order.batch, ChangingBatch):
            raise PlanRefused(
                f"the batch changes during the run ({order.batch}), and with staleness={sync.staleness} "
                "workers take parts of steps that are cut alike",
                hint="staleness=0, or a data=N plan",
            )
        self._usual, self._steps_per_epoch = min(self.width, order.batch), order.epoch_end(0)
        self._per_epoch = self.before(self._steps_per_epoch - 1) + self._in(
            self._steps_per_epoch - 1
        )

    def before(self, step: int) -> int:
        """Turns of the steps before this one."""
        if self.width == 1:
            return step
        epoch, in_epoch = divmod(step, self._steps_per_epoch)
        return (epoch * self._per_epoch if epoch else 0) + in_epoch * self._usual

    def steps(self, turns: int) -> int:
        """Steps that are whole among the first so many turns."""
        if self.width == 1:
            return turns
        epoch, rest = divmod(turns, self._per_epoch)
        return epoch * self._steps_per_epoch + rest // self._usual

    def begun(self, turns: int) -> int:
        """Steps of which anything is among the first so many turns."""
        whole = self.steps(turns)
        return whole + (self.before(whole) < turns)

    def place(self, turn: int) -> tuple[int, int]:
        """The step of a turn, and which part of it."""
        step = self.steps(turn)
        return step, turn - self.before(step)

    def part(self, turn: int) -> float:
        """The part of its window's samples that a turn has."""
        step, place = self.place(turn)
        count, parts = self.order.window(step).count, self._in(step)
        return (count // parts + (place < count % parts)) / count

    def _in(self, step: int) -> int:
        return min(self.width, self.order.window(step).count)
