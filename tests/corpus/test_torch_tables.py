"""Modules and optimizers of torch's own test tables give no wrong numbers under a plan, no hang and no raw error."""

from __future__ import annotations

from pathlib import Path

import pytest
from later import needed

from .plain import WHOLE
from .sweep import REFUSED, WRONG, Sweep
from .torch_tables import MODULE_PLANS, OPTIMIZER_PLANS, module_entries, optimizer_entries

needed("expecttest")  # torch's tables import it
SMALL = ("Bilinear 0", "GaussianNLLLoss 0", "LSTM 0", "PReLU 0", "Adagrad 3", "RMSprop 7")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("names", [SMALL, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_cell_is_wrong(tmp_path: Path, names: tuple[str, ...]):
    """Some rows under two plans, or all of them under all plans."""
    sweep, wrong = Sweep(tmp_path), []
    for rows, plans in ((module_entries(6), MODULE_PLANS), (optimizer_entries(), OPTIMIZER_PLANS)):
        chosen = [row for row in rows if not names or row.name.startswith(names)]
        sweep.learn([(row, WHOLE) for row in chosen])
        trained = [row for row in chosen if sweep.references[row.name, WHOLE].outcome is not None]
        cells = sweep.run(trained, ("data=2", "tensor=2") if names else plans)
        assert trained and not all(cell.verdict == REFUSED for cell in cells)
        wrong += [f"{cell.job} under {cell.plan}: {cell.reason}" for cell in cells if cell.verdict == WRONG]
    assert not wrong
