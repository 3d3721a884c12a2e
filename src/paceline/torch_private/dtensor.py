"""DTensors without what their public functions cost: autograd's record, and a rebuilt spec.

Private names: `DTensor._local_tensor`, `DTensor._spec`, and the arguments of `DTensor.__new__`.
Tested with torch 2.11 and 2.13.

`to_local` and `from_local` are the public functions. They cost the host more, once or twice for each
parameter and step.
"""

from typing import Any

import torch


def part_of(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor in the same memory; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def spec_of(tensor: Any) -> Any:
    """Return the mesh, the placements and the shape of a DTensor; None for any other tensor."""
    return getattr(tensor, "_spec", None)


def with_spec(kind: Any, part: torch.Tensor, spec: Any) -> Any:
    """Return a DTensor of this part, outside of autograd.

    `DTensor.__init__` does nothing, and takes the host longer than `__new__`.
    """
    return kind.__new__(kind, part, spec, requires_grad=False)
