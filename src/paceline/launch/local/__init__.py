"""Ranks that are forked on this machine, and pools of ranks that wait for tasks."""
