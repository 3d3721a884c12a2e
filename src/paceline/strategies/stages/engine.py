"""Runs a model that is cut into stages, each on its rank.

Values and gradients are sent directly to the ranks that need them. A stage takes values from any
earlier stage on any rank, and gives values to any later stage. Skip connections over stages and
branches therefore need no special treatment. Ranks follow their own order of actions, and wait only
for the values that an action needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.waiting import waiting
from paceline.model.graph import Capture, Constant, Piece, Value
from paceline.strategies.stages.schedule import Action
from paceline.torch_private.autograd import accumulated_hooks

RunPiece = Callable[[Piece, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Stage:
    """Pieces that run one after the other on one rank."""

    number: int
    rank: int  # place along the axis of stages
    pieces: tuple[Piece, ...]
    inputs: tuple[Value, ...]  # values of earlier stages that this stage needs
    outputs: tuple[Value, ...]  # values that later stages need


@dataclass(frozen=True)
class Staged:
    """A capture cut into stages. The last stage also has the model's output and the loss."""

    capture: Capture
    stages: tuple[Stage, ...]
    producer: Mapping[str, int]  # by value that other stages need: the stage that makes it
    consumers: Mapping[str, tuple[int, ...]]  # by value: the stages that need it, in order

    def home(self, name: str) -> int:
        """Return the rank that makes a value."""
        return self.stages[self.producer[name]].rank

    def takers(self, name: str) -> list[int]:
        """Return the other ranks that need a value."""
        return sorted({self.stages[k].rank for k in self.consumers[name]} - {self.home(name)})


def cut(capture: Capture, stage_of: Callable[[Piece], int], ranks: Sequence[int]) -> Staged:
    """Cut a capture into stages. ranks: the place of each stage along the axis of stages."""
    members: list[list[Piece]] = [[] for _ in ranks]
    producer: dict[str, int] = {}
    for piece in capture.pieces:
        members[stage_of(piece)].append(piece)
        producer |= dict.fromkeys(piece.outputs, stage_of(piece))
    needed: list[dict[str, None]] = [{} for _ in ranks]
    for number, pieces in enumerate(members):
        for name in (name for piece in pieces for name in piece.inputs):
            if name in producer and producer[name] != number:
                needed[number][name] = None
    for output in capture.outputs:
        if (
            not isinstance(output, Constant)
            and output in producer
            and producer[output] != len(ranks) - 1
        ):
            needed[-1][output] = None
    consumers = {
        name: users
        for name in producer
        if (users := tuple(k for k, names in enumerate(needed) if name in names))
    }
    stages = tuple(
        Stage(
            number,
            ranks[number],
            tuple(pieces),
            tuple(capture.values[name] for name in needed[number]),
            tuple(
                capture.values[name]
                for piece in pieces
                for name in piece.outputs
                if name in consumers
            ),
        )
        for number, pieces in enumerate(members)
    )
    return Staged(capture, stages, {name: producer[name] for name in consumers}, consumers)


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """A message with a value, or with its gradient from one of its consumers."""

    value: str
    microbatch: int
    consumer: int | None = None


@dataclass
class _Flight:
    """The tensors that a stage keeps of a micro-batch between its forward and its backward."""

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    loss: torch.Tensor | None = None
    weights_left: Callable[[], None] = lambda: None  # runs what "I" has left of the backward


class Links:
    """Sends and receives between the ranks along an axis.

    Messages from one rank to another arrive in the sender's order, which the receiver knows, so
    that no tags are needed.

    NCCL runs the messages of a group between two ranks one after the other. Two ranks that wait for
    each other's message before they send would wait forever. Therefore each direction has its own
    group.

    Args:
        ranks: The ranks of the axis.
        place: This rank's place among them.
        ahead: The group for messages to later places.
        back: The group for messages to earlier places.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        place: int,
        device: torch.device,
        *,
        ahead: dist.ProcessGroup | None,
        back: dist.ProcessGroup | None,
    ) -> None:
        self.ranks, self.place, self.device, self.ahead, self.back = (
            ranks,
            place,
            device,
            ahead,
            back,
        )
        self.expected: dict[int, Iterator[tuple[PeerMessage, Value]]] = {}
        self.posted: dict[tuple[int, PeerMessage], tuple[dist.Work, torch.Tensor]] = {}
        self.sent: list[tuple[dist.Work, torch.Tensor]] = []

    def expect(self, messages: Mapping[int, Sequence[tuple[PeerMessage, Value]]]) -> None:
        """Set the messages that each rank will send to this one in the coming step, in order."""
        self.expected = {rank: iter(items) for rank, items in messages.items()}

    def send(self, tensor: torch.Tensor, to: int) -> None:
        tensor = tensor.detach().contiguous()
        self.sent = [
            (work, tensor_sent) for work, tensor_sent in self.sent if not work.is_completed()
        ]
        work = dist.isend(
            tensor, self.ranks[to], group=self.ahead if to > self.place else self.back
        )
        assert work is not None
        self.sent.append((work, tensor))

    def post(self, message: PeerMessage, source: int) -> None:
        """Start to receive a message, and all messages before it."""
        while (source, message) not in self.posted:
            coming, value = next(self.expected[source])
            buffer = torch.empty(value.shape, dtype=value.dtype, device=self.device)
            work = dist.irecv(
                buffer, self.ranks[source], group=self.ahead if source < self.place else self.back
            )
            assert work is not None
            self.posted[source, coming] = (work, buffer)

    def receive(self, message: PeerMessage, source: int) -> torch.Tensor:
        self.post(message, source)
        work, buffer = self.posted.pop((source, message))
        with waiting:
            work.wait()
        return buffer

    def finish(self) -> None:
        """Wait until all messages have been sent."""
        with waiting:
            for work, _ in self.sent:
                work.wait()
        self.sent = []
        assert not self.posted, "messages were received that nobody used"


@dataclass
class Engine:
    """Runs one rank's part of a step."""

    orders: Sequence[Sequence[Action]]  # the actions of every rank
    links: Links  # to the other ranks of the axis
    run_piece: RunPiece  # runs one piece with the tensors that this rank holds
    # Returns the tensors on which gradients of a stage of this rank accumulate.
    weights: Callable[[Stage], list[torch.nn.Parameter]]
    # Receives each action with the times at which its work began (after its inputs had arrived) and
    # ended, by perf_counter.
    record: Callable[[Action, float, float], None] | None = None
    _ready_s: float = 0.0
    # By capture and stage: whether its backward can be done in two actions, I and W.
    _separable: dict[tuple[int, int], bool] = field(default_factory=dict)
    _received: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    _uses: dict[tuple[str, int], int] = field(default_factory=dict)
    _gradients: dict[PeerMessage, torch.Tensor | None] = field(default_factory=dict)
    _flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)

    def run(
        self,
        staged: Mapping[int, Staged],
        inputs: Mapping[int, Mapping[str, torch.Tensor]],
        loss: Callable[[int, Any], torch.Tensor],
        *,
        before: Callable[[Action], None] = lambda action: None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Run forward and backward of these micro-batches. Other micro-batches of the orders are
        left out.

        Args:
            staged: The cut capture of each micro-batch by number. The numbers are the same on every
                rank.
            inputs: The model's own inputs of each micro-batch, by name.
            loss: Returns the tensor from which backward starts, from a micro-batch's number and the
                model's output.
            before: Called before each action.
            context: The numeric context of a forward. A backward needs none: autograd knows that of
                each operator.
        """
        orders = [
            [action for action in order if action.microbatch in staged] for order in self.orders
        ]
        self._begin(orders, staged)
        order = orders[self.links.place]
        for position, action in enumerate(order):
            for coming in order[position : position + 2]:
                self._post(coming, staged[coming.microbatch])
            before(action)
            if action.kind == "F":
                with context():
                    self._forward(
                        action, staged[action.microbatch], inputs[action.microbatch], loss
                    )
            else:
                self._backward(action, staged[action.microbatch])
            if self.record is not None:
                self.record(action, self._ready_s, time.perf_counter())
        self.links.finish()

    def run_forward(self, staged: Staged, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Return the model's output for one batch on the rank of the last stage; None on other
        ranks."""
        output = None
        orders = [
            [Action("F", stage.number, 0) for stage in staged.stages if stage.rank == rank]
            for rank in range(len(self.orders))
        ]
        self._begin(orders, {0: staged})
        for action in orders[self.links.place]:
            stage = staged.stages[action.stage]
            values = dict(inputs) | {v.name: self._take(staged, v, 0) for v in stage.inputs}
            self._run_pieces(stage, values)
            self._give(staged, stage, {v.name: values[v.name] for v in stage.outputs}, 0)
            if stage.number == len(staged.stages) - 1:
                output = staged.capture.result(values)
        self.links.finish()
        return output

    def forget(self, staged: Staged) -> None:
        """Forget a cut capture that will not run again. Another one may get its id."""
        for stage in staged.stages:
            self._separable.pop((id(staged), stage.number), None)

    def _begin(self, orders: Sequence[Sequence[Action]], staged: Mapping[int, Staged]) -> None:
        place = self.links.place
        self.links.expect(
            {
                rank: list(self._messages(orders[rank], staged, to=place, rank=rank))
                for rank in range(len(orders))
                if rank != place
            }
        )
        self._received, self._uses, self._gradients, self._flights = {}, {}, {}, {}

    def _messages(
        self, order: Sequence[Action], staged: Mapping[int, Staged], *, to: int, rank: int
    ) -> Iterator[tuple[PeerMessage, Value]]:
        """Yield the messages that a rank with this order sends to another rank."""
        for action in order:
            stages_of = staged[action.microbatch]
            stage = stages_of.stages[action.stage]
            if action.kind == "F":
                yield from (
                    (PeerMessage(value.name, action.microbatch), value)
                    for value in stage.outputs
                    if to in stages_of.takers(value.name)
                )
            elif action.kind in ("B", "I"):
                yield from (
                    (PeerMessage(value.name, action.microbatch, stage.number), value)
                    for value in stage.inputs
                    if value.differentiable and stages_of.home(value.name) == to
                )

    def _post(self, action: Action, staged: Staged) -> None:
        """Start to receive the messages that an action needs."""
        place, stage, number = self.links.place, staged.stages[action.stage], action.microbatch
        if action.kind == "F":
            for value in stage.inputs:
                home = staged.home(value.name)
                if home != place and (value.name, number) not in self._received:
                    self.links.post(PeerMessage(value.name, number), home)
        elif action.kind in ("B", "I"):
            for value in stage.outputs:
                for consumer in staged.consumers[value.name] if value.differentiable else ():
                    if staged.stages[consumer].rank != place:
                        self.links.post(
                            PeerMessage(value.name, number, consumer), staged.stages[consumer].rank
                        )

    def _take(self, staged: Staged, value: Value, number: int) -> torch.Tensor:
        """Return a value of an earlier stage, from this rank or another.

        It is kept until the last stage of this rank has taken it.
        """
        key = (value.name, number)
        if key not in self._received:
            home = staged.home(value.name)
            self._keep(
                staged,
                value.name,
                number,
                self.links.receive(PeerMessage(value.name, number), home),
            )
        self._uses[key] -= 1
        return self._received[key] if self._uses[key] else self._received.pop(key)

    def _keep(self, staged: Staged, name: str, number: int, tensor: torch.Tensor) -> None:
        uses = sum(staged.stages[k].rank == self.links.place for k in staged.consumers[name])
        if uses:
            self._received[name, number], self._uses[name, number] = tensor.detach(), uses

    def _give(
        self, staged: Staged, stage: Stage, outputs: Mapping[str, torch.Tensor], number: int
    ) -> None:
        for name, tensor in outputs.items():
            self._keep(staged, name, number, tensor)
            for rank in staged.takers(name):
                self.links.send(tensor, rank)

    def _run_pieces(self, stage: Stage, values: dict[str, torch.Tensor]) -> None:
        for piece in stage.pieces:
            values |= zip(
                piece.outputs,
                self.run_piece(piece, tuple(values[name] for name in piece.inputs)),
                strict=True,
            )

    def _forward(
        self,
        action: Action,
        staged: Staged,
        inputs: Mapping[str, torch.Tensor],
        loss: Callable[[int, Any], torch.Tensor],
    ) -> None:
        stage, number = staged.stages[action.stage], action.microbatch
        taken = {
            value.name: self._take(staged, value, number)
            .detach()
            .requires_grad_(value.differentiable)
            for value in stage.inputs
        }
        self._ready_s = time.perf_counter()
        values = dict(inputs) | taken
        self._run_pieces(stage, values)
        flight = _Flight(taken, {value.name: values[value.name] for value in stage.outputs})
        if stage.number == len(staged.stages) - 1:
            flight.loss = loss(number, staged.capture.result(values))
        self._flights[action.stage, number] = flight
        self._give(staged, stage, flight.outputs, number)

    def _backward(self, action: Action, staged: Staged) -> None:
        stage, key = staged.stages[action.stage], (action.stage, action.microbatch)
        flight = self._flights[key]
        self._ready_s = time.perf_counter()
        if action.kind == "W":
            flight.weights_left()
            del self._flights[key]
            return
        roots, gradients = self._roots(action, staged, flight)
        self._ready_s = time.perf_counter()
        if action.kind == "I":
            inputs = [tensor for tensor in flight.inputs.values() if tensor.requires_grad]
            stage_key = (id(staged), action.stage)
            if stage_key not in self._separable:
                self._separable[stage_key] = uses_weights_once(roots, inputs)
            if self._separable[stage_key]:
                flight.weights_left = backward_of_inputs(
                    roots, gradients, inputs, self.weights(stage)
                )
            else:
                torch.autograd.backward(roots, gradients)
        elif roots:
            torch.autograd.backward(roots, gradients)
        self._return_gradients(action, staged, flight)
        if action.kind == "B":
            del self._flights[key]

    def _roots(
        self, action: Action, staged: Staged, flight: _Flight
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors from which a stage's backward starts, and their gradients.

        These are the outputs for which gradients have arrived, and the loss.
        """
        stage, number = staged.stages[action.stage], action.microbatch
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for value in stage.outputs:
            if not value.differentiable:
                continue
            arrived = [
                g
                for g in (
                    self._gradient(staged, value, number, consumer)
                    for consumer in staged.consumers[value.name]
                )
                if g is not None
            ]
            output = flight.outputs[value.name]
            if arrived and output.requires_grad:
                roots.append(output)
                gradients.append(arrived[0] if len(arrived) == 1 else torch.stack(arrived).sum(0))
        if flight.loss is not None:
            roots.append(flight.loss)
            gradients.append(torch.ones_like(flight.loss))
        return roots, gradients

    def _gradient(
        self, staged: Staged, value: Value, number: int, consumer: int
    ) -> torch.Tensor | None:
        home, message = staged.stages[consumer].rank, PeerMessage(value.name, number, consumer)
        if home == self.links.place:
            return self._gradients.pop(message)
        return self.links.receive(message, home)

    def _return_gradients(self, action: Action, staged: Staged, flight: _Flight) -> None:
        """Give the gradients of a stage's inputs to the stages that made the inputs."""
        stage, number = staged.stages[action.stage], action.microbatch
        for value in stage.inputs:
            if not value.differentiable:
                continue
            home, gradient = staged.home(value.name), flight.inputs[value.name].grad
            if home == self.links.place:
                self._gradients[PeerMessage(value.name, number, stage.number)] = gradient
            else:
                self.links.send(
                    torch.zeros(value.shape, dtype=value.dtype, device=self.links.device)
                    if gradient is None
                    else gradient,
                    home,
                )


def uses_weights_once(roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a backward can be done in two parts, because no weight is used at two places of the
    graph.

    torch starts the second part at every place where a weight is used. From the place nearer to the
    roots, it would reach the other place a second time.
    """
    ends = {torch.autograd.graph.get_gradient_edge(tensor).node for tensor in inputs}
    order: list[Any] = []
    users: dict[Any, int] = {}
    stack: list[tuple[Any, bool]] = [
        (root.grad_fn, False) for root in roots if root.grad_fn is not None
    ]
    seen: set[Any] = set()
    while stack:  # depth first; a node enters the order after all nodes that it leads to
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            for following, _ in node.next_functions:
                if following is not None:
                    users[following] = users.get(following, 0) + 1
                    stack.append((following, False))
    to_inputs: set[Any] = set()
    for node in order:
        if node in ends or any(following in to_inputs for following, _ in node.next_functions):
            to_inputs.add(node)
    return all(count == 1 or node in to_inputs for node, count in users.items())


def backward_of_inputs(
    roots: list[torch.Tensor],
    gradients: list[torch.Tensor],
    inputs: list[torch.Tensor],
    weights: list[torch.nn.Parameter],
) -> Callable[[], None]:
    """Run the first half of a backward, which computes only the gradients of the inputs.

    Returns a function that runs the other half. The graph is kept in between.
    """
    from paceline.torch_private.pipelining import stage_backward_input, stage_backward_weight

    if not roots:
        return lambda: None
    if not inputs:  # the first stage: its whole backward computes weight gradients
        return lambda: torch.autograd.backward(roots, gradients)
    # torch detaches these tensors in place, which views don't allow.
    _, groups = stage_backward_input(
        [root.clone() for root in roots], gradients, inputs, iter(weights)
    )
    edges = {torch.autograd.graph.get_gradient_edge(weight).node: weight for weight in weights}
    reached = {edges[node] for group in groups for node in group["params"]}

    def rest() -> None:
        # Weights that are on no path from the inputs, such as those of an embedding that this stage
        # adds.
        apart = [weight for weight in weights if weight not in reached]
        if apart:
            torch.autograd.backward(roots, gradients, inputs=apart, retain_graph=True)
        stage_backward_weight(iter(weights), groups)
        for weight in reached:  # torch adds these gradients without calling the hooks
            for hook in accumulated_hooks(weight).values():
                hook(weight)

    return rest
