"""The plans that are tried on a device, with the jobs that go with them; `MORE_` is left to the long form.

Each key of the README's table of plans is in one of them. Tables of which a step touches a few rows are left out: the
device has no sparse tensors.
"""

# Under which a job is one device's.
EXACT = (
    "single",
    "data=2",
    "data=2 microbatches=2",
    "shard=2",
    "shard=2 zero=1",
    "tensor=2",
    "pipeline=2 schedule=1f1b",
    "place=2",
    "servers=1 workers=2",
)
MORE_EXACT = (
    "data=2 recompute=full",
    "shard=2 zero=2",
    "shard=3",
    "data=2 shard=2",
    "shard=2 tensor=2",
    "pipeline=2 schedule=gpipe",
    "pipeline=2 schedule=interleaved",
    "pipeline=2 schedule=zero-bubble",
    "pipeline=2 shard=2",
    "pipeline=2 data=2",
    "pipeline=3",
    "place=3",
    "servers=2 workers=2",
    "servers=1 workers=2 colocate=yes",
    "data=3",
    "single microbatches=3 recompute=full",
    "data=2 microbatches=auto",
    "data=2 shares=2:1",
    "data=2 shares=memory",
    "data=2 shard=2 zero=1",
    "data=2 shard=2 zero=2",
    "shard=2 recompute=full",
    "shard=2 zero=2 microbatches=2",
    "data=2 tensor=2",
    "tensor=2 recompute=full",
    "pipeline=2 tensor=2",
    "pipeline=2 schedule=interleaved virtual=3",
    "pipeline=2 microbatches=1",
    "pipeline=2 microbatches=3",
    "pipeline=2 recompute=full",
    "pipeline=4 schedule=zero-bubble",
    "pipeline=2 data=2 schedule=interleaved",
    "place=FILE parts=2",
    "place=2 recompute=full",
    "place=2 data=2",
    "servers=1 workers=2 staleness=0",
    "servers=2 workers=2 colocate=yes",
)
# What FILE stands for: two parts of the job "blocks", by name.
PLACEMENT = '[parts]\n0 = ["*", "blocks.3"]\n1 = ["blocks.1", "blocks.2", "last"]\n'
# Which are compared with themselves on the CPU.
ALIKE = ("data=2 local=2 outer=diloco", "data=2 compress=int8")
MORE_ALIKE = (
    "data=2 local=2 outer=average",
    "data=2 local=2 outer=diloco fragments=2",
    "data=2 compress=bf16",
    "data=2 compress=topk",
    "data=2 compress=powersgd",
    "data=2 shard=2 compress=int8",
)
# In which it is chance which updates a worker's weights have, be they its own.
CHANCE = (
    "servers=1 workers=2 staleness=1",
    "servers=1 workers=1 staleness=2",
    "servers=1 workers=1 staleness=inf",
    "servers=2 workers=2 staleness=inf",
    "servers=2 workers=2 staleness=1 colocate=yes",
)
FEATURES = (
    ("clip and validation", "data=2"),
    ("reused", "data=2"),
    ("statistics", "data=2"),
    ("attention", "tensor=2"),
    ("recurrent", "shard=2"),
    ("gan", "data=2"),
    ("gan", "shard=2"),
    ("of a generator", "data=2"),
    ("distillation", "pipeline=2"),
    ("begun", "shard=2"),
    ("phases", "data=2"),
    ("watched", "data=2"),
    ("padded llama", "pipeline=2"),
)
MORE_FEATURES = (
    tuple(
        (job, plan)
        for job in ("clip and validation", "attention", "recurrent")
        for plan in ("single", "data=2", "shard=2", "tensor=2", "pipeline=2", "place=2")
        if (job, plan) not in FEATURES
    )
    + tuple(
        ("branches", plan) for plan in ("data=2", "place=2", "place=3", "pipeline=2", "tensor=2")
    )
    + tuple(
        (job, plan)
        for job, plans in {
            "gan": (
                "single",
                "data=2 microbatches=2",
                "shard=2 zero=1",
                "shard=2 zero=2",
                "data=2 shard=2",
                "data=2 recompute=full",
            ),
            "distillation": (
                "single",
                "data=2",
                "shard=2",
                "tensor=2",
                "data=2 pipeline=2",
                "data=2 microbatches=2",
            ),
            "begun": (
                "data=2",
                "tensor=2",
                "pipeline=2",
                "place=2",
                "servers=1 workers=2",
            ),
            "phases": ("single", "shard=2", "tensor=2", "pipeline=2", "data=2 microbatches=2"),
            "padded llama": ("single", "data=2", "shard=2", "tensor=2", "single microbatches=3"),
            "plateau": ("data=2", "shard=2", "pipeline=2"),
            "watched": ("single", "shard=2", "tensor=2", "pipeline=2"),
        }.items()
        for plan in plans
    )
)
