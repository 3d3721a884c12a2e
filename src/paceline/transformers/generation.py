"""Options of a model's `generate` on their way to ranks: JSON, as all that ranks are told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from paceline.base.errors import UsageError
from paceline.base.wire import encode

_CONFIG = "__generation_config__"


def told_generation(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `generate` as ranks can be told of them; see `heard_generation`.

    Raises:
        UsageError: names one that can't be told.
    """
    encoded = {
        name: {_CONFIG: option.to_json_string(use_diff=False)}
        if isinstance(option, GenerationConfig)
        else option
        for name, option in options.items()
    }
    for name, option in encoded.items():
        try:
            encode(option)
        except TypeError as error:
            raise UsageError(
                f"while ranks train, they can't be told of {name}= for `generate`: {error}",
                hint="evaluate() and predict() after the training take it",
            ) from error
    return encoded


def heard_generation(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `told_generation` was given."""
    return {
        name: GenerationConfig.from_dict(json.loads(option[_CONFIG]))
        if isinstance(option, Mapping) and _CONFIG in option
        else option
        for name, option in encoded.items()
    }
