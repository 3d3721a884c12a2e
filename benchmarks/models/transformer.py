"""The cost of a decoder transformer on one device, from its dimensions alone: no model is built.

One layer stands for all. Figures are those of the module in `decoder.py`; a test compares them with
its traced profile. Widths count values of a token: `hidden` h, keys and values kv, the inner width
of the MLP ffn.
"""

from __future__ import annotations

from benchmarks.models.adapters import with_adapters
from benchmarks.models.formats import EAGER, FLOAT32, Formats, Kernels
from benchmarks.models.sizes import DecoderSize
from paceline.model.cost.profile import (
    Affine,
    Core,
    Parameter,
    Product,
    Profile,
    Segment,
    TensorCut,
    Work,
)

TOKEN_BYTES = 8  # a token's number
STATISTIC_BYTES = 4  # norms and attention keep statistics in float32
LOSS_BYTES = 4  # the loss is computed in float32
LAYER, EMBEDDING, HEAD = "layers", "embedding", "head"  # the latter two belong to the root
# Operators launched in a layer, counted in the traced profile of `decoder.py`: (forward, backward).
_OPERATORS = {
    ("gpt", "eager"): (10, 19),
    ("llama", "eager"): (32, 56),
    ("gpt", "fused"): (9, 17),
    ("llama", "fused"): (12, 22),
}
_PLAIN_OPERATORS = (
    6,
    8,
)  # more where attention is not one kernel: two products, softmax, transposes
_DROPOUT_OPERATORS = (3, 3)


def decoder_profile(
    size: DecoderSize, formats: Formats = FLOAT32, kernels: Kernels = EAGER
) -> Profile:
    """Return the profile of training with Adam on next tokens. A sample is a sequence."""
    tables = [_table("tokens", EMBEDDING, size.vocab * size.hidden, formats, is_cut=True)]
    if size.form == "gpt":
        tables.append(_table("places", EMBEDDING, size.sequence * size.hidden, formats))
    layer = [
        _table("matrices", LAYER, size.matrices_per_layer, formats, is_cut=True, count=size.layers),
        _table("vectors", LAYER, size.vectors_per_layer, formats, count=size.layers),
    ]
    ends = [_table("norm", HEAD, size.hidden * (2 if size.form == "gpt" else 1), formats)]
    if not size.tied:
        ends.append(_table("logits", HEAD, size.vocab * size.hidden, formats, is_cut=True))
    parameters = (*tables, *layer, *ends)
    values = sum(p.num_bytes * p.count for p in parameters) / formats.weight
    profile = Profile(
        parameters=parameters,
        segments=(
            _embedding(size, formats, [p.name for p in tables]),
            _layer(size, formats, kernels),
            _head(size, formats, [p.name for p in ends]),
        ),
        batch_bytes=Affine(0, 2 * TOKEN_BYTES * size.sequence),
        update=Work(
            moved_bytes=Affine(
                values * (2 * formats.state + formats.gradient + 2 * formats.weight)
            ),
            operators=4,
        ),
        gathered_part=formats.gathered / formats.weight,
        reduced_part=formats.reduced / formats.gradient,
        is_layered=True,
    )
    return with_adapters(profile, size, formats, kernels) if size.lora_rank else profile


def _table(
    name: str, unit: str, values: int, formats: Formats, *, is_cut: bool = False, count: int = 1
) -> Parameter:
    return Parameter(
        f"{unit}.{name}",
        LAYER if unit == LAYER else "",
        values * formats.weight,
        rows=values,
        state_bytes=values * formats.state,
        count=count,
        gradient_part=formats.gradient / formats.weight,
        is_cut=is_cut,
        dtype={2: "bfloat16", 4: "float32"}.get(formats.weight, "float32"),
    )


def _layer(size: DecoderSize, formats: Formats, kernels: Kernels) -> Segment:
    s, h, kv, ffn, item = size.sequence, size.hidden, size.kv_width, size.ffn, formats.activation
    is_llama, is_eager, is_plain = (
        size.form == "llama",
        kernels.elementwise == "eager",
        kernels.attention == "plain",
    )
    linear = [Product(s, h + 2 * kv, h, cut="columns"), Product(s, h, h, cut="inner")]
    linear += [Product(s, ffn, h, cut="columns")] * (2 if is_llama else 1) + [
        Product(s, h, ffn, cut="inner")
    ]
    core = [
        Product(s, s, size.head_dim, size.heads, "count", "count", kind="attention"),
        Product(s, size.head_dim, s, size.heads, "count", "count", kind="attention"),
    ]
    turned = [behind for product in (*linear, *core) for behind in product.backward()]
    if not is_plain:
        turned.append(core[0])  # a fused kernel computes the scores again

    scores = s * size.heads  # a token has so many scores
    norms, sums = ((14, 36) if is_eager and is_llama else (4, 6)), (6, 10 if is_eager else 6)
    between = {  # values that each token moves through memory: not cut, and cut by a tensor axis; forward, backward
        "whole": tuple(h * (norms[k] + sums[k] + (2 if kernels.dropout else 0)) for k in (0, 1)),
        "cut": (
            ffn * ((5 if is_eager else 3) if is_llama else 2),
            ffn * ((9 if is_eager else 5) if is_llama else 4),
        ),
    }
    rotary = ((10, 20) if is_eager else (2, 2)) if is_llama else (0, 0)
    qkv_backward = (
        2 * (h + 2 * kv) if not is_llama else 0
    )  # gradients of the parts are joined; their bias is summed
    cut: list[float] = [
        between["cut"][0] + rotary[0] * (h + kv),
        between["cut"][1] + rotary[1] * (h + kv) + qkv_backward,
    ]
    core_work, core_kept = Work(), 0.0
    if is_plain:  # scaled, masked, softmax; dropout with masks of a byte
        dropped = 2 + 1 / item if kernels.dropout else 0
        cut[0] += scores * (2 + dropped)
        cut[1] += scores * (3 + dropped)
        core_kept = scores * (item + (1 + item if kernels.dropout else 0))
        core_work = Work(
            flops=Affine(0, sum(p.flops for p in core)),
            function_bytes=Affine(0, item * s * scores * (2 + dropped)),
            products=tuple(core),
            operators=_PLAIN_OPERATORS[0],
        )

    statistics = STATISTIC_BYTES * (2 * (1 if is_llama else 2) + (0 if is_plain else size.heads))
    kept_cut = (h + 2 * kv) + h + (ffn * (4 if is_eager else 3) if is_llama else 2 * ffn)
    kept_whole = 4 * h  # each norm's result, each sum
    if is_llama and is_eager:
        kept_whole += 2 * h  # what a norm multiplies with its weight
        kept_cut += (
            h + kv
        )  # rotated queries and keys beside those that values share their memory with
    masks = 2 * h if kernels.dropout else 0  # a byte each
    cut_kept_bytes = s * (item * kept_cut + core_kept)
    operators = [
        a + (b if is_plain else 0) + (c if kernels.dropout else 0)
        for a, b, c in zip(
            _OPERATORS[size.form, kernels.elementwise],
            _PLAIN_OPERATORS,
            _DROPOUT_OPERATORS,
            strict=True,
        )
    ]

    def work(products: list[Product], direction: int) -> Work:
        return Work(
            Affine(0, sum(p.flops for p in products)),
            function_bytes=Affine(0, item * s * (between["whole"][direction] + cut[direction])),
            operators=operators[direction],
            products=tuple(products),
        )

    return Segment(
        LAYER,
        forward=work([*linear, *core], 0),
        backward=work(turned, 1),
        again=work([*linear[:-1], *core], 0),
        kept_bytes=Affine(0, s * (item * kept_whole + masks + statistics) + cut_kept_bytes),
        output_bytes=Affine(0, item * s * h),
        forward_peak_bytes=Affine(
            0, s * (item * (kept_whole + h) + masks + statistics) + cut_kept_bytes
        ),
        backward_peak_bytes=Affine(0, item * s * max(ffn, h + 2 * kv) * (2 if is_llama else 1)),
        gradients=(f"{LAYER}.matrices", f"{LAYER}.vectors"),
        repeat=size.layers,
        core=Core(core_work, Affine(0, s * core_kept)),
        tensor=TensorCut(
            Affine(0, item * s * cut[0]),
            Affine(0, item * s * cut[1]),
            Affine(0, cut_kept_bytes),
            Affine(0, item * s * h),
            forward_exchanges=2,
            backward_exchanges=2,
        ),
    )


def _embedding(size: DecoderSize, formats: Formats, names: list[str]) -> Segment:
    s, h, item = size.sequence, size.hidden, formats.activation
    moved = item * s * h * (3 if size.form == "gpt" else 1)
    return Segment(
        "",
        Work(function_bytes=Affine(0, moved + item * s * h), operators=2),
        Work(
            function_bytes=Affine(formats.gradient * size.vocab * h, 2 * item * s * h), operators=3
        ),
        kept_bytes=Affine(0, item * s * h),
        output_bytes=Affine(0, item * s * h),
        forward_peak_bytes=Affine(0, 2 * item * s * h),
        gradients=tuple(names),
        tensor=TensorCut(exchanged_bytes=Affine(0, item * s * h), forward_exchanges=1),
    )


def _head(size: DecoderSize, formats: Formats, names: list[str]) -> Segment:
    s, h, vocab, item = size.sequence, size.hidden, size.vocab, formats.activation
    product = Product(s, vocab, h, cut="columns")
    widened = item + LOSS_BYTES if item < LOSS_BYTES else 0  # to float32
    forward, backward = widened + 3 * LOSS_BYTES, widened + 5 * LOSS_BYTES
    kept = s * vocab * LOSS_BYTES
    peak = s * vocab * (item + LOSS_BYTES)
    norm = s * (item * h * (2 if size.form == "llama" else 1) + STATISTIC_BYTES * 2)
    return Segment(
        "",
        Work(
            Affine(0, product.flops),
            function_bytes=Affine(0, s * (vocab * forward + 2 * item * h)),
            operators=6,
            products=(product,),
        ),
        Work(
            Affine(0, 2 * product.flops),
            function_bytes=Affine(0, s * (vocab * backward + 3 * item * h)),
            operators=9,
            products=product.backward(),
        ),
        kept_bytes=Affine(0, norm + kept),
        output_bytes=Affine(0, 0),
        forward_peak_bytes=Affine(0, norm + kept + peak),
        backward_peak_bytes=Affine(0, peak),
        gradients=tuple(names),
        borrows=(f"{EMBEDDING}.tokens",) if size.tied else (),
        tensor=TensorCut(
            Affine(0, s * vocab * forward),
            Affine(0, s * vocab * backward),
            Affine(0, kept),
            Affine(0, item * s * h),
            backward_exchanges=1,
        ),
    )
