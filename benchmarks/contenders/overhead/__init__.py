"""The runs of `benchmarks.overhead`: with all that lets a run survive, and without it."""
