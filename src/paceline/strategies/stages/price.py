"""A job's model in pieces, captured and priced without memory, and dealt out to ranks as a plan would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from paceline.capture.graph import Capture, Piece, capture, capture_or_learn
from paceline.capture.opaque import OpaqueModules
from paceline.capture.price import INSIDE_OF_OPAQUE
from paceline.cluster import Device
from paceline.job import Job
from paceline.plans import Plan
from paceline.profile.profile import Affine, Parameter, Profile, Segment, Work
from paceline.profile.recorder import Place, Recorder, Tallied
from paceline.profile.trace import as_the_job_takes, autocast, build, first_items, kept_generators, state_factor
from paceline.strategies.stages.assignment import EXAMPLE_SAMPLES, Assignment, assigned
from paceline.strategies.stages.cost import Message, RankCost, StageCost
from paceline.strategies.stages.engine import Staged, cut
from paceline.strategies.stages.layout import first_names, renamed

# What the engine takes for an action beside its operators: messages waited for, bookkeeping. Fitted on a GPT of 128
# wide in 2 to 16 micro-batches on two CPU ranks; see docs/prediction.md.
ACTION_S = 1.0e-3
LOSS = ""  # its key among the pieces


class SplitJob:
    """A job's model as pieces on fake tensors.

    Raises:
        JobError: the model can't be captured.
        Exception: whatever the model raises on fake tensors; one whose course depends on values can't be priced.
    """

    def __init__(self, job: Job, whole: Profile) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.job, self.whole = job, whole
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.opaque = OpaqueModules()
        with kept_generators():
            with self.mode:
                self.model = build(job)
            self.model.train()
            self.first_name = first_names(self.model)
            with autocast(job):
                found = capture_or_learn(self.model, lambda samples: _arguments(self._batch(samples)[0]), self.opaque)
            self.state_factor = state_factor(job, self.model)
        self.example = renamed(found, self.first_name)
        self._priced: dict[int, tuple[Capture, dict[str, Segment]]] = {}

    def ranks(self, plan: Plan, devices: Sequence[Device], *, microbatch_samples: int) -> list[RankCost]:
        """What each place along the axis of stages holds and does under a plan whose counts are all settled.

        Raises:
            PlanError: the model has fewer pieces than the plan has stages, or what it is cut into doesn't fit.
        """
        found = assigned(self.model, self.example, plan, samples=microbatch_samples, state_factor=self.state_factor,
                         devices=devices)
        at, costs = self.priced(microbatch_samples)
        staged = cut(at, lambda piece: found.stage_of.get(piece.key, 0), found.ranks)
        return [self._rank(place, plan, found, staged, costs, microbatch_samples)
                for place in range(len(found.orders))]

    def _rank(self, place: int, plan: Plan, found: Assignment, staged: Staged, costs: Mapping[str, Segment],
              samples: int) -> RankCost:
        last = len(staged.stages) - 1
        segments: list[Segment] = []
        stages: dict[int, StageCost] = {}
        pieces: list[Piece] = []
        taken: set[str] = set()
        halves = 2 if plan.schedule.schedule == "zero-bubble" else 1
        for stage in staged.stages:
            if stage.rank != place:
                continue
            begin = len(segments)
            segments += [costs[piece.key] for piece in stage.pieces]
            segments += [costs[LOSS]] if stage.number == last else []
            pieces += stage.pieces
            home = {value.name: staged.stages[staged.producer[value.name]].rank for value in stage.inputs}
            away = [(value, staged.stages[k].rank, k) for value in stage.outputs if value.differentiable
                    for k in staged.consumers[value.name] if staged.stages[k].rank != place]
            takers = [(value, rank) for value in stage.outputs
                      for rank in sorted({staged.stages[k].rank for k in staged.consumers[value.name]} - {place})]
            stages[stage.number] = StageCost(
                range(begin, len(segments)),
                takes=tuple(Message(value.name, home[value.name], value.num_bytes) for value in stage.inputs
                            if home[value.name] != place and value.name not in taken),
                gives=tuple(Message(value.name, rank, value.num_bytes) for value, rank in takers),
                regains=tuple(Message(f"{value.name}<{k}", rank, value.num_bytes) for value, rank, k in away),
                returns=tuple(Message(f"{value.name}<{stage.number}", home[value.name], value.num_bytes)
                              for value in stage.inputs if value.differentiable and home[value.name] != place))
            taken.update(value.name for value in stage.inputs)
        held = self._held(place, plan, found)
        return RankCost(
            self._profile(held, _once(segments, halves), _unit_of(pieces)), stages, found.orders[place],
            batch_bytes=self.whole.batch_bytes.at(samples * plan.num_microbatches), action_s=ACTION_S,
            tied_bytes=sum(self._sizes(plan)[name].gradient_bytes for name in held if self._ranks_of(found, name) > 1))

    def _profile(self, held: Mapping[str, Parameter], segments: tuple[Segment, ...],
                 unit_of: Mapping[str, str]) -> Profile:
        """The whole model's profile with this rank's parameters and segments alone."""
        whole = self.whole
        parameters = tuple(replace(p, unit=unit_of.get(name, "")) for name, p in held.items())
        trained, of = (sum(p.gradient_bytes for p in listed) for listed in (parameters, whole.parameters))
        largest, of_all = (max((p.gradient_bytes for p in listed), default=0)
                           for listed in (parameters, whole.parameters))
        part = trained / of if of else 0.0
        update = _scaled(whole.update, part)
        return replace(whole, parameters=parameters, segments=segments, batch_bytes=Affine(), update=update,
                       update_peak_bytes=round(whole.update_peak_bytes * largest / of_all) if of_all else 0)

    def _held(self, place: int, plan: Plan, found: Assignment) -> dict[str, Parameter]:
        """Parameters of a place, in the model's order. What no piece uses is on the first."""
        used: dict[str, set[int]] = {}
        for piece in self.example.pieces:
            for name in piece.parameters:
                used.setdefault(name, set()).add(found.ranks[found.stage_of[piece.key]])
        return {name: p for name, p in self._sizes(plan).items() if place in used.get(name, {0})}

    def _ranks_of(self, found: Assignment, name: str) -> int:
        return len({found.ranks[found.stage_of[piece.key]] for piece in self.example.pieces
                    if name in piece.parameters})

    def _sizes(self, plan: Plan) -> dict[str, Parameter]:
        """Every parameter as a rank of the tensor axis holds it: matrices that divide evenly are taken to be split."""
        ranks, shapes = plan.axes.tensor, {name: tuple(p.shape) for name, p in self.model.named_parameters()}

        def part(parameter: Parameter) -> Parameter:
            shape = shapes[parameter.name]
            if ranks == 1 or len(shape) != 2 or not any(size % ranks == 0 for size in shape):
                return parameter
            return replace(parameter, num_bytes=parameter.num_bytes // ranks,
                           state_bytes=parameter.state_bytes // ranks)

        return {p.name: part(p) for p in self.whole.parameters}

    def priced(self, samples: int) -> tuple[Capture, dict[str, Segment]]:
        """The capture for so many samples, and what each piece costs; the loss under its own key."""
        if samples not in self._priced:
            inputs, target = self._batch(samples)
            args, kwargs = _arguments(inputs)
            with kept_generators(), autocast(self.job):
                found = self.example if samples == EXAMPLE_SAMPLES else renamed(
                    capture(self.model, args, kwargs, opaque=self.opaque), self.first_name)
                with self.mode:
                    costs = {piece.key: self._price(piece, found) for piece in found.pieces}
                    costs[LOSS] = self._price_loss(found, target)
            self._priced[samples] = found, costs
        return self._priced[samples]

    def _batch(self, samples: int) -> tuple[Any, Any]:
        batch = default_collate(first_items(self.job.data, 1))
        inputs, target = (tree_map(lambda t: as_the_job_takes(t, self.job, samples, samples), part) for part in batch)
        return inputs, target

    def _price(self, piece: Piece, found: Capture) -> Segment:
        """Forward and backward of a piece on fake tensors."""
        if piece.opaque:  # its code may keep what it is given
            return self._guess(piece, found)
        parameters = dict(self.model.named_parameters())
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        own = {name: nn.Parameter(torch.empty_like(parameters[name]), requires_grad=parameters[name].requires_grad)
               for name in piece.parameters}
        given = [torch.empty(value.shape, dtype=value.dtype, requires_grad=value.differentiable)
                 for value in (found.values[name] for name in piece.inputs)]
        taken = [tensor.clone() if name in piece.mutates else tensor
                 for name, tensor in zip(piece.inputs, given, strict=True)]
        recorder = Recorder()
        recorder.ignore([*own.values(), *buffers.values(), *given, *taken])
        for name, parameter in own.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: recorder.complete_gradient(name, p.grad))
        try:
            with recorder:
                outputs = piece.run(*own.values(), *(buffers[name] for name in piece.buffers), *taken)
                recorder.outputs[0] = sum(t.numel() * t.element_size() for t in outputs)
                recorder.move_to(Place(0, "backward"))
                roots = [t for t in outputs if t.requires_grad]
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        except Exception:  # a function that looks at values
            return self._guess(piece, found)
        return _segment(piece.key, recorder)

    def _guess(self, piece: Piece, found: Capture) -> Segment:
        """Of a piece that can't be run on fake tensors: its results stand for what is inside it."""
        parameters = dict(self.model.named_parameters())
        made = sum(found.values[name].num_bytes for name in piece.outputs)
        return Segment(piece.key, kept_bytes=Affine(INSIDE_OF_OPAQUE * made), output_bytes=Affine(made),
                       gradients=tuple(name for name in dict.fromkeys(piece.parameters)
                                       if parameters[name].requires_grad))

    def _price_loss(self, found: Capture, target: Any) -> Segment:
        values = {name: torch.empty(value.shape, dtype=value.dtype, requires_grad=value.differentiable)
                  for name, value in found.values.items()}
        goal = tree_map(lambda t: self.mode.from_tensor(t, static_shapes=True)
                        if isinstance(t, torch.Tensor) else t, target)
        recorder = Recorder()
        recorder.ignore([*values.values(), *tree_leaves(goal)])
        with recorder:
            loss = self.job.loss(found.result(values), goal)
            loss = loss[0] if isinstance(loss, tuple | list) else loss
            recorder.move_to(Place(0, "backward"))
            loss.backward()
        return _segment(LOSS, recorder)


def _segment(unit: str, recorder: Recorder) -> Segment:
    levels, ahead, back = recorder.levels(), Place(0, "forward"), Place(0, "backward")
    start, peak, end = ((levels[ahead].start, levels[ahead].peak, levels[ahead].end) if ahead in levels else (0, 0, 0))

    def work(place: Place) -> Work:
        found = recorder.work.get(place, Tallied())
        return Work(Affine(found.flops), Affine(found.moved_bytes), Affine(found.function_bytes), found.operators,
                    tuple(found.products))

    return Segment(unit, work(ahead), work(back), Affine(end - start), Affine(recorder.outputs.get(0, 0)),
                   Affine(peak - start), Affine(max(0, levels[back].peak - end) if back in levels else 0),
                   tuple(recorder.gradients[0]))


def _once(segments: Sequence[Segment], halves: int) -> tuple[Segment, ...]:
    """Segments that complete each gradient once, and whose backward is what one of its parts takes."""
    seen: set[str] = set()
    found = []
    for segment in reversed(segments):
        found.append(replace(segment, backward=_scaled(segment.backward, 1 / halves),
                             gradients=tuple(name for name in segment.gradients if name not in seen)))
        seen.update(segment.gradients)
    return tuple(reversed(found))


def _scaled(work: Work, part: float) -> Work:
    def scaled(figure: Affine) -> Affine:
        return Affine(figure.fixed * part, figure.per_sample * part)

    return Work(scaled(work.flops), scaled(work.moved_bytes), scaled(work.function_bytes), work.operators * part)


def _unit_of(pieces: Sequence[Piece]) -> dict[str, str]:
    """The first piece that uses each parameter."""
    found: dict[str, str] = {}
    for piece in pieces:
        for name in piece.parameters:
            found.setdefault(name, piece.key)
    return found


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}
