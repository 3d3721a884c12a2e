"""Tensors with shapes and without values.

Private names: `torch._subclasses.fake_tensor` with `FakeTensor`, `FakeTensorMode`, `is_fake`,
`DataDependentOutputException` and `DynamicOutputShapeException`; `torch._guards` with
`detect_fake_mode`. Tested with torch 2.11 and 2.13.

torch.export and torch.compile stand on them: if they move, torch/export/_trace.py imports them from
where they are. `torch.device("meta")` is no replacement: it loses devices and the exceptions.
"""

import logging

from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    is_fake,
)

LOGGER = logging.getLogger(FakeTensorMode.__module__)  # prints the traceback of a failed operator
