"""Copies of a run's state in memory, made every so many steps for ranks that take the place of lost ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

from paceline.checkpoint.read import Checkpoint
from paceline.launch.collectives.values import value_of_one
from paceline.launch.hosts.host_copies import HostCopies
from paceline.training import state
from paceline.training.parts import copied_state, drift
from paceline.training.parts.callbacks import Callbacks
from paceline.training.parts.memory_checkpoint import Copier
from paceline.training.run import RunPart, TrainingRun


class Copies(RunPart):
    """Copies the state where the next ranks find it if one of these is lost."""

    def __init__(self, run: TrainingRun, callbacks: Callbacks) -> None:
        self.run, self.callbacks = run, callbacks
        self.copier = _copier(run)

    def restored(self, checkpoint: Checkpoint | None) -> None:
        if self.copier is not None:
            self.copier.begin(self.run.step, is_copied=self.run.is_copied)

    def settled(self) -> None:
        """Copy the state, if it is time. Collective now and then."""
        run, copier = self.run, self.copier
        if copier is not None and run.step >= copier.next_step:
            self._copy(copier)

    def finished(self) -> None:
        self.wait()

    def summary(self) -> Mapping[str, Any]:
        return {"copy_blocked_s": self.copier.blocked_s if self.copier is not None else 0.0}

    def wait(self) -> None:
        """Return when the last copy is in its place."""
        if self.copier is not None:
            self.copier.wait()

    def _copy(self, copier: Copier) -> None:
        run, context = self.run, self.run.context
        context.beat("copy")
        began_s = time.perf_counter()
        run.stepper.step_sync.drain()
        run.tell("saving")
        sends = (
            copier.neighbour is not None
            and self._is_sent(copier, copier.neighbour)
            and run.step >= copier.next_send
        )
        if self.copier is None:
            return
        pieces = list(
            chain(
                state.pieces(
                    run.stepper,
                    host_ranks=context.local_world_size
                    if context.host_copies is not None
                    else None,
                ),
                drift.fingerprints(run.stepper, partial(state.alike_along, run.stepper)),
            )
        )
        # It is too late once the kernel ends a rank.
        if not copier.set_pace(pieces, run.log.speed.latest_s, greatest=run.greatest):
            self._end()
            return
        copier.copy(run.step, pieces, self._document(), began_s=began_s)
        if (
            copier.num_copies == 2  # all ranks have the one before
            and context.host_copies is not None
            and copier.neighbour is None
            and context.slot == 0
        ):
            context.host_copies.give_back_kept()
        if sends:
            copier.send(run.step)

    def _is_sent(self, copier: Copier, neighbour: HostCopies) -> bool:
        """Whether each host has what it was to take over of the host before it. Collective."""
        is_missing = copier.sending >= 0 and neighbour.taken_step != copier.sending
        missing = self.run.greatest(2 * int(neighbour.has_failed) + int(is_missing))
        if missing > 1:
            self._end()
        elif not missing:
            copier.note_sent()
        return not missing

    def _end(self) -> None:
        """Make no more copies, and give back the memory of those that no other host takes over. All ranks do."""
        assert self.copier is not None
        copier, self.copier = self.copier, None
        if copier.neighbour is None:
            copier.copies.give_back(self.run.context.slot)
        self.run.log.display.say(
            "a host's memory has no room for copies of the state: if a rank is lost, the run goes on from the "
            "last checkpoint"
        )

    def _document(self) -> dict[str, Any] | None:
        """Return what of the run's state is not a tensor, for ranks that go on from memory.

        Rank 0 alone has it; where there are several hosts, the first rank of each. Callbacks' state is in it if they
        end with rank 0. Collective on several hosts.
        """
        run, context = self.run, self.run.context
        if context.host_copies is None:
            if context.rank:
                return None
            states = self.callbacks.states_here()
            return run.document() | {"figures": run.figures(), "callbacks": states}
        answer = self.callbacks.states()
        self.callbacks.heed(answer)
        document: dict[str, Any] | None = None
        if context.rank == 0:
            document = run.document() | {
                "figures": run.figures(),
                "callbacks": answer.get("callbacks"),
            }
        if context.world_size > 1:
            document = value_of_one(document, 0, device=context.device)
        return document if context.slot == 0 else None


def _copier(run: TrainingRun) -> Copier | None:
    """Return what makes this rank's copies; None where nobody would read them."""
    context, stepper = run.context, run.stepper
    if context.copies is None:
        return None
    return Copier(
        context,
        context.copies,
        context.local_world_size,
        copied_state.part_of(stepper),
        context.host_copies if copied_state.needs_neighbour(stepper, context) else None,
    )
