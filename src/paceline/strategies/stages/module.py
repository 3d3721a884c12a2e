"""What a rank holds of a model that is cut into stages: its pieces as modules, under the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from paceline.model.graph import Piece
from paceline.model.units import name_in_model, name_of_attribute
from paceline.strategies.tensor.run import TensorSplit


class PieceModule(nn.Module):
    """The parameters of one piece, as a module of its own that can be sharded and recomputed.

    split: makes what runs a piece whose parameters are split over ranks; None if they are whole.
    apart: of its parameters those that the module holding all pieces registers, because several of them use them.
    attributes: under which the others are registered, by their names in the model.
    runs_once: whether it must not be computed again in backward, as it has code that keeps a state of its own.
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
        self.attributes = {name: name_of_attribute(name) for name in parameters}
        for name, parameter in parameters.items():
            self.register_parameter(self.attributes[name], parameter)

    def forward(self, piece: Piece, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run any capture's piece with this key.

        tensors: the model's buffers that it needs, then its inputs. Returns its outputs, then the buffers that it
        changes, as they are after it: those it is given stay as they are, so that it can be computed again.
        """
        if id(piece) not in self.runs:
            self.runs[id(piece)] = (
                piece,
                self._wrap(piece, self.split(piece) if self.split else piece.run),
            )
        parameters = tuple(map(self.parameter_of, piece.parameters))
        return run_purely(self.runs[id(piece)][1], piece, parameters, tensors)

    def wrap_runs(self, wrap: Callable[[Piece, Callable[..., Any]], Callable[..., Any]]) -> None:
        """Run what `wrap` makes of a piece and its run, before any piece has run."""
        self._wrap = wrap

    def holds(self, names: Iterable[str]) -> bool:
        return all(name in self.apart or name in self.attributes for name in names)

    def parameter_of(self, name: str) -> nn.Parameter:
        """A parameter by its name in the model."""
        parameter = (
            self.apart[name] if name in self.apart else self._parameters[self.attributes[name]]
        )
        assert parameter is not None
        return parameter


def run_purely(
    run: Callable[..., tuple[torch.Tensor, ...]],
    piece: Piece,
    parameters: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The outputs of a piece, then the buffers that it changes; none of those given is changed.

    A parameter that the piece writes to may be one of its outputs. It is given as it is now: the next micro-batch may
    write to it before the output was used.
    """
    if not piece.changes and not piece.opaque:
        return run(*parameters, *tensors)
    count = len(piece.buffers)
    buffers = [
        buffer.clone() if name in piece.changes else buffer
        for name, buffer in zip(piece.buffers, tensors[:count], strict=True)
    ]
    versions = [parameter._version for parameter in parameters]
    outputs = run(*parameters, *buffers, *tensors[count:])
    written = {
        parameter.untyped_storage().data_ptr()
        for parameter, version in zip(parameters, versions, strict=True)
        if parameter._version != version
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
    """All pieces of a rank. It is never called itself; its parameters have the names that the model gives them.

    lone: parameters that no piece registers, by name.
    model: whose buffers the pieces use and change.
    keeps_changes: whether what pieces write to buffers and parameters now is kept; a stand-in leaves nothing behind.
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
        self.by_key, self.keeps_changes = dict(pieces), True
        self._holders: dict[
            int, tuple[Piece, PieceModule | None]
        ] = {}  # of pieces, which stay as long, by id
        self.buffers_at: dict[str, tuple[nn.Module, str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for name in module._buffers:
                self.buffers_at[f"{path}.{name}" if path else name] = module, name

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for path, parameter in super().named_parameters(*args, **options):
            yield name_in_model(path), parameter

    def run(self, piece: Piece, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # Asked for each time: a module that is taken whole may put others in their places.
        buffers = [
            cast(torch.Tensor, module._buffers[name])
            for module, name in map(self.buffers_at.__getitem__, piece.buffers)
        ]
        module = self._module_of(piece)
        if not piece.changes:
            return self._outputs(module, piece, buffers, inputs)
        # What a later forward changes must not be what an earlier one has kept for its backward.
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
                parameter.data.copy_(value)  # which no version counter tells backward of
        return outputs[:count]

    def forget(self, pieces: Iterable[Piece]) -> None:
        """They will not be run again."""
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
        """See `run_purely`."""
        if module is not None:
            return module(piece, *buffers, *inputs)
        parameters = tuple(map(self.parameter_of, piece.parameters))
        return run_purely(self._run_of(piece), piece, parameters, (*buffers, *inputs))

    def _module_of(self, piece: Piece) -> PieceModule | None:
        if id(piece) not in self._holders:
            self._holders[id(piece)] = piece, self._find_module(piece)
        return self._holders[id(piece)][1]

    def _find_module(self, piece: Piece) -> PieceModule | None:
        """Which one holds the weights of a piece: the one with its key, or else another one, for a capture of the
        model's evaluation may use the same weights at other places. None if they lie in several, or there are none."""
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
        """A parameter by its name in the model."""
        return next(
            (module.parameter_of(name) for module in self.by_key.values() if module.holds([name])),
            getattr(self, name_of_attribute(name), None),
        )  # type: ignore[return-value]

    def _run_of(self, piece: Piece) -> Callable[..., tuple[torch.Tensor, ...]]:
        return self.split.runner(piece) if self.split.touches(piece) else piece.run
