"""A rank's part of a model that is cut into stages: its pieces as modules, with the model's own
names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from paceline.model.graph import Piece
from paceline.model.units import name_in_model, name_of_attribute
from paceline.strategies.tensor.run import TensorSplit
from paceline.torch_private.autograd import version_of
from paceline.torch_private.modules import own_buffers, own_parameters

Run = Callable[..., tuple[torch.Tensor, ...]]


class PieceModule(nn.Module):
    """The parameters of one piece, as a module that can be sharded and recomputed.

    Args:
        apart: The parameters that other pieces use, too. Other modules register them.
        run_of: Makes the function that runs a piece.
        runs_once: Whether the piece must not be recomputed in backward, because its code keeps its
            own state.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        apart: Mapping[str, nn.Parameter],
        run_of: Callable[[Piece], Run],
        *,
        runs_once: bool = False,
    ) -> None:
        super().__init__()
        self.apart, self.run_of, self.runs_once = apart, run_of, runs_once
        self.runs: dict[int, tuple[Piece, Run]] = {}
        # The attributes of registered parameters, by the parameters' names in the model.
        self.attributes = {name: name_of_attribute(name) for name in parameters}
        for name, parameter in parameters.items():
            self.register_parameter(self.attributes[name], parameter)

    def forward(self, piece: Piece, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run a piece with this key, from any capture.

        Args:
            tensors: The model's buffers that the piece needs, then its inputs.

        Returns:
            The piece's outputs, then the new values of buffers that it changes. The given buffers
            are not changed, so that the piece can be recomputed. A parameter that the piece writes
            to may be one of its outputs. Such an output is a copy, because the next micro-batch may
            write to the parameter before the output is used.
        """
        if id(piece) not in self.runs:
            self.runs[id(piece)] = piece, self.run_of(piece)
        _, run = self.runs[id(piece)]
        parameters = tuple(map(self.parameter_of, piece.parameters))
        if not piece.changes and not piece.opaque:
            return run(*parameters, *tensors)
        count = len(piece.buffers)
        buffers = [
            buffer.clone() if name in piece.changes else buffer
            for name, buffer in zip(piece.buffers, tensors[:count], strict=True)
        ]
        versions = [version_of(parameter) for parameter in parameters]
        outputs = run(*parameters, *buffers, *tensors[count:])
        written = {
            parameter.untyped_storage().data_ptr()
            for parameter, version in zip(parameters, versions, strict=True)
            if version_of(parameter) != version
        }
        if written:
            outputs = tuple(
                output.clone() if output.untyped_storage().data_ptr() in written else output
                for output in outputs
            )
        return (
            *outputs,
            *(
                buffer
                for name, buffer in zip(piece.buffers, buffers, strict=True)
                if name in piece.changes
            ),
        )

    def wrap_runs(self, wrap: Callable[[Piece, Run], Run]) -> None:
        """Replace each piece's run by the result of `wrap(piece, run)`.

        Call it before any piece has run.
        """
        run_of = self.run_of
        self.run_of = lambda piece: wrap(piece, run_of(piece))

    def holds(self, names: Iterable[str]) -> bool:
        return all(name in self.apart or name in self.attributes for name in names)

    def parameter_of(self, name: str) -> nn.Parameter:
        """Return a parameter by its name in the model."""
        parameter = (
            self.apart[name] if name in self.apart else own_parameters(self)[self.attributes[name]]
        )
        assert parameter is not None
        return parameter


class PieceModules(nn.Module):
    """All pieces of a rank. The module itself is never called. Its parameters have the model's
    names.

    Args:
        lone: Parameters that no piece registers, by name.
        model: The model whose buffers the pieces use and change.
    """

    def __init__(
        self,
        pieces: Mapping[str, PieceModule],
        lone: Mapping[str, nn.Parameter],
        model: nn.Module,
        split: TensorSplit,
    ) -> None:
        super().__init__()
        self.run_of = split.runner
        self.pieces = nn.ModuleList(pieces.values())
        for name, parameter in lone.items():
            self.register_parameter(name_of_attribute(name), parameter)
        # keeps_changes: whether changes of buffers and parameters are kept. Those of a padding
        # batch are not.
        self.by_key, self.keeps_changes = dict(pieces), True
        # The module of each piece by the piece's id. The entry keeps the piece alive.
        self._holders: dict[int, tuple[Piece, PieceModule]] = {}
        self.buffers_at: dict[str, tuple[nn.Module, str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for name in own_buffers(module):
                self.buffers_at[f"{path}.{name}" if path else name] = module, name

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for path, parameter in super().named_parameters(*args, **options):
            yield name_in_model(path), parameter

    def run(self, piece: Piece, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # Looked up each time, because a module that is taken whole may replace its buffers.
        buffers = [
            cast(torch.Tensor, own_buffers(module)[name])
            for module, name in map(self.buffers_at.__getitem__, piece.buffers)
        ]
        module = self._module_of(piece)
        if not piece.changes:
            return module(piece, *buffers, *inputs)
        # Copies are needed, because a later forward must not change tensors that an earlier one
        # keeps for its backward.
        buffer_inputs = [
            buffer.clone() if name in piece.changes else buffer
            for name, buffer in zip(piece.buffers, buffers, strict=True)
        ]
        edited = (
            []
            if self.keeps_changes
            else [module.parameter_of(name) for name in piece.parameters if name in piece.changes]
        )
        before = [parameter.detach().clone() for parameter in edited]
        outputs = module(piece, *buffer_inputs, *inputs)
        count = len(piece.outputs)
        changed = [
            buffer
            for name, buffer in zip(piece.buffers, buffers, strict=True)
            if name in piece.changes
        ]
        with torch.no_grad():
            for buffer, value in (
                zip(changed, outputs[count:], strict=True) if self.keeps_changes else ()
            ):
                buffer.copy_(value)
            for parameter, value in zip(edited, before, strict=True):
                # This does not increase the version counter, which backward checks.
                parameter.data.copy_(value)
        return outputs[:count]

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Forget pieces that will not run again."""
        for piece in pieces:
            _, module = self._holders.pop(id(piece), (piece, None))
            if module is not None:
                module.runs.pop(id(piece), None)

    def _module_of(self, piece: Piece) -> PieceModule:
        """Return a module that has the weights of a piece.

        That is the one with the piece's key, or another one, because an evaluation may use the same
        weights at other places. If the weights are in several modules, or if there are none, it is
        a new one that registers nothing.
        """
        if id(piece) not in self._holders:
            home = [self.by_key[piece.key]] if piece.key in self.by_key else []
            others = self.by_key.values() if piece.parameters else ()
            module = next((m for m in (*home, *others) if m.holds(piece.parameters)), None)
            if module is None:
                apart = {name: self.parameter_of(name) for name in piece.parameters}
                module = PieceModule({}, apart, self.run_of)
            self._holders[id(piece)] = piece, module
        return self._holders[id(piece)][1]

    def parameter_of(self, name: str) -> nn.Parameter:
        """Return a parameter by its name in the model."""
        return next(
            (module.parameter_of(name) for module in self.by_key.values() if module.holds([name])),
            getattr(self, name_of_attribute(name), None),
        )  # type: ignore[return-value]
