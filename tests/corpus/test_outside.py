"""What a captured model read in Python is not frozen, and what user code keeps is as it would be on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from paceline.base.errors import PacelineError
from paceline.launch.process.failure import RankFailed

from .outside import Masked, attribute_of_the_loss, of_sequences
from .registry import FEATURES, Entry, Net, entries, make_job
from .sweep import EXACT, REFUSED, Sweep

LATER = {  # jobs of which something changes in Python after the first step
    "tensor=2": "nested_config_of_a_schedule,masks_by_lengths",
    "pipeline=2 microbatches=1": "hook_of_a_schedule,packed_and_longer",
    "servers=1 workers=2": "globals_of_a_schedule,frozen_for_a_while",
    "servers=1 workers=2 colocate=yes": "hook_of*",
}
OUTSIDE = (
    "temperature_of_a_schedule,tuple*,list*,nested_config*,text*,function_of*,globals*,dropout_of*,frozen_by*,"
    "frozen_for*,hook_of*,attribute_of_the_data,numbers_of*,masks_by*,packed_and*,buffer_brought*"
)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "jobs"),
    [
        *LATER.items(),
        *(
            pytest.param(plan, OUTSIDE, marks=pytest.mark.slow)
            for plan in (
                "tensor=2",
                "pipeline=2",
                "place=2",
                "data=2 tensor=2",
                "shard=2 tensor=2",
                "pipeline=2 shard=2",
                "servers=1 workers=2",
                "servers=2 workers=2 colocate=yes",
            )
        ),
    ],
)
def test_values_that_change_are_seen(tmp_path: Path, plan: str, jobs: str):
    """Attributes, variables, hooks, frozen parts, and sizes after a module that is taken whole."""
    cells = Sweep(tmp_path).run(entries(jobs), [plan])

    assert {cell.job: cell.reason for cell in cells if cell.verdict != EXACT} == {}


@pytest.mark.slow
def test_a_loss_may_not_set_what_other_ranks_read(tmp_path: Path):
    """Only the last stage's rank runs it; under `tensor=2` all do."""
    job = Entry(
        "attribute_of_the_loss", "outside", "a loss that writes on the model", attribute_of_the_loss
    )
    cells = Sweep(tmp_path).run([job], ["pipeline=2 microbatches=1", "tensor=2"])

    assert [cell.verdict for cell in cells] == [REFUSED, EXACT]
    assert "the loss sets 'weights'" in cells[0].reason


@pytest.mark.sweep(1)
@pytest.mark.parametrize("result", ["shape", "number"])
def test_a_module_that_returns_what_was_not_recorded_ends_the_run(result: str, tmp_path: Path):
    """Its sizes, and what it returns beside tensors, are constants of the graph that it is taken whole in."""

    class Strided(Masked):
        def forward(self, x: Tensor, lengths: Tensor) -> Any:
            x = super().forward(x, lengths)
            return (x[:, ::2], 1) if result == "shape" else (x, int(lengths.max()))

    class Outer(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Strided()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            x, number = self.inner(x, lengths)
            return super().forward(x.sum(1) / number)

    with pytest.raises(
        RankFailed, match=r"'inner' is not looked into.* was recorded for such inputs"
    ):
        paceline.train(of_sequences(Outer), "tensor=2", run=tmp_path / "run", check=False)


class Scaled(Net):
    """Has code of its own, which may write to its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += 1
        return super().forward(x)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["tensor=2", "single recompute=full", "servers=1 workers=2"])
def test_a_step_is_called_once_for_each_step(plan: str, tmp_path: Path):
    """In the process that trains: its world does not see that it was tried."""
    world = [0]

    def step(ctx: Any, batch: Any) -> None:
        world[0] += 1
        at = world[0]
        ctx.backward("net", batch.input, lambda output, batch: output.square().mean() * 0 + at)
        ctx.update("net")

    job = make_job()
    result = paceline.train(
        paceline.Job(
            models={"net": Scaled},
            training_step=step,
            optimizers={"net": job.optimizer},
            data=torch.ones(24, FEATURES),
            batch=12,
            steps=3,
            precision="float64",
        ),
        plan,
        run=tmp_path / "run",
        check=False,
    )

    assert [row["loss"] for row in result.history if "loss" in row] == [1.0, 2.0, 3.0]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["servers=1 workers=2", "servers=1 workers=2 colocate=yes"])
@pytest.mark.parametrize("has_own_step", [False, True])
def test_workers_of_servers_see_what_a_schedule_sets(plan: str, has_own_step: bool, tmp_path: Path):
    """Also after a resume. The servers' processes step the schedule for the learning rates."""
    scale = [1.0]

    def factor(step: int) -> float:
        scale[0] = 1.0 + step
        return 1.0

    def loss(output: Tensor, *_: Any) -> Tensor:
        return output.square().mean() * 0 + scale[0]

    def step(ctx: Any, batch: Any) -> None:
        ctx.backward("net", batch.input, loss)
        ctx.update("net")

    def job(steps: int) -> paceline.Job:
        one = make_job(
            loss=loss,
            lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
            validation=None,
            steps=steps,
        )
        return (
            one
            if not has_own_step
            else paceline.Job(
                models={"net": Net},
                training_step=step,
                optimizers={"net": paceline.Optimizer(one.optimizer, lr_schedule=one.lr_schedule)},
                data=torch.ones(24, FEATURES),
                batch=12,
                steps=steps,
                precision="float64",
            )
        )

    run = tmp_path / "run"
    paceline.train(job(2), plan, run=run, check=False)
    result = paceline.train(job(4), plan, run=run, resume=True, check=False)

    assert [row["loss"] for row in result.history if "loss" in row] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.slow
def test_a_schedule_that_waits_for_a_metric_may_not_change_more_under_servers(tmp_path: Path):
    """Servers alone step it. torch's own changes nothing but learning rates."""

    class Changing(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            super().step(metrics, epoch)

    def job(kind: Any) -> paceline.Job:
        return make_job(
            lr_schedule=kind,
            validation=torch.utils.data.TensorDataset(torch.ones(4, FEATURES), torch.ones(4, 3)),
        )

    with pytest.raises(
        PacelineError, match="Changing has a step of its own that waits for a metric"
    ):
        paceline.train(job(Changing), "servers=1 workers=2", run=tmp_path / "a", check=False)
    paceline.train(
        job(torch.optim.lr_scheduler.ReduceLROnPlateau),
        "servers=1 workers=2",
        run=tmp_path / "b",
        check=False,
    )


@pytest.mark.slow
def test_a_loss_is_called_once_for_each_batch(tmp_path: Path):
    """Under a plan that looks at it beforehand: a count that it keeps in an object is that of its steps."""
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(0)
        return output.square().mean() * 0 + len(calls)

    result = paceline.train(
        make_job(loss=loss, steps=2), "tensor=2", run=tmp_path / "run", check=False
    )

    assert [row["loss"] for row in result.history if "loss" in row] == [1.0, 2.0]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("layout", [torch.jagged, torch.sparse_coo])
def test_batches_that_are_no_plain_tensors_are_checked(layout: torch.layout):
    """What one device and the ranks were given is compared by samples, which such a batch has no rows for."""
    rows = [torch.ones(1 + number % 3, FEATURES) * (number + 1) / 8 for number in range(8)]

    def collate(samples: list[Tensor]) -> Any:
        given = (
            torch.nested.as_nested_tensor(samples, layout=torch.jagged)
            if layout is torch.jagged
            else torch.stack([row[0] for row in samples]).to_sparse()
        )
        return given, torch.stack([row.mean(0)[:3] for row in samples])

    class Reader(Net):
        def forward(self, given: Tensor) -> Tensor:
            parts = given.unbind() if given.is_nested else given.to_dense()[:, None].unbind()
            return super().forward(torch.stack([part.mean(0) for part in parts]))

    (certificate,) = paceline.verify(
        make_job(Reader, data=rows, collate=collate, batch=8, steps=1), ["data=2"], steps=1
    )

    assert certificate.passed, certificate


def test_a_model_that_calls_torch_distributed_is_not_split(tmp_path: Path):
    """Its ranks would wait for each other for ever."""

    class Meeting(Net):
        def forward(self, x: Tensor) -> Tensor:
            mean = x.detach().mean(0)
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(mean)
            return super().forward(x + 0 * mean)

    with pytest.raises(PacelineError, match=r"the model calls torch\.distributed itself"):
        paceline.train(
            make_job(Meeting), "pipeline=2", run=tmp_path / "run", check=False, timeout_s=20
        )
