"""What the processes of tests import before they fork: forks, ranks above all, would import it each anew."""

from __future__ import annotations

from paceline.launch.imports import OF_RUNS

OF_FORKS = (
    *OF_RUNS, "torch.distributed.fsdp", "torch.distributed.tensor", "torch.export._trace",
    "torch.profiler._cupti_monitor", "numpy.ctypeslib", "encodings.idna", "paceline.profile.trace",
    "paceline.strategies.shard.gathers", "paceline.strategies.recompute.attention",
    "paceline.strategies.server.ranks.train")
