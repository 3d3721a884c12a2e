"""The mode behind torch's default device.

Private names: `torch.utils._device` with `DeviceContext` and `_device_constructors`. Tested with
torch 2.11 and 2.13.

If torch drops the class, a `TorchFunctionMode` that adds `device=` to these constructors serves.
"""

from torch.utils._device import DeviceContext
from torch.utils._device import _device_constructors as device_constructors
