"""Modules that torch imports late, so that a process can import them before it forks.

Private names: those of the modules below. Tested with torch 2.11 and 2.13.

A module that is gone is left out of its list; ranks then import by themselves what took its place.
Importing this file does not import torch.
"""

OF_OPTIMIZERS = ("torch._dynamo",)  # imported when one is built; takes a second
OF_COMPILING = ("torch._dynamo", "torch._inductor.compile_fx")
OF_CAPTURING = (  # a rank that imports them itself needs 26 MiB of pages
    "torch.export._trace",
    "torch._inductor.sizevars",
    "torch._inductor.fx_passes.dedupe_symint_uses",
    "torch._inductor.compiler_bisector",
    "torch._export.passes._node_metadata_hook",
    "torch._export.passes.replace_autocast_with_hop_pass",
    "torch._export.passes.replace_set_grad_with_hop_pass",
    "torch._subclasses.schema_check_mode",
    "torch.fx.experimental.validator",
    "torch.distributed.tensor",
)
