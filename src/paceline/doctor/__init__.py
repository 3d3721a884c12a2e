"""Checks of this machine and its GPUs."""
