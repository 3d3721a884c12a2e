"""Rewrite a user's scalar loss as (sum, count), as code to paste, if it is a mean of something else
than samples.

The loss's own source is rewritten where it returns a mean: by a function of torch, by `.mean()`, or
as a sum divided by a count. The rewritten loss is then tried. It is only shown if its sum divided
by its count is the loss, and if sums and counts of parts of the batch add up. It is then exact for
any cut of a batch.
"""

from __future__ import annotations

import ast
import builtins
import linecache
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# targets that they ignore by default
_COUNTED: dict[Any, int] = {F.cross_entropy: -100, F.nll_loss: -100}
_ELEMENTWISE = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
    F.soft_margin_loss,
)
_CRITERIA = {
    nn.CrossEntropyLoss: ("cross_entropy", ("weight", "ignore_index", "label_smoothing")),
    nn.NLLLoss: ("nll_loss", ("weight", "ignore_index")),
    nn.MSELoss: ("mse_loss", ()),
    nn.L1Loss: ("l1_loss", ()),
    nn.SmoothL1Loss: ("smooth_l1_loss", ("beta",)),
    nn.HuberLoss: ("huber_loss", ("delta",)),
    nn.BCELoss: ("binary_cross_entropy", ("weight",)),
    nn.BCEWithLogitsLoss: ("binary_cross_entropy_with_logits", ("weight", "pos_weight")),
}
_DEFAULTS = {
    "weight": None,
    "pos_weight": None,
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "beta": 1.0,
    "delta": 1.0,
}
_AT_LEAST = ("clamp", "clamp_min", "clip")
_SMALL = 1e-3  # the largest number that is taken for a guard against a count of 0

Pair = tuple[ast.expr, ast.expr]


def replacement(
    loss: Callable[..., Any], output: Any, target: Any, parts: list[tuple[Any, Any]]
) -> str | None:
    """Return code of a loss that returns (sum, count) and equals this one; None if none is found.

    Args:
        output, target: Of a batch, in which the loss is the mean of something.
        parts: (output, target) of the parts that the batch is cut into.
    """
    whole = float(loss(output, target))
    for code, names in _candidates(loss):
        with suppress(Exception):  # a rewritten loss that fails is not shown
            exec(compile(code, "<replacement>", "exec"), names)
            made = partial(names["loss"], names["self"]) if "self" in names else names["loss"]
            total, count = map(float, made(output, target))
            cut = [tuple(map(float, made(*part))) for part in parts]
            sums = [sum(each) for each in zip(*cut, strict=True)]
            if (
                _is_near(total / count, whole)
                and _is_near(sums[0], total)
                and _is_near(sums[1], count)
            ):
                return code
    return None


def _is_near(value: float, other: float) -> bool:
    return abs(value - other) <= 1e-4 * max(abs(value), abs(other), 1e-6)


def _candidates(loss: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield code of rewritten losses, with the names that it uses."""
    if (plain := _of_torch(loss)) is not None:
        text, names = plain
        criterion = type(loss).__name__ if isinstance(loss, nn.Module) else "partial"
        unknown = [
            name for name in names if name != "F"
        ]  # the user's file may have other names for them
        note = f"  # {' and '.join(unknown)}: what {criterion} was given" if unknown else ""
        for code, known in _rewritten(
            ast.parse(f"def loss(output, target):\n    return {text}").body[0], names
        ):
            yield code + note, known
        return
    function: Any = loss.func if isinstance(loss, partial) else loss
    of_module = isinstance(function, nn.Module)
    function = type(function).forward if of_module else getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        return
    names = {**function.__globals__, **_closure(function), "F": function.__globals__.get("F", F)}
    if isinstance(loss, partial):
        names.update(loss.keywords)
    owner = loss if of_module else getattr(loss, "__self__", None)
    if owner is not None:
        names["self"] = owner
    for node in _definitions(function.__code__):
        yield from _rewritten(node, names)


def _of_torch(loss: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the call of torch's own loss, which is given as it is, as a module, or with arguments
    by `partial`.
    """
    function, keywords = (
        (loss.func, dict(loss.keywords))
        if isinstance(loss, partial) and not loss.args
        else (loss, {})
    )
    if type(function) in _CRITERIA and not keywords:
        name, attributes = _CRITERIA[type(function)]
        keywords = {key: getattr(function, key) for key in attributes}
    elif function in _COUNTED or function in _ELEMENTWISE:
        name = function.__name__
    else:
        return None
    names: dict[str, Any] = {"F": F}
    words = []
    for key, value in keywords.items():
        if isinstance(value, torch.Tensor):
            names[key] = value
            words.append(f"{key}={key}")  # a tensor of the user's is shown by its name
        elif key != "reduction" and value != _DEFAULTS.get(key):
            words.append(f"{key}={value!r}")
    return f"F.{name}({', '.join(['output', 'target', *words])})", names


def _closure(function: Any) -> dict[str, Any]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return {name: cell.cell_contents for name, cell in cells.items()}


def _definitions(code: Any) -> Iterator[Any]:
    """Yield the function's definition from its file's source; for a lambda, each lambda on its
    line.
    """
    source = "".join(linecache.getlines(code.co_filename))
    with suppress(SyntaxError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                if node.name == code.co_name and first == code.co_firstlineno:
                    yield node
            elif (
                isinstance(node, ast.Lambda)
                and code.co_name == "<lambda>"
                and node.lineno == code.co_firstlineno
            ):
                yield _defined(node.args, [ast.Return(node.body)])


def _defined(arguments: ast.arguments, body: list[ast.stmt]) -> ast.FunctionDef:
    """Return the definition of a function `loss` with these arguments and this body."""
    made = ast.parse("def loss(): pass").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.args, made.body = arguments, body
    return made


def _rewritten(node: Any, names: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the definition whose last return gives (sum, count)."""
    body = list(node.body)
    if not isinstance(body[-1], ast.Return) or body[-1].value is None:
        return
    value = body[-1].value
    if isinstance(value, ast.Name):  # loss = ...; return loss
        assigned = [
            each
            for each in body
            if isinstance(each, ast.Assign)
            and len(each.targets) == 1
            and isinstance(each.targets[0], ast.Name)
            and each.targets[0].id == value.id
        ]
        if len(assigned) != 1:
            return
        value = assigned[0].value
        body.remove(assigned[0])
    if (pair := _pair(value, names)) is None:
        return
    body[-1] = ast.Return(ast.Tuple(list(pair), ast.Load()))
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:] or body  # its docstring
    plain = [
        ast.arg(each.arg) for each in node.args.args
    ]  # without annotations, whose names it may not see
    made = _defined(ast.arguments([], plain, None, [], [], None, node.args.defaults), body)
    yield ast.unparse(ast.fix_missing_locations(ast.Module([made], []))), dict(names)


def _pair(value: ast.expr, names: dict[str, Any]) -> Pair | None:
    """Return expressions of a sum and a count whose quotient is the given expression."""
    if isinstance(value, ast.BinOp):
        if isinstance(value.op, ast.Div):
            inner = _pair(value.left, names) if isinstance(value.right, ast.Constant) else None
            if inner is not None:
                return ast.BinOp(inner[0], value.op, value.right), inner[1]
            return value.left, _count(value.right)
        if isinstance(value.op, ast.Mult):  # a factor
            for factor, rest, is_left in (
                (value.left, value.right, True),
                (value.right, value.left, False),
            ):
                if (pair := _pair(rest, names)) is not None:
                    left, right = (factor, pair[0]) if is_left else (pair[0], factor)
                    return ast.BinOp(left, value.op, right), pair[1]
        return None
    if isinstance(value, ast.UnaryOp) and (pair := _pair(value.operand, names)) is not None:
        return ast.UnaryOp(value.op, pair[0]), pair[1]
    return _pair_of_call(value, names) if isinstance(value, ast.Call) else None


def _pair_of_call(call: ast.Call, names: dict[str, Any]) -> Pair | None:
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("mean", "div", "divide"):
        owner = _value(call.func.value, names)
        parts = [*([] if owner is torch else [call.func.value]), *call.args]
        if call.keywords or len(parts) != (1 if call.func.attr == "mean" else 2):
            return None
        if call.func.attr != "mean":
            return parts[0], _count(parts[1])
        return _method(parts[0], "sum"), _method(parts[0], "numel")
    function = _value(call.func, names)
    keywords = {word.arg: word.value for word in call.keywords if word.arg}
    if type(function) in _CRITERIA:
        name, attributes = _CRITERIA[type(function)]
        for key in attributes:
            if (setting := getattr(function, key)) is not None and not _is_default(key, setting):
                keywords[key] = (
                    ast.Attribute(call.func, key, ast.Load())
                    if isinstance(setting, torch.Tensor)
                    else ast.Constant(setting)
                )
        call = ast.Call(ast.Attribute(ast.Name("F", ast.Load()), name, ast.Load()), call.args, [])
        function = getattr(F, name)
    summed = {
        **{
            key: word
            for key, word in keywords.items()
            if key not in ("reduction", "size_average", "reduce")
        },
        "reduction": ast.Constant("sum"),
    }
    total = ast.Call(call.func, call.args, [ast.keyword(key, word) for key, word in summed.items()])
    if function in _ELEMENTWISE and call.args:
        return total, _method(call.args[0], "numel")
    if function in _COUNTED and (len(call.args) > 1 or "target" in keywords):
        target = call.args[1] if len(call.args) > 1 else keywords["target"]
        weight = call.args[2] if len(call.args) > 2 else keywords.get("weight")
        ignored = keywords.get("ignore_index", ast.Constant(_COUNTED[function]))
        kept = ast.Compare(target, [ast.NotEq()], [ignored])
        if weight is None or (isinstance(weight, ast.Constant) and weight.value is None):
            return total, ast.Call(ast.Attribute(kept, "sum", ast.Load()), [], [])
        return total, _method(
            ast.Subscript(weight, ast.Subscript(target, kept, ast.Load()), ast.Load()), "sum"
        )
    return None


def _is_default(key: str, setting: Any) -> bool:
    return not isinstance(setting, torch.Tensor) and setting == _DEFAULTS[key]


def _count(value: ast.expr) -> ast.expr:
    """Return a divisor without the part that keeps it from being 0, because a count of 0 says that
    nothing counts.
    """
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in _AT_LEAST
    ):
        return value.func.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "max":
        return next((each for each in value.args if not isinstance(each, ast.Constant)), value)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        for small, rest in ((value.right, value.left), (value.left, value.right)):
            if (
                isinstance(small, ast.Constant)
                and isinstance(small.value, float)
                and abs(small.value) <= _SMALL
            ):
                return rest
    return value


def _method(value: ast.expr, name: str) -> ast.expr:
    return ast.Call(ast.Attribute(value, name, ast.Load()), [], [])


def _value(expression: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of a name or an attribute in the loss; None if it is not known before the
    loss runs.
    """
    if isinstance(expression, ast.Name):
        return names.get(expression.id, getattr(builtins, expression.id, None))
    if isinstance(expression, ast.Attribute):
        return getattr(_value(expression.value, names), expression.attr, None)
    return None
