"""The change that adapters of low rank make to a decoder's profile by dimensions: only the adapters
are trained.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.models.formats import Formats, Kernels
from benchmarks.models.sizes import DecoderSize
from paceline.model.cost.profile import (
    Affine,
    Parameter,
    Product,
    Profile,
    Segment,
    TensorCut,
    Work,
)

# Operators that an adapter adds to a layer, counted in the traced profile of `decoder.py`: two
# products, a scale and a sum in forward, and six in backward, minus those that give gradients of
# weights, of biases and of norms. If operators are fused, kernels that run anyway give gradients of
# biases and norms.
_FORWARD_OPERATORS = 4
_BACKWARD_OPERATORS = {
    ("gpt", "eager"): -2,
    ("llama", "eager"): -3,
    ("gpt", "fused"): 2,
    ("llama", "fused"): 1,
}
_SCALED_VALUES, _UNSCALED_VALUES = (
    5,
    2,
)  # read and written for each value of the product beside it; forward, backward


def with_adapters(
    profile: Profile, size: DecoderSize, formats: Formats, kernels: Kernels
) -> Profile:
    """Return the profile of the same decoder with frozen weights and adapters of `size.lora_rank`
    in each layer.

    Like the other layers, the first one is priced with gradients of its input, although it does not
    need them.
    """
    embedding, layer, head = profile.segments
    values = size.adapters_per_layer
    adapters = Parameter(
        f"{layer.unit}.adapters",
        layer.unit,
        values * formats.weight,
        rows=values,
        state_bytes=values * formats.state,
        count=size.layers,
        gradient_part=formats.gradient / formats.weight,
        dtype=profile.parameters[0].dtype,
    )
    frozen = [
        replace(parameter, trainable=False, state_bytes=0) for parameter in profile.parameters
    ]
    trained_part = adapters.num_bytes * adapters.count / sum(p.num_bytes * p.count for p in frozen)
    update = replace(profile.update, moved_bytes=profile.update.moved_bytes.times(trained_part))
    return replace(
        profile,
        parameters=(*frozen, adapters),
        update=update,
        segments=(
            _without_gradients(replace(embedding, backward=Work())),
            _layer(_without_gradients(layer), adapters, size, formats, kernels),
            _head(_without_gradients(head), size, formats),
        ),
    )


def _without_gradients(segment: Segment) -> Segment:
    """Return a segment without the products that give gradients of weights, which are those that
    sum over tokens.
    """
    products = tuple(p for p in segment.backward.products if p.grows != "inner")
    backward = replace(
        segment.backward, products=products, flops=Affine(0, sum(p.flops for p in products))
    )
    return replace(
        segment, backward=backward, gradients=(), borrows=(*segment.gradients, *segment.borrows)
    )


def _layer(
    frozen: Segment, adapters: Parameter, size: DecoderSize, formats: Formats, kernels: Kernels
) -> Segment:
    s, h, ffn, item = size.sequence, size.hidden, size.ffn, formats.activation
    joined = size.hidden + 2 * size.kv_width
    is_unfused_llama = size.form == "llama" and kernels.elementwise == "eager"
    down, up = Product(s, size.lora_rank, h), Product(s, joined, size.lora_rank, cut="columns")
    scaled, unscaled = item * s * joined * _SCALED_VALUES, item * s * joined * _UNSCALED_VALUES
    # Inputs of products and norms that only gradients of weights need, and the input of the
    # adapters' second product.
    kept_cut = Affine(0, -item * s * ffn)
    kept = Affine(0, item * s * (size.lora_rank - ffn - h * (3 if is_unfused_llama else 1)))
    has_biases = size.form == "gpt"
    cut_bytes = unscaled - item * s * (
        joined + ffn if has_biases else 0
    )  # sums that give gradients of biases
    # The input's gradients are summed; biases of what is not cut, and weights of norms, have none.
    whole_bytes = item * s * h * (3 - (2 if has_biases else 0) - (8 if is_unfused_llama else 0))
    forward = Work(
        Affine(0, down.flops + up.flops),
        function_bytes=Affine(0, scaled),
        operators=_FORWARD_OPERATORS,
        products=(down, up),
    )
    turned = (*down.backward(), *up.backward())
    backward = Work(
        Affine(0, sum(p.flops for p in turned)),
        function_bytes=Affine(0, cut_bytes + whole_bytes),
        products=turned,
        operators=_BACKWARD_OPERATORS[size.form, kernels.elementwise],
    )
    cut = frozen.tensor or TensorCut()
    return replace(
        frozen,
        forward=_plus(frozen.forward, forward),
        backward=_plus(frozen.backward, backward),
        again=frozen.again and _plus(frozen.again, forward),
        kept_bytes=_sum(frozen.kept_bytes, kept),
        forward_peak_bytes=_sum(frozen.forward_peak_bytes, kept),
        gradients=(adapters.name,),
        tensor=replace(
            cut,
            forward_bytes=_sum(cut.forward_bytes, Affine(0, scaled)),
            backward_bytes=_sum(cut.backward_bytes, Affine(0, cut_bytes)),
            kept_bytes=_sum(cut.kept_bytes, kept_cut),
        ),
    )


def _head(frozen: Segment, size: DecoderSize, formats: Formats) -> Segment:
    """Return the head without the values that the last norm and the logits would keep for gradients
    of weights.
    """
    norm_bytes = Affine(
        0, -formats.activation * size.sequence * size.hidden * (2 if size.form == "llama" else 1)
    )
    return replace(
        frozen,
        kept_bytes=_sum(frozen.kept_bytes, norm_bytes),
        forward_peak_bytes=_sum(frozen.forward_peak_bytes, norm_bytes),
    )


def _sum(first: Affine, second: Affine) -> Affine:
    return Affine(first.fixed + second.fixed, first.per_sample + second.per_sample)


def _plus(work: Work, more: Work) -> Work:
    return replace(
        work,
        flops=_sum(work.flops, more.flops),
        function_bytes=_sum(work.function_bytes, more.function_bytes),
        operators=work.operators + more.operators,
        products=(*more.products, *work.products),
    )
