"""How a worker takes a step of the job's own: server 0 sums figures, and servers make the updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from paceline.servers.connection import GradientSender, ServerConnection
from paceline.servers.lazy_weights import WeightArrivals
from paceline.servers.wire import Connection
from paceline.strategies.step_sync import SyncEveryStep


class ServedSteps(SyncEveryStep):
    """All workers meet in every step, as often as it has backwards and updates; see `meetings.py`.

    An update is one exchange: workers send the gradients of what an optimizer updates, servers update it, and workers
    have its weights before the step goes on.

    meeting: the number of the next one; weights have a meeting's number and one as their version.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        links: Sequence[ServerConnection],
        arrivals: WeightArrivals,
        control: Connection,
        met: Callable[[int], list[float]],
        *,
        num_workers: int,
    ) -> None:
        """
        Args:
            met: Waits for the sums of a meeting.
        """
        super().__init__(num_workers)
        self.links, self.arrivals, self.control, self.met = links, arrivals, control, met
        self.sender = GradientSender(parameters, links)
        self.meeting = -1

    def begin_at(self, version: int) -> None:
        """Fetch the weights that training begins with, or goes on from."""
        self.meeting = version
        self._fetch(version)

    def all_reduce_figures(self, figures: torch.Tensor) -> torch.Tensor:
        number, self.meeting = self.meeting, self.meeting + 1
        self.control.send_message({"figures": number, "values": figures.flatten().tolist()})
        self.met_bytes += figures.nbytes
        return figures.new_tensor(self.met(number)).view_as(figures)

    def update(self, optimizer: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Have servers take the step of an optimizer. parameters: that it updates."""
        number, self.meeting = self.meeting, self.meeting + 1
        self.sender.forget()
        for server, link in enumerate(self.links):
            for chunk in link.shard.updated_by(optimizer):
                self.sender.push(number, server, chunk, is_whole=True)
        unused = sorted(name for name, p in parameters.items() if p.grad is None)
        self.control.send_message({"update": number, "optimizer": optimizer, "unused": unused})
        self._fetch(number + 1, optimizer)

    def _fetch(self, version: int, optimizer: str | None = None) -> None:
        self.arrivals.ask(version, optimizer)
        self.arrivals.begin()
        self.arrivals.settle()
