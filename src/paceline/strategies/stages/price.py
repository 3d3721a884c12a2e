"""Captures and prices a job's model in pieces without memory, and assigns them to ranks as a plan
would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.base.nested import map_batch
from paceline.cluster.devices import Device
from paceline.job import Job
from paceline.job.batches import collated
from paceline.model.casts import autocast
from paceline.model.cost.attention import SparedBySelective
from paceline.model.cost.fakes import FakeModel
from paceline.model.cost.profile import Affine, Parameter, Profile, Segment, TensorCut
from paceline.model.cost.recorder import StepPosition, WorkRecorder
from paceline.model.cost.repeated_layers import left_out, shortened
from paceline.model.cost.trace import (
    as_the_job_takes,
    fake_model,
    first_items,
    kept_generators,
    state_factor,
)
from paceline.model.graph import Capture, Piece, Value, capture, capture_or_learn
from paceline.model.graph_cost import INSIDE_OF_OPAQUE
from paceline.model.opaque import OpaqueModules
from paceline.strategies.plan import Plan
from paceline.strategies.stages.assignment import (
    EXAMPLE_SAMPLES,
    Assignment,
    assigned,
    piece_needs,
)
from paceline.strategies.stages.cost import RankCost, StageCost, StageMessage
from paceline.strategies.stages.engine import Staged, cut
from paceline.strategies.stages.keys import splits_backward
from paceline.strategies.stages.layout import first_names, renamed
from paceline.strategies.stages.ledger import PieceMemory
from paceline.strategies.stages.repeats import RepeatedBlocks
from paceline.strategies.tensor.run import TensorSplit, derive
from paceline.torch_private.pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from paceline.strategies.tensor.dry_run import Counted
    from paceline.strategies.tensor.program import Program

# The engine's time for an action besides its operators: waiting for messages, and bookkeeping.
# Fitted on a GPT of width 128 in 2 to 16 micro-batches on two CPU ranks; see docs/formulas.md.
ACTION_S = 0.6e-3
LOSS = ""  # key of the loss among the pieces
WHOLE = TensorSplit()  # the split of a model whose layers are not split


class SplitJob:
    """A job's model as pieces on fake tensors.

    Args:
        each: Whether each block is captured. Otherwise only one block of each kind is captured.
            This is enough to know the cost of all blocks, and not enough to place them.

    Raises:
        JobError: the model can't be captured.
        NotStoodFor: the model can't be captured without the blocks that `built` leaves out.
        Exception: any error that the model raises on fake tensors. A model whose control flow
            depends on values can't be priced.
    """

    def __init__(
        self, job: Job, whole: Profile, *, each: bool = True, built: FakeModel | None = None
    ) -> None:
        self.job, self.whole, self.built = job, whole, built or fake_model(job)
        self.chains = () if each else self.built.chains or ()
        self.model = self.built.model
        self.opaque = OpaqueModules()
        with kept_generators(), shortened(self.model, self.chains):
            self.model.train()
            self.first_name = first_names(self.model)
            self.parameters = dict(self.model.named_parameters())
            self.buffers = dict(self.model.named_buffers(remove_duplicate=False))
            if not each:
                self.opaque = RepeatedBlocks(self.model)
            with autocast(job):
                capture = capture_or_learn(
                    self.model, lambda samples: _arguments(self._batch(samples)[0]), self.opaque
                )
            self.example = renamed(capture, self.first_name)
            self._check_chains()
        self._captures = {EXAMPLE_SAMPLES: self.example}  # by number of samples
        self._splits: dict[tuple[int, int, bool], TensorSplit] = {}
        self._priced: dict[tuple[int, int], dict[str, Segment]] = {}

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of the whole model, including those of blocks that are left out of
        captures."""
        piece_of = {piece.key: piece for piece in self.example.pieces}
        after = {chain.unit(chain.kept - 1): chain for chain in self.chains}
        pieces: list[Piece] = []
        for piece in self.example.pieces:
            stand_ins = after[piece.key].stand_ins if piece.key in after else {}
            pieces += [
                piece,
                *(_named_as(piece_of[other], unit) for unit, other in stand_ins.items()),
            ]
        return tuple(pieces)

    def _check_chains(self) -> None:
        """Check that the blocks that are left out equal a block that was captured as one call.

        Raises:
            NotStoodFor: the capture looked into a block that represents blocks that are left out.
        """
        if isinstance(self.opaque, RepeatedBlocks):
            self.opaque.repeats.stand_for(left_out(self.chains))

    @cached_property
    def state_factor(self) -> float:
        """Bytes of optimizer state per byte of trainable parameters."""
        return state_factor(self.job, self.model)

    @cached_property
    def needs(self) -> Mapping[str, PieceMemory]:
        """What each piece needs for one sample; see `piece_needs`."""
        return piece_needs(self.model, self.example, state_factor=self.state_factor)

    def ranks(
        self, plan: Plan, devices: Sequence[Device], *, microbatch_samples: int
    ) -> list[RankCost]:
        """Return the cost of each place along the axis of stages, under a plan without "auto".

        Raises:
            PlanError: the model has fewer pieces than the plan has stages, or a part doesn't fit
                into its device.
        """
        assignment = assigned(
            self.model,
            self.example,
            plan,
            needs=self.needs,
            samples=microbatch_samples,
            devices=devices,
            precision=self.job.precision,
        )
        split = self._split(plan, microbatch_samples)
        capture, costs = self.priced(microbatch_samples, split)
        staged = cut(capture, lambda piece: assignment.stage_of.get(piece.key, 0), assignment.ranks)
        return [
            self._rank(
                place, plan, assignment, staged, costs, self._sizes(split), microbatch_samples
            )
            for place in range(len(assignment.orders))
        ]

    def _rank(
        self,
        place: int,
        plan: Plan,
        assignment: Assignment,
        staged: Staged,
        costs: Mapping[str, Segment],
        sizes: Mapping[str, Parameter],
        samples: int,
    ) -> RankCost:
        last = len(staged.stages) - 1
        segments: list[Segment] = []
        stages: dict[int, StageCost] = {}
        pieces: list[Piece] = []
        taken: set[str] = set()
        halves = 2 if splits_backward(plan) else 1
        for stage in staged.stages:
            if stage.rank != place:
                continue
            begin = len(segments)
            segments += [costs[piece.key] for piece in stage.pieces]
            segments += [costs[LOSS]] if stage.number == last else []
            pieces += stage.pieces
            away = [
                (value, staged.stages[k].rank, k)
                for value in stage.outputs
                if value.differentiable
                for k in staged.consumers[value.name]
                if staged.stages[k].rank != place
            ]
            stages[stage.number] = StageCost(
                range(begin, len(segments)),
                takes=tuple(
                    StageMessage(value.name, staged.home(value.name), value.num_bytes)
                    for value in stage.inputs
                    if staged.home(value.name) != place and value.name not in taken
                ),
                gives=tuple(
                    StageMessage(value.name, rank, value.num_bytes)
                    for value in stage.outputs
                    for rank in staged.takers(value.name)
                ),
                regains=tuple(
                    StageMessage(f"{value.name}<{k}", rank, value.num_bytes)
                    for value, rank, k in away
                ),
                returns=tuple(
                    StageMessage(
                        f"{value.name}<{stage.number}", staged.home(value.name), value.num_bytes
                    )
                    for value in stage.inputs
                    if value.differentiable and staged.home(value.name) != place
                ),
            )
            taken.update(value.name for value in stage.inputs)
        homes = self._homes(assignment)
        # The first place holds the parameters that no piece uses.
        parameters = {name: p for name, p in sizes.items() if place in homes.get(name, {0})}
        return RankCost(
            self._profile(parameters, _once(segments, halves), _unit_of(pieces)),
            stages,
            assignment.orders[place],
            (1.0,) * plan.num_microbatches,
            batch_bytes=self.whole.batch_bytes.at(samples * plan.num_microbatches),
            action_s=ACTION_S,
            tied_bytes=sum(
                sizes[name].gradient_bytes for name in parameters if len(homes.get(name, ())) > 1
            ),
        )

    def _profile(
        self,
        sizes: Mapping[str, Parameter],
        segments: tuple[Segment, ...],
        unit_of: Mapping[str, str],
    ) -> Profile:
        """Return the whole model's profile with only this rank's parameters and segments."""
        whole = self.whole
        parameters = tuple(replace(p, unit=unit_of.get(name, "")) for name, p in sizes.items())
        largest_bytes, most_bytes = (
            max((p.gradient_bytes for p in listed), default=0)
            for listed in (parameters, whole.parameters)
        )
        peak_bytes = (
            round(whole.update_peak_bytes * largest_bytes / most_bytes) if most_bytes else 0
        )
        return replace(whole.part(parameters, segments), update_peak_bytes=peak_bytes)

    def _homes(self, assignment: Assignment) -> dict[str, set[int]]:
        """Return the places that use each parameter, by name."""
        homes: dict[str, set[int]] = {}
        for piece in self.example.pieces:
            for name in piece.parameters:
                homes.setdefault(name, set()).add(assignment.ranks[assignment.stage_of[piece.key]])
        return homes

    def _sizes(self, split: TensorSplit) -> dict[str, Parameter]:
        """Return every parameter with the sizes that a rank of the tensor axis holds."""
        ranks = split.mesh.size() if split.mesh is not None else 1
        return {
            p.name: replace(p, num_bytes=p.num_bytes // ranks, state_bytes=p.state_bytes // ranks)
            if p.name in split.cuts
            else p
            for p in self.whole.parameters
        }

    def _split(self, plan: Plan, samples: int) -> TensorSplit:
        """Return the split of layers over a plan's tensor axis, for micro-batches of `samples`
        samples."""
        if plan.axes.tensor == 1:
            return WHOLE
        key = plan.axes.tensor, samples, plan.axes.shard > 1
        if key not in self._splits:
            from paceline.strategies.tensor.dry_run import PaperMesh, try_on_paper

            args, kwargs = _arguments(self._batch(EXAMPLE_SAMPLES)[0])
            inputs = {
                name: self.built.mode.from_tensor(t, static_shapes=True)
                for name, t in self.example.bind(args, kwargs).items()
            }
            with kept_generators(), autocast(self.job):
                self._splits[key] = derive(
                    self.model,
                    self.example,
                    inputs,
                    PaperMesh(plan.axes.tensor),
                    batches=samples / EXAMPLE_SAMPLES,
                    sharded=plan.axes.shard > 1,
                    tried=try_on_paper,
                )
        return self._splits[key]

    def priced(
        self, samples: int, split: TensorSplit = WHOLE
    ) -> tuple[Capture, dict[str, Segment]]:
        """Return the capture for `samples` samples, and the cost of each piece for a rank.

        The loss has its own key.
        """
        inputs, target = self._batch(samples)
        args, kwargs = _arguments(inputs)
        with kept_generators(), shortened(self.model, self.chains), autocast(self.job):
            if samples not in self._captures:
                self._captures[samples] = renamed(
                    capture(self.model, args, kwargs, opaque=self.opaque), self.first_name
                )
                self._check_chains()
            in_parts, key = split.in_parts(self._captures[samples]), (samples, id(split))
            if key not in self._priced:
                like = (
                    self.opaque.repeats.members if isinstance(self.opaque, RepeatedBlocks) else {}
                )
                run = [piece for piece in in_parts.pieces if piece.key not in like]
                programs = {
                    piece.key: self._program(piece, in_parts, split)
                    for piece in run
                    if split.touches(piece)
                }
                with self.built.symbolic():
                    costs = {
                        piece.key: self._price(
                            piece, in_parts, split, programs.get(piece.key), samples
                        )
                        for piece in run
                    }
                    costs |= {unit: _like(costs[traced], unit) for unit, traced in like.items()}
                    costs[LOSS] = self._price_loss(in_parts, target, samples)
                self._priced[key] = costs
        return in_parts, self._priced[key]

    def _program(
        self, piece: Piece, capture: Capture, split: TensorSplit
    ) -> tuple[Program, Counted]:
        """Return the program that a rank runs for a split piece.

        It is recorded outside of the fake mode, because the recorder has its own.
        """
        from paceline.strategies.tensor.dry_run import program_of

        with self.built.symbolic():
            inputs = _inputs(piece, capture)
        return program_of(
            piece,
            split,
            [
                *(self.parameters[name] for name in piece.parameters),
                *(self.buffers[name] for name in piece.buffers),
                *inputs,
            ],
        )

    def _batch(self, samples: int) -> tuple[Any, Any]:
        batch = collated(first_items(self.job.data, 1), self.job.collate)
        return map_batch(lambda t: as_the_job_takes(t, self.job, samples, samples), batch)

    def _price(
        self,
        piece: Piece,
        capture: Capture,
        split: TensorSplit,
        program: tuple[Program, Counted] | None,
        samples: int,
    ) -> Segment:
        """Price forward and backward of a piece on fake tensors.

        program: the program of a split piece.
        """
        if piece.opaque:  # its code may keep its arguments
            return self._guess(piece, capture)
        weights = {
            name: nn.Parameter(
                split.empty_part(name, self.parameters[name]),
                requires_grad=self.parameters[name].requires_grad,
            )
            for name in piece.parameters
        }
        inputs = _inputs(piece, capture)
        taken = [
            tensor.clone() if name in piece.mutates else tensor
            for name, tensor in zip(piece.inputs, inputs, strict=True)
        ]
        recorder = WorkRecorder()
        recorder.ignore([*weights.values(), *self.buffers.values(), *inputs, *taken])
        for name, parameter in weights.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: recorder.complete_gradient(name, p.grad)
                )
        spared = SparedBySelective(recorder)
        try:
            with recorder:
                run = piece.run if program is None else program[0]
                with spared:
                    outputs = run(
                        *weights.values(), *(self.buffers[name] for name in piece.buffers), *taken
                    )
                num_ahead = 0 if program is None else len(program[1].sent)
                recorder.outputs[0] = sum(t.numel() * t.element_size() for t in outputs)
                recorder.move_to(StepPosition(0, "backward"))
                roots = [t for t in outputs if t.requires_grad]
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        except Exception:  # a function that reads values of fake tensors
            return self._guess(piece, capture)
        segment = _segment(piece.key, recorder, spared)
        if program is None:
            return segment
        sent = tuple(program[1].sent)
        return replace(segment, tensor=TensorCut(counted=(sent[:num_ahead], sent[num_ahead:])))

    def _guess(self, piece: Piece, capture: Capture) -> Segment:
        """Estimate the cost of a piece that can't run on fake tensors, from the size of its
        results."""
        output_bytes = sum(capture.values[name].num_bytes for name in piece.outputs)
        return Segment(
            piece.key,
            kept_bytes=Affine(INSIDE_OF_OPAQUE * output_bytes),
            output_bytes=Affine(output_bytes),
            gradients=tuple(
                name
                for name in dict.fromkeys(piece.parameters)
                if self.parameters[name].requires_grad
            ),
        )

    def _price_loss(self, capture: Capture, target: Any, samples: int) -> Segment:
        values = {name: _stand_in(value) for name, value in capture.values.items()}
        goal = tree_map_only(
            torch.Tensor, lambda t: self.built.mode.from_tensor(t, static_shapes=True), target
        )
        recorder = WorkRecorder()
        recorder.ignore([*values.values(), *tree_leaves(goal)])
        with recorder:
            loss = self.job.criterion(capture.result(values), goal)
            loss = loss[0] if isinstance(loss, tuple | list) else loss
            recorder.move_to(StepPosition(0, "backward"))
            loss.backward()
        return _segment(LOSS, recorder)


def _inputs(piece: Piece, capture: Capture) -> list[torch.Tensor]:
    """Return tensors without values like those that the piece is given."""
    return [_stand_in(capture.values[name]) for name in piece.inputs]


def _stand_in(value: Value) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, requires_grad=value.differentiable)


def _named_as(piece: Piece, unit: str) -> Piece:
    """Return a piece like this one for another unit."""
    return replace(
        piece,
        key=unit,
        path=unit,
        parameters=tuple(f"{unit}{name.removeprefix(piece.key)}" for name in piece.parameters),
    )


def _like(traced: Segment, unit: str) -> Segment:
    """Return the cost of a unit that equals the unit of a traced segment."""
    return replace(
        traced,
        unit=unit,
        gradients=tuple(f"{unit}{name.removeprefix(traced.unit)}" for name in traced.gradients),
    )


def _segment(unit: str, recorder: WorkRecorder, spared: SparedBySelective | None = None) -> Segment:
    scores = None if spared is None else spared.spared.get(StepPosition(0, "forward"))
    return replace(
        recorder.segment(0, spared=scores),
        unit=unit,
        gradients=tuple(recorder.gradients[0]),
    )


def _once(segments: Sequence[Segment], halves: int) -> tuple[Segment, ...]:
    """Return the segments so that each gradient is completed once, with the backward divided by
    `halves`."""
    seen: set[str] = set()
    folded = []
    for segment in reversed(segments):
        folded.append(
            replace(
                segment,
                backward=segment.backward.times(1 / halves),
                gradients=tuple(name for name in segment.gradients if name not in seen),
            )
        )
        seen.update(segment.gradients)
    return tuple(reversed(folded))


def _unit_of(pieces: Sequence[Piece]) -> dict[str, str]:
    """Return the first piece that uses each parameter."""
    units: dict[str, str] = {}
    for piece in pieces:
        for name in piece.parameters:
            units.setdefault(name, piece.key)
    return units


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}
