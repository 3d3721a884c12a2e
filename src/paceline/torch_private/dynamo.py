"""The front end of torch.compile. Importing this file imports torch._dynamo, which takes a second.

Private names: `torch._dynamo` with `callback.CallbackArgs`, `callback.callback_handler`,
`config._make_closure_patcher`, `eval_frame.OptimizedModule`, `exc.FailOnRecompileLimitHit`,
`exc.TorchDynamoException` and `utils.guard_failures`. Tested with torch 2.11 and 2.13.

Without the callbacks, ranks compile at the same time and figures have no seconds; without
`guard_failures`, messages have no reason for a recompilation. Both can be left out.
"""

from collections.abc import Callable
from typing import Any

from torch._dynamo import config
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import guard_failures


def limit_setter(recompile_limit: int) -> Any:
    """Return a function that sets the most compilations of a function, and returns its undoing."""
    return config._make_closure_patcher(recompile_limit=recompile_limit)
