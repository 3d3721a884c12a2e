"""What the tests of Keras share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from later import Later

keras, dtypes = map(Later, ("keras", "keras.src.backend.common.dtypes"))


@pytest.fixture
def real_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keras computes in float32 where it promotes types; float64 tells a bug from rounding."""
    monkeypatch.delitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64")
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])
