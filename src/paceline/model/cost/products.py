"""The matrix products that an operator consists of, from the shapes of its tensors: of all samples of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.model.cost.profile import Product, ProductKind

aten = torch.ops.aten
SMALL = (3, 5)  # sides of kernels for which there are algorithms with fewer multiplications


def products_of(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> list[Product]:
    """Those of an operator; none of one that is not known."""
    rule = _PRODUCTS.get(operator)
    return [] if rule is None else rule(args, kwargs, result)


def _mm(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Product]:
    left, right = args[-2:]
    return [Product(left.shape[-2], right.shape[-1], left.shape[-1], math.prod(left.shape[:-2]))]


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool
) -> list[Product]:
    kind: ProductKind = "attention" if is_causal else "full attention"
    *batch, rows, width = query.shape
    return [
        Product(rows, key.shape[-2], width, math.prod(batch), kind=kind),
        Product(rows, value.shape[-1], key.shape[-2], math.prod(batch), kind=kind),
    ]


def _is_causal(args: Sequence[Any], kwargs: dict[str, Any], place: int) -> bool:
    return bool(kwargs.get("is_causal", args[place] if len(args) > place else False))


def _flash(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Product]:
    return _attention(*args[:3], is_causal=_is_causal(args, kwargs, 4))


def _flash_backward(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Product]:
    """Of both products two each; the scores are computed again."""
    ahead = _attention(*args[1:4], is_causal=_is_causal(args, kwargs, 7))
    return [*(turned for product in ahead for turned in product.backward()), ahead[0]]


def _convolved(weight: torch.Tensor, places: int, stride: Sequence[int], groups: int) -> Product:
    channels, *kernel = weight.shape
    is_small = set(kernel[1:]) <= set(SMALL) and len(set(kernel[1:])) == 1 and set(stride) == {1}
    return Product(
        places,
        channels // groups,
        math.prod(kernel),
        groups,
        kind="small convolution" if is_small else "convolution",
    )


def _convolution(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Product]:
    _, weight, _, stride, _, _, is_transposed, _, groups = args
    return [] if is_transposed else [_convolved(weight, _places(result), stride, groups)]


def _convolution_backward(
    args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> list[Product]:
    gradient, _, weight, _, stride, _, _, is_transposed, _, groups, wanted = args
    if is_transposed:
        return []
    both = _convolved(weight, _places(gradient), stride, groups).backward()
    return [product for product, is_wanted in zip(both, wanted, strict=False) if is_wanted]


def _recurrent(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Product]:
    """Of one layer and direction of an LSTM: inputs of the whole sequence together, states one after another."""
    x, weight, recurrent = args[:3]
    length, samples, _ = x.shape
    return [
        Product(length * samples, weight.shape[0], weight.shape[1], kind="recurrent"),
        Product(samples, recurrent.shape[0], recurrent.shape[1], length, kind="recurrent"),
    ]


def _recurrent_backward(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Product]:
    return [turned for product in _recurrent(args, kwargs, result) for turned in product.backward()]


def _places(tensor: torch.Tensor) -> int:
    """Of an image: samples and pixels."""
    return tensor.numel() // tensor.shape[1]


_PRODUCTS: dict[Any, Callable[[Sequence[Any], dict[str, Any], Any], list[Product]]] = {
    aten.mm: _mm,
    aten.addmm: _mm,
    aten.bmm: _mm,
    aten.baddbmm: _mm,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}
