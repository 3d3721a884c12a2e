"""A rank's part of a model that is cut into stages over the ranks of an axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.base.errors import JobError, PlanRefused
from paceline.base.logs import logger
from paceline.model.forward_effects import sparsely_trained
from paceline.model.graph import Capture, Piece, capture
from paceline.model.opaque import OpaqueModules
from paceline.model.reads import frozen
from paceline.strategies.data.sparse import SparseGradients, sparse_parameters
from paceline.strategies.layout import Batch, Extent, MicrobatchWork, ModelUse
from paceline.strategies.mesh import let_go_of, local_part
from paceline.strategies.stages.assignment import Assignment
from paceline.strategies.stages.engine import Engine, Links, Stage, Staged, cut
from paceline.strategies.stages.module import PieceModule, PieceModules
from paceline.strategies.stages.schedule import Action
from paceline.strategies.tensor.leaf import leaf_of
from paceline.strategies.tensor.run import TensorSplit, has_hooks
from paceline.torch_private import pytree
from paceline.torch_private.autograd import accumulated_hooks
from paceline.torch_private.fake_tensors import FakeTensorMode
from paceline.torch_private.modules import own_parameters

if TYPE_CHECKING:
    from paceline.strategies.mesh import Mesh


MOST_CAPTURES = 64  # that are kept after a step, of all shapes of batches
_SAID_AFTER = 16  # captures
_ACTIONS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def first_names(model: nn.Module) -> dict[str, str]:
    """Return, for every name of a parameter, the name under which the model lists it."""
    listed = {id(p): name for name, p in model.named_parameters()}
    return {name: listed[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def renamed(capture: Capture, first_name: Mapping[str, str]) -> Capture:
    """Return the capture with each tied parameter under one name."""
    return replace(
        capture,
        pieces=tuple(
            replace(piece, parameters=tuple(first_name[name] for name in piece.parameters))
            for piece in capture.pieces
        ),
    )


def hollow(model: nn.Module, device: torch.device) -> dict[str, nn.Parameter]:
    """Replace a model's parameters by fake tensors without memory, and return the parameters by
    name.

    The model can still be captured, on the device. Tied parameters stay tied. The model's buffers
    are moved to the device.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    parameters = dict(model.named_parameters())

    def stand_in(parameter: nn.Parameter) -> nn.Parameter:
        fake = mode.from_tensor(parameter.data, static_shapes=True)
        with mode:
            return nn.Parameter(fake.to(device), requires_grad=parameter.requires_grad)

    stand_ins = {id(p): stand_in(p) for p in parameters.values()}
    for module in model.modules():
        for name, parameter in list(own_parameters(module).items()):
            if parameter is not None:  # already a stand-in where two modules hold the same
                own_parameters(module)[name] = stand_ins.get(id(parameter), parameter)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return parameters


@dataclass(frozen=True)
class CapturedModel:
    """The capture of a model's forward."""

    example: Capture  # for a training batch
    batch: Batch  # that batch
    opaque: OpaqueModules  # modules that are taken whole
    changing: Collection[str] = ()  # names of buffers that a forward changes
    notes: Sequence[str] = ()  # shown when a run begins


class Stages:
    """Stages of a model on their ranks; see `Layout`.

    Args:
        template: The hollow model.
        tensors: The model's parameters, with their values until `let_go`.
        assignment: The assignment of the captured model's pieces.
        split: The split of layers over the tensor axis.

    Raises:
        PlanRefused: several ranks would use a tensor that a forward changes.
    """

    def __init__(
        self,
        template: nn.Module,
        tensors: Mapping[str, nn.Parameter],
        captured: CapturedModel,
        assignment: Assignment,
        *,
        mesh: Mesh,
        device: torch.device,
        use: ModelUse,
        split: TensorSplit,
    ) -> None:
        axis, example = mesh.stage_axis, captured.example
        self.template, self.context = template, use.context
        self.stage_of, self.ranks = assignment.stage_of, assignment.ranks
        # The place along the axis of stages of each piece of the example, by key.
        self.rank_of = {piece.key: self.ranks[self.stage_of[piece.key]] for piece in example.pieces}
        # Each with the signature of its batch, and the batch's values that are not tensors. The one
        # that was used last comes last.
        self.captures: list[tuple[Hashable, Any, Staged]] = []
        self.num_captures = 0  # including those that were forgotten
        self.opaque, self.tensors, self.example, self.split = (
            captured.opaque,
            tensors,
            example,
            split,
        )
        self.is_sharded = mesh.sizes["shard"] > 1
        place = mesh.coordinates[axis]
        self.links = Links(
            mesh.ranks_along(axis),
            place,
            device,
            ahead=None,
            back=mesh.new_group([axis]) if mesh.sizes[axis] > 1 else None,
        )
        self.first_name = first_names(template)
        self.stand_ins = dict(template.named_parameters())
        self.trained = [p.requires_grad for p in self.stand_ins.values()]
        buffer_owners = dict.fromkeys((name for name, _ in template.named_buffers()), 0)
        for piece in example.pieces:
            buffer_owners |= dict.fromkeys(piece.buffers, self.rank_of[piece.key])
        holders, self.unused = _holders(example, tensors, self.rank_of)
        # The holders of a tied parameter are in the order of the stages, and the first one owns it.
        self.owned = frozenset(name for name, places in holders.items() if places[0] == place)
        self.owned_buffers = frozenset(
            name for name, owner in buffer_owners.items() if owner == place
        )
        self.holders = holders
        # Buffers and parameters that a forward changes, as observed or as recorded. Both are needed:
        # a buffer that follows a weight, for example, does not change before the weight has changed.
        changed = set(captured.changing).union(*(piece.changes for piece in example.pieces))
        self.changing_at = {name: buffer_owners[name] for name in changed if name in buffer_owners}
        if self.is_sharded:
            _refuse_shards(example, tensors)
        report = split.report(tensors)
        self.report = replace(report, lines=(*report.lines, *captured.notes))
        _refuse_spread(example, holders, self.rank_of, changed, tensors)
        here = split.apply(
            {name: tensors[name] for name, places in holders.items() if place in places},
            None if self.is_sharded else device,
        )
        # A weight that several pieces of a rank use belongs to none of them, and the rank has it
        # whole. Then all ranks have it whole, because gradients of its parts could not be summed
        # over stages.
        users = Counter(
            (name, self.rank_of[piece.key])
            for piece in example.pieces
            for name in set(piece.parameters)
        )
        apart = {name for (name, _), count in users.items() if self.is_sharded and count > 1}
        pieces = {
            piece.key: PieceModule(
                {name: here[name] for name in dict.fromkeys(piece.parameters) if name not in apart},
                {name: here[name] for name in piece.parameters if name in apart},
                split.runner,
                runs_once=bool(piece.opaque),
            )
            for piece in example.pieces
            if piece.parameters and self.rank_of[piece.key] == place
        }
        lone = {name: p for name, p in here.items() if name in self.unused | apart}
        self.module: PieceModules = PieceModules(pieces, lone, template, split)
        self.engine = Engine(assignment.orders, self.links, self.module.run, self._weights)
        self.output_place, self.statistics = self.ranks[-1], use.statistics
        self.has_output = self.output_place == place
        self.ties = [(name, places) for name, places in holders.items() if len(places) > 1]
        self.groups = {
            members: mesh.new_group([axis], members)
            for members in sorted({tuple(places) for _, places in self.ties})
        }
        self.place, self.sparse = place, sparsely_trained(template)
        self.extents: dict[str, Extent] = {}
        # The model's first runs may have changed opaque modules and constants.
        if not captured.opaque.outputs and not example.has_constants:
            staged = self._cut_for_training(split.in_parts(example))
            self.captures.append((*self._signature(captured.batch), staged))

    @property
    def meets_in_forward(self) -> bool:
        return self.is_sharded or self.statistics.may_meet

    def let_go(self) -> None:
        """Free the memory of parameters that this rank doesn't hold."""
        kept = set(self.module.parameters())
        for parameter in self.tensors.values():
            if parameter not in kept:
                let_go_of(parameter)

    def run(self, batches: Sequence[Batch], work: MicrobatchWork) -> None:
        self._freeze_alike()
        with self.statistics.over(batches[0].samples):  # joined only if there is one micro-batch
            self._run(batches, work)
        self._forget_captures()

    def _run(self, batches: Sequence[Batch], work: MicrobatchWork) -> None:
        run = {
            number: batch
            for number, batch in enumerate(batches)
            if batch.samples or self.meets_in_forward
        }
        staged = {number: self._staged(batch) for number, batch in run.items()}
        inputs = {
            number: staged[number].capture.bind(*batch.arguments()) for number, batch in run.items()
        }

        def before(action: Action) -> None:
            if action.kind == "F":
                self.module.keeps_changes = batches[action.microbatch].samples > 0
                work.before_forward(action.microbatch, action.stage)
            else:
                work.before_backward(action.microbatch)

        def record(action: Action, start_s: float, end_s: float) -> None:
            label = (
                str(action.microbatch)
                if len(self.ranks) == len(set(self.ranks))
                else str(action)[1:]
            )
            work.record(_ACTIONS[action.kind], label, start_s, end_s)

        self.engine.record = record
        self.engine.run(staged, inputs, work.loss, before=before, context=self.context)
        for number in range(len(batches)):
            if number not in run:
                work.before_backward(number)

    def forward(self, batch: Batch) -> Any:
        self.module.keeps_changes = batch.samples > 0
        with self.statistics.over(batch.samples):
            staged = self._staged(batch)
            output = self.engine.run_forward(staged, staged.capture.bind(*batch.arguments()))
        self._forget_captures()
        return output

    def finish(self) -> None:
        """Sum the gradients of parameters that several stages use, over the ranks of these stages.

        Collective over these ranks.
        """
        parameters = dict(self.module.named_parameters()) if self.ties else {}
        for name, members in self.ties:
            if self.place not in members:
                continue
            parameter, group = parameters[name], self.groups[tuple(members)]
            assert group is not None, "this rank is a member"
            if sparse_parameters({name: parameter}, self.sparse):
                SparseGradients([parameter], group).finish()
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local_part(parameter.grad), group=group)

    def _weights(self, stage: Stage) -> list[nn.Parameter]:
        """Return the tensors on which the gradients of a stage's parameters accumulate."""
        parameters = (
            self.module.parameter_of(name) for piece in stage.pieces for name in piece.parameters
        )
        trainable = dict.fromkeys(p for p in parameters if p.requires_grad)
        return [p if (leaf := leaf_of(p)) is None else leaf for p in trainable]

    def _freeze_alike(self) -> None:
        """Copy `requires_grad` from the template's parameters to this rank's.

        The job's code knows only the template's parameters, and may freeze them and train them
        again.
        """
        trained = [p.requires_grad for p in self.stand_ins.values()]
        if trained == self.trained:
            return
        self.trained = trained
        for name, parameter in self.module.named_parameters():
            for held in (parameter, leaf_of(parameter)):
                if held is not None:
                    held.requires_grad_(self.stand_ins[name].requires_grad)

    def _staged(self, batch: Batch) -> Staged:
        """Return the cut capture for a batch of this shape.

        Makes a new capture if the Python values that the known ones have read are different now.
        """
        key, values = self._signature(batch)
        for number, (known_key, known, staged) in enumerate(self.captures):
            if (known_key, known) == (key, values) and not staged.capture.reads.changed():
                self.captures.append(self.captures.pop(number))
                return staged
        self.num_captures += 1
        if self.num_captures == _SAID_AFTER:
            alike = [staged for known_key, _, staged in self.captures if known_key == key]
            self._say_slow(alike[-1].capture.reads.changed() if alike else None)
        args, kwargs = batch.arguments()
        with self.context():
            captured = capture(
                self.template, args, kwargs, opaque=self.opaque, tensors=self.tensors
            )
        captured = self.split.in_parts(renamed(captured, self.first_name))
        staged = (
            self._cut_for_training(captured)
            if self.template.training
            else self._cut_for_evaluation(captured)
        )
        self.captures.append((key, values, staged))
        return staged

    def _forget_captures(self) -> None:
        """Forget the captures that were not used for longest."""
        while len(self.captures) > MOST_CAPTURES:
            *_, oldest = self.captures.pop(0)
            self.engine.forget(oldest)
            self.module.forget(oldest.capture.pieces)

    def _say_slow(self, changed: Sequence[str] | None) -> None:
        """Warn of many recordings. changed: what the last one for a batch of this shape has read;
        None if the shape is new."""
        if changed is None:
            reason = "batches have other shapes, which padding to a few lengths would avoid"
        elif changed:
            reason = f"{changed[0]} changes; a number in a buffer is an input of the recorded graph"
        else:
            reason = "what is no tensor of the batch differs"
        logger.warning(
            "the model was recorded %d times, and a recording takes longer than a step: %s",
            _SAID_AFTER,
            reason,
        )

    def _signature(self, batch: Batch) -> tuple[Hashable, Any]:
        """Return a key that is equal for batches that can share captures, and this batch's values
        besides tensors."""
        flat, spec = pytree.tree_flatten(batch.arguments())
        shapes = tuple(
            (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None for v in flat
        )
        return (
            (self.template.training, str(spec), shapes),
            [frozen(v) for v in flat if not isinstance(v, torch.Tensor)],
        )

    def prepare_evaluation(self, batch: Batch) -> None:
        """Capture the model as it runs in an evaluation of a batch like this.

        Raises:
            PlanRefused: the model can't be captured, or the stages do not allow the way it runs.
        """
        self.template.eval()
        try:
            with torch.no_grad():
                self._staged(batch)
        finally:
            self.template.train()

    def _cut_for_training(self, capture: Capture) -> Staged:
        """Cut a capture into the stages of the first capture.

        A piece that the first capture does not have goes to the stage of the piece before it, or to
        the next stage that has its weights.
        """
        weights = {piece.key: set(piece.parameters) for piece in self.example.pieces}
        stages: dict[str, int] = {}
        made: dict[str, int] = {}
        for piece in capture.pieces:
            first = self.stage_of.get(piece.key, next(reversed(stages.values()), 0))
            possible = range(first, first + 1 if piece.key in self.stage_of else len(self.ranks))
            is_whole = not self.is_sharded or self.unused.issuperset(piece.parameters)
            is_known = weights.get(piece.key, set()).issuperset(piece.parameters)
            stage = next(
                (
                    stage
                    for stage in possible
                    if is_known
                    or (
                        is_whole
                        and all(
                            self.ranks[stage] in self.holders[name] for name in piece.parameters
                        )
                    )
                ),
                -1,
            )
            if any(made.get(name, 0) > stage for name in piece.inputs) or stage < 0:
                raise JobError(
                    f"'{piece.key}' runs here otherwise than in the capture that the model was cut by",
                    hint="the model takes another course for this input; use a data=N or shard=N plan",
                )
            stages[piece.key] = stage
            made |= dict.fromkeys(piece.outputs, stage)
        return cut(capture, lambda piece: stages[piece.key], self.ranks)

    def _cut_for_evaluation(self, capture: Capture) -> Staged:
        """Cut a capture of an evaluation into stages, in the order in which the model runs its
        pieces.

        This order may differ from that of training. Each piece runs where its weights are, and a
        new stage begins wherever the rank changes. The last stage is on the rank that has the loss.
        """
        ranks: list[int] = []
        stages: dict[str, int] = {}
        for piece in capture.pieces:
            place = self._place(piece, before=ranks[-1] if ranks else 0)
            if not ranks or ranks[-1] != place:
                ranks.append(place)
            stages[piece.key] = len(ranks) - 1
        if not ranks or ranks[-1] != self.ranks[-1]:
            ranks.append(self.ranks[-1])
        return cut(capture, lambda piece: stages[piece.key], ranks)

    def _place(self, piece: Piece, *, before: int) -> int:
        """Return the place along the axis where a piece of an evaluation can run: preferably that
        of training."""
        rank_of, places = self.rank_of, set(self.ranks)
        if piece.parameters:
            places = {
                rank_of[other.key]
                for other in self.example.pieces
                if set(piece.parameters) <= set(other.parameters)
            }
            if not places and not self.is_sharded:  # its weights are in several modules
                places = set(self.ranks).intersection(
                    *(self.holders[name] for name in piece.parameters)
                )
        places = places.intersection(
            *([self.changing_at[name]] for name in piece.buffers if name in self.changing_at)
        )
        for path in piece.opaque:  # its attributes are on the rank that trains it
            places &= {
                rank_of[other.key] for other in self.example.pieces if path in other.opaque
            } or places
        if not places:
            raise PlanRefused(
                f"an evaluation runs '{piece.key}' otherwise than training does, and no rank has all "
                "that it needs there",
                hint="data=N and shard=N plans run the model as it is",
            )
        return next(
            (place for place in (rank_of.get(piece.key, before), before) if place in places),
            min(places),
        )


def _holders(
    example: Capture, names: Collection[str], rank_of: Mapping[str, int]
) -> tuple[dict[str, list[int]], set[str]]:
    """Return the ranks that hold each parameter, and the parameters that the example does not use.

    Another batch may use such a parameter in place of the one with the most similar name. It is
    therefore held by the rank of that one.
    """
    holders: dict[str, list[int]] = {name: [] for name in names}
    for piece in example.pieces:
        for name in piece.parameters:
            if rank_of[piece.key] not in holders[name]:
                holders[name].append(rank_of[piece.key])
    unused = [name for name in names if not holders[name]]
    used = sorted(holders.keys() - unused)
    for name in unused:
        similar = max(used, key=lambda other: len(commonprefix([name, other])), default=None)  # noqa: RUF071  # letters
        holders[name] = holders[similar][:1] if similar is not None else [0]
    return holders, set(unused)


def _refuse_shards(example: Capture, tensors: Mapping[str, nn.Parameter]) -> None:
    """Refuse features that shards of stages would lose: edits in place, and hooks on gradients."""
    edited = next((piece for piece in example.pieces if piece.mutates), None)
    if edited is not None:
        raise JobError(
            f"'{edited.key}' edits in place what another module returned, and shard=N would lose the "
            "hooks on it",
            hint="x = x + y in place of x += y",
        )
    hooked = next(
        (name for name, p in tensors.items() if accumulated_hooks(p)),
        None,
    )
    if hooked is not None:
        raise PlanRefused(
            f"'{hooked}' has a hook on its accumulated gradient, and shards of stages would run it "
            "for micro-batches without samples, too",
            hint="data=N, shard=N and tensor=N plans don't",
        )


def _refuse_spread(
    example: Capture,
    holders: Mapping[str, Sequence[int]],
    rank_of: Mapping[str, int],
    changed: Collection[str],
    tensors: Mapping[str, nn.Parameter],
) -> None:
    """Refuse tensors that several ranks use, if a forward changes them or if their gradient has a
    hook.

    Only one rank would see the change, and each hook would see a part of the gradient.
    """
    for name in changed:
        used_at = {
            rank_of[piece.key]
            for piece in example.pieces
            if name in (*piece.buffers, *piece.parameters)
        }
        if len(used_at) > 1:
            raise PlanRefused(
                f"the forward changes '{name}', which modules on {len(used_at)} ranks would use",
                hint="data=N, shard=N and tensor=N plans keep it together",
            )
    for name, places in holders.items():
        if len(places) > 1 and has_hooks(tensors[name]):
            raise PlanRefused(
                f"'{name}' has a hook on its gradient, which is the sum of parts that {len(places)} "
                "ranks compute",
                hint="data=N and tensor=N plans keep it together",
            )
