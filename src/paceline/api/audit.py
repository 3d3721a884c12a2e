"""The verb audit: check by a run's journal whether each sample of an epoch counted in exactly one
applied update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline.base.errors import CheckpointError, UsageError
from paceline.base.streams import key_to_seed
from paceline.checkpoint.read import open_checkpoint
from paceline.job.order import Permutation, digest
from paceline.runs import folder, journal
from paceline.runs.journal import Launch, Update

NAMED = 8  # samples that the message of a finding names
SHOWN = 20  # findings that `describe` shows

Kind = Literal[
    "lost", "repeated", "other samples", "outdated writer", "unreadable", "changed job", "disagrees"
]


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A problem that an audit found."""

    kind: Kind
    message: str
    updates: tuple[str, ...] = ()
    epoch: int | None = None
    # first position in the epoch, and the one after the last
    positions: tuple[int, int] | None = None
    # samples at the first of these positions, if the order is the seed's shuffle
    indices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    run: Path
    launches: int
    updates: int  # updates that are in the weights
    samples: int  # samples that are in the weights
    whole_epochs: int  # epochs all of whose samples counted
    # updates that were made again, because a launch went on from a point before them
    recomputed_updates: int
    # updates that consumed samples and changed no weight, due to loss scaling or a spike
    skipped_updates: int
    findings: tuple[AuditFinding, ...]

    @property
    def passed(self) -> bool:
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "run": str(self.run), "passed": self.passed}

    def describe(self) -> str:
        """Return the audit as text for people: the verdict, the counts, and each finding."""
        counts = (
            f"{self.updates} updates of {self.samples} samples in {self.launches} "
            f"launch{'es' if self.launches != 1 else ''}; whole epochs: {self.whole_epochs}; "
            f"{self.recomputed_updates} updates undone and made again"
        )
        if self.skipped_updates:
            counts += f"; {self.skipped_updates} updates skipped, by loss scaling or as spikes"
        if self.passed:
            return f"each sample counted in exactly one update of its epoch\n{counts}"
        shown = [f"- {finding.kind}: {finding.message}" for finding in self.findings[:SHOWN]]
        if len(self.findings) > SHOWN:
            shown.append(f"- and {len(self.findings) - SHOWN} more: --json lists all")
        return "\n".join([f"NOT exactly once: {len(self.findings)} findings", counts, *shown])


def audit(run: str | Path) -> Audit:
    """Check that each position of an epoch contributed to exactly one applied update, over all
    launches of a run.

    The audit compares four sources: the windows of the updates, which must cover each epoch without
    gaps or overlaps; the digest of the fetched samples, which the ranks sum up in each update; the
    order that the seed gives; and the cursors in the checkpoints and in the summary. A window that
    is still incomplete at the end of the last epoch does not count as a loss.

    Args:
        run: The folder of a trained run.

    Raises:
        UsageError: the folder has no journal.
    """
    run_dir = Path(run)
    path = run_dir / folder.JOURNAL
    try:
        books = _Books.of(path)
    except OSError as error:
        raise UsageError(
            f"{run_dir} has no journal to audit: {error.strerror}",
            hint="paceline train FILE --run DIR writes one",
        ) from error
    whole_epochs = books.check_epochs()
    books.check_cursors(run_dir)
    steps = {update.step for update in books.applied} if books.is_by_step else books.applied
    return Audit(
        run_dir,
        len(books.launches),
        len(steps),
        sum(update.count for update in books.applied),
        whole_epochs,
        books.num_undone,
        sum(update.skipped for update in books.applied),
        tuple(books.findings),
    )


@dataclass
class _Books:
    """The contents of a journal: the updates that it says were applied, and the problems found in
    it.
    """

    launches: list[Launch] = field(default_factory=list)
    applied: list[Update] = field(default_factory=list)
    num_undone: int = 0
    findings: list[AuditFinding] = field(default_factory=list)
    _unwitnessed: list[Update] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> _Books:
        books = cls()
        for number, record in journal.read(path):
            if record is None:
                books._find("unreadable", f"line {number} of {path.name} can't be read")
            elif isinstance(record, Launch):
                books._begin(record)
            elif isinstance(record, Update):
                books._add(record)
        if not books.launches:
            books._find("unreadable", f"{path.name} does not say which launch began")
        return books

    @property
    def is_by_step(self) -> bool:
        return all(update.part is None for update in self.applied)

    def _find(
        self,
        kind: Kind,
        message: str,
        updates: Sequence[Update] = (),
        *,
        epoch: int | None = None,
        positions: range | None = None,
    ) -> None:
        named: tuple[int, ...] = ()
        if positions is not None:
            assert epoch is not None
            named = (
                tuple(self._indices(epoch, positions[:NAMED]))
                if self._order.order == "shuffle"
                else ()
            )
            if named:
                message += f" (indices {', '.join(map(str, named))}{', ...' if len(positions) > NAMED else ''})"
        self.findings.append(
            AuditFinding(
                kind,
                message,
                tuple(map(_name, updates)),
                epoch,
                (positions.start, positions.stop) if positions is not None else None,
                named,
            )
        )

    @property
    def _order(self) -> Launch:
        return self.launches[0]

    def _indices(self, epoch: int, positions: range) -> list[int]:
        """Return the indices of the samples at these positions.

        If the order is no shuffle, the digest contains only positions, and these are returned.
        """
        if self._order.order != "shuffle":
            return list(positions)
        assert self._order.num_samples is not None
        inside = np.asarray([p for p in positions if p < self._order.num_samples], dtype=np.int64)
        return Permutation(self._order.num_samples, key_to_seed(self._order.seed, "order", epoch))(
            inside
        ).tolist()

    def _begin(self, launch: Launch) -> None:
        if self.launches:
            before = self.launches[-1]
            for name in ("seed", "order", "num_samples", "drop_last"):
                if getattr(launch, name) != getattr(before, name):
                    self._find(
                        "changed job",
                        f"launch {launch.launch} has {name} {getattr(launch, name)!r}, and "
                        f"launch {before.launch} had {getattr(before, name)!r}: their epochs are not the same",
                    )
            if launch.launch <= before.launch:
                self._find(
                    "outdated writer", f"launch {launch.launch} began after launch {before.launch}"
                )
        self.launches.append(launch)
        self._unwitnessed = []
        applied = [update for update in self.applied if launch.keeps(update)]
        self.num_undone += len(self.applied) - len(applied)
        self.applied = applied
        last = max((update.step for update in applied if update.step <= launch.after), default=0)
        if last < launch.after:
            self._find(
                "lost",
                f"launch {launch.launch} goes on after step {launch.after}, and the journal has no "
                f"steps {last + 1} to {launch.after}",
            )
        for step, part in sorted(
            set(launch.also) - {(update.step, update.part) for update in applied}
        ):
            self._find(
                "lost",
                f"launch {launch.launch} goes on after part {part} of step {step}, which the journal "
                "does not have",
            )

    def _add(self, update: Update) -> None:
        if not self.launches or update.launch != self.launches[-1].launch:
            now = self.launches[-1].launch if self.launches else "none"
            self._find(
                "outdated writer",
                f"{_name(update)} was written by launch {update.launch}, and the run was at "
                f"launch {now}",
                [update],
            )
            return
        self.applied.append(update)
        self._unwitnessed.append(update)
        if update.digest is None:
            return
        expected = sum(
            digest(each.epoch, each.positions, self._indices(each.epoch, each.positions))
            for each in self._unwitnessed
            if self._is_inside(each)
        )
        if expected != update.digest:
            first = self._unwitnessed[0]
            which = _name(first) if first is update else f"{_name(first)} to {_name(update)}"
            self._find(
                "other samples",
                f"what ranks fetched for {which} is not positions {first.start} to "
                f"{update.start + update.count - 1} of epoch {update.epoch}",
                [first, update],
                epoch=update.epoch,
                positions=update.positions if self._is_inside(update) else None,
            )
        self._unwitnessed = []

    def _is_inside(self, update: Update) -> bool:
        return self._order.num_samples is None or update.positions.stop <= self._order.num_samples

    def check_epochs(self) -> int:
        """Check that the windows of each epoch cover it without gaps or overlaps. Return the number
        of complete epochs.
        """
        by_epoch: dict[int, list[Update]] = {}
        for update in self.applied:
            by_epoch.setdefault(update.epoch, []).append(update)
        last_epoch, due, whole = max(by_epoch, default=-1), 0, 0
        for epoch in sorted(by_epoch):
            if epoch > due:
                which = f"epochs {due} to {epoch - 1}" if epoch - due > 1 else f"epoch {due}"
                self._find("lost", f"no update is of {which}, and epoch {epoch} began", epoch=due)
            due = epoch + 1
            updates = sorted(by_epoch[epoch], key=lambda update: (update.start, update.step))
            end, is_tiled = self._check_tiles(epoch, updates)
            whole += self._check_end(epoch, end, updates, is_last=epoch == last_epoch) and is_tiled
        return whole

    def _check_tiles(self, epoch: int, updates: Sequence[Update]) -> tuple[int, bool]:
        """Return where an epoch's windows end, and whether each window begins where another one
        ends.
        """
        before: Update | None = None
        num_findings = len(self.findings)
        for update in updates:
            end = before.positions.stop if before is not None else 0
            if update.start > end:
                self._find(
                    "lost",
                    f"positions {end} to {update.start - 1} of epoch {epoch} are in no update: "
                    f"{_name(before) if before is not None else 'the epoch begins'}, then {_name(update)}",
                    [each for each in (before, update) if each is not None],
                    epoch=epoch,
                    positions=range(end, update.start),
                )
            elif update.start < end and before is not None and update.count:
                shared = range(update.start, min(end, update.positions.stop))
                self._find(
                    "repeated",
                    f"positions {shared.start} to {shared.stop - 1} of epoch {epoch} are in "
                    f"{_name(before)} and in {_name(update)}",
                    [before, update],
                    epoch=epoch,
                    positions=shared,
                )
            if before is None or update.positions.stop >= end:
                before = update
        return before.positions.stop if before is not None else 0, len(
            self.findings
        ) == num_findings

    def _check_end(self, epoch: int, end: int, updates: Sequence[Update], *, is_last: bool) -> bool:
        """Whether an epoch is complete."""
        size = self._order.num_samples
        if size is None:
            return not is_last
        widest = max((update.count for update in updates), default=0)
        if end > size:
            self._find(
                "repeated",
                f"epoch {epoch} has {size} samples, and an update used position {end - 1}",
            )
        elif end < size and not is_last and not (self._order.drop_last and size - end < widest):
            self._find(
                "lost",
                f"positions {end} to {size - 1} of epoch {epoch} are in no update, and epoch "
                f"{epoch + 1} began",
                epoch=epoch,
                positions=range(end, size),
            )
        return end >= size or (not is_last and self._order.drop_last)

    def check_cursors(self, run_dir: Path) -> None:
        """Check that checkpoints and the summary count steps and samples as the journal does."""
        counts: Counter[int] = Counter()
        for update in self.applied:
            counts[update.step] += update.count
        for name, document in _cursors(run_dir):
            samples = sum(count for step, count in counts.items() if step <= document["steps"])
            last = max((step for step in counts if step <= document["steps"]), default=0)
            if (last, samples) != (document["steps"], document["samples"]):
                self._find(
                    "disagrees",
                    f"{name} is of {document['steps']} steps and {document['samples']} samples, "
                    f"and the journal has {last} steps and {samples} samples up to there",
                )


def _cursors(run_dir: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the other records of a run folder that count steps and samples. Damaged checkpoints are
    left out.
    """
    for path in sorted((run_dir / folder.CHECKPOINTS).glob("step-*")):
        try:
            document = open_checkpoint(path).document
        except CheckpointError:
            continue
        if isinstance(document.get("step"), int) and isinstance(document.get("samples"), int):
            yield path.name, {"steps": document["step"], "samples": document["samples"]}
    summary = folder.read_summary(run_dir)
    if isinstance(summary.get("steps"), int) and isinstance(summary.get("samples"), int):
        yield folder.SUMMARY, summary


def _name(update: Update) -> str:
    part = "" if update.part is None else f", part {update.part}"
    return f"step {update.step}{part} (launch {update.launch})"
