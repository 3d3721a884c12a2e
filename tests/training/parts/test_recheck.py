"""Gradients that are computed a second time, and state that nothing should write to: what is wrong is found and its
rank is named, what is right stays as it is."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import paceline as pl
from paceline.base.errors import CheckpointError, DriftError
from paceline.checkpoint import newest_checkpoint, open_checkpoint
from paceline.checkpoint.suspect import mark_suspect, suspect_steps
from paceline.checkpoint.write import Writer
from paceline.job.named_optimizers import NamedOptimizers
from paceline.launch.process.faults import Fault, FaultInjector
from paceline.strategies.compose import load
from paceline.strategies.mesh import local_part
from paceline.strategies.plan import Plan
from paceline.training.loop import Settings, train_rank
from paceline.training.parts.memory_check import _memory
from paceline.training.parts.recompute_check import RecomputeCheck


class Centred(nn.Module):
    """Takes a running mean away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.running_mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.running_mean


class Net(nn.Module):
    """Dropout, a running mean, and a count that the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm, self.drop = Centred(), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.outer(self.drop(self.norm(torch.relu(self.inner(x))))) * (1 + self.calls / 100)


def make_job(model: Callable[[], nn.Module] = Net, *, steps: int = 8, **more: Any) -> pl.Job:
    source = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(32, 6, generator=source), torch.randint(3, (32,), generator=source)
    )
    return pl.Job(
        **{
            "model": model,
            "data": data,
            "loss": nn.functional.cross_entropy,
            "batch": 12,
            "steps": steps,
            "optimizer": lambda named: torch.optim.AdamW(named, lr=0.05),
            "clip": 0.5,
            **more,
        }
    )


def trained(
    run_ranks: Callable[..., Any],
    plan: str,
    run_dir: Path,
    every: int,
    *,
    job: pl.Job | None = None,
    flip: str | None = None,
    alter: Callable[[int, nn.Module], None] | None = None,
    save_every: int | None = None,
) -> list[DriftError | None]:
    """What each rank's run ended with. alter: is given each rank's number and its model."""
    parsed, job = Plan.parse(plan), job or make_job()
    built = job.model

    def body(context: Any) -> Any:
        def altered() -> nn.Module:
            model = built()
            if alter is not None:
                alter(context.rank, model)
            return model

        object.__setattr__(job, "model", altered)
        if flip is not None:
            context.faults = FaultInjector(
                [Fault.parse("flip", flip)], rank=context.rank, run_dir=run_dir, launcher_pid=0
            )
        try:
            train_rank(
                context,
                job,
                parsed,
                Settings(
                    run_dir, (1,) * parsed.replicas, save_every=save_every, recheck_every=every
                ),
            )
        except DriftError as error:
            return str(error), bool(error.heard)  # type: ignore[attr-defined]
        return None

    run_dir.mkdir(exist_ok=True)
    load(parsed)
    return run_ranks(body, parsed.world_size)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model.safetensors")


def last_checked(run_dir: Path) -> int:
    checkpoint = newest_checkpoint(run_dir, accept=lambda saved: None, warn=print)
    return checkpoint.document.get("rechecked", 0) if checkpoint is not None else 0


PRODUCTS = [
    "data=2 shard=2",
    "data=2 compress=int8",
    "data=3",
    "data=2 deterministic=yes",
    "data=2 recompute=full",
]


@pytest.mark.parametrize(
    "plan",
    ["data=2 accumulate=2", *(pytest.param(plan, marks=pytest.mark.slow) for plan in PRODUCTS)],
)
def test_right_gradients_stay_as_they_are(run_ranks: Any, tmp_path: Path, plan: str):
    """Runs with and without a second computation end with equal weights and buffers."""
    for every in (0, 1):
        assert set(trained(run_ranks, plan, tmp_path / str(every), every)) == {None}
    plain, checked = weights(tmp_path / "0"), weights(tmp_path / "1")
    assert plain.keys() == checked.keys() and all(
        torch.equal(plain[name], checked[name]) for name in plain
    )
    assert last_checked(tmp_path / "0") == 0 and last_checked(tmp_path / "1") == 8


@pytest.mark.parametrize(
    ("plan", "rank"),
    [
        ("data=2", 0),
        ("data=3", 1),
        *(
            pytest.param(plan, rank, marks=pytest.mark.slow)
            for plan, rank in (
                ("data=2", 1),
                ("data=3", 0),
                ("data=3", 2),
                ("data=2 compress=int8", 1),
                ("data=2 accumulate=2", 1),
            )
        ),
    ],
)
def test_a_flipped_bit_is_found_and_its_rank_named(
    run_ranks: Any, tmp_path: Path, plan: str, rank: int
):
    """Its report is the one that counts. The next older checkpoint is passed over, as it was saved since the last step
    that was found right."""
    ended = trained(run_ranks, plan, tmp_path, 3, flip=f"{rank}@6:gradients", save_every=2)
    assert [end and end[1] for end in ended] == [place != rank for place in range(len(ended))]
    (message,) = {end[0] for end in ended if end}
    assert (
        "gradients of step 6 are wrong before they are summed: two replicas computed 'inner.weight'"
        in message
    )
    assert f"and rank {rank} came to another result when it computed them again" in message
    assert (
        "after step 3, when gradients were last found right" in message
        and "passes over: step 4" in message
    )
    warned: list[str] = []
    checkpoint = newest_checkpoint(tmp_path, accept=lambda saved: None, warn=warned.append)
    assert checkpoint is not None and checkpoint.step == 2 and "SUSPECT" in warned[0]


@pytest.mark.parametrize(
    ("world_size", "says"),
    [
        (3, "rank 2 comes to another result than most replicas"),
        (2, "rank 0 and rank 1 come to different ones each time"),
    ],
)
def test_a_processor_that_always_errs(run_ranks: Any, tmp_path: Path, world_size: int, says: str):
    """A third replica decides who is wrong; of two nobody can."""

    def alter(rank: int, model: nn.Module) -> None:
        if rank == world_size - 1:
            model.outer.bias.register_hook(lambda gradient: gradient * 1.001)

    ended = trained(run_ranks, f"data={world_size}", tmp_path, 2, alter=alter)
    assert all(end and says in end[0] for end in ended)
    assert [end[1] for end in ended if end] == [world_size == 3, world_size == 3, False][
        :world_size
    ]


def test_arithmetic_that_does_not_repeat_ends_the_comparison(
    run_ranks: Any, tmp_path: Path, caplog: Any
):
    """And not the run, whose sums are those of its own step."""

    def alter(rank: int, model: nn.Module) -> None:
        model.outer.bias.register_hook(lambda gradient: gradient + 1e-9 * os.urandom(1)[0])

    assert set(trained(run_ranks, "data=2", tmp_path, 2, alter=alter)) == {None}
    assert last_checked(tmp_path) == 0


class Remembered(Dataset[Any]):
    """Each process makes noise of its own, once, and then gives the same."""

    def __init__(self) -> None:
        self.samples: dict[int, tuple[torch.Tensor, int]] = {}

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index not in self.samples:
            noise = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
            self.samples[index] = torch.randn(6, generator=noise), index % 3
        return self.samples[index]


@pytest.mark.parametrize("plan", ["data=2", pytest.param("data=3", marks=pytest.mark.slow)])
def test_other_samples_on_another_rank_end_the_comparison(
    run_ranks: Any, tmp_path: Path, plan: str
):
    """No rank is at fault."""
    assert not any(trained(run_ranks, plan, tmp_path / "run", 2, job=make_job(data=Remembered())))
    assert last_checked(tmp_path / "run") == 0


class Meets(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean()
        dist.all_reduce(mean)
        return super().forward(x + mean)


class Edits(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.outer.bias.clamp_(-0.01, 0.01)
        return super().forward(x)


class Joins(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)


@pytest.mark.parametrize("model", [Meets, Edits, Joins])
def test_what_can_not_be_computed_twice_is_not(run_ranks: Any, tmp_path: Path, model: Any):
    """Forwards that meet other replicas, or write to parameters."""
    for every in (0, 2):
        assert set(
            trained(run_ranks, "data=2", tmp_path / str(every), every, job=make_job(model))
        ) == {None}
    plain, checked = weights(tmp_path / "0"), weights(tmp_path / "2")
    assert all(torch.equal(plain[name], checked[name]) for name in plain)
    assert last_checked(tmp_path / "2") == 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.zeros(6), torch.zeros(())


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


ALONE = ["single", "shard=2", "pipeline=2 microbatches=2"]
MORE_ALONE = [
    "tensor=2",
    "place=auto parts=2",
    "data=2 tensor=2",
    "data=2 pipeline=2 microbatches=2",
]


@pytest.mark.parametrize(
    ("plan", "step"),
    [
        *((plan, 5) for plan in (*ALONE, "data=2 local=2")),
        ("single", 4),
        *(
            pytest.param(plan, 5, marks=pytest.mark.slow)
            for plan in (*MORE_ALONE, "data=2", "data=2 compress=int8")
        ),
    ],
)
def test_a_weight_that_flips_at_rest_is_found(run_ranks: Any, tmp_path: Path, plan: str, step: int):
    """By the rank whose memory it is, under plans of which no other rank holds the same: before the next update, and
    before the checkpoint of step 4 where it flips between that step and its save. No checkpoint has it."""
    rank = Plan.parse(plan).world_size - 1
    ended = trained(
        run_ranks, plan, tmp_path, 1, flip=f"{rank}@{step}", job=make_job(plain), save_every=2
    )
    assert [end and end[1] for end in ended] == [place != rank for place in range(len(ended))]
    (message,) = {end[0] for end in ended if end and not end[1]}
    assert re.search(
        rf"on rank {rank}, '\S+' changed after the update of step {step}, and nothing was seen",
        message,
    )
    checkpoint = newest_checkpoint(tmp_path, accept=lambda saved: None, warn=print)
    assert checkpoint is not None and checkpoint.step == {4: 2, 5: 4}[step]


@pytest.mark.parametrize(
    "plan",
    [*ALONE[1:], *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("single", *MORE_ALONE))],
)
def test_a_gradient_that_flips_is_found_without_replicas(run_ranks: Any, tmp_path: Path, plan: str):
    """Of those whose gradients it is part of, one is at fault. Shards are sums over ranks, and what each adds shows."""
    rank = Plan.parse(plan).world_size - 1
    ended = trained(run_ranks, plan, tmp_path, 2, flip=f"{rank}@6:gradients", job=make_job(plain))
    assert all(ended) and False in [end[1] for end in ended if end]
    message = next(end[0] for end in ended if end and not end[1])
    assert (
        "of step 6 are wrong" in message
        and f"rank {rank} came to another result when it computed them again" in message
    )
    assert plan != "shard=2" or (
        "one of" not in message and [end[1] for end in ended if end] == [True, False]
    )


@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 microbatches=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in ("single", "shard=2", *MORE_ALONE)
        ),
    ],
)
def test_a_right_run_stays_as_it_is_without_replicas(run_ranks: Any, tmp_path: Path, plan: str):
    for every in (0, 1):
        assert set(trained(run_ranks, plan, tmp_path / str(every), every, job=make_job(plain))) == {
            None
        }
    before, checked = weights(tmp_path / "0"), weights(tmp_path / "1")
    assert before.keys() == checked.keys() and all(
        torch.equal(before[name], checked[name]) for name in before
    )
    assert last_checked(tmp_path / "1") == 8


class WritesUnseen(Net):
    """torch does not count what is written through `.data`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outer.bias.data.mul_(0.999)
        return super().forward(x)


def test_what_forwards_write_unseen_is_left_out(run_ranks: Any, tmp_path: Path):
    """It shows in a launch's first comparison. What else changes is still found."""
    assert trained(run_ranks, "single", tmp_path / "right", 1, job=make_job(WritesUnseen)) == [None]
    ((message, _),) = trained(
        run_ranks, "single", tmp_path / "wrong", 1, job=make_job(WritesUnseen), flip="0@4"
    )
    assert "on rank 0, 'inner.weight' changed after the update of step 4" in message


def test_optimizer_state_that_flips_is_found(run_ranks: Any, tmp_path: Path):
    """And what torch sees written, such as by a hook, is not taken for it."""

    def alter(rank: int, model: nn.Module) -> None:
        calls = iter(range(100))

        def forward(module: nn.Module, args: Any) -> None:
            call = next(calls)
            with torch.no_grad():
                module.bias[0] *= 1.5
                module.weight[0] += float(call == 5)  # the first call after the first comparison
            if call >= 6:
                state = next(
                    each.state
                    for each in gc.get_objects()
                    if issubclass(type(each), torch.optim.AdamW) and module.weight in each.state
                )
                state[module.weight]["exp_avg"].data[0, 0] += 1

        model[4].register_forward_pre_hook(forward)

    ((message, _),) = trained(
        run_ranks, "single", tmp_path, 1, job=make_job(plain, clip=None), alter=alter
    )
    assert (
        "on rank 0, the optimizer's exp_avg of '4.weight' changed after the update of step"
        in message
    )


class Late(Net):
    """Its statistics are frozen for three steps, and then written to, which torch does not count. Evaluation writes to
    them in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.norm.train(self.calls >= 3)
        else:
            self.norm.running_mean.data.mul_(0.99)
        return super().forward(x) * self.scale


@pytest.mark.parametrize("every", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_buffers_that_forwards_write_to_are_no_finding(run_ranks: Any, tmp_path: Path, every: int):
    """From a later step on, and in evaluations."""
    job = make_job(Late, validation=make_job().data)
    assert trained(run_ranks, "single", tmp_path, every, job=job) == [None]


@pytest.mark.parametrize(
    ("name", "call", "says", "more"),
    [
        (
            "norm.running_mean",
            -5,
            "the buffer 'norm.running_mean' changed after the update of step 4",
            {},
        ),
        (
            "norm.running_mean",
            -4,
            "the buffer 'norm.running_mean' changed after the update of step 3",
            {},
        ),
        (
            "norm.running_mean",
            -4,
            "the buffer 'norm.running_mean' changed after the update of step 3",
            {"validation": make_job().data},
        ),
        ("scale", 5, "the buffer 'scale' changed after the update of step 4", {}),
    ],
)
def test_a_buffer_that_flips_is_found(
    run_ranks: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    call: int,
    says: str,
    more: dict[str, Any],
):
    """Statistics before they are saved, before the next forward and before an evaluation; what no forward writes to in
    a forward, too: in the second of a step, which is the one that counts."""
    called: list[nn.Module] = []
    calls: list[int] = []

    def flip(at: int) -> None:
        calls.append(at)
        if at == call and (at < 0 or calls.count(at) == 2):
            called[-1].get_buffer(name).data.add_(1)

    def alter(rank: int, model: nn.Module) -> None:
        def forward(module: nn.Module, args: Any) -> None:
            called.append(module)
            flip(module.calls + 1)

        model.register_forward_pre_hook(forward)

    def poll(writer: Writer) -> None:
        flip(-1 - called[-1].calls)

    monkeypatch.setattr(Writer, "poll", poll)
    ((message, _),) = trained(
        run_ranks, "single", tmp_path, 1, job=make_job(Late, **more), alter=alter, save_every=2
    )
    assert f"on rank 0, {says}" in message
    checkpoint = newest_checkpoint(tmp_path, accept=lambda saved: None, warn=print)
    assert checkpoint is not None and checkpoint.step == (4 if call > 0 else 2)


def test_tensors_that_consist_of_others_are_read_in_parts():
    """Quantized state has codes and scales, each of which a bit may flip in."""
    from torchao.optim.subclass_8bit import OptimState8bit

    parts = dict(_memory("state", OptimState8bit.zeros((256, 256))))
    assert {"codes of state", "scale of state"} <= set(parts)
    assert all(type(part) is torch.Tensor for part in parts.values())


def test_what_has_no_value_or_no_count_of_writes_is_left_out():
    with torch.inference_mode():
        uncounted = torch.ones(2)
    assert not list(_memory("state", uncounted)) and not list(
        _memory("state", torch.ones(2, device="meta"))
    )


def flip(kind: str) -> None:
    """A bit of what this rank holds, if it is not only trying the step."""
    for optimizer in [each for each in gc.get_objects() if issubclass(type(each), NamedOptimizers)]:
        for p in (
            optimizer.members["head"].param_groups[0]["params"]
            if "head" in optimizer.members
            else ()
        ):
            if (
                p.ndim == 2 and p in optimizer.state
            ):  # this rank's, and no other that a test left behind
                tensor = p if kind == "weight" else optimizer.state[p]["exp_avg"]
                local_part(tensor.detach()).data.view(-1).view(torch.int32)[0] ^= 1
                break


def own_job(flips: tuple[str, str, int, int] | None = None) -> pl.Job:
    """Two models with an optimizer each, and an average. Every third step updates the first one alone.

    flips: what, where in a step, in which step from 1, on which rank.
    """

    def disturb(moment: str, step: int) -> None:
        if flips and (moment, step, dist.get_rank() if dist.is_initialized() else 0) == flips[1:]:
            flip(flips[0])

    def step(ctx: Any, batch: Any) -> None:
        disturb("begin", ctx.step + 1)
        ctx.backward("code", batch.input, lambda code, batch: code.square().mean())
        ctx.update("code")
        disturb("between", ctx.step + 1)
        if ctx.step % 3 < 2:
            ctx.backward(
                "head",
                ctx.run("code", batch.input),
                lambda output, batch: nn.functional.cross_entropy(output, batch.target),
            )
            ctx.update("head")
        disturb("end", ctx.step + 1)

    adamw = lambda named: torch.optim.AdamW(named, lr=0.05)  # noqa: E731
    base = make_job()
    return pl.Job(
        models={
            "code": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)),
            "head": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
        },
        step=step,
        optimizers={"code": adamw, "head": pl.Optimizer(adamw, clip=0.5)},
        followers={"average": pl.ema("head", 0.9)},
        data=base.data,
        batch=12,
        steps=8,
    )


@pytest.mark.parametrize(
    ("plan", "target", "moment", "step", "says"),
    [
        ("single", "weight", "begin", 5, r"'head\.\d\.weight' changed after the update of step 4"),
        (
            "shard=2",
            "state",
            "between",
            5,
            r"exp_avg of 'head\.\d\.weight' changed after the update of step 5",
        ),
        (
            "single",
            "state",
            "end",
            6,
            r"exp_avg of 'head\.\d\.weight' changed after the update of step 6",
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (
                    "data=2",
                    "weight",
                    "between",
                    6,
                    r"'head\.\d\.weight' changed after the update of step 6",
                ),
                (
                    "tensor=2",
                    "weight",
                    "end",
                    5,
                    r"'head\.\d\.weight' changed after the update of step 5",
                ),
                (
                    "pipeline=2 microbatches=2",
                    "state",
                    "begin",
                    5,
                    r"'head\.\d\.weight' changed after the update of step 4",
                ),
                (
                    "data=2 local=2",
                    "weight",
                    "begin",
                    5,
                    r"'head\.\d\.weight' changed after the update of step 4",
                ),
            )
        ),
    ],
)
def test_what_flips_in_a_step_of_ones_own_is_found(
    run_ranks: Any, tmp_path: Path, plan: str, target: str, moment: str, step: int, says: str
):
    """Between two updates of one step, in one that updates this model not at all, and before the next."""
    rank = Plan.parse(plan).world_size - 1
    ended = trained(
        run_ranks, plan, tmp_path, 1, job=own_job((target, moment, step, rank)), save_every=2
    )
    assert [end and end[1] for end in ended] == [place != rank for place in range(len(ended))]
    (message,) = {end[0] for end in ended if end and not end[1]}
    assert re.search(f"on rank {rank}, .*{says}", message)
    checkpoint = newest_checkpoint(tmp_path, accept=lambda saved: None, warn=print)
    assert checkpoint is not None and checkpoint.step == 4


@pytest.mark.parametrize(
    ("plan", "every"),
    [
        ("single", 1),
        ("shard=2", 2),
        *(
            pytest.param(plan, 1, marks=pytest.mark.slow)
            for plan in (
                "data=2",
                "tensor=2",
                "pipeline=2 microbatches=2",
                "data=2 local=2",
                "shard=2 zero=1",
            )
        ),
    ],
)
def test_a_right_step_of_ones_own_stays_as_it_is(
    run_ranks: Any, tmp_path: Path, plan: str, every: int
):
    for each in (0, every):
        assert set(trained(run_ranks, plan, tmp_path / str(each), each, job=own_job())) == {None}
    before, checked = weights(tmp_path / "0"), weights(tmp_path / str(every))
    assert before.keys() == checked.keys() and all(
        torch.equal(before[name], checked[name]) for name in before
    )


@pytest.mark.parametrize(
    ("plan", "more", "says"),
    [
        ("data=2 local=2", {}, "replicas take steps of their own"),
        ("single", {"models": {"net": Net}}, "the job brings a step of its own"),
        ("data=2", {"data": Stream()}, "a data stream gives its samples once"),
        (
            "data=2",
            {"optimizer": lambda named: torch.optim.LBFGS([p for _, p in named]), "clip": None},
            "LBFGS evaluates the loss itself",
        ),
    ],
)
def test_gradients_that_can_not_be_computed_twice(
    caplog: Any, plan: str, more: dict[str, Any], says: str
):
    """Rank 0 says why; the state is compared all the same."""
    job = make_job(plain, **{name: value for name, value in more.items() if name != "models"})
    object.__setattr__(job, "models", more.get("models", {}))
    caplog.set_level("INFO", logger="paceline")
    stepper: Any = SimpleNamespace(
        job=job,
        mesh=SimpleNamespace(rank=0, num_copies=1),
        device=torch.device("cpu"),
        step_sync=SimpleNamespace(has_own_steps="local" in plan),
        needs_closure="optimizer" in more,
        optimizer=torch.optim.LBFGS(plain().parameters()),
    )
    assert RecomputeCheck.of(stepper, Plan.parse(plan), 2) is None and says in caplog.text


def test_in_which_steps():
    """Never where forwards edit weights."""
    recheck = object.__new__(RecomputeCheck)
    recheck.stepper = SimpleNamespace(edits=SimpleNamespace(names=[]))  # type: ignore[assignment]
    recheck.has_ended, recheck.every = False, 5
    assert [recheck.is_due(step) for step in (11, 15)] == [False, True]
    recheck.stepper.edits.names.append("table.weight")
    assert not recheck.is_due(15)


def test_marked_checkpoints_are_passed_over(run_ranks: Any, tmp_path: Path):
    trained(run_ranks, "data=2", tmp_path, 0, save_every=2, job=make_job(steps=6))
    mark_suspect(tmp_path, after=2)
    assert suspect_steps(tmp_path) == [4, 6]
    checkpoint = newest_checkpoint(tmp_path, accept=lambda saved: None, warn=print)
    assert checkpoint is not None and checkpoint.step == 2
    assert (
        open_checkpoint(tmp_path / "checkpoints" / "step-6").step == 6
    )  # by its name it can still be read
    mark_suspect(tmp_path, after=0)
    with pytest.raises(CheckpointError, match="remove its file SUSPECT"):
        newest_checkpoint(tmp_path, accept=lambda saved: None, warn=print)
