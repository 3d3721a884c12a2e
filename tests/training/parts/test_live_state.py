"""Ranks hold their state in memory that outlives them: whoever takes a lost one's place computes no step again."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conditions import PATIENCE_S
from torch import nn

import paceline as pl
from paceline.base.logs import logger
from paceline.checkpoint.files import bytes_of
from paceline.launch.local import ranks as local
from paceline.launch.process.live_states import LiveStates
from paceline.launch.process.state_copies import TIME_SHARE, StateCopies
from paceline.strategies.compose import copies_weights_lazily
from paceline.strategies.plan import Plan
from paceline.training import loop
from paceline.training.parts import live_state
from paceline.training.parts.live_state import live_disagreement, live_step, open_live
from paceline.training.parts.memory_checkpoint import Copier, _newest
from tests.training.test_recovery import SAMPLES, STEPS, Fatal, job_of, load_file, steps_of

KILLED_AT = 7  # step that is not taken, or is in its update


@pytest.fixture(autouse=True)
def from_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is moved after two steps, and no copy is made after that. Ranks may take long to end theirs."""
    monkeypatch.setattr(local, "_SETTLE_S", PATIENCE_S)
    monkeypatch.setattr(live_state, "SEARCH_S", 0.0)
    monkeypatch.setattr(live_state, "MOVE_TENSOR_S", 0.0)
    monkeypatch.setattr(live_state, "MOVE_BYTES_PER_S", math.inf)
    monkeypatch.setattr(loop, "NOTE_SHARE", math.inf)
    monkeypatch.setattr(Copier, "affordable_every", lambda self, step_s, **share: 1000)


def train(run: Path, plan: str, job: pl.Job) -> Any:
    return pl.train(job, plan, run=run, check=False, table=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The undisturbed run under a plan, which tests share."""
    return cache(
        lambda plan: Path(
            train(tmp_path_factory.mktemp("whole") / "run", plan, job_of(None, 0)).run
        )
    )


def gone_on_from(run: Path) -> list[int]:
    """The step that each launch went on from."""
    lines = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return [line["after"] for line in lines if "after" in line]


def equal_weights(tmp_path: Path, whole: Path | None = None) -> bool:
    expected, actual = (
        load_file(run / "model.safetensors")
        for run in (whole or tmp_path / "whole", tmp_path / "run")
    )
    return all(torch.equal(expected[name], actual[name]) for name in expected)


class Normed(nn.Module):
    """Its forwards change buffers, of a step that is then not applied too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


PLANS = ["single", "data=2", "shard=2"]
SLOW_PLANS = [
    "pipeline=2 microbatches=2",
    "tensor=2",
    "place=auto parts=2",
    "data=2 accumulate=2",
    "shard=2 zero=1",
    "data=2 compress=powersgd",
    "data=2 shard=2",
]


@pytest.mark.parametrize(
    "plan", [*PLANS, *(pytest.param(plan, marks=pytest.mark.slow) for plan in SLOW_PLANS)]
)
def test_no_step_is_computed_again(tmp_path: Path, plan: str, whole: Callable[[str], Path]) -> None:
    """A rank is killed while it reads the samples of a step; weights are those of the undisturbed run, bit by bit."""
    replicas = {"data=2 shard=2": 4}.get(plan, 2 if plan.startswith(("data", "shard")) else 1)
    train(tmp_path / "run", plan, job_of(tmp_path / "killed", 8 * (KILLED_AT - 1) // replicas))
    assert (tmp_path / "killed").exists()
    lines = list(map(json.loads, (tmp_path / "run" / "journal.jsonl").read_text().splitlines()))
    applied = max(line["step"] for line in lines if line["launch"] == 1 and "step" in line)
    assert gone_on_from(tmp_path / "run") == [0, applied] and applied >= KILLED_AT - 2
    assert equal_weights(tmp_path, whole(plan)) and steps_of(tmp_path / "run") == list(
        range(1, STEPS + 1)
    )


def test_buffers_are_those_of_the_step_before(tmp_path: Path) -> None:
    """Forwards of the step that was not taken had changed them."""

    def job(mark: Path | None) -> pl.Job:
        def net() -> nn.Module:
            model = Normed().double()
            forward, calls = model.last.forward, [0]

            def counted(x: torch.Tensor) -> torch.Tensor:
                calls[0] += 1
                if calls[0] == KILLED_AT and mark is not None and not mark.exists() and rank() == 1:
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return forward(x)

            model.last.forward = counted  # type: ignore[method-assign]
            return model

        return replace(job_of(None, 0), model=net)

    train(tmp_path / "whole", "data=2", job(None))
    train(tmp_path / "run", "data=2", job(tmp_path / "killed"))
    assert gone_on_from(tmp_path / "run")[1] >= 3 and equal_weights(tmp_path)


def test_ranks_that_are_lost_again_at_once(tmp_path: Path, whole: Callable[[str], Path]) -> None:
    """Before the first copy of the next launch: what the one before has left is still there."""

    def job(marks: Path) -> pl.Job:
        def net() -> nn.Module:
            model = job_of(None, 0).model()
            forward, calls = model[-1].forward, [0]

            def counted(x: torch.Tensor) -> torch.Tensor:
                calls[0] += 1
                deaths = len(list(marks.iterdir()))
                if rank() == 1 and calls[0] == {0: KILLED_AT, 1: 1, 2: 2}.get(deaths):
                    (marks / str(deaths)).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return forward(x)

            model[-1].forward = counted
            return model

        return replace(job_of(None, 0), model=net)

    (tmp_path / "marks").mkdir()
    train(tmp_path / "run", "data=2", job(tmp_path / "marks"))
    begun = gone_on_from(tmp_path / "run")
    assert len(list((tmp_path / "marks").iterdir())) == 3 and begun[1] >= 3
    assert begun == [0, begun[1], begun[1], begun[1] + 1] and equal_weights(
        tmp_path, whole("data=2")
    )


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Torn(torch.optim.SGD):
    """Ends its process in the middle of an update, once."""

    mark: Path | None = None
    in_run = False
    number = 0

    def step(self, closure: Any = None) -> Any:
        if self.mark is not None and type(self).in_run:
            type(self).number += 1
            if type(self).number == KILLED_AT and rank() == self.victim and not self.mark.exists():
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(1.0)
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)

    victim = 0


def tear_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a rank in an update of the run itself, and not while its optimizer is tried before."""
    build = loop._build

    def build_run(*args: Any) -> Any:
        run = build(*args)
        Torn.in_run = True
        return run

    monkeypatch.setattr(loop, "_build", build_run)


@pytest.mark.parametrize(
    ("plan", "victim", "steps"),
    [
        ("data=2", 1, [0, KILLED_AT]),
        ("data=2", 0, [0, 2]),
        *(
            pytest.param(plan, victim, [0, 2], marks=pytest.mark.slow)
            for plan, victim in (("single", 0), ("shard=2", 1))
        ),
    ],
)
def test_a_rank_that_dies_in_an_update(
    tmp_path: Path, plan: str, victim: int, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replica has the whole state after the update; without one, the copy in memory is taken."""

    def job(mark: Path | None) -> pl.Job:
        def optimizer(named: Any) -> Torn:
            built = Torn(named, lr=0.03, momentum=0.9)
            built.mark = mark
            return built

        return replace(job_of(None, 0), optimizer=optimizer)

    tear_in_runs(monkeypatch)
    monkeypatch.setattr(Torn, "victim", victim)
    train(tmp_path / "whole", plan, job(None))
    train(tmp_path / "run", plan, job(tmp_path / "killed"))
    assert (tmp_path / "killed").exists()
    assert gone_on_from(tmp_path / "run") == steps and equal_weights(tmp_path)


def test_what_a_torn_rank_left_is_kept_until_the_next_copy() -> None:
    """Its replica was read; if it is lost again at once, the replica is read again, and copies
    before are still there."""
    copies = StateCopies(2)
    for rank_ in range(2):
        copies.write(rank_, 2, [memoryview(b"2")], b'{"document": {}, "tensors": {}}')
        note(copies.live, rank_, 5, {}, torch.arange(4.0))
    copies.live.change(1)
    assert _newest(copies, range(2), least=0) == (5, True)
    for rank_ in range(2):
        context: Any = SimpleNamespace(slot=rank_)
        Copier(context, copies, 2).begin(5, is_copied=True)
    assert _newest(copies, range(2), least=0) == (5, True)
    copies.live.change(0)
    assert _newest(copies, range(2), least=0) == (2, False)
    copies.write(0, 6, [memoryview(b"6")], b"{}")
    Copier(SimpleNamespace(slot=0), copies, 2).begin(5, is_copied=True)  # type: ignore[arg-type]
    assert set(copies.steps(0)) == {2}
    copies.close()


def test_a_step_of_ones_own_is_torn_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first update is before the ranks agree on anything."""

    def job(mark: Path | None) -> pl.Job:
        def step(ctx: pl.StepContext, batch: Any) -> None:
            ctx.backward(
                "net", batch, lambda output, batch: (output - batch.target).square().mean()
            )
            ctx.update("net")

        def optimizer(named: Any) -> Torn:
            built = Torn(named, lr=0.03, momentum=0.9)
            built.mark = mark
            return built

        plain = job_of(None, 0)
        return replace(
            plain,
            model=None,
            loss=None,
            optimizer=None,
            lr_schedule=None,
            clip=None,
            step=step,
            models={"net": plain.model},
            optimizers={"net": optimizer},
        )

    tear_in_runs(monkeypatch)
    train(tmp_path / "whole", "single", job(None))
    train(tmp_path / "run", "single", job(tmp_path / "killed"))
    assert (tmp_path / "killed").exists()
    assert gone_on_from(tmp_path / "run") == [0, 2] and equal_weights(tmp_path)


def test_ranks_that_have_not_ended_a_step_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is killed as it reads for the next step, while rank 0 is still busy with what follows the update."""
    after_step = loop._after_step

    def slow(run: Any, *args: Any) -> None:
        after_step(run, *args)
        if run.context.rank == 0 and run.context.num_starts == 1:
            time.sleep(0.3)

    monkeypatch.setattr(loop, "_after_step", slow)
    job = job_of(tmp_path / "killed", 4 * (KILLED_AT - 1))
    monkeypatch.setattr(Fatal, "__getitem__", _kills_rank_1)
    train(tmp_path / "run", "data=2", job)
    assert gone_on_from(tmp_path / "run") == [0, KILLED_AT - 1]


def _kills_rank_1(data: Fatal, index: int) -> Any:
    data.seen = getattr(data, "seen", 0) + 1  # type: ignore[attr-defined]
    if rank() == 1 and data.seen > data.number and data.mark is not None and not data.mark.exists():  # type: ignore
        data.mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return SAMPLES[index]


def test_a_move_is_no_write_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error about replicas that differ would name it."""
    finish = loop._finish

    def told(run: Any, started_s: float) -> Any:
        (tmp_path / f"outside-{run.context.rank}").write_text(
            json.dumps([sorted(run.stepper.edits.outside), run.live.num_bytes])
        )
        return finish(run, started_s)

    monkeypatch.setattr(loop, "_finish", told)
    train(tmp_path / "run", "data=2", job_of(None, 0))
    for number in range(2):
        outside, moved_bytes = json.loads((tmp_path / f"outside-{number}").read_text())
        assert outside == [] and moved_bytes > 0


class WritesToItself(nn.Module):
    """A parameter follows another one in each forward, unseen by version counters."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.slow = (
            nn.Linear(8, 600).double(),
            nn.Parameter(torch.zeros(600, dtype=torch.float64)),
        )
        self.last = nn.Linear(600, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.slow.data.mul_(0.9).add_(self.net.bias.data, alpha=0.1)
        return self.last(torch.tanh(self.net(x) + self.slow))


def test_a_forward_that_writes_to_a_parameter(tmp_path: Path) -> None:
    """The state before an update is then none to go on from: the copy is taken."""
    job = replace(job_of(None, 0), model=WritesToItself)
    train(tmp_path / "whole", "single", job)
    killed = replace(job_of(tmp_path / "killed", 8 * (KILLED_AT - 1)), model=WritesToItself)
    train(tmp_path / "run", "single", killed)
    assert gone_on_from(tmp_path / "run") == [0, 2] and equal_weights(tmp_path)


def test_what_is_moved() -> None:
    """All that refers to the memory goes on to; what something unknown refers to stays where it is."""
    states = LiveStates(1)
    weight, known = torch.arange(4096.0), torch.arange(4096.0)
    view = weight[10:20]
    unseen = known.view(4, 16, 64) @ nn.Parameter(
        torch.ones(64, 8)
    )  # autograd has a view that Python never saw
    arena = states.arena(0, 2 * 4 * 4096)
    states.reserve(0, 0, 2 * 4 * 4096)
    for place, tensor in ((0, weight), (4 * 4096, known)):
        storage = tensor.untyped_storage()
        tensors = live_state._tensors_of_python([storage._cdata])[storage._cdata]
        live_state._move(storage, tensors, arena, place)
        del tensors, storage
    view.fill_(-1.0)
    assert weight[10] == -1.0 and weight[20] == 20.0
    in_arena = torch.frombuffer(arena, dtype=torch.float32)
    assert torch.equal(in_arena[:4096], weight) and weight.data_ptr() == in_arena.data_ptr()
    assert not in_arena[4096:].any() and known[4095] == 4095.0 and unseen.requires_grad
    states.close()


def test_memory_that_numpy_looks_into_stays() -> None:
    """An array would be left with memory that is free. Copies in memory don't look through NumPy."""
    for look, is_moved in ((bytes_of, True), (lambda tensor: tensor.detach().numpy(), False)):
        states, tensor = LiveStates(1), torch.arange(4096.0)
        seen, storage = look(tensor), tensor.untyped_storage()
        if is_moved:
            del seen
        arena = states.arena(0, storage.nbytes())
        states.reserve(0, 0, storage.nbytes())
        aliases = live_state._tensors_of_python([storage._cdata])[storage._cdata]
        live_state._move(storage, aliases, arena, 0)
        assert (
            torch.frombuffer(arena, dtype=torch.float32).data_ptr() == tensor.data_ptr()
        ) is is_moved
        states.close()


def note(
    states: LiveStates,
    rank: int,
    step: int,
    document: Any,
    values: torch.Tensor,
    *,
    part: int = 0,
    is_whole: bool = True,
) -> None:
    """A rank that holds one tensor in its arena and a number in its note."""
    if states.index(rank) is None:
        states.arena(rank, values.nbytes)[:] = values.numpy().tobytes()
    entry = {
        "shape": [2 * len(values)],
        "dtype": "F32",
        "pieces": [["arena", 0, [part * len(values)], [len(values)]]],
    }
    number = {"shape": [], "dtype": "F32", "pieces": [["note", 0, [], []]]}
    fixed = {"seed": 1, "optimizer": {"kind": "SGD", "groups": [{"parameters": ["w"]}]}}
    states.describe(
        rank,
        step,
        json.dumps(
            {
                "part": part,
                "document": fixed,
                "tensors": {"parameters/w": entry, "buffers/n": number},
            }
        ).encode(),
    )
    states.note(
        rank,
        step,
        memoryview(torch.tensor(float(step)).numpy().tobytes()),
        json.dumps(document).encode(),
        is_whole=is_whole,
    )


def test_which_state_is_read() -> None:
    """Of two parts with two replicas each: rank 0 must have its own, others may have been in an update."""
    states = LiveStates(4)
    parts = [torch.arange(0.0, 4.0), torch.arange(4.0, 8.0)]
    assert live_step(states, range(4)) is None
    for rank_, part in ((0, 0), (1, 1), (2, 0)):
        note(
            states,
            rank_,
            5,
            {"step": 5, "groups": [{"lr": 0.5}]} if not rank_ else None,
            parts[part],
            part=part,
        )
    assert live_step(states, range(4)) is None  # nobody knows what rank 3 held
    note(states, 3, 5, None, parts[1], part=1)
    assert live_step(states, range(4)) == 5
    states.change(1)
    assert live_step(states, range(4)) == 5
    checkpoint = open_live(states, range(4), 5)
    assert torch.equal(checkpoint.read("parameters/w"), torch.arange(8.0))
    assert checkpoint.document == {
        "step": 5,
        "seed": 1,
        "optimizer": {"kind": "SGD", "groups": [{"lr": 0.5, "parameters": ["w"]}]},
    }
    assert checkpoint.read("buffers/n") == 5.0
    states.forget(1)  # rank 1 goes on already, and rank 2 reads: what rank 0 chose holds
    assert torch.equal(open_live(states, range(4), 5).read("parameters/w"), torch.arange(8.0))
    note(states, 1, 4, None, parts[1], part=1)
    states.change(1)
    states.change(3)
    assert live_step(states, range(4)) is None
    note(states, 3, 6, None, parts[1], part=1)  # of another step
    assert live_step(states, range(4)) is None
    note(states, 1, 5, None, parts[1], part=1)
    states.change(0)
    assert live_step(states, range(4)) is None
    states.close()


def test_replicas_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", warnings.append)
    copies = StateCopies(2)
    states = copies.live
    for rank_ in range(2):
        note(states, rank_, 3, {}, torch.arange(4.0))
    assert live_disagreement(states, range(2), 3) is None
    note(states, 1, 3, {}, torch.arange(4.0))
    os.pwrite(states._arenas[1], b"\1", 5)
    assert (
        live_disagreement(states, range(2), 3) == "'parameters/w' differs between rank 0 and rank 1"
    )
    assert _newest(copies, range(2), least=0) == (None, False)
    assert warnings == [
        "the state in memory of step 3 is passed over: 'parameters/w' differs between rank 0 and rank 1"
    ]
    states.change(1)
    assert live_disagreement(states, range(2), 3) is None  # which is not read
    copies.close()


def test_a_first_note_is_kept_back() -> None:
    states = LiveStates(1)
    note(states, 0, 1, {}, torch.arange(4.0), is_whole=False)
    assert states.step(0) is None and states.index(0) is not None
    states.forget(0)
    assert states.index(0) is None
    states.close()


def test_memory_in_use_stays() -> None:
    """A process whose tensors lie in an arena may train again: what was noted is forgotten, and the memory is not."""
    states = LiveStates(1)
    tensor = torch.frombuffer(states.arena(0, 4096), dtype=torch.uint8)
    states.reserve(0, 0, 4096)
    states.forget(0)
    assert tensor.fill_(7).sum() == 7 * 4096 and states.step(0) is None and states.is_mapped
    states.is_mapped = False  # as in the next rank
    states.forget(0)
    assert os.fstat(states._arenas[0]).st_size == 0
    states.close()


@pytest.mark.parametrize(
    ("words", "waits"), [((4, 4), False), ((4, None), True), ((5, 4), True), ((4, 5), True)]
)
def test_who_is_waited_for(
    words: tuple[int | None, ...], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 runs, rank 0 is lost. A rank in an update, or one that is a step behind, is waited for."""
    states, slept = LiveStates(2), []
    for rank_, step in enumerate(words):
        note(states, rank_, step or 3, {}, torch.arange(4.0), is_whole=step is not None)
    monkeypatch.setattr(live_time(), "sleep", slept.append)
    states.settle([1], patience_s=0.01)
    assert bool(slept) is waits
    states.settle([], patience_s=0.01)
    states.close()


def live_time() -> Any:
    from paceline.launch.process import live_states

    return live_states.time


def test_no_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up, and the run goes on."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    states = LiveStates(1)
    stepper = SimpleNamespace(
        mesh=SimpleNamespace(rank=0),
        edits=SimpleNamespace(names=[]),
        local_parameters={},
        optimizer=SimpleNamespace(state={}),
    )
    state = live_state.LiveState(states, stepper, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(
        live_state.LiveState, "_movable", lambda self: {1: torch.zeros(2000).untyped_storage()}
    )
    monkeypatch.setattr(os, "posix_fallocate", full)
    stepper.edits.updated = lambda: None
    state.move()
    assert state.has_ended
    state.note(3, None, began_s=0.0)
    assert states.index(0) is None
    states.close()


def test_memory_for_the_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes that of the largest tensor and of what is not given back yet, and the next ranks need all of it again;
    without that it is not begun."""
    storages = {place: torch.zeros(2**20).untyped_storage() for place in range(3)}
    stepper = SimpleNamespace(
        mesh=SimpleNamespace(rank=0),
        edits=SimpleNamespace(names=[]),
        local_parameters={},
        optimizer=SimpleNamespace(state={}),
    )
    state = live_state.LiveState(SimpleNamespace(), stepper, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(live_state.LiveState, "_movable", lambda self: storages)
    monkeypatch.setattr(live_state, "GIVEN_BACK_BYTES", 2**20)
    for share, available, possible in (
        (0.5, 24, True),
        (0.5, 23, False),
        (0.25, 40, True),
        (0.25, 39, False),
    ):
        monkeypatch.setattr(live_state, "MEMORY_SHARE", share)
        monkeypatch.setattr(
            live_state, "free_memory_bytes", lambda available=available: available * 2**20
        )
        assert math.isfinite(state.move_s(2)) is possible
    stepper.edits.names = ["w"]
    assert state.move_s(1) == math.inf


def test_plans_that_keep_lazy_copies_of_weights() -> None:
    """Of memory that torch did not allocate they would be whole, where little memory is why the plan was chosen."""
    assert copies_weights_lazily(Plan.parse("single recompute=full"))
    assert copies_weights_lazily(Plan.parse("pipeline=2 recompute=full"))
    assert not copies_weights_lazily(Plan.parse("data=2 recompute=selective"))


def test_the_first_notes_do_not_count() -> None:
    """They take longer than later ones, and would end it at once."""
    stepper = SimpleNamespace(mesh=SimpleNamespace(rank=0), edits=SimpleNamespace(names=[]))
    state = live_state.LiveState(SimpleNamespace(), stepper, 0)  # type: ignore[arg-type]
    state._latest_s.extend([0.5] * 15)
    assert state.note_s == 0.0
    state._latest_s.append(0.5)
    assert state.note_s == 0.5
    state._latest_s.extend([1e-4] * 17)
    assert state.note_s == 1e-4


def test_what_is_given_up_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes that take too long end, and nobody waits for a state whose index is gone when a rank is lost."""
    monkeypatch.setattr(live_state, "_ENOUGH", 1)
    monkeypatch.setattr(loop, "NOTE_SHARE", 0.0)
    keep, seen = loop._keep_live, tmp_path / "seen"

    def looked_at(run: Any) -> None:
        keep(run)
        with seen.open("a") as file:
            file.write(f"{run.context.copies.live.index(0) is not None} ")

    monkeypatch.setattr(loop, "_keep_live", looked_at)
    train(tmp_path / "run", "single", job_of(None, 0))
    there = seen.read_text().split()
    assert "True" in there and there[-1] == "False"


def test_copies_are_closer_again_without_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside notes they have a smaller share of the time. That must not last until some later copy."""
    monkeypatch.setattr(live_state, "_ENOUGH", 1)
    monkeypatch.setattr(loop, "NOTE_SHARE", 0.0)
    monkeypatch.setattr(
        Copier,
        "affordable_every",
        lambda self, step_s, *, share: 2 if share == TIME_SHARE else 1000,
    )
    copy, seen = Copier.copy, tmp_path / "seen"

    def seen_copy(self: Copier, step: int, *args: Any, **kwargs: Any) -> None:
        copy(self, step, *args, **kwargs)
        with seen.open("a") as file:
            file.write(f"{step} ")
        if self.num_copies == 2:  # as if notes had begun before it
            self.every, self.next_step = 1000, step + 1000

    monkeypatch.setattr(Copier, "copy", seen_copy)
    train(tmp_path / "run", "single", job_of(None, 0))
    assert list(map(int, seen.read_text().split()))[-2:] == [STEPS - 2, STEPS]
