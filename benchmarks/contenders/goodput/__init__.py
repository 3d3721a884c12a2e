"""The run of `benchmarks.goodput`, by the way in which it survives."""
