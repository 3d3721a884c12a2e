"""What a spike leaves in the run folder for whoever looks for its cause: the samples, and where numbers went wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.base.files import write_json
from paceline.base.nested import tensors_in
from paceline.checkpoint.dtypes import save_tensors
from paceline.job.order import Window
from paceline.job.own_step import is_of_script
from paceline.runs.folder import SPIKES
from paceline.torch_private import pytree
from paceline.training.blame import sample_names
from paceline.training.feed import MicroBatch
from paceline.training.stepper import Stepper

MOST_KEPT = 20  # spikes of a run whose samples are kept: their files may be large


def first_bad_module(
    stepper: Stepper, window: Window, batches: list[MicroBatch], *, step: int
) -> str | None:
    """The path of the first module that returns a number which is infinite or NaN, on this rank; None if there is none.

    Computes the step's gradients again, as all ranks do then. What its forwards change is not to be kept.
    Modules of a model that the plan splits run as parts of others, and are not seen. The step that a job or a script's
    loop brings is not run again.
    """
    if stepper.job.own_step is not None or is_of_script(stepper.job):
        return None
    bad: list[str] = []
    with (
        _watched(stepper.model, bad.append),
        suppress(Exception),
    ):  # an error is on its way, and that one counts
        stepper.backward(window, batches, step=step, part=stepper.loss_number)
    return bad[0] if bad else None


@contextmanager
def _watched(model: nn.Module, tell: Callable[[str], None]) -> Iterator[None]:
    def look(path: str, output: Any) -> None:
        if any(
            tensor.is_floating_point() and not bool(tensor.isfinite().all())
            for tensor in tensors_in(output)
        ):
            tell(path)

    hooks = [
        module.register_forward_hook(lambda module, args, output, path=path: look(path, output))
        for path, module in model.named_modules()
        if path
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def keep(
    run_dir: Path,
    stepper: Stepper,
    window: Window,
    batches: Sequence[MicroBatch],
    *,
    step: int,
    why: str,
    module: str | None,
) -> Path | None:
    """Write this rank's samples of a step, and what is known of it.

    Args:
        batches: On the CPU.
        step: Its number, from 1.

    Returns:
        The folder; None if another rank writes the same samples, or if the folder has enough of them.
    """
    folder = run_dir / SPIKES / f"step-{step}"
    if not stepper.mesh.is_first_of_same_samples or (
        not folder.exists() and len(list(folder.parent.glob("step-*"))) >= MOST_KEPT
    ):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    tensors, others = {}, []
    for number, batch in enumerate(batches):
        for path, leaf in pytree.tree_flatten_with_path(
            {"input": batch.input, "target": batch.target}
        )[0]:
            name = f"microbatch {number}{pytree.keystr(path)}"
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                tensors[name] = leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
            else:
                others.append(name)
    rank = stepper.mesh.rank
    save_tensors(folder / f"rank-{rank}.safetensors", tensors)
    write_json(
        folder / f"rank-{rank}.json",
        {
            "step": step,
            "epoch": window.epoch,
            "why": why,
            "module": module,
            "left_out": others,
            "samples": [
                sample_names(stepper.job, stepper.part, window, number)
                for number in range(len(batches))
            ],
        },
    )
    return folder
