"""Captures a model's forward for one signature of inputs: a graph of operators, cut into pieces along its modules.

torch.export records the operators, with every size fixed: another number of samples is another capture. What the
graph says about a node's module decides which piece it belongs to, so that pieces have the names of the user's own
modules, and the same names in every capture.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from paceline.errors import JobError
from paceline.launch.failure import user_frames

# Checks of sizes and dtypes that export writes into the graph; sizes are fixed here, and dtypes change under autocast.
_CHECKS = ("aten._assert", "aten.sym_constrain", "aten._make_dep_token")


@dataclass(frozen=True)
class Value:
    """A tensor that passes from one piece to others.

    differentiable: whether a gradient can come back for it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """A stretch of the forward that belongs to one call of one module, or lies between two.

    key: the module's path, with `@1` for a second call; for what lies between, `PATH+` after the piece before it.
    path: the module's path; "" for what lies between.
    parameters, buffers: by their names in the model, in the order in which `run` takes them.
    inputs, outputs: names of values; a piece's inputs are outputs of earlier ones or of the model's own inputs.
    mutates: values of other pieces that it changes in place.
    run: (*parameters, *buffers, *inputs) -> outputs.
    """

    key: str
    path: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mutates: tuple[str, ...]
    run: Callable[..., tuple[torch.Tensor, ...]]
    nodes: tuple[fx.Node, ...] = field(repr=False)


@dataclass(frozen=True)
class Capture:
    """A forward as pieces in the order in which the model runs them.

    values: everything that passes between pieces, by name.
    inputs: names of the model's own inputs, flat; None for one that is no tensor.
    outputs: of the model, flat: names of values, or constants wrapped in `Constant`.
    """

    pieces: tuple[Piece, ...]
    values: Mapping[str, Value]
    inputs: tuple[str | None, ...]
    outputs: tuple[str | Constant, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The model's inputs by name."""
        flat, _ = pytree.tree_flatten((args, kwargs))
        return {name: value for name, value in zip(self.inputs, flat, strict=True) if name is not None}

    def result(self, values: Mapping[str, torch.Tensor]) -> Any:
        """The model's output from its values."""
        return pytree.tree_unflatten([item.value if isinstance(item, Constant) else values[item]
                                      for item in self.outputs], self.out_spec)


@dataclass(frozen=True)
class Constant:
    """An output that is no tensor."""

    value: Any


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    """The model's forward for inputs like these, in the mode (training or not) that the model is in.

    No weight is read and none is changed.

    Raises:
        JobError: the course of the model depends on values, or something else can't be recorded; the message has
            the line.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(model, args, kwargs, strict=False)
        except Exception as error:
            where, _ = user_frames(error)
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise JobError(f"{type(model).__name__} can't be cut: recording its forward failed"
                           f"{f' at {where}' if where else ''}: {type(error).__name__}: {first}",
                           hint="a forward whose course depends on the values of tensors can't be split; "
                                "data=N and shard=N plans run it as it is") from error
    return _Reader(model, exported, (args, kwargs)).read()


class _Reader:
    """Makes a `Capture` of an exported program."""

    def __init__(self, model: nn.Module, exported: Any, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        from torch.export.graph_signature import InputKind

        self.model, self.exported = model, exported
        self.graph: fx.Graph = exported.graph_module.graph
        flat, self.in_spec = pytree.tree_flatten(given)
        self.listed = _listed_modules(model)
        self.leaves = {name for name, module in model.named_modules() if name and not any(module.children())}
        self.tensors: dict[str, tuple[str, str]] = {}  # placeholder: (kind, name in the model)
        self.constants: dict[str, torch.Tensor] = {}
        self.inputs: list[str | None] = []
        for spec in exported.graph_signature.input_specs:
            if spec.kind == InputKind.PARAMETER:
                self.tensors[spec.arg.name] = ("parameter", spec.target)
            elif spec.kind == InputKind.BUFFER and spec.target in dict(model.named_buffers(remove_duplicate=False)):
                self.tensors[spec.arg.name] = ("buffer", spec.target)
            elif spec.kind == InputKind.USER_INPUT:
                self.inputs.append(spec.arg.name)
            else:
                found = exported.constants.get(spec.target, exported.state_dict.get(spec.target))
                self.constants[spec.arg.name] = found
        assert len(flat) == len(self.inputs), (len(flat), self.inputs)
        self.inputs = [name if isinstance(value, torch.Tensor) else None
                       for name, value in zip(self.inputs, flat, strict=True)]

    def read(self) -> Capture:
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and str(node.target).startswith(_CHECKS):
                self.graph.erase_node(node)
        runs = self._runs()
        owner = {node: number for number, (_, nodes) in enumerate(runs) for node in nodes}
        output = next(node for node in self.graph.nodes if node.op == "output")
        returned = {arg for arg in output.args[0] if isinstance(arg, fx.Node)}
        differentiable = self._differentiable()
        aliases = _aliases(self.graph)
        pieces = tuple(self._piece(number, key, nodes, owner, returned, aliases)
                       for number, (key, nodes) in enumerate(runs))
        crossing = {name for piece in pieces for name in (*piece.inputs, *piece.outputs)}
        crossing |= {arg.name for arg in returned}
        values = {node.name: Value(node.name, tuple(node.meta["val"].shape), node.meta["val"].dtype,
                                   node in differentiable)
                  for node in self.graph.nodes if node.name in crossing}
        outputs = tuple(arg.name if isinstance(arg, fx.Node) else Constant(arg) for arg in output.args[0])
        return Capture(pieces, values, tuple(self.inputs), outputs, self.in_spec,
                       self.exported.call_spec.out_spec)

    def _runs(self) -> list[tuple[str, list[fx.Node]]]:
        """Nodes in order, grouped by the module call that they belong to."""
        runs: list[tuple[str, list[fx.Node]]] = []
        place: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                continue
            source = node.args[0] if node.target is operator.getitem else None
            if isinstance(source, fx.Node) and source in place:
                number = place[source]  # a part of a tuple stays with it: only tensors pass between pieces
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

    def _owner(self, node: fx.Node) -> str:
        """The outermost listed module that the node runs in, else its leaf; "" for neither."""
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        for path in stack:
            if path.partition("@")[0] in self.listed:
                return str(path)
        innermost = stack[-1] if stack else ""
        return str(innermost) if innermost.partition("@")[0] in self.leaves else ""

    def _piece(self, number: int, key: str, nodes: list[fx.Node], owner: Mapping[fx.Node, int],
               returned: set[fx.Node], aliases: Mapping[fx.Node, fx.Node]) -> Piece:
        used = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes)
        own = set(nodes)
        parameters = [n for n in used if self.tensors.get(n.name, ("",))[0] == "parameter"]
        buffers = [n for n in used if self.tensors.get(n.name, ("",))[0] == "buffer"]
        inputs = [n for n in used if n not in own and n.op != "get_attr" and n.name not in self.tensors
                  and n.name not in self.constants]
        outputs = [n for n in nodes if n in returned or any(owner.get(user, number) != number for user in n.users)]
        mutated = {aliases[arg] for node in nodes for arg in _mutated(node)}
        mutates = [base.name for base in mutated if owner.get(base, number) != number]
        graph, copies = fx.Graph(), {}
        for node in (*parameters, *buffers, *inputs):
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
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[n] for n in outputs))
        path = key.partition("@")[0]
        return Piece(
            key, "" if path.endswith("+") else path,
            tuple(self.tensors[n.name][1] for n in parameters), tuple(self.tensors[n.name][1] for n in buffers),
            tuple(n.name for n in inputs), tuple(n.name for n in outputs), tuple(mutates),
            fx.GraphModule(root, graph), tuple(nodes))

    def _differentiable(self) -> set[fx.Node]:
        """Nodes that a gradient may come back for: they depend on a trainable parameter. Rather too many than few."""
        trainable = {name for name, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad}
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                kind, name = self.tensors.get(node.name, ("", ""))
                if kind == "parameter" and name in trainable:
                    found.add(node)
            elif any(arg in found for arg in node.all_input_nodes):
                value = node.meta.get("val")
                if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
                    found.add(node)
        return found


def _listed_modules(model: nn.Module) -> set[str]:
    """The outermost children of ModuleLists and Sequentials that are called themselves."""
    found: set[str] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(module, nn.ModuleList | nn.Sequential) and type(child).forward is not nn.Module.forward:
                found.add(path)
            else:
                visit(child, f"{path}.")

    visit(model, "")
    return found


def _mutated(node: fx.Node) -> Sequence[fx.Node]:
    """Arguments that a node's operator changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    return [arg for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for arg in pytree.tree_leaves(named.get(argument.name)) if isinstance(arg, fx.Node)]


def _aliases(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the first one that has the same memory."""
    first: dict[Any, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        memory = value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node
        found[node] = first.setdefault(memory, node)
    return found
