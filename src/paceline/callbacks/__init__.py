"""Callbacks: what looks on a run and controls it, once a run, in the process that started it."""
