"""Transformers' Trainer on pretended GPUs, by a script with one changed import: as on one CPU."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from later import not_installed
from pretended_cuda.build import CannotBuild, build
from pretended_cuda.client import SITE

from paceline.base.fork import in_a_fork

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        None in map(find_spec, ("transformers", "accelerate")),
        reason=not_installed("transformers or accelerate", "transformers accelerate"),
    ),
]
_DEVICES = Path(__file__).parent
_SCRIPT = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

def made(folder):
    return TrainingArguments(folder, max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
                             eval_strategy="steps", eval_steps=2, save_strategy="no", report_to=[], disable_tqdm=True)

how, folder, plan = sys.argv[1:]
arguments = made(folder) if how == "arguments before" else None
from {package} import Trainer

def collate(samples):
    width = max(map(len, samples))
    return {{name: torch.tensor([sample + [fill] * (width - len(sample)) for sample in samples])
            for name, fill in (("input_ids", 0), ("labels", -100))}}

set_seed(0)
lengths = torch.randint(4, 12, (13,)).tolist()
samples = [torch.randint(3, 60, (length,)).tolist() for length in lengths]
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0))
if how == "model moved":
    model.to("cuda")
trainer = Trainer(model=model, args=arguments or made(folder), train_dataset=samples, eval_dataset=samples[:5],
                  data_collator=collate, **({{"plan": plan}} if plan else {{}}))
trainer.train()
trainer.state.log_history.append({{"eval_loss": trainer.evaluate()["eval_loss"]}})
trainer.state.save_to_json(folder + "/state.json")
"""


def _log(
    tmp_path: Path, how: str, plan: str = "", library: Path | None = None
) -> list[dict[str, Any]]:
    """What a script logs. library: of the pretended device; without it the script is Transformers' own, on the CPU, and
    a fork runs it, which has imported most of what it needs."""
    folder, script = tmp_path / "run", tmp_path / "script.py"
    folder.mkdir()
    script.write_text(
        _SCRIPT.format(package="transformers" if library is None else "paceline.transformers")
    )
    words = [str(script), how, str(folder), plan]
    if library is None:

        def run() -> None:
            sys.argv = words
            runpy.run_path(str(script), run_name="__main__")

        in_a_fork(run, timeout_s=250)
    else:
        (tmp_path / "site").mkdir()
        (tmp_path / "site/sitecustomize.py").write_text(SITE)
        paths = [str(_DEVICES.parent.parent / "src"), str(tmp_path / "site"), str(_DEVICES)]
        subprocess.run(
            [sys.executable, *words],
            check=True,
            timeout=250,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(paths),
                "PRETENDED_CUDA_LIBRARY": str(library),
                "OMP_NUM_THREADS": "1",
            },
        )
    history: list[dict[str, Any]] = json.loads((folder / "state.json").read_text())["log_history"]
    return [
        {
            key: value
            for key, value in entry.items()
            if key in ("loss", "eval_loss", "grad_norm", "learning_rate")
        }
        for entry in history
    ]


@pytest.mark.slow  # the suite has a Trainer in test_fork_safety.py and used CUDA in test_keras_on_gpus.py
@pytest.mark.parametrize(
    ("how", "plan"),
    [("model moved", "data=2"), ("arguments before", "shard=2"), ("nothing", "data=2")],
)
def test_a_script_trains_on_gpus_as_on_one_cpu(how: str, plan: str, tmp_path: Path):
    """Also where the process of the script has used CUDA: it made its arguments before, or moved the model."""
    try:
        library = build()
    except CannotBuild as error:
        pytest.skip(str(error))
    (tmp_path / "plain").mkdir()

    planned, plain = _log(tmp_path, how, plan, library), _log(tmp_path / "plain", "nothing")

    assert [entry.keys() for entry in planned] == [entry.keys() for entry in plain]
    for entry, expected in zip(planned, plain, strict=True):
        assert entry == pytest.approx(expected, rel=1e-5)
