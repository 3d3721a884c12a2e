"""What is checked on pretended devices in a process of its own: each check returns what JSON can hold."""

from __future__ import annotations

import gc
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, random_split

from paceline.checkpoint.pieces import TensorPiece
from paceline.checkpoint.staging import Staging
from paceline.job import Job
from paceline.job.order import Order, Window
from paceline.model.randomness import WithoutRandomness
from paceline.training.feed import DataShard, MicroBatch, training_feed
from paceline.training.prefetch import Prefetch


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.mix(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3 if self.training else 0.0)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, 2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


def means() -> dict[str, Any]:
    """How far layers without their draws are from layers that don't draw, with what was switched off or left on."""
    observed = {}
    for name, model in (
        ("dropout", nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 2))),
        ("attention", _Attention()),
        ("recurrent", _Recurrent()),
    ):
        model, x = model.cuda(), torch.randn(4, 5, 8, device="cuda")
        with WithoutRandomness() as random:
            drawn = _figures(model, x)
        plain = _figures(model.eval(), x)
        observed[name] = {
            "off": max(
                float((figure - other).abs().max())
                for figure, other in zip(drawn, plain, strict=True)
            ),
            "switched_off": sorted({name for names in random.off.values() for name in names}),
            "left_on": sorted(random.left_on),
            "draws": len(random.drawn),
        }
    return observed


def _figures(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def device() -> dict[str, Any]:
    """What torch says of a device, its streams, its memory and its refusals."""
    observed: dict[str, Any] = {
        "count": torch.cuda.device_count(),
        "accelerator": str(torch.accelerator.current_accelerator()),
    }
    stream, before, after = (
        torch.cuda.Stream(),
        *(torch.cuda.Event(enable_timing=True) for _ in range(2)),
    )
    x = torch.ones(4, 4, device="cuda:1")
    with torch.cuda.stream(stream):
        before.record()
        observed["is_current"] = torch.cuda.current_stream() == stream
        after.record()
    torch.cuda.current_stream().wait_event(after)
    observed["elapsed"] = before.elapsed_time(after) >= 0
    observed["allocated"] = (
        torch.cuda.memory_allocated("cuda:1"),
        torch.accelerator.memory_allocated("cuda:1"),
    )
    observed["free"] = torch.cuda.mem_get_info("cuda:1")
    observed["pinned"] = torch.ones(3).pin_memory().is_pinned(), torch.ones(3).is_pinned()
    for name, work in (
        ("mixed", lambda: x + torch.ones(4, 4)),
        ("two", lambda: x + torch.ones(4, 4, device="cuda:0")),
        ("index", lambda: torch.ones(1, device="cuda:9")),
        ("generator", lambda: torch.rand(1, device="cuda:1", generator=torch.Generator())),
        ("memory", lambda: torch.empty(1 << 40, device="cuda:1")),
    ):
        try:
            work()
        except Exception as error:
            observed[name] = f"{type(error).__name__}: {error}"
    torch.manual_seed(5)
    draws = [torch.rand(3, device="cuda:1") for _ in range(2)]
    torch.manual_seed(5)
    observed["draws"] = [
        torch.equal(draws[0], torch.rand(3, device="cuda:1")),
        torch.equal(draws[0], draws[1]),
    ]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        observed["autocast"] = (
            str((x @ x).dtype),
            str(x.sum().dtype),
            str(F.softmax((x @ x), 0).dtype),
        )
    return observed


def generated() -> dict[str, Any]:
    """Of draws from a generator of the CPU, in code that makes tensors on a GPU: where each is, and whether it holds
    the numbers that the CPU draws."""
    from paceline.training.own_step.step_draws import MakesOn

    draws: dict[str, Callable[[torch.Generator], Tensor]] = {
        "randn": lambda g: torch.randn(3, 2, generator=g),
        "randint": lambda g: torch.randint(9, (5,), generator=g),
        "randperm": lambda g: torch.randperm(7, generator=g),
        "normal of a size": lambda g: torch.normal(0.0, 2.0, (3,), generator=g),
        "named": lambda g: torch.randn(3, generator=g, device="cpu"),
        "split": lambda g: torch.tensor(
            random_split(range(9), [4, 5], generator=g)[0].indices, device="cpu"
        ),
        "in place": lambda g: torch.empty(5).normal_(generator=g),
        "a view": lambda g: torch.zeros(2, 3).t().uniform_(generator=g),
        "initial": lambda g: nn.init.xavier_uniform_(torch.empty(3, 3), generator=g),
        "normal": lambda g: torch.normal(torch.arange(3.0), torch.ones(3), generator=g),
        "bernoulli": lambda g: torch.bernoulli(torch.full((9,), 0.5), generator=g),
        "multinomial": lambda g: torch.multinomial(torch.ones(4), 3, generator=g),
        "out": lambda g: torch.randn(4, generator=g, out=torch.empty(4)),
        "sampler": lambda g: torch.tensor(list(RandomSampler(range(9), generator=g)), device="cpu"),
        "drawn sampler": lambda g: torch.tensor(
            list(RandomSampler(range(9), True, 4, generator=g)), device="cpu"
        ),
        "loader": lambda g: next(
            iter(DataLoader(torch.arange(6, device="cpu"), 6, True, generator=g))
        ),
    }
    observed = {}
    for name, draw in draws.items():
        expected = draw(torch.Generator().manual_seed(3))
        with MakesOn(torch.device("cuda", 1)):
            drawn = draw(torch.Generator().manual_seed(3))
        observed[name] = [str(drawn.device), torch.equal(drawn.cpu(), expected)]
    with MakesOn(torch.device("cuda", 1)):
        observed["own"] = [str(torch.rand(3, generator=torch.Generator("cuda:1")).device), True]
        observed["NumPy"] = [
            str(torch.tensor(np.random.default_rng(0).normal(size=3)).device),
            True,
        ]
        observed["shared"] = [str(torch.from_numpy(np.zeros(3)).device), True]
    return observed


def shared() -> dict[str, Any]:
    """Two tensors on one memory until one of them is written to, as on CUDA; how often that reads the device."""
    import pretended_cuda_device as counting

    from paceline.model.copy_on_write import TensorSnapshot

    observed: dict[str, Any] = {}
    writes = {
        "nothing": lambda x: x.sum() + x[1:].exp(),
        "in place": lambda x: x.add_(1),
        "a view": lambda x: x[1:].zero_(),
        "data": lambda x: x.data.mul_(2),
        "out=": lambda x: torch.add(x, 1, out=x),
        "a list": lambda x: torch._foreach_mul_([x], 2.0),
        "a copy": lambda x: x.copy_(torch.zeros(8)),
        "an upload": lambda x: x.copy_(torch.zeros(8).pin_memory(), non_blocking=True),
    }
    for name, write in writes.items():
        x = torch.ones(8, device="cuda:1")
        used = torch.cuda.memory_allocated("cuda:1")
        before, seen = counting.counts()["reads"], TensorSnapshot(x)
        allocated_bytes = torch.cuda.memory_allocated("cuda:1") - used
        write(x)
        is_written = seen.is_written()
        observed[name] = [
            allocated_bytes,
            is_written,
            counting.counts()["reads"] - before,
            seen.value.tolist() == [1.0] * 8,
        ]
        del x, seen
    return observed


def counts() -> dict[str, Any]:
    """What is counted of reads and uploads."""
    import pretended_cuda_device as counting

    observed: dict[str, Any] = {}
    x, host = torch.ones(8, device="cuda"), torch.ones(8)
    pinned = host.pin_memory()
    for name, work in (
        ("item", lambda: x.sum().item()),
        ("list", x.tolist),
        ("if", lambda: bool(x.any())),
        ("mask", lambda: x[x > 0]),
        ("arithmetic", lambda: (x * 2).exp().sum()),
        ("upload", host.cuda),
        ("upload later", lambda: pinned.to("cuda", non_blocking=True)),
        ("numbers", lambda: torch.tensor([1.0, 2.0], device="cuda")),
        ("wait", torch.cuda.synchronize),
    ):
        before = counting.counts()
        work()
        observed[name] = {
            key: value - before[key]
            for key, value in counting.counts().items()
            if value != before[key] and key != "kernels"
        }
    return observed


def poisoned() -> dict[str, Any]:
    """What the fork of a process that used CUDA can do; and of one whose backward ran on the CPU alone."""
    from paceline.base import fork

    fork._is_apart = False
    torch.ones(2, requires_grad=True).sum().backward()
    observed = {}
    for name, work in (
        ("use", lambda: float(torch.ones(1, device="cuda"))),
        ("backward", lambda: torch.ones(2, requires_grad=True).sum().backward()),
    ):
        try:
            fork.in_a_fork(work)
        except RuntimeError as error:
            observed[name] = str(error)
    return observed


def roundings() -> dict[str, list[float]]:
    """Of the coarsest numbers of one GPU's forwards: with TF32 as torch allows it by default, for matrix products only,
    and for nothing."""
    from paceline.model.randomness import WithoutRandomness
    from paceline.proof.device import computing_on, tf32
    from paceline.proof.reference import PlainSteps
    from pretended_cuda.jobs import JOBS

    def coarsest(job: Any) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return PlainSteps(job, Path(folder), steps=1, random=WithoutRandomness()).epsilon

    backends: Any = torch.backends
    jobs, observed = ("float32", "images in float32", "recurrent in float32", "blocks", "half"), {}
    with computing_on(torch.device("cuda", 1)):
        assert tf32() == {"matrix products": False, "convolutions": True, "recurrent layers": True}
        observed["default"] = [coarsest(JOBS[name]()) for name in jobs]
        backends.cuda.matmul.fp32_precision = "tf32"
        backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = "ieee"
        observed["matrix products"] = [coarsest(JOBS[name]()) for name in jobs]
        backends.cuda.matmul.fp32_precision = "ieee"
        observed["nothing"] = [coarsest(JOBS[name]()) for name in jobs]
    return observed


class _Positions(nn.Module):
    """Makes a tensor of its own on the device of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x + self.table(torch.arange(x.shape[1], device=x.device))).tanh()


def kept() -> list[int]:
    """Bytes that the pieces of a model keep, on the CPU and on a GPU."""
    from paceline.model.graph import capture
    from paceline.model.graph_cost import kept_bytes

    kept_by_device_bytes = []
    for device in ("cpu", "cuda"):
        model = nn.Sequential(_Positions(), _Positions()).to(device)
        captured = capture(model, (torch.randn(4, 6, 8, device=device),), {})
        kept_by_device_bytes.append(
            sum(
                kept_bytes(
                    piece,
                    captured.values,
                    dict(model.named_parameters()),
                    dict(model.named_buffers()),
                )
                for piece in captured.pieces
            )
        )
    return kept_by_device_bytes


def exchanged() -> list[dict[str, Any]]:
    """What two ranks that share a GPU find of their messages. The process has not used CUDA."""
    from paceline.base import fork
    from pretended_cuda import exchange

    fork._is_apart = False
    return exchange.exchanged()


def tasks() -> list[dict[str, int]]:
    """What a pool's rank finds on its device when a task begins, and its peak at the end: a large task, then a small
    one. Objects are collected by the pool alone."""
    from paceline.base import fork
    from paceline.cluster.cluster import Cluster
    from paceline.launch.local.pool import Pool
    from paceline.launch.process.fault_policy import ALL_NEEDED

    def body(context: Any, num_mib: int, line: Any) -> dict[str, int]:
        gc.disable()
        memory_bytes = {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
        model = nn.Linear(num_mib << 9, 512, bias=False, device=context.device)
        model.itself = [model]  # a cycle
        return {**memory_bytes, "peak": torch.cuda.max_memory_allocated()}

    fork._is_apart = False
    results = []
    with Pool(body, Cluster.local("cuda:0").devices, timeout_s=60) as pool:
        for num_mib in (64, 2):
            pool.start(num_mib, [0], fault_policy=ALL_NEEDED)
            while not (events := pool.wait(1.0)):
                pass
            results.append(
                events[0].value
                if events[0].failure is None
                else {"failed": events[0].failure.message}
            )
    return results


def ahead() -> dict[str, Any]:
    """How many windows are made after each call, what they hold, and what the generators draw afterwards."""
    samples = [(torch.tensor([float(number)]), number) for number in range(20)]
    made: list[int] = []

    def feed() -> Iterator[tuple[Window, list[MicroBatch]]]:
        job = Job(
            model=torch.nn.Identity,
            loss=min,
            optimizer=torch.optim.SGD,
            data=Drawing(samples),
            batch=5,
            steps=4,
        )
        windows = training_feed(
            job,
            order=Order(20, 5, 0, False),
            part=DataShard((1,), 0, 1),
            steps=range(4),
            loader_workers=0,
        )
        for window in windows:
            made.append(len(made) + 1)
            yield window

    expected = [batch.input.tolist() for _, (batch,) in feed()]
    made.clear()
    prefetch, observed = (
        Prefetch(feed(), torch.device("cuda:0"), torch.float64),
        dict[str, Any](made=[0]),
    )
    drawn = [random.getstate(), np.random.get_state()[2], torch.get_rng_state()]
    fed = []
    for calls in ("n", "a", "n", "a", "n", "an"):
        for call in calls:
            if call == "a":
                prefetch.prepare_next()
                prefetch.prepare_next()  # another evaluation of the same step
            else:
                fed.append(prefetch.next())
        observed["made"].append(len(made))
        if calls == "n" and len(fed) == 1:
            drawn = [random.getstate(), np.random.get_state()[2], torch.get_rng_state()]
        if len(fed) == 1 and calls == "a":
            observed["draws"] = [
                random.getstate() == drawn[0],
                np.random.get_state()[2] == drawn[1],
                torch.equal(torch.get_rng_state(), drawn[2]),
            ]
    assert prefetch.next() is None
    return {
        **observed,
        "samples": [window.placed[0].input.tolist() for window in fed if window],
        "expected": expected,
        "devices": sorted({str(window.placed[0].input.device) for window in fed if window}),
    }


class Drawing:
    """Samples that draw from every generator."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return x + random.random() + float(np.random.rand()) + torch.rand(1), y


class _WithKernels(nn.Module):
    """As with kernels of its own: it runs neither on fake tensors nor on the CPU. Notes where it ran."""

    def __init__(self, seen: Path) -> None:
        super().__init__()
        self.mix, self.seen = nn.Linear(8, 8), seen

    def forward(self, x: Tensor) -> Tensor:
        with self.seen.open("a") as file:
            file.write(f"{os.getpid()} {type(x).__name__} {x.device}\n")
        if type(x) is not Tensor or x.device.type != "cuda":
            raise RuntimeError("no such kernel")
        return self.mix(x).relu()


def _regression(model: Callable[[], nn.Module]) -> Any:
    from paceline.job import Job

    x = torch.randn(12, 8)
    return Job(
        model=model,
        data=TensorDataset(x, x),
        loss=F.mse_loss,
        batch=2,
        steps=1,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


def profiled() -> dict[str, Any]:
    """Where a model with kernels of its own is run for its profile, and what that says beside one without. The process
    has not used CUDA."""
    from paceline.base import fork
    from paceline.model.cost.trace import profile_job

    fork._is_apart = False
    with tempfile.TemporaryDirectory() as folder:
        with_kernels = profile_job(
            _regression(lambda: _WithKernels(Path(folder) / "seen")), device="cuda:1"
        )
        seen = [line.split() for line in (Path(folder) / "seen").read_text().splitlines()]
    plain = profile_job(_regression(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())))
    return {
        "here": [kind for pid, kind, _ in seen if int(pid) == os.getpid()],
        "elsewhere": [ran for pid, *ran in seen if int(pid) != os.getpid()],
        "flops": [
            sum(s.forward.flops.per_sample for s in each.segments) for each in (with_kernels, plain)
        ],
        "notes": list(with_kernels.notes),
        "parameters": with_kernels.parameter_bytes,
        "used": torch.cuda.is_initialized(),
    }


def planned() -> dict[str, Any]:
    """What `plan` says of two GPUs, and whether forks of the process that asked can use them and run backward."""
    import paceline
    from paceline.base import fork
    from paceline.cluster.cluster import Cluster

    fork._is_apart = False
    answer = paceline.plan(
        _regression(lambda: nn.Linear(8, 8)), Cluster.local("cuda:0-1"), calibrate_s=0.1
    )  # the best plan alone is tried
    used = torch.cuda.is_initialized()

    def work() -> float:
        x = torch.ones(2, device="cuda:1", requires_grad=True)
        x.sum().backward()
        return float(x.grad.sum())

    return {**answer.to_dict(), "used": used, "fork": fork.in_a_fork(work)}


class Note(torch.cuda.Event):
    """Tells when it is recorded, and who waits for it."""

    told: ClassVar[list[str]] = []

    def record(self, stream: Any = None) -> None:
        self.told.append("copied")
        super().record(stream)

    def wait(self, stream: Any = None) -> None:
        self.told.append("stream waits")
        super().wait(stream)

    def synchronize(self) -> None:
        self.told.append("host waits")
        super().synchronize()


def staging() -> dict[str, Any]:
    """When copies of a checkpoint are waited for, what they hold, and whether the host waited."""
    import pretended_cuda_device as counted

    on_gpu = {
        "parameters/a": torch.randn(4, 6, device="cuda").t(),
        "buffers/b": torch.arange(3, device="cuda"),
        "optimizer/a/c": torch.randn(5, device="cuda", dtype=torch.complex64).conj(),
    }
    pieces = [
        TensorPiece(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)
        for name, tensor in on_gpu.items()
    ]
    expected = {name: tensor.cpu().resolve_conj() for name, tensor in on_gpu.items()}
    staged, torch.cuda.Event = Staging(), Note  # type: ignore[misc]
    observed: dict[str, Any] = {"reads": [], "same": [], "pointers": []}
    for _ in range(2):
        before = counted.counts()["reads"]
        Note.told.append("save")
        copies = staged.copy(pieces)
        Note.told.append("forward")
        observed["reads"].append(counted.counts()["reads"] - before)
        staged.wait()
        observed["same"] += [
            torch.equal(copy, expected[piece.name]) and copy.is_pinned() and copy.is_contiguous()
            for piece, copy in zip(pieces, copies, strict=True)
        ]
        observed["pointers"].append([copy.data_ptr() for copy in copies])
    return {**observed, "told": list(Note.told)}


def examined() -> dict[str, Any]:
    """What doctor says of two pretended GPUs, of two whose all-reduce does not end, and of a look that doesn't."""
    import time

    from paceline.base import fork
    from paceline.doctor import gpu_findings, gpus

    fork._is_apart = False
    gpus.COPIED_BYTES = 2**20
    observed = {
        name: check()
        for name, check in {
            "GPUs": gpus.check_gpus,
            **gpus.CHECKS,
            "NCCL": gpus.check_nccl,
        }.items()
    }

    def hang(*_: Any) -> None:
        time.sleep(60)

    gpus.NCCL_TIMEOUT_S = gpu_findings.NCCL_TIMEOUT_S = 2.0
    gpus._sum = hang
    observed["NCCL that hangs"] = gpus.check_nccl()
    gpus.LOOK_TIMEOUT_S, gpus._look = 0.5, hang
    try:
        gpus.look()
    except RuntimeError as error:
        observed["a look that hangs"] = str(error)
    observed["used"] = torch.cuda.is_initialized()
    return observed
