"""The code of docs/attach.md runs."""

from __future__ import annotations

import pytest

from tests.attached.scripts import alone
from tests.house.test_docs_code import ROOT, blocks

SUPPOSED = """
import torch
import torch.nn.functional as F
from torch import nn
import paceline as pl

torch.manual_seed(0)
train_set = test_set = torch.utils.data.TensorDataset(torch.randn(24, 6), torch.randint(10, (24,)))
loader = torch.utils.data.DataLoader(train_set, batch_size=8)
Net = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 10))
model, augment = Net(), nn.Dropout(0.1)
optimizer = torch.optim.Adam(model.parameters())
generator, critic = nn.Linear(64, 6), nn.Linear(6, 1)
model = Net()
optimizer = torch.optim.Adam(model.parameters())
of_generator, of_critic = (torch.optim.Adam(model.parameters()) for model in (generator, critic))
"""
STEPS = {0: 12, 1: 100, 2: 6, 3: 6}


@pytest.mark.parametrize("number", STEPS)
def test_a_loop_on_the_page_runs(tmp_path, number):
    script = SUPPOSED + blocks(ROOT / "docs" / "attach.md")[number]

    assert alone(tmp_path, script)["steps"] == STEPS[number]


def test_the_page_has_no_other_loop():
    assert len(blocks(ROOT / "docs" / "attach.md")) == len(STEPS)
