"""Callbacks observe a run and control it. They run once per run, in the process that started it."""
