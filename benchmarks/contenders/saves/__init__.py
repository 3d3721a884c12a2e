"""The job of `benchmarks.saves`."""
