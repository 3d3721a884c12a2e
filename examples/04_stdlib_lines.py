"""Which module of Python's standard library does a line of code come from? A table of some million rows tells.

As in fastText (Joulin et al. 2016): the words of a line and their pairs are hashed to rows of a table, whose mean goes
through one layer. A step touches a few hundred rows, so under servers workers hold none of the table:

    paceline train examples/04_stdlib_lines.py --plan "servers=2 workers=2 staleness=inf" --devices cpu:0-3
"""

import functools
import re
import sysconfig
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline as pl

NGRAMS = 32  # of a line: words, then pairs; more are left out
_WORD = re.compile(r"\w+|[^\w\s]")


def lines_of(path: Path) -> Iterator[str]:
    """Lines with something to go by: no comments, no imports, at least three words."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    for file in files:
        for line in map(str.strip, file.read_text(errors="replace").splitlines()):
            if len(re.findall(r"\w+", line)) >= 3 and not line.startswith(
                ("#", "import ", "from ")
            ):
                yield line


@functools.cache
def read(modules: int, per_module: int, buckets: int) -> tuple[Tensor, Tensor]:
    """Rows of the table for every line, and the number of its module; the modules with the most lines.

    Returns:
        (N, NGRAMS) int64, padded with row 0, and (N,) int64.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in sorted(library.iterdir())
        if path.name != "test" and (path.suffix == ".py" or (path / "__init__.py").exists())
    ]
    lines_by_file = [list(dict.fromkeys(lines_of(path))) for path in paths]
    most = sorted(lines_by_file, key=len, reverse=True)[:modules]
    rows, labels = [], []
    for label, lines in enumerate(most):
        for line in lines[:: -(-len(lines) // per_module)]:
            words = _WORD.findall(line)
            grams = [*words, *map(" ".join, pairwise(words))][:NGRAMS]
            hashed = [1 + zlib.crc32(gram.encode()) % (buckets - 1) for gram in grams]
            rows.append(hashed + [0] * (NGRAMS - len(hashed)))
            labels.append(label)
    return torch.tensor(rows), torch.tensor(labels)


class Lines(nn.Module):
    """The mean of a line's rows, and one layer."""

    def __init__(self, buckets: int, dim: int, modules: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(buckets, dim, mode="mean", sparse=True, padding_idx=0)
        nn.init.uniform_(self.table.weight, -1 / dim, 1 / dim)
        self.out = nn.Linear(dim, modules)

    def forward(self, rows: Tensor) -> Tensor:
        return self.out(self.table(rows))


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(1) == target).sum(), len(target)


def job(
    buckets: int = 2**21,
    dim: int = 16,
    modules: int = 40,
    per_module: int = 1000,
    batch: int = 32,
    epochs: int = 4,
    lr: float = 5.0,
) -> pl.Job:
    """`buckets`: rows of the table. `per_module`: lines of each module, at most."""
    rows, labels = read(modules, per_module, buckets)
    mixed = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    held_out, train = mixed.tensor_split([len(mixed) // 10])
    return pl.Job(
        model=lambda: Lines(buckets, dim, modules),
        data=TensorDataset(rows[train], labels[train]),
        validation=TensorDataset(rows[held_out], labels[held_out]),
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
        batch=batch,
        epochs=epochs,
        optimizer=lambda named: torch.optim.SGD(named, lr=lr),
    )
