"""`python -m tests.corpus.torch_tables`: all modules and optimizers of torch's own test tables under plans.

Torch keeps a table of its modules with inputs that they take, and one of its optimizers with their options. Each row
that a plain loop can train becomes a job. No cell may be wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, TensorDataset

from .plain import WHOLE
from .registry import FEATURES, SAMPLES, Entry, Net, make_job, numbers
from .sweep import WRONG, Cell, Sweep

MODULE_PLANS = ("data=2", "shard=2", "tensor=2", "pipeline=2")
OPTIMIZER_PLANS = ("data=2", "shard=2", "tensor=2")
MODULE_SAMPLES, MODULE_BATCH, MODULE_STEPS = (
    15,
    6,
    3,
)  # the last window of the epoch has three samples, or two


class _Inputs(Dataset):
    """Samples made of one input of torch's table: each is scaled by a number of its own, so that all differ.

    rows: whether the input is a batch, of which a sample is a row; else each sample is a whole input.
    """

    def __init__(self, given: tuple[tuple[Any, ...], dict[str, Any]], rows: int) -> None:
        self.given, self.rows = given, rows

    def __len__(self) -> int:
        return MODULE_SAMPLES if self.rows else MODULE_SAMPLES - 1  # called as often on each rank

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        def of_sample(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.detach()
            if self.rows:
                value = value[index % self.rows]
            return value * (1 - (index % 7) / 70) if value.is_floating_point() else value

        args, options = tree_map(of_sample, self.given)
        return {"args": tuple(args), "options": options}, torch.zeros((), dtype=torch.float64)


class _Tried(nn.Module):
    """One of torch's modules between trainable scales, which let gradients pass through it.

    by_row: the module takes a batch; else it is called once for each sample. The output has a figure for each sample.
    """

    def __init__(self, build: Callable[[], nn.Module], by_row: bool) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(()))
        self.tried = build()
        self.after = nn.Linear(1, 1)
        self.by_row = by_row

    def forward(self, args: Any = (), options: Any = (), samples: Any = ()) -> Tensor:
        if self.by_row:
            out = self._figures(self._called(args, options))
        else:
            out = torch.stack([self._figures(self._called(**each))[0] for each in samples])
        return self.after(out[:, None])

    def _called(self, args: Any, options: Any) -> Any:
        scaled = [
            value * self.before
            if place == 0 and isinstance(value, Tensor) and value.is_floating_point()
            else value
            for place, value in enumerate(args)
        ]
        return self.tried(*scaled, **options)

    def _figures(self, output: Any) -> Tensor:
        """The mean of each sample's outputs, kept within -1 and 1: of shape (samples,), or (1,) of a whole input."""
        leaves = [
            leaf
            for leaf in tree_leaves(output)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        if self.by_row:
            return sum(torch.tanh(leaf).flatten(1).mean(1) for leaf in leaves)
        return sum(torch.tanh(leaf).mean() for leaf in leaves)[None]


def _as_list(samples: list[Any]) -> tuple[Any, Tensor]:
    """A batch as the list of its samples."""
    return {"samples": [given for given, _ in samples]}, torch.stack(
        [target for _, target in samples]
    )


def _rows(build: Callable[[], nn.Module], args: Any, options: Any) -> int:
    """How many rows a batch has, if all of the module's tensors have one for each sample; else 0."""
    tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
    rows = len(tensors[0]) if tensors and tensors[0].dim() else 0
    if (
        rows < 2
        or any(not tensor.dim() or len(tensor) != rows for tensor in tensors)
        or len(tree_leaves((args, options))) != len(tensors)
    ):
        return 0
    torch.manual_seed(0)
    module = build().double().eval()
    with torch.no_grad():
        out = module(*args, **options)
        if not isinstance(out, Tensor) or out.dim() < 2 or len(out) != rows:
            return 0
        half = module(
            *tree_map(lambda value: value[:1], args), **tree_map(lambda value: value[:1], options)
        )
    return rows if len(half) == 1 and torch.allclose(half, out[:1], equal_nan=True) else 0


def module_entries(most: int) -> Iterator[Entry]:
    """A job for each class and input of torch's table of modules, at most so many of a class, spread over them."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        torch.manual_seed(1)
        given = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=False, training=True
        )
        given = [each for each in given if each.forward_input is not None]
        chosen = (
            given
            if len(given) <= most
            else [given[len(given) * place // most] for place in range(most)]
        )
        for place, each in enumerate(chosen):
            constructor = each.constructor_input
            build = partial(_built, info.module_cls, constructor.args, constructor.kwargs)
            args, options = list(each.forward_input.args), dict(each.forward_input.kwargs)
            if "input" in options:
                args.insert(0, options.pop("input"))
            yield Entry(
                f"{info.name.replace('nn.', '')} {place} {each.desc}"[:60].strip(),
                "modules",
                info.name,
                partial(_module_job, build, args, options),
                random_layers=True,
            )


def _built(kind: type, args: Any, options: Any) -> nn.Module:
    return kind(
        *args, **{name: value for name, value in options.items() if name not in ("device", "dtype")}
    )


def _module_job(build: Callable[[], nn.Module], args: Any, options: Any) -> Any:
    rows = _rows(build, args, options)
    extra = {} if rows else {"collate": _as_list}
    return make_job(
        partial(_Tried, build, bool(rows)),
        data=_Inputs((args, options), rows),
        batch=MODULE_BATCH,
        loss=_mean,
        steps=MODULE_STEPS,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        **extra,
    )


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def optimizer_entries() -> Iterator[Entry]:
    """A job for each optimizer and set of options of torch's table of optimizers."""
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        for place, each in enumerate(info.optim_inputs_func(device="cpu")):
            name = info.optim_cls.__name__
            yield Entry(
                f"{name} {place} {each.desc}"[:60],
                "optimizers",
                name,
                partial(_optimizer_job, info.optim_cls, each.kwargs),
            )


def _optimizer_job(kind: type, options: dict[str, Any]) -> Any:
    model: Callable[[], nn.Module] = Net
    if kind is torch.optim.Muon:
        model = _WithoutBiases
    if (
        kind is torch.optim.LBFGS
    ):  # a convex problem and one batch: else its line searches make much of rounding
        x = numbers(SAMPLES, FEATURES)
        data = TensorDataset(x, torch.tanh(x @ numbers(FEATURES, 4, seed=3)))
        return make_job(
            partial(nn.Linear, FEATURES, 4),
            data=data,
            batch=SAMPLES,
            steps=1,
            optimizer=partial(_optimizer, kind, options),
        )
    if kind is torch.optim.SparseAdam:
        return make_job(_Sparse, data=_Tokens(), optimizer=partial(kind, **options))
    return make_job(model, optimizer=partial(_optimizer, kind, options))


def _optimizer(kind: type, options: dict[str, Any], named: Any) -> Any:
    """A fresh one: a learning rate that is a tensor would be shared by all jobs otherwise."""
    return kind(
        named,
        **tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, options),
    )


class _WithoutBiases(Net):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(FEATURES, FEATURES, bias=False))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.bias = None


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 3, sparse=True)
        self.more = nn.Embedding(11, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.words(x)).mean(1) * self.more(x).mean(1)


class _Tokens(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index * 7 % 11, index * 3 % 11]), numbers(SAMPLES, 3)[index]


def main() -> int:
    """Run the tables, print the counts by plan, and return 1 if a cell is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.corpus.torch_tables", description=__doc__
    )
    parser.add_argument("--most", type=int, default=6, help="inputs of a class of modules at most")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rows whose name begins with one of these"
    )
    parser.add_argument("--tables", nargs="+", default=["modules", "optimizers"])
    parser.add_argument("--plans", nargs="+", help="these instead of each table's own")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="a rank that is silent for so long hangs"
    )
    parser.add_argument("--json", type=Path, help="every cell with its reason")
    parser.add_argument("--before", type=Path, help="an earlier --json: say which verdicts differ")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cells: list[Cell] = []
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="tables-", dir=shared if shared.is_dir() else None
    ) as folder:
        sweep = Sweep(Path(folder), given.seconds)
        for table in given.tables:
            rows = list(module_entries(given.most) if table == "modules" else optimizer_entries())
            rows = [row for row in rows if row.name.startswith(tuple(given.only))]
            sweep.learn([(row, WHOLE) for row in rows])
            trained = []
            for row in rows:
                reference = sweep.references[row.name, WHOLE]
                if reference.outcome is not None and all(
                    map(math.isfinite, reference.outcome.losses)
                ):
                    trained.append(row)
                else:
                    print(
                        f"a plain loop does not train {row.name}: {reference.failure or 'its loss is not finite'}"
                    )
            for plan in given.plans or (MODULE_PLANS if table == "modules" else OPTIMIZER_PLANS):
                cells += sweep.run(trained, [plan])
                if given.json:
                    given.json.write_text(
                        json.dumps([cell.to_dict() for cell in cells], indent=1) + "\n"
                    )
    for plan in dict.fromkeys(cell.plan for cell in cells):
        count = Counter(cell.verdict for cell in cells if cell.plan == plan)
        print(plan, dict(count))
    if given.before:
        before = {
            (cell["job"], cell["plan"]): cell for cell in json.loads(given.before.read_text())
        }
        for cell in cells:
            old = before.get((cell.job, cell.plan))
            if old is not None and old["verdict"] != cell.verdict:
                print(
                    f"{cell.job} under {cell.plan}: {old['verdict']} -> {cell.verdict} {cell.reason}"
                )
    for cell in cells:
        if cell.verdict == WRONG:
            print(f"wrong: {cell.job} under {cell.plan}: {cell.reason}")
    return int(any(cell.verdict == WRONG for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
