"""A device that pretends to be CUDA, on a CPU build of torch: real values in the host's memory behind device "cuda:k".

Tensors are on CUDA for every check that torch makes, backward runs on autograd's threads of devices, collectives of
CUDA tensors go through a backend "nccl" of their own (which is gloo on the same memory), and torch.cuda's own Python
code runs unchanged over it. It counts what the host asks of the devices and what memory they hold, and it refuses what
CUDA refuses: tensors of two devices, use in the fork of a process that used it, more memory than there is.

It can't show what kernels of CUDA compute, races between streams, what NCCL fails at, overlap, fragmentation or speed.

    library = build()               # once for each torch and source; raises CannotBuild without a compiler
    subprocess: pretend(library)    # before torch is imported

PRETENDED_CUDA_DEVICES (2) and PRETENDED_CUDA_MEMORY_BYTES (80 GiB each) say what there is, PRETENDED_CUDA_TAKEN_BYTES
(0) how much of each device others are said to hold.
"""
