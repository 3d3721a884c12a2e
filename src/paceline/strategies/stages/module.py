"""A rank's part of a model that is cut into stages: its pieces as modules, with the model's own
names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from paceline.model.graph import Piece
from paceline.model.units import name_in_model, name_of_attribute
from paceline.strategies.tensor.run import TensorSplit
from paceline.torch_private.autograd import version_of
from paceline.torch_private.modules import own_buffers, own_parameters


class PieceModule(nn.Module):
    """The parameters of one piece, as a module that can be sharded and recomputed.

    Args:
        split: Makes the function that runs a piece whose parameters are split over ranks; None if
            they are whole.
        apart: The parameters that several pieces use. The module of all pieces registers them.
        runs_once: Whether the piece must not be recomputed in backward, because its code keeps its
            own state.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        split: Callable[[Piece], Callable[..., tuple[torch.Tensor, ...]]] | None = None,
        apart: Mapping[str, nn.Parameter] | None = None,
        *,
        runs_once: bool = False,
    ) -> None:
        super().__init__()
        self.split, self.apart, self.runs_once = split, dict(apart or {}), runs_once
        self._wrap: Callable[[Piece, Callable[..., Any]], Callable[..., Any]] = lambda piece, run: (
            run
        )
        self.runs: dict[int, tuple[Piece, Callable[..., tuple[torch.Tensor, ...]]]] = {}
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
            are not changed, so that the piece can be recomputed.
        """
        if id(piece) not in self.runs:
            self.runs[id(piece)] = (
                piece,
                self._wrap(piece, self.split(piece) if self.split else piece.run),
            )
        parameters = tuple(map(self.parameter_of, piece.parameters))
        return run_purely(self.runs[id(piece)][1], piece, parameters, tensors)

    def wrap_runs(self, wrap: Callable[[Piece, Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace each piece's run by the result of `wrap(piece, run)`.

        Call it before any piece has run.
        """
        self._wrap = wrap

    def holds(self, names: Iterable[str]) -> bool:
        return all(name in self.apart or name in self.attributes for name in names)

    def parameter_of(self, name: str) -> nn.Parameter:
        """Return a parameter by its name in the model."""
        parameter = (
            self.apart[name] if name in self.apart else own_parameters(self)[self.attributes[name]]
        )
        assert parameter is not None
        return parameter


def run_purely(
    run: Callable[..., tuple[torch.Tensor, ...]],
    piece: Piece,
    parameters: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a piece, then the new values of buffers that it changes. No given
    buffer is changed.

    A parameter that the piece writes to may be one of its outputs. Such an output is a copy,
    because the next micro-batch may write to the parameter before the output is used.
    """
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
        self.split = split
        self.pieces = nn.ModuleList(pieces.values())
        for name, parameter in lone.items():
            self.register_parameter(name_of_attribute(name), parameter)
        # keeps_changes: whether changes of buffers and parameters are kept. Those of a padding
        # batch are not.
        self.by_key, self.keeps_changes = dict(pieces), True
        # The module of each piece by the piece's id. The entry keeps the piece alive.
        self._holders: dict[int, tuple[Piece, PieceModule | None]] = {}
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
            return self._outputs(module, piece, buffers, inputs)
        # Copies are needed, because a later forward must not change tensors that an earlier one
        # keeps for its backward.
        buffer_inputs = [
            buffer.clone() if name in piece.changes else buffer
            for name, buffer in zip(piece.buffers, buffers, strict=True)
        ]
        edited = (
            []
            if module is None or self.keeps_changes
            else [module.parameter_of(name) for name in piece.parameters if name in piece.changes]
        )
        before = [parameter.detach().clone() for parameter in edited]
        outputs = self._outputs(module, piece, buffer_inputs, inputs)
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

    def _outputs(
        self,
        module: PieceModule | None,
        piece: Piece,
        buffers: Sequence[torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of a piece, then the buffers that it changes; see `run_purely`."""
        if module is not None:
            return module(piece, *buffers, *inputs)
        parameters = tuple(map(self.parameter_of, piece.parameters))
        return run_purely(self._run_of(piece), piece, parameters, (*buffers, *inputs))

    def _module_of(self, piece: Piece) -> PieceModule | None:
        if id(piece) not in self._holders:
            self._holders[id(piece)] = piece, self._find_module(piece)
        return self._holders[id(piece)][1]

    def _find_module(self, piece: Piece) -> PieceModule | None:
        """Return the module that holds the weights of a piece.

        That is the one with the piece's key, or another one, because an evaluation may use the same
        weights at other places. None if the weights are in several modules, or if there are none.
        """
        home = self.by_key.get(piece.key)
        if home is not None and home.holds(piece.parameters):
            return home
        return next(
            (
                module
                for module in self.by_key.values()
                if piece.parameters and module.holds(piece.parameters)
            ),
            None,
        )

    def parameter_of(self, name: str) -> nn.Parameter:
        """Return a parameter by its name in the model."""
        return next(
            (module.parameter_of(name) for module in self.by_key.values() if module.holds([name])),
            getattr(self, name_of_attribute(name), None),
        )  # type: ignore[return-value]

    def _run_of(self, piece: Piece) -> Callable[..., tuple[torch.Tensor, ...]]:
        return self.split.runner(piece) if self.split.touches(piece) else piece.run
