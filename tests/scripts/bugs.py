"""Bugs that loops of one's own have, each planted into `loops/sound.py` as a user may write it.

`pl.attach` makes some bugs of such loops impossible; IMPOSSIBLE says how.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOUND = (Path(__file__).parent / "loops" / "sound.py").read_text(encoding="utf-8")
_LOSS = "        loss = F.cross_entropy(model(x), y)\n"
_FORWARD = "model(x)"


@dataclass(frozen=True)
class Bug:
    """A text of the sound loop with the one that takes its place.

    says: what the user did, as a row of the docs' table.
    """

    name: str
    says: str
    old: str
    new: str

    @property
    def script(self) -> str:
        assert SOUND.count(self.old) == 1, self.name
        return SOUND.replace(self.old, self.new)


BUGS = (
    Bug(
        "short_batch",
        "the loss is divided by the size of a whole batch, also where there are fewer rows",
        _LOSS,
        '        loss = F.cross_entropy(model(x), y, reduction="sum") / train_loader.batch_size\n',
    ),
    Bug(
        "clipped_early",
        "gradients are clipped by a hook on each rank, before they are summed",
        "for epoch in run.epochs(2):\n",
        "for p in model.parameters():\n"
        "    p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))\n"
        "for epoch in run.epochs(2):\n",
    ),
    Bug(
        "same_seed",
        "noise comes from a generator with the same seed on all ranks",
        _LOSS,
        "        import numpy\n"
        "        noise = torch.from_numpy(numpy.random.default_rng(run.step).normal(size=x.shape))\n"
        "        loss = F.cross_entropy(model(x + 0.1 * noise.to(x)), y)\n",
    ),
    Bug(
        "mean_of_ranks",
        "the ranks' validation losses are averaged, and their parts are uneven",
        "    val_loss = run.evaluate(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), val_loader)\n",
        "    part = slice(23 + run.rank, None, run.world_size)\n"
        "    with torch.no_grad():\n"
        "        mean = F.cross_entropy(model(inputs[part].to(loss)), targets[part])\n"
        "    if run.world_size > 1:\n"
        "        torch.distributed.all_reduce(mean)\n"
        "    val_loss = mean.item() / run.world_size\n",
    ),
    Bug(
        "schedule_per_rank",
        "the schedule is stepped once for each rank",
        "        scheduler.step()\n",
        "        for _ in range(run.world_size):\n            scheduler.step()\n",
    ),
    Bug(
        "batch_statistics",
        "inputs are normalised by the mean and the deviation of this rank's rows",
        _FORWARD,
        "model((x - x.mean(0)) / (x.std(0, unbiased=False) + 1))",
    ),
    Bug(
        "divided_twice",
        "the loss is divided by the number of ranks, as for gradients that are summed",
        _LOSS,
        "        loss = F.cross_entropy(model(x), y) / run.world_size\n",
    ),
    Bug(
        "cut_twice",
        "the rank takes its part of the rows that are its part already",
        _LOSS,
        "        x, y = x[run.rank :: run.world_size], y[run.rank :: run.world_size]\n" + _LOSS,
    ),
    Bug(
        "sum_as_mean",
        "the loss is a sum, and is given as a mean",
        _LOSS,
        '        loss = F.cross_entropy(model(x), y, reduction="sum")\n',
    ),
    Bug(
        "masked_mean",
        "the loss is a mean over the targets that count, and is weighed by rows",
        _LOSS,
        "        loss = F.cross_entropy(model(x), y, ignore_index=2)\n",
    ),
    Bug(
        "main_only",
        "weights are clamped on the main rank only",
        "        run.update()\n",
        "        run.update()\n"
        "        if run.is_main:\n"
        "            with torch.no_grad():\n"
        "                for p in model.parameters():\n"
        "                    p.clamp_(-0.2, 0.2)\n",
    ),
    Bug(
        "own_scale",
        "the loss is scaled by a figure of this rank's rows",
        "        run.backward(loss)\n",
        "        run.backward(loss / (1 + loss.detach()))\n",
    ),
)
IMPOSSIBLE = {
    "gradients that are not zeroed": "`run.update()` drops them",
    "a sampler without `set_epoch`": "the run owns the order; a `DistributedSampler` is refused",
    "`loss.backward()` in place of `run.backward(loss)`": "`run.update()` finds no gradients and says so",
    "gradients that are clipped after `run.backward` and before they are summed": (
        "`run.backward` returns when they are summed"
    ),
    "a batch that a rank skips": "the loop is told that nothing was trained with it",
}
