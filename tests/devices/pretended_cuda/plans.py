"""The plans that are tried on a device, with the jobs that go with them; `MORE_` is left to the long form."""

# Under which a job is one device's.
EXACT = ("single", "data=2", "data=2 accumulate=2", "shard=2", "shard=2 zero=1", "tensor=2", "pipeline=2 schedule=1f1b",
         "place=auto parts=2", "server=1 workers=2")
MORE_EXACT = ("data=2 recompute=full", "shard=2 zero=2", "shard=3", "data=2 shard=2", "shard=2 tensor=2",
              "pipeline=2 schedule=gpipe", "pipeline=2 schedule=interleaved", "pipeline=2 schedule=zero-bubble",
              "pipeline=2 shard=2", "pipeline=2 data=2", "pipeline=2 tensor=2", "pipeline=3", "place=auto parts=3",
              "server=2 workers=2", "server=1 workers=2 colocate=yes", "data=3", "data=2 shares=2:1")
# Which are compared with themselves on the CPU.
ALIKE = ("data=2 local=2 outer=diloco", "data=2 compress=int8")
MORE_ALIKE = ("data=2 local=2 outer=average", "data=2 local=2 outer=diloco fragments=2", "data=2 compress=bf16",
              "data=2 compress=topk", "data=2 compress=powersgd", "data=2 shard=2 compress=int8",
              "server=1 workers=2 staleness=1")
FEATURES = (("clip and validation", "data=2"), ("reused", "data=2"), ("statistics", "data=2"),
            ("attention", "tensor=2"), ("recurrent", "shard=2"))
MORE_FEATURES = tuple((job, plan) for job in ("clip and validation", "attention", "recurrent")
                      for plan in ("single", "data=2", "shard=2", "tensor=2", "pipeline=2", "place=auto parts=2"))
