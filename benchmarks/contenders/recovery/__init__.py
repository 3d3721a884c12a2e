"""The job of `benchmarks.recovery`, and a hand-written loop that saves checkpoints for `torchrun --max-restarts`."""
