"""A backward in two halves. Importing this file imports torch.distributed.pipelining.

Private names: `torch.distributed.pipelining._backward` with `stage_backward_input` and
`stage_backward_weight`. Tested with torch 2.11 and 2.13.

Without them `schedule=zero-bubble` must be refused; other schedules run whole backwards.
"""

from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
