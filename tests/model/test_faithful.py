"""A capture computes what the model computes, leaves it as it was, and takes whole what it would lose."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.base.errors import PlanRefused
from paceline.model.forward_state import state_kept
from paceline.model.graph import CaptureFailed, capture
from paceline.model.graph_check import first_difference
from paceline.model.graph_limits import examine
from paceline.model.losses import refuse_readers
from paceline.model.opaque import OpaqueModules
from paceline.model.randomness import WithoutRandomness
from paceline.strategies.stages.build import faithful_capture


class Batch:
    """So many samples of four numbers."""

    target = None

    def __init__(self, samples: int) -> None:
        self.x = torch.linspace(-1, 1, 4 * samples).view(samples, 4)

    def call(self, model: nn.Module) -> Any:
        return model(self.x)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.x,), {}


class Steps(nn.Module):
    """Two layers, the second with a forward of the test's."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        vars(self.layers[1]).update(attributes)
        self.layers[1].forward = forward.__get__(self.layers[1])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def linear(layer: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.weight, layer.bias)


def counts(layer: Any, x: Tensor) -> Tensor:
    layer.calls += 1
    return linear(layer, x) * layer.calls


def remembers(layer: Any, x: Tensor) -> Tensor:
    layer.history.append(float(x.shape[0]))
    return linear(layer, x) / len(layer.history)


def draws(layer: Any, x: Tensor) -> Tensor:
    return linear(layer, x) * random.random()


def draws_alone(layer: Any, x: Tensor) -> Tensor:
    return linear(layer, x) * layer.source.random()


def caches(layer: Any, x: Tensor) -> Tensor:
    if x.shape[0] not in layer.cache:
        layer.cache[x.shape[0]] = torch.full((x.shape[0], 1), 0.5)
    return linear(layer, x) * layer.cache[x.shape[0]]


@pytest.mark.parametrize(
    ("forward", "attributes", "whole"),
    [
        (linear, {}, False),
        (counts, {"calls": 0}, True),
        (remembers, {"history": []}, True),
        (draws, {}, True),
        (draws_alone, {"source": random.Random(3)}, True),
        (caches, {"cache": {}}, False),
    ],
)
def test_modules_with_a_state(forward: Any, attributes: dict[str, Any], whole: bool) -> None:
    """They are taken whole if a forward depends on those before it; all is left as it was found."""
    model = Steps(forward, **attributes)
    layer, state = model.layers[1], random.getstate()
    before = {name: str(vars(layer)[name]) for name in attributes if name != "source"}
    sources = attributes["source"].getstate() if "source" in attributes else None
    opaque = OpaqueModules()

    faithful_capture(model.train(), Batch, opaque, nullcontext)

    assert ("layers.1" in opaque.outputs) == whole
    assert {name: str(vars(layer)[name]) for name in before} == before
    assert random.getstate() == state
    assert sources is None or attributes["source"].getstate() == sources
    assert layer.forward.__func__ is forward


def test_a_wrong_capture_is_named() -> None:
    """The first module whose output differs, and buffers by name."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    given = Batch(3).arguments()
    right = capture(model, *given)
    assert first_difference(model, right, *given) is None
    for node in right.pieces[2].run.graph.nodes:  # type: ignore[attr-defined]
        if node.op == "call_function":
            node.args = (node.args[0], node.args[1])  # without its bias
    right.pieces[2].run.recompile()  # type: ignore[attr-defined]

    difference = first_difference(model, right, *given)

    assert difference is not None and difference.path == "2"
    assert int(model[1].num_batches_tracked) == 0


def test_a_lost_backward_hook_is_seen() -> None:
    """If it were not looked for, the gradients would tell."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    captured = capture(model, *Batch(2).arguments())
    model[1].register_full_backward_hook(lambda module, given, came: (given[0] * 3,))

    seen = first_difference(model, captured, *Batch(2).arguments())

    assert seen is not None and seen.description == "the gradient of '0.weight' differs"


def test_parameters_that_a_forward_edits_are_put_back() -> None:
    """Also in place, as a momentum target is."""
    model = nn.Embedding(6, 3, max_norm=0.1)
    before = model.weight.detach().clone()
    with state_kept(model):
        model(torch.arange(6))
        assert not torch.equal(model.weight, before)

    assert torch.equal(model.weight, before)


def test_hooks_on_the_model_itself_are_refused() -> None:
    """No rank has all of it."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_full_backward_hook(lambda module, given, came: None)

    with pytest.raises(PlanRefused, match="Sequential itself has a backward hook"):
        examine(model, *Batch(2).arguments())


def test_draws_of_the_forward_are_not_recorded() -> None:
    """A number that Python drew would be the same in every step."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * random.random()

    with pytest.raises(CaptureFailed, match="draws from Python's or NumPy's random numbers"):
        capture(Scaled(4, 4), *Batch(2).arguments())


def test_a_loss_with_a_state_is_left_as_it_was() -> None:
    """It is run on the example, which counts for nothing."""
    model, calls, log = nn.Linear(4, 2), 0, []

    class Warm:
        def __init__(self) -> None:
            self.steps = 0

        def __call__(self, output: Tensor, target: Any) -> Tensor:
            self.steps += 1
            return output.mean() * self.steps

    def counted(output: Tensor, target: Any) -> Tensor:
        nonlocal calls
        calls += 1
        log.append(calls)
        return output.mean()

    warm = Warm()
    functions = {"the loss": partial(of_output, warm), "a metric": partial(of_output, counted)}

    refuse_readers(model, *Batch(2).arguments(), functions=functions)

    assert (warm.steps, calls, log) == (0, 0, [])


def of_output(function: Any, output: Any) -> Any:
    return function(output, None)


class Wasteful(nn.Module):
    """Makes tensors that are gone when its forward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        gone = [x + number for number in range(50)]
        return self.layer(x) + 0 * len(gone)


def test_a_tensor_where_one_of_the_forward_was_is_the_losss_own() -> None:
    """What a loss makes from numpy may lie where a tensor of the forward lay; it is no tensor of the model."""

    def loss(output: Any) -> Any:
        return (
            (output + sum([torch.from_numpy(np.zeros(2, dtype="float32")) for _ in range(200)]))
            .square()
            .mean()
        )

    refuse_readers(Wasteful(), *Batch(3).arguments(), functions={"the loss": loss})


@pytest.mark.parametrize("enabled", [True, False])
def test_a_module_taken_whole_is_captured_with_and_without_gradients(enabled: bool) -> None:
    """An evaluation captures the model where gradients are off."""
    model, opaque = Steps(counts, calls=0), OpaqueModules()
    faithful_capture(model.train(), Batch, opaque, nullcontext)
    args, kwargs = Batch(3).arguments()
    with torch.set_grad_enabled(enabled):
        captured = capture(model, args, kwargs, opaque=opaque)

        assert first_difference(model, captured, args, kwargs) is None
        assert [piece.opaque for piece in captured.pieces] == [(), ("layers.1",)]


class Reparametrised(nn.Module):
    """Draws in its own forward, as a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.encoder(x)
        return self.decoder(mean + torch.randn_like(mean))


def test_a_capture_made_without_randomness_still_draws() -> None:
    model, batch = Reparametrised(), Batch(2)
    with WithoutRandomness() as random_layers:
        captured = capture(model, *batch.arguments())
        assert not random_layers.is_needed, "nothing has run yet"
    names = [node.target for piece in captured.pieces for node in piece.nodes]
    assert torch.ops.aten.randn_like.default in names


class Decoder(nn.Module):
    """Gives what speeds up generating along with its output, as its own configuration says."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.linear = SimpleNamespace(use_cache=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return (x, SimpleNamespace(keys=x)) if self.config.use_cache else x


def test_caches_of_decoders_are_left_out():
    """Of a model whose stacks have configurations of their own; they are as before afterwards."""
    model = nn.Sequential(Decoder(), nn.ReLU())
    assert capture(model, (torch.ones(2, 4),), {}).pieces
    assert model[0].config.use_cache is True


class Picked(nn.Module):
    """Passes the rows that a mask picks from one module to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return y + self.last(y[y[:, 0] > 0]).sum(0)


def test_a_size_that_depends_on_values_is_refused() -> None:
    """Stages are balanced by the bytes that pass between them, which nobody knows before the model runs."""
    recorded = capture(Picked(), (torch.randn(6, 4),), {})

    with pytest.raises(PlanRefused, match="depends on the values of tensors"):
        sum(value.num_bytes for value in recorded.values.values())


@pytest.mark.skipif(
    not hasattr(torch.fx.config, "do_not_emit_stack_traces"),
    reason="needs a later torch than 2.11, which always looks for them",
)
def test_no_operator_s_line_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes a fifth of a capture; torch looks for them again afterwards."""

    def extract(**_: Any) -> Any:
        raise AssertionError("a line is looked for")

    monkeypatch.setattr("torch.fx.proxy.CapturedTraceback", SimpleNamespace(extract=extract))
    assert capture(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), (torch.zeros(2, 4),), {}).pieces
    assert not torch.fx.config.do_not_emit_stack_traces


class PastTheRecording(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 3), nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.data.add_(1)
        return self.layer(x)


def test_what_is_used_past_the_recording_is_said_in_our_words():
    with pytest.raises(
        CaptureFailed, match=r"a tensor that can't be recorded, such as a parameter's \.data"
    ):
        capture(PastTheRecording(), (torch.ones(2, 3),), {})
