"""On a machine with GPUs no verb's own process begins to use CUDA: ranks are forks of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from later import needed
from stubbed_cuda import stubbed_cuda
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.base.errors import PacelineError
from paceline.base.fork import in_a_fork
from paceline.cluster.accelerators import _seen
from paceline.cluster.cluster import Cluster
from paceline.model.cost.trace import kept_generators


@pytest.fixture(autouse=True)
def touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What this process does with CUDA."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _seen.cache_clear()
    with stubbed_cuda() as done:
        yield done
    _seen.cache_clear()


def job() -> paceline.Job:
    x = torch.randn(24, 6)
    return paceline.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3)),
        loss=F.cross_entropy,
        data=TensorDataset(x, (x[:, 0] > 0).long()),
        batch=8,
        steps=2,
        clip=1.0,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    )


def own_step_job() -> paceline.Job:
    def step(ctx: paceline.StepContext, batch: Any) -> None:
        noise = torch.randn(len(batch), 6)
        ctx.backward(
            "first", noise, lambda output, batch: ctx.run("second", output).square().mean()
        )
        ctx.update("first")
        ctx.backward("second", batch, lambda output, batch: F.cross_entropy(output, batch.target))
        ctx.update("second")

    adam = lambda named: torch.optim.AdamW(named, lr=1e-2)  # noqa: E731
    return paceline.Job(
        models={"first": lambda: nn.Linear(6, 6), "second": lambda: nn.Linear(6, 3)},
        training_step=step,
        optimizers={"first": adam, "second": adam},
        data=job().data,
        batch=8,
        steps=2,
        followers={"average": paceline.ema("first", 0.9)},
    )


class Asking(paceline.Callback):
    """Asks for weights and a checkpoint where ranks wait."""

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        assert run.state_dict()
        run.save()


def watched_job() -> paceline.Job:
    """As users watch one: with callbacks, phases, initial weights and a plateau."""
    given = job()
    return replace(
        given,
        validation=given.data,
        callbacks=[Asking(), paceline.EarlyStopping("validation_loss")],
        steps=None,
        epochs=2,
        freeze=paceline.by_step({0: ("0.*",), 1: ()}),
        init=given.model().state_dict(),
        lr_schedule=torch.optim.lr_scheduler.ReduceLROnPlateau,
    )


def opened(folder: Path) -> Any:
    """What a run leaves, in the process that began it."""
    trained = paceline.train(
        watched_job(), "data=2", devices="cpu:0,cpu:1", run=folder / "run", check=False
    )
    return trained.model(), paceline.open(folder / "run", job=job()).state_dict()


VERBS: dict[str, Callable[[Path], Any]] = {
    "train a step of its own": lambda folder: paceline.train(
        own_step_job(), "data=2", devices="cpu:0,cpu:1", run=folder / "run"
    ),
    "train with callbacks, and open": opened,
    "verify a step of its own": lambda folder: paceline.verify(
        replace(own_step_job(), precision="float64"), ["data=2"], steps=2, restore="no"
    ),
    "train": lambda folder: paceline.train(
        job(), "data=2", devices="cpu:0,cpu:1", run=folder / "run"
    ),
    "train tensor": lambda folder: paceline.train(
        job(), "tensor=2", devices="cpu:0,cpu:1", run=folder / "run"
    ),
    "train auto": lambda folder: paceline.train(
        job(), "auto", devices="cpu:0,cpu:1", run=folder / "run"
    ),
    "verify": lambda folder: paceline.verify(job(), ["data=2"], steps=2),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_uses_cuda_in_its_own_process(verb: str, touched: list[str], tmp_path: Path):
    VERBS[verb](tmp_path)
    assert not touched


def test_verify_on_gpus_uses_them_in_other_processes_alone(touched: list[str], tmp_path: Path):
    """As far as stubs go: the process of one device sets its GPU, and there is none."""
    with pytest.raises(PacelineError, match="rank 0"):
        paceline.verify(job(), ["data=2"], steps=2, devices="cuda:0-1", run=tmp_path / "run")
    with pytest.raises(PacelineError, match=r"there is no cuda:2: this machine has 2 GPUs"):
        paceline.verify(job(), ["data=2"], steps=2, devices="cuda:1-2")
    assert not touched


@pytest.mark.slow
def test_a_trainer_of_transformers_uses_no_cuda_in_its_own_process(
    touched: list[str], tmp_path: Path
):
    """Where its arguments keep to the CPU; others start ranks from another interpreter, see test_trainer_on_gpus."""
    transformers = needed("transformers")
    needed("accelerate")
    from paceline.transformers import Trainer

    samples = [
        {"input_ids": torch.tensor([1, 2, 3, number]), "labels": torch.tensor([1, 2, 3, number])}
        for number in range(8)
    ]

    def trainer() -> Any:
        args = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=4,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        config = transformers.LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        return Trainer(
            plan="data=2",
            devices="cpu:0,cpu:1",
            args=args,
            train_dataset=samples,
            model=transformers.LlamaForCausalLM(config),
        )

    trainer().train()
    touched.clear()  # libraries that are imported on the way may count GPUs
    trainer().train()
    assert not touched


def test_generators_are_kept_without_cuda(touched: list[str]):
    """Where a job is profiled, whose optimizer asks for GPUs."""
    with kept_generators():
        made = job()
        model = made.model()
        optimizer = made.optimizer(list(model.named_parameters()))
        model(torch.randn(2, 6)).sum().backward()
        optimizer.step()
    assert not touched


def test_gpus_are_looked_at_in_a_fork(touched: list[str]):
    """Their names and memory are known here all the same."""
    assert [
        (str(device), device.name, device.memory_bytes) for device in Cluster.local().devices
    ] == [("cuda:0", "Stub", 80 * 2**30), ("cuda:1", "Stub", 80 * 2**30)]
    assert not touched


@pytest.mark.parametrize(
    "asks",
    [
        "assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and torch.cuda.current_device() == 0",
        "assert torch.cuda.get_device_capability() == (9, 0)",  # as torchao does, which Transformers imports
        "assert torch.cuda.get_device_properties(0).total_memory == 80 * 2**30",
        "from torch.utils._triton import has_triton; has_triton()",
        "torch.accelerator.current_accelerator(check_available=True)",
        "import torch._inductor.runtime.benchmarking",
    ],
)  # as a plan with compile=blocks does
def test_what_a_job_file_imports_may_ask_for_gpus(asks: str, touched: list[str], tmp_path: Path):
    """On an H200, Llama's job and compile=blocks were refused: imports had used CUDA in the process that forks."""
    (tmp_path / "job.py").write_text(
        f"import torch\n{asks}\nimport paceline\ndef job():\n    return paceline.Job(**{{}})\n"
    )
    with pytest.raises(PacelineError, match="Job"):
        paceline.load(str(tmp_path / "job.py"))
    assert not touched


def test_a_stub_that_is_touched_is_seen(touched: list[str]):
    """The test can fail."""
    torch.cuda.is_available()
    assert touched


def test_a_fork_asks_for_its_thread_pool_before_it_has_threads(monkeypatch: pytest.MonkeyPatch):
    """Threads of autograd would race for it, and torch ends the process of one that finds none."""
    thread_counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", thread_counts.append)
    assert in_a_fork(lambda: list(thread_counts)) == [torch.get_num_threads()]


def test_what_a_fork_answers():
    assert in_a_fork(lambda: {"pid": os.getpid()})["pid"] != os.getpid()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_a_fork(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="ended with 3"):
        in_a_fork(lambda: os._exit(3))
