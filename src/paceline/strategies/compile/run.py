"""Compiled blocks: torch.compile turns the forward of each repeated block, and its backward, into
fused kernels.

Blocks are compiled one by one, before they are sharded (regional compilation). Equal blocks
therefore share one compilation, and the hooks of FSDP2 and of the user run outside of compiled
code. Code between blocks is not compiled. A forward without gradients, such as that of an
evaluation, runs the block's own code, because it would need a compilation of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.errors import PlanRefused
from paceline.model.randomness import means, without_modes
from paceline.model.units import find_units, recurrent_units, refuse_scripted
from paceline.strategies.batch_norm.run import is_joined
from paceline.strategies.compile.cost import NOTHING_COMPILED, WITHOUT
from paceline.strategies.compile.limit import compile_whole
from paceline.strategies.compile.watch import CompilationWatch
from paceline.torch_private.inductor import (
    LazyGraphModule,
    compile_graph,
    compile_here,
    has_cpp_compiler,
)
from paceline.torch_private.modules import is_compiled_in_place, own_buffers

if TYPE_CHECKING:
    from torch import fx, nn

    from paceline.model.graph import Piece
    from paceline.strategies.mesh import Mesh
_LOSES = "torch.compile would lose what it writes to its buffer '{}', which is a float64 scalar"
# The most compiled variants of one block. torch by itself allows 8 for all blocks of one class
# together.
MOST_WAYS = 8


def prepare(
    model: nn.Module, *, mesh: Mesh, device: torch.device | None = None, **_: Any
) -> CompilationWatch:
    """Wrap the forward of every unit; names of modules and parameters stay as they are.

    A model without units is compiled whole. Nothing is compiled before the first forward.

    Raises:
        PlanRefused: there is no C++ compiler, a part of the model is compiled already, or no block
            can be compiled.
    """
    place = device or next(model.parameters()).device
    refuse_scripted(model, "compile=blocks")
    refuse_compiled(model, "compile=blocks")
    _refuse_without_compiler(place)
    if place.type == "cpu":
        compile_here()  # ranks share the cores, and a block is one file of C++
    watch = CompilationWatch(place, num_ranks=mesh.world_size)
    units, recurrent = find_units(model) or {"": model}, recurrent_units(model)
    if recurrent.keys() == units.keys() and not any(
        hasattr(unit, "wrap_runs") for unit in units.values()
    ):
        raise PlanRefused(NOTHING_COMPILED, hint=WITHOUT)
    for path, unit in units.items():
        name = path or type(model).__name__
        most_ways = MOST_WAYS * len(units)
        # The units of a captured model are pieces, which wrap their own runs.
        if (wrap_runs := getattr(unit, "wrap_runs", None)) is not None:
            buffers_at = getattr(model, "buffers_at", {})
            lost = {
                path
                for path, (module, key) in buffers_at.items()
                if _is_lost(own_buffers(module)[key])
            }
            wrap_runs(partial(_compiled_piece, watch=watch, most_ways=most_ways, lost=lost))
        elif path in recurrent:
            watch.leave_out(name, f"torch.compile takes no nn.{recurrent[path]}")
        elif lost := {path for path, buffer in unit.named_buffers() if _is_lost(buffer)}:
            watch.leave_out(name, _LOSES.format(min(lost)))
        else:
            unit.forward = Compiled(name, unit.forward, watch, most_ways=most_ways)
    return watch


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's forward is compiled code, in which torch's functions can't be watched."""
    forward = vars(module).get("forward")
    while forward is not None and not isinstance(forward, Compiled):
        forward = getattr(forward, "forward", None)  # a forward that is recomputed in backward
    return forward is not None


def refuse_compiled(model: nn.Module, plan_key: str) -> None:
    """Refuse a model of which the user has compiled a module.

    Args:
        plan_key: The plan's key that needs the modules' own code, for the message.

    Raises:
        PlanRefused: the user has compiled a module with torch.compile.
    """
    from paceline.torch_private.dynamo import OptimizedModule

    for path, module in model.named_modules():
        if isinstance(module, OptimizedModule) or is_compiled_in_place(module):
            where = f"'{path}'" if path else "the model"
            raise PlanRefused(
                f"{where} is compiled by torch.compile already, and {plan_key} needs its own code",
                hint="leave out torch.compile where the model is built; compile=blocks in the plan "
                "compiles its blocks and leaves their parameters' names as they are",
            )


def _is_lost(buffer: torch.Tensor | None) -> bool:
    """Whether compiled code of torch 2.13 loses what a forward writes to a buffer.

    It treats float64 scalars as plain numbers.
    """
    return buffer is not None and buffer.ndim == 0 and buffer.dtype == torch.float64


def _refuse_without_compiler(device: torch.device) -> None:
    if device.type == "cpu" and not has_cpp_compiler():
        raise PlanRefused(
            "compile=blocks needs a C++ compiler on the CPU, and there is none",
            hint="install g++ (apt install g++) or name one in the environment variable CXX; or "
            + WITHOUT,
        )


def inductor(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile a graph with torch's default backend."""
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag=config.cache_key_tag + " joined" * is_joined()):
        return compile_graph(graph, inputs)


def inductor_with_means(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile a graph like `inductor`, but let random operators return the mean of their
    distribution.

    Used for comparisons with one device.
    """
    return compile_graph(graph, inputs, means())


class Compiled:
    """A block's forward. It runs compiled code if gradients are needed.

    Args:
        block: The block's name, for messages.
        most_ways: The most compilations of one forward's code.
        again: The reason of a further compilation, if the block was compiled before as another
            forward.
    """

    def __init__(
        self,
        block: str,
        forward: Callable[..., Any],
        watch: CompilationWatch,
        *,
        most_ways: int,
        again: str = "",
    ) -> None:
        self.block, self.forward, self.watch, self.again = block, forward, watch, again
        compiled = partial(compile_whole, forward, most_ways=most_ways)
        self.drawing, self.with_means = (
            compiled(backend=inductor),
            compiled(backend=inductor_with_means),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        from paceline.torch_private.dynamo import FailOnRecompileLimitHit, TorchDynamoException

        try:
            with self.watch.running(self.block, self.again), without_modes() as draws:
                return (self.drawing if draws else self.with_means)(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self._refuse(error, args, kwargs, too_often=isinstance(error, FailOnRecompileLimitHit))

    def _refuse(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], *, too_often: bool
    ) -> None:
        """Run the block's own code, to raise its error if it fails too; otherwise refuse the plan.

        Raises:
            PlanRefused: torch can't compile the block.
        """
        self.forward(*args, **kwargs)
        if too_often:
            raise PlanRefused(
                f"'{self.block}' had to be compiled too often ({_first_line(error)})",
                hint="the rank's log says why each time, such as a number in an attribute that changes "
                f"in every step; or {WITHOUT}",
            ) from error
        raise PlanRefused(
            f"torch.compile can't compile '{self.block}' as a whole ({_first_line(error)})",
            hint=WITHOUT,
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next((line.strip() for line in str(error).splitlines() if line.strip()), '')}"


def _compiled_piece(
    piece: Piece, run: Any, *, watch: CompilationWatch, most_ways: int, lost: Set[str]
) -> Callable[..., Any]:
    """Return the function that runs a piece of a captured model.

    A piece with modules that are taken whole runs their own code.
    """
    if piece.opaque:
        watch.leave_out(piece.key, f"'{piece.opaque[0]}' in it is taken whole")
        return run
    if changed := piece.changes & lost:
        watch.leave_out(piece.key, _LOSES.format(min(changed)))
        return run
    # This turns the graph into code now, and not during compilation.
    LazyGraphModule.force_recompile(run)
    return Compiled(
        piece.key,
        run.forward,
        watch,
        most_ways=most_ways,
        again="the model is captured anew for inputs of another size, as of a short last batch",
    )
