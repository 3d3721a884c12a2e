"""Plays what a step does on a device and its links: time and memory."""
