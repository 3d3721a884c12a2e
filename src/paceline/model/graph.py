"""Capture of a model's forward for one signature of inputs: a graph of operators, cut into pieces
along its modules.

torch.export records the operators with every size fixed, so another number of samples needs another
capture. The graph names each node's module, and this decides to which piece the node belongs. So
pieces have the names of the user's own modules, and the same names in every capture.
"""

from __future__ import annotations

import io
import linecache
import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from paceline.base.errors import PlanRefused
from paceline.base.streams import stream_states
from paceline.base.user_code import user_frames
from paceline.cluster.gpu_use import start_autograd_without_gpus
from paceline.job.batch_loss import computing
from paceline.model.forward_state import ForwardState, state_kept
from paceline.model.opaque import (
    Call,
    CannotRecord,
    OpaqueModules,
    TakesGradients,
    functions_kept,
    modules_in,
)
from paceline.model.reads import Reads, attributes_read
from paceline.model.units import listed_modules
from paceline.torch_private import pytree
from paceline.torch_private.dispatch import HigherOrderOperator, written
from paceline.torch_private.inductor import LazyGraphModule, lazy_graphs
from paceline.torch_private.storage import storage_key

aten = torch.ops.aten
# Operators that change running statistics although their schema does not say so: the positions of
# these arguments, and of the argument that says whether they change them.
_STATISTICS: dict[Any, tuple[tuple[int, int], int]] = {
    aten.batch_norm.default: ((3, 4), 5),
    aten.instance_norm.default: ((3, 4), 5),
}
# Checks of sizes and dtypes that export writes into the graph; sizes are fixed here, and dtypes
# change under autocast.
_CHECKS = ("aten._assert", "aten.sym_constrain", "aten._make_dep_token")


@dataclass(frozen=True)
class Value:
    """A tensor that passes from one piece to others."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool  # whether a gradient can come back for it

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor.

        Raises:
            CaptureFailed: its size is known only when the model runs.
        """
        if not all(isinstance(size, int) for size in self.shape):
            raise CaptureFailed(
                "the size of a tensor that passes between modules depends on the values of tensors, as "
                "that of x[mask] does",
                hint="data=N and shard=N plans run the model as it is. torch.where in the place of "
                "x[mask] keeps the size; in a module of its own such a part is kept whole",
            )
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """A part of the forward that belongs to one call of one module, or that lies between two such
    calls.
    """

    # The module's path, with `@1` for a second call. For code between modules: `PATH+`, where PATH
    # is that of the piece before it.
    key: str
    path: str  # the module's path; "" for code between modules
    # Names of parameters and buffers in the model, in the order in which `run` takes them.
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    # Names of values. A piece's inputs are outputs of earlier pieces, or the model's own inputs.
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mutates: tuple[str, ...]  # values of other pieces that it changes in place
    edited: frozenset[str]  # outputs of its own that another piece changes
    # Names of buffers and parameters that it changes in place, except those of opaque modules.
    changes: frozenset[str]
    opaque: tuple[str, ...]  # paths of modules in it that are taken whole
    run: Callable[..., tuple[torch.Tensor, ...]]  # (*parameters, *buffers, *inputs) -> outputs
    nodes: tuple[fx.Node, ...] = field(repr=False)
    # Inputs and outputs of which a rank has only a part of the sequence.
    parts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Capture:
    """A forward as pieces in the order in which the model runs them."""

    pieces: tuple[Piece, ...]
    values: Mapping[str, Value]  # all values that pass between pieces, by name
    inputs: tuple[str | None, ...]  # names of the model's inputs, flat; None for a non-tensor
    # The model's outputs, flat: names of values, or constants wrapped in `Constant`.
    outputs: tuple[str | Constant, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    # Whether pieces have tensors of their own, which the forward has made or found outside of the
    # model.
    has_constants: bool = False
    # The values in Python on which the capture depends.
    reads: Reads = field(default_factory=Reads, repr=False)

    @property
    def maker(self) -> dict[str, str]:
        """The key of the piece that makes each value, by the value's name."""
        return {name: piece.key for piece in self.pieces for name in piece.outputs}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the model's inputs by name."""
        flat, _ = pytree.tree_flatten((args, kwargs))
        return {
            name: value for name, value in zip(self.inputs, flat, strict=True) if name is not None
        }

    def result(self, values: Mapping[str, torch.Tensor]) -> Any:
        """Return the model's output, made from its values."""
        return pytree.tree_unflatten(
            [item.value if isinstance(item, Constant) else values[item] for item in self.outputs],
            self.out_spec,
        )


@dataclass(frozen=True)
class Constant:
    """An output that is no tensor."""

    value: Any


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch.export's messages to its developers in the block, and skip the source lines of
    operators.

    It takes a fifth of an export to find the line of the model for each operator, and nobody reads
    them.
    """
    before, config = logging.root.manager.disable, torch.fx.config
    can_leave_out = hasattr(
        config, "do_not_emit_stack_traces"
    )  # not in torch 2.11, which always finds them
    emitted_none = can_leave_out and config.do_not_emit_stack_traces
    logging.disable(logging.CRITICAL)
    if can_leave_out:
        config.do_not_emit_stack_traces = True
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        if can_leave_out:
            config.do_not_emit_stack_traces = emitted_none


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Switch the cache for text generation off in the block, which models of Transformers otherwise
    return.

    No loss is computed from this cache, and it can't be passed on between pieces. An encoder and a
    decoder have configurations of their own.
    """
    configs = {
        id(config): config
        for module in model.modules()
        if (config := vars(module).get("config")) is not None
    }
    caching_configs: list[Any] = [
        config for config in configs.values() if getattr(config, "use_cache", None) is True
    ]
    for config in caching_configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching_configs:
            config.use_cache = True


class CaptureFailed(PlanRefused):
    """A model's forward can't be recorded. The cause is the error that stopped the recording."""


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    opaque: OpaqueModules | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Capture:
    """Capture the model's forward for inputs like these, in the model's current mode (training or
    not).

    No weight is read or changed. Attributes of modules and Python's and NumPy's generators are not
    changed either.

    Args:
        opaque: Modules that are taken whole.
        tensors: The model's parameters by name, where the model may use them past its own
            attributes, as Keras does.

    Raises:
        CaptureFailed: the model's control flow depends on values, or something else can't be
            recorded; the message has the line.
    """
    start_autograd_without_gpus()
    try:
        return _captured(model, args, kwargs, opaque or OpaqueModules(), tensors)
    except Exception as error:
        raise _failed(model, error) from error


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    opaque: OpaqueModules,
    tensors: Mapping[str, torch.Tensor] | None,
) -> Capture:
    samples = next(
        (leaf.shape[0] for leaf in pytree.tensor_leaves((args, kwargs)) if leaf.ndim),
        1,
    )
    before = ForwardState(model).now()
    try:
        with (
            _quiet(),
            lazy_graphs(),  # export changes its graphs a dozen times: a quarter of its time
            without_cache(model),
            functions_kept(),
            attributes_read() as attributes,
            opaque.standing_in(model, samples) as calls,
        ):
            exported = torch.export.export(model, args, kwargs, strict=False)
            if stream_states()[:2] != before.streams[:2]:
                raise CannotRecord("the forward draws from Python's or NumPy's random numbers")
    finally:
        before.restore()
    read = _Reader(
        model, exported, (args, kwargs), tuple(calls), tensors or dict(model.named_parameters())
    ).read()
    return replace(read, reads=Reads.of(model, attributes))


def _failed(model: nn.Module, error: Exception) -> CaptureFailed:
    line, _ = user_frames(error)
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    reason = first if isinstance(error, CannotRecord) else f"{type(error).__name__}: {first}"
    # What torch says of a tensor without values that is asked for them.
    if any(
        words in first
        for words in ("its data is not allocated yet", "data-dependent", ".numpy() is not")
    ):
        path, _, number = (line or "").rpartition(":")
        read = linecache.getline(path, int(number or 0)).strip()
        reason = f"it reads values of a tensor{f' in `{read}`' * bool(read)}, as pack_padded_sequence does of lengths"
    if "a fake tensor in the exported program constant" in first:
        reason = "it uses a tensor that can't be recorded, such as a parameter's .data"
    if isinstance(error, TakesGradients):
        hint = "data=N plans run the model as it is"
    else:
        hint = (
            "a forward whose course depends on the values of tensors can't be split; data=N and shard=N plans run "
            "it as it is. In a module of its own such a part is kept whole, and the rest is split"
        )
    name = type(model).__name__ if computing(model) is model else "compute"
    return CaptureFailed(
        f"{name} can't be cut: recording its forward failed"
        f"{f' at {line}' if line else ''}: {reason}",
        hint=hint,
    )


def capture_or_learn(
    model: nn.Module,
    arguments: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]],
    opaque: OpaqueModules,
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Capture:
    """Capture the model's forward for two samples.

    A module that can't be recorded becomes opaque, with all modules of its class.

    Args:
        arguments: Returns the model's arguments for a number of samples.
        running: A context in which the model runs to learn the shapes of opaque modules.

    Raises:
        CaptureFailed: code that can't be recorded is in the model's own forward and not in a module
            of it.
    """
    while True:
        try:
            return capture(model, *arguments(2), opaque=opaque)
        except CaptureFailed as failed:
            cause = failed.__cause__
            assert cause is not None
            through = [
                path
                for path in modules_in(cause.__traceback__, model)
                if path not in opaque.outputs
            ]
            listed = [path for path in through if path.rpartition(".")[2].isdigit()]
            if not through:
                raise
            kind = type(model.get_submodule((listed or through)[-1]))
            alike = [path for path, module in model.named_modules() if type(module) is kind]
            outermost = [
                path for path in alike if not any(path.startswith(f"{other}.") for other in alike)
            ]
            take_whole(model, outermost, arguments, opaque, running)
            if (listed or through)[-1] not in opaque.outputs:
                raise


def take_whole(
    model: nn.Module,
    paths: Sequence[str],
    arguments: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]],
    opaque: OpaqueModules,
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Make modules opaque.

    The model runs to find what they return, and its state is left as it was.
    """

    def run(samples: int) -> None:
        args, kwargs = arguments(samples)
        with running(), torch.no_grad(), state_kept(model):
            model(*args, **kwargs)

    opaque.learn(model, paths, run)


class _Reader:
    """A reader that makes a `Capture` from an exported program."""

    def __init__(
        self,
        model: nn.Module,
        exported: Any,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        calls: tuple[Call, ...],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        from torch.export.graph_signature import InputKind

        self.model, self.exported, self.calls = model, exported, calls
        self.trainable = {
            name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
        }
        known = {_memory(tensor): name for name, tensor in tensors.items() if tensor.numel()}
        self.graph: fx.Graph = exported.graph_module.graph
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        flat, self.in_spec = pytree.tree_flatten(arguments)
        self.listed = {path for path, _ in listed_modules(computing(model))}
        self.leaves = {
            name for name, module in model.named_modules() if name and not any(module.children())
        }
        self.leaves |= {call.path for call in calls if call.path}
        self.tensors: dict[str, tuple[str, str]] = {}  # placeholder: (kind, name in the model)
        self.constants: dict[str, torch.Tensor] = {}
        self.inputs: list[str | None] = []
        for spec in exported.graph_signature.input_specs:
            if spec.kind == InputKind.PARAMETER:
                self.tensors[spec.arg.name] = ("parameter", spec.target)
            elif spec.kind == InputKind.BUFFER and spec.target in buffers:
                self.tensors[spec.arg.name] = ("buffer", spec.target)
            elif spec.kind == InputKind.USER_INPUT:
                self.inputs.append(spec.arg.name)
            else:
                constant = exported.constants.get(spec.target, exported.state_dict.get(spec.target))
                if isinstance(constant, torch.Tensor) and _memory(constant) in known:
                    self.tensors[spec.arg.name] = ("parameter", known[_memory(constant)])
                else:
                    self.constants[spec.arg.name] = constant
        assert len(flat) == len(self.inputs), (len(flat), self.inputs)
        self.inputs = [
            name if isinstance(value, torch.Tensor) else None
            for name, value in zip(self.inputs, flat, strict=True)
        ]

    def read(self) -> Capture:
        for node in reversed(list(self.graph.nodes)):
            if (
                node.op == "call_function"
                and not node.users
                and str(node.target).startswith(_CHECKS)
            ):
                self.graph.erase_node(node)
            elif _changes_nothing(node):
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)
        for node in list(self.graph.nodes):
            if node.target is aten.copy_.default and _is_itself(*node.args[:2]):
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)
        output = next(node for node in self.graph.nodes if node.op == "output")
        returned = {arg for arg in output.args[0] if isinstance(arg, fx.Node)}
        self.of_weights = self._of_weights(returned)
        runs = [(key, self._with_weights(nodes)) for key, nodes in self._runs()]
        owner = {
            node: number
            for number, (_, nodes) in enumerate(runs)
            for node in nodes
            if node not in self.of_weights
        }
        differentiable = self._differentiable()
        aliases = _aliases(self.graph)
        pieces = tuple(
            self._piece(number, key, nodes, owner, returned, aliases)
            for number, (key, nodes) in enumerate(runs)
        )
        edited = frozenset(name for piece in pieces for name in piece.mutates)
        pieces = tuple(
            replace(piece, edited=edited.intersection(piece.outputs)) for piece in pieces
        )
        crossing = {name for piece in pieces for name in (*piece.inputs, *piece.outputs)}
        crossing |= {arg.name for arg in returned}
        values = {
            node.name: Value(
                node.name,
                tuple(node.meta["val"].shape),
                node.meta["val"].dtype,
                node in differentiable,
            )
            for node in self.graph.nodes
            if node.name in crossing
        }
        outputs = tuple(
            arg.name if isinstance(arg, fx.Node) else Constant(arg) for arg in output.args[0]
        )
        has_constants = bool(self.constants) or any(
            node.op == "get_attr" for node in self.graph.nodes
        )
        return Capture(
            pieces,
            values,
            tuple(self.inputs),
            outputs,
            self.in_spec,
            self.exported.call_spec.out_spec,
            has_constants,
        )

    def _runs(self) -> list[tuple[str, list[fx.Node]]]:
        """Return the nodes in order, grouped by the module calls to which they belong."""
        runs: list[tuple[str, list[fx.Node]]] = []
        place: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr") or node in self.of_weights:
                continue
            source = node.args[0] if node.target is operator.getitem else None
            if source is None and self._assigns(node):
                source = node.args[1]  # a module has put this in place of its buffer
            if isinstance(source, fx.Node) and source in place:
                number = place[
                    source
                ]  # a part of a tuple stays with it: only tensors pass between pieces
                runs[number][1].append(node)
            else:
                key = self._owner(node)
                if not runs or runs[-1][0] != key:
                    runs.append((key, []))
                number = len(runs) - 1
                runs[number][1].append(node)
            place[node] = number
        seen: dict[str, int] = {}
        named: list[tuple[str, list[fx.Node]]] = []
        for key, nodes in runs:
            shown = key or (f"{named[-1][0].rstrip('+')}+" if named else "+")
            seen[shown] = seen.get(shown, -1) + 1
            named.append((f"{shown}@{seen[shown]}" if seen[shown] else shown, nodes))
        return named

    def _assigns(self, node: fx.Node) -> bool:
        """Whether export added a node, to copy at the end the value that a forward has put in place
        of a buffer.

        Such a node may come earlier, because nothing reads the buffer after the value is made.
        """
        inside = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]
        if node.target is not aten.copy_.default or inside:
            return False
        buffer, value = node.args[:2]
        if (
            not isinstance(buffer, fx.Node)
            or not isinstance(value, fx.Node)
            or value.op == "placeholder"
        ):
            return False
        positions = {other: number for number, other in enumerate(self.graph.nodes)}
        return self.tensors.get(buffer.name, ("",))[0] == "buffer" and all(
            user is node or positions[user] <= positions[value] for user in buffer.users
        )

    def _of_weights(self, returned: set[fx.Node]) -> set[fx.Node]:
        """Return the nodes that depend on weights alone, such as a transposed weight.

        Every piece that uses such a node has a copy of it. If the result passed from piece to
        piece, it would outlive the weight, which a shard doesn't keep whole.
        """
        computed: set[fx.Node] = set()
        for node in self.graph.nodes:
            if (
                node.op != "call_function"
                or node in returned
                or not node.all_input_nodes
                or mutated(node)
            ):
                continue
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                continue
            if all(arg in computed or arg.name in self.tensors for arg in node.all_input_nodes):
                computed.add(node)
        # What is edited in place must stay one tensor.
        edited = {arg for node in self.graph.nodes for arg in mutated(node)}
        return set() if edited & computed else computed

    def _with_weights(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Return the nodes of a piece, after the nodes of weights alone that they need."""
        needed: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            for arg in node.all_input_nodes:
                if arg in self.of_weights and arg not in needed:
                    visit(arg)
                    needed[arg] = None

        for node in nodes:
            visit(node)
        return [*needed, *nodes]

    def _owner(self, node: fx.Node) -> str:
        """Return the path of the outermost listed module in which the node runs, else that of its
        leaf, else "".
        """
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        for path in stack:
            if path.partition("@")[0] in self.listed:
                return str(path)
        innermost = stack[-1] if stack else ""
        if innermost.partition("@")[0] in self.leaves:
            return str(innermost)
        # Outside all of them a weight still shows where a node belongs: a model may read a weight
        # without a call of its module.
        names = [
            self.tensors[arg.name][1]
            for used in self._with_weights([node])
            for arg in used.all_input_nodes
            if self.tensors.get(arg.name, ("",))[0] == "parameter"
        ]
        return re.sub(r"[./]?[^./]*$", "", names[0]) or names[0] if names else ""

    def _piece(
        self,
        number: int,
        key: str,
        nodes: list[fx.Node],
        owner: Mapping[fx.Node, int],
        returned: set[fx.Node],
        aliases: Mapping[fx.Node, fx.Node],
    ) -> Piece:
        used = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes)
        inside = set(nodes)
        whole = {node: self.calls[node.args[1]] for node in nodes if _is_opaque(node)}  # type: ignore[index]
        tensors: dict[str, dict[str, None]] = {"parameter": {}, "buffer": {}}
        for n in used:
            kind, name = self.tensors.get(n.name, ("", ""))
            if kind:
                tensors[kind][name] = None
        for call in whole.values():
            tensors["parameter"] |= dict.fromkeys(call.parameters)
            tensors["buffer"] |= dict.fromkeys(call.buffers)
        inputs = [
            n
            for n in used
            if n not in inside
            and n.op != "get_attr"
            and n.name not in self.tensors
            and n.name not in self.constants
        ]
        outputs = [
            n
            for n in nodes
            if n not in self.of_weights
            and (n in returned or any(owner.get(user, number) != number for user in n.users))
        ]
        edited = {aliases[arg] for node in nodes for arg in mutated(node)}
        mutates = [base.name for base in edited if owner.get(base, number) != number]
        changed = {
            aliases[arg].name for node in nodes for arg in (*mutated(node), *statistics(node))
        }
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        placeholders = {
            name: graph.placeholder(f"{kind}_{number}")
            for kind, names in tensors.items()
            for number, name in enumerate(names)
        }
        copies |= {n: placeholders[self.tensors[n.name][1]] for n in used if n.name in self.tensors}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
        root: dict[str, Any] = {}
        for node in used:
            if node.name in self.constants:
                root[f"constant_{node.name}"] = self.constants[node.name]
                copies[node] = graph.get_attr(f"constant_{node.name}")
            elif node.op == "get_attr":
                root[str(node.target)] = getattr(self.exported.graph_module, str(node.target))
                copies[node] = graph.get_attr(str(node.target))
        for node in nodes:
            if node in whole:
                call = whole[node]
                weights = [placeholders[name] for name in call.parameters]
                operands = [copies[n] for n in node.args[0]]  # type: ignore
                copies[node] = graph.call_function(call.run, (weights, operands))
            else:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[n] for n in outputs))
        path = key.partition("@")[0]
        return Piece(
            key,
            "" if path.endswith("+") else path,
            tuple(tensors["parameter"]),
            tuple(tensors["buffer"]),
            tuple(n.name for n in inputs),
            tuple(n.name for n in outputs),
            tuple(mutates),
            frozenset(),
            frozenset(self.tensors[name][1] for name in changed if name in self.tensors),
            tuple(dict.fromkeys(call.path for call in whole.values() if call.path)),
            LazyGraphModule(root, graph),
            tuple(nodes),
        )

    def _differentiable(self) -> set[fx.Node]:
        """Return the nodes to which a gradient may come back, because they depend on a trainable
        parameter.

        There may be too many of them, but not too few.
        """
        differentiable: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                kind, name = self.tensors.get(node.name, ("", ""))
                if kind == "parameter" and name in self.trainable:
                    differentiable.add(node)
            elif _is_opaque(node) and self.trainable.intersection(
                self.calls[node.args[1]].parameters
            ):
                differentiable.add(node)
            elif any(arg in differentiable for arg in node.all_input_nodes):
                value = node.meta.get("val")
                if (
                    not isinstance(value, torch.Tensor)
                    or value.is_floating_point()
                    or value.is_complex()
                ):
                    differentiable.add(node)
        return differentiable


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share if they are the same elements in memory."""
    return (
        storage_key(tensor),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.dtype,
    )


def _is_itself(node: Any, other: Any) -> bool:
    """Whether two nodes are the same elements in the same order, as in `self.buffer =
    self.buffer.to(device)`.
    """
    value, other_value = (
        n.meta.get("val") if isinstance(n, fx.Node) else None for n in (node, other)
    )
    return (
        isinstance(value, torch.Tensor)
        and isinstance(other_value, torch.Tensor)
        and _memory(value) == _memory(other_value)
        and value.stride() == other_value.stride()
    )


def _changes_nothing(node: fx.Node) -> bool:
    """Whether a node converts a tensor to the dtype and device that it already has, and so returns
    the tensor itself.
    """
    if (
        node.op != "call_function"
        or not str(node.target).startswith("aten.to.")
        or node.kwargs.get("copy")
    ):
        return False
    before, after = (
        n.meta.get("val") if isinstance(n, fx.Node) else None for n in (node.args[0], node)
    )
    return (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.dtype == after.dtype
        and before.device == after.device
        and True not in node.args
    )


def _is_opaque(node: fx.Node) -> bool:
    return node.target is torch.ops.paceline.opaque.default


def mutated(node: fx.Node) -> Sequence[fx.Node]:
    """Return the arguments that a node's operator changes in place, also inside a block under
    no_grad or autocast.
    """
    if (block := _block(node)) is not None:
        return _of_arguments(*block, [base for inner in block[0].nodes for base in mutated(inner)])
    return [arg for arg in written(node.target, node.args, node.kwargs) if isinstance(arg, fx.Node)]


def statistics(node: fx.Node) -> Sequence[fx.Node]:
    """Return the running statistics that a node's operator updates."""
    if (block := _block(node)) is not None:
        return _of_arguments(
            *block, [base for inner in block[0].nodes for base in statistics(inner)]
        )
    positions, training = _STATISTICS.get(node.target, ((), 0))
    if not positions or not node.args[training]:
        return []
    return [
        arg for arg in (node.args[position] for position in positions) if isinstance(arg, fx.Node)
    ]


def _block(node: fx.Node) -> tuple[fx.Graph, Sequence[Any]] | None:
    """Return the graph of the block of the forward that a node stands for, and the node's
    arguments; None otherwise.
    """
    if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
        return None
    for position, arg in enumerate(node.args):
        inside = (
            getattr(node.graph.owning_module, str(arg.target), None)
            if (isinstance(arg, fx.Node) and arg.op == "get_attr")
            else None
        )
        if isinstance(inside, fx.GraphModule):
            return inside.graph, node.args[position + 1 :]
    return None


def _of_arguments(
    graph: fx.Graph, arguments: Sequence[Any], bases: Sequence[fx.Node]
) -> list[fx.Node]:
    """Return the arguments of a block that have the same memory as these nodes inside it."""
    aliases = _aliases(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    changed = {aliases[base] for base in bases}
    return [
        arg
        for placeholder, arg in zip(placeholders, arguments, strict=False)
        if aliases[placeholder] in changed and isinstance(arg, fx.Node)
    ]


def _aliases(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the first node with the same memory, for each node."""
    first: dict[Any, fx.Node] = {}
    aliases: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        memory = storage_key(value) if isinstance(value, torch.Tensor) else node
        aliases[node] = first.setdefault(memory, node)
    return aliases
