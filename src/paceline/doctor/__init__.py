"""Checks of this machine, its GPUs, and the connections between hosts."""
