"""Predicts published measurements of training: `python -m benchmarks.published FILE.csv`."""
