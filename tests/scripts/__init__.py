"""Scripts of the kinds that people publish, each beside its ports.

`original/` has a script as its owner would write it in plain torch or with Accelerate, `attach/` the same
script whose loop is kept by `pl.attach`, `compute/` the same script as a `pl.Job` whose `compute` is the body
of the loop, and `step/` as a `pl.Job` with a step of its own. `python -m tests.scripts` runs them and writes
docs/ported-scripts.md.
"""
