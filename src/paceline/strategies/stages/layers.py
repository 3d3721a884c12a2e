"""The profile of a captured model as repeated layers. It can be cut anywhere without another
capture.

Consecutive equal pieces are one segment, so that a plan for thousands of devices is priced in
milliseconds. Figures are lines through two captures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.model.cost.profile import (
    Affine,
    Parameter,
    Product,
    Profile,
    Segment,
    TensorCut,
    Work,
    folded,
    growing_figures,
)
from paceline.strategies.stages.assignment import EXAMPLE_SAMPLES
from paceline.strategies.stages.price import LOSS, SplitJob

SAMPLES = (EXAMPLE_SAMPLES, 2 * EXAMPLE_SAMPLES)  # of the two captures
# Each rank of a tensor axis is assumed to keep 4x and to move 10x a transformer layer's output
# without splitting it: norms, sums and their inputs. Counted for
# `benchmarks/models/transformer.py`; a rough figure for other layers.
WHOLE_KEPT, WHOLE_MOVED = 4, 10
TENSOR_NOTE = (
    "tensor=N: every matrix that can be is taken to be split, and a layer to exchange its output once, or "
    "twice if it has attention"
)


def layered(split: SplitJob) -> Profile:
    """Return the job's profile, cut at its modules.

    Raises:
        ValueError: the model has different pieces for another number of samples.
    """
    (small, first), (large, second) = (split.priced(samples) for samples in SAMPLES)
    if [piece.key for piece in small.pieces] != [piece.key for piece in large.pieces]:
        raise ValueError("the model is in other pieces for another number of samples")
    known = {p.name: p for p in split.whole.parameters}
    # Place of a parameter in the model, independent of the piece that uses it first.
    places = {name: place for place, name in enumerate(known)}
    units = set(split.whole.units) or {piece.key for piece in split.pieces if piece.parameters}
    used: set[str] = set()
    segments: list[Segment] = []
    parameters: list[Parameter] = []
    for piece in split.pieces:
        unit = piece.key if piece.key in units else ""
        first_used = sorted(
            (known[name] for name in set(piece.parameters) - used), key=lambda p: places[p.name]
        )
        line = _line(first[piece.key], second[piece.key])
        segments.append(
            replace(
                line,
                unit=unit,
                gradients=tuple(p.name for p in first_used if p.trainable),
                borrows=(
                    *(name for name in dict.fromkeys(piece.parameters) if name in used),
                    *(p.name for p in first_used if not p.trainable),
                ),
                tensor=_cut(line) if unit else None,
            )
        )
        # Matrices are split. Rounding up if a side doesn't divide changes little.
        parameters += [replace(p, unit=unit, is_cut=p.num_bytes > p.rows * 8) for p in first_used]
        used.update(piece.parameters)
    segments.append(replace(_line(first[LOSS], second[LOSS]), unit=""))
    return folded(
        replace(
            split.whole,
            parameters=tuple(parameters),
            segments=tuple(s for s in segments if s != Segment()),
            is_layered=True,
            notes=(*split.whole.notes, TENSOR_NOTE),
        )
    )


def _cut(segment: Segment) -> TensorCut | None:
    kinds = {product.kind for product in segment.forward.products} - {"recurrent"}
    if not kinds:
        return None
    exchanges = 2 if kinds & {"attention", "full attention"} else 1
    return TensorCut(
        _less(segment.forward.function_bytes, segment.output_bytes, WHOLE_MOVED),
        _less(segment.backward.function_bytes, segment.output_bytes, WHOLE_MOVED),
        _less(segment.kept_bytes, segment.output_bytes, WHOLE_KEPT),
        segment.output_bytes,
        forward_exchanges=exchanges,
        backward_exchanges=exchanges,
    )


def _less(figure: Affine, output: Affine, times: int) -> Affine:
    """Return the part of a figure that is split: the figure without `times` the output.

    The fixed part stays, because it belongs to the matrices, like their casts.
    """
    return Affine(max(0.0, figure.fixed), max(0.0, figure.per_sample - times * output.per_sample))


def _line(first: Segment, second: Segment) -> Segment:
    """Return a segment with figures that grow with the samples, as accelerators need them.

    All work that waits for memory is one figure.
    """

    def work(separate: Work) -> Work:
        moved, functions = separate.moved_bytes, separate.function_bytes
        return Work(
            separate.flops,
            operators=separate.operators,
            products=_cut_products(separate.products),
            function_bytes=Affine(
                moved.fixed + functions.fixed, moved.per_sample + functions.per_sample
            ),
        )

    line = growing_figures(first, second, samples=SAMPLES)
    return replace(
        line,
        forward=work(line.forward),
        backward=work(line.backward),
        again=line.again and work(line.again),
        core=line.core and replace(line.core, forward=work(line.core.forward)),
    )


def _cut_products(products: Sequence[Product]) -> tuple[Product, ...]:
    """Return products with the side along which ranks cut them.

    Attention is cut by heads, and recurrent layers are not cut. Other products are cut along a side
    that does not grow with the samples.
    """
    return tuple(
        p
        if p.kind == "recurrent"
        else replace(
            p,
            cut="count"
            if p.kind in ("attention", "full attention")
            else "columns"
            if p.grows != "columns"
            else "inner",
        )
        for p in products
    )
