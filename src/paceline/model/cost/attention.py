"""What selective recomputation would save in each place of a traced step, and what it would compute again."""

from __future__ import annotations

from typing import Any

import torch

from paceline.model.attention import AttentionStep, Made, Selective
from paceline.model.cost.recorder import SparedScores, StepPosition, Tallied, WorkRecorder
from paceline.torch_private import pytree
from paceline.torch_private.dispatch import OpOverload


class SparedBySelective(Selective):
    """Notes what recompute=selective would not keep, and keeps it. recorder: is told of all that autograd keeps."""

    def __init__(self, recorder: WorkRecorder) -> None:
        super().__init__(kept_as_is=lambda tensor: recorder.note_kept())
        self.recorder = recorder
        self.spared: dict[StepPosition, SparedScores] = {}
        self._work: dict[AttentionStep, Tallied] = {}
        self._done: set[AttentionStep] = set()

    def noted(self, step: AttentionStep, func: Any, args: Any, output: torch.Tensor) -> None:
        scratch = WorkRecorder(self.recorder.place)
        if isinstance(func, OpOverload):
            scratch.count(func, args, {}, output, [output])
        self._work[step] = scratch.work[scratch.place]

    def spare(self, step: AttentionStep, tensor: torch.Tensor) -> Any:
        self.recorder.note_kept()
        spared = self.spared.setdefault(self.recorder.place, SparedScores())
        if step not in self._done:
            spared.num_bytes += tensor.untyped_storage().nbytes()
        self._add_work(step, spared.work)
        return tensor

    def _add_work(self, step: AttentionStep, work: Tallied) -> None:
        if step in self._done:
            return
        self._done.add(step)
        spared_work = self._work[step]
        work.flops += spared_work.flops
        work.moved_bytes += spared_work.moved_bytes
        work.function_bytes += spared_work.function_bytes
        work.operators += spared_work.operators
        work.products += spared_work.products
        for argument in pytree.tree_leaves((step.args, step.kwargs)):
            if isinstance(argument, Made):
                self._add_work(argument.step, work)
