"""A script that keeps its own loop, on every rank of a plan.

The loop of a run (`training.loop.Loop`) is turned around: it hands out the samples of a step, the script
computes with them, and the loop counts the step when the script asks for the next one. All else is the
loop's own: order, shares, agreement of ranks, saves, copies, restarts, journal, callbacks.

- `given.py` makes a `Job` of the script's model, optimizer and loader. The optimizer stays the script's object:
  it gets the parameters that this rank holds, and its state by name.
- `turn.py` is the step of one batch, an `OwnStep`: `backward` and `update` as often as the script wants. A loss that
  is a tensor has run its forward already; a function runs in the layout like any loss, micro-batch by micro-batch.
- `gather.py` sums rows that a script gathers from all ranks; `training.own_step.gathered` has their gradients.
- `run.py` is what a script sees: epochs, batches, evaluation, figures.
- `session.py` says where a script runs: a rank of `paceline run`, one that torchrun started, or a process by itself.
- `launch.py` starts the ranks of `paceline run`, each of which runs the script from its first line.
- `logged.py` joins the figures of `run.log` over ranks, without a collective of each step.
- `verify.py` runs the script on one device and under a plan in float64, and compares each update.

A script's own draws, files and variables are its own: what is not in `state=` begins anew in a resumed run.
"""
