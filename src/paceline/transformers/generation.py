"""Send options of a model's `generate` to ranks as JSON, as everything is sent to ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from paceline.base.codec import encode
from paceline.base.errors import UsageError

_CONFIG = "__generation_config__"


def told_generation(options: Mapping[str, Any]) -> dict[str, Any]:
    """Encode options of `generate` for ranks; see `heard_generation`.

    Raises:
        UsageError: an option can't be encoded; the message names it.
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
    """Decode the options from the result of `told_generation`."""
    return {
        name: GenerationConfig.from_dict(json.loads(option[_CONFIG]))
        if isinstance(option, Mapping) and _CONFIG in option
        else option
        for name, option in encoded.items()
    }
