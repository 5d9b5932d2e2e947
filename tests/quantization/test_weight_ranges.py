"""Ranges of weights against the exact ones, over blocks of rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.errors import NonFiniteError
from llmjax.quantization import weight_ranges as module
from llmjax.quantization.log_bins import RELATIVE_ERROR
from llmjax.quantization.weight_ranges import weight_ranges


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_they_are_those_of_the_rows(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 4)
    random = np.random.default_rng(0)
    weight = (random.standard_normal((10, 700)) * np.exp(random.standard_normal((10, 1)))).astype(np.float32)
    weight[5] = 0
    exact = np.abs(weight.astype(np.float64)).reshape(1 if granularity == "tensor" else 10, -1)
    got = weight_ranges("w", jnp.asarray(weight), "absmax", granularity=granularity)
    np.testing.assert_array_equal(got, exact.max(1))
    got = weight_ranges("w", jnp.asarray(weight), "percentile", granularity=granularity, percent=99)
    want = np.percentile(exact, 99, axis=1, method="inverted_cdf")
    assert (got >= want).all()
    assert (got <= want * (1 + RELATIVE_ERROR)).all()
    got = weight_ranges("w", jnp.asarray(weight), "mse", granularity=granularity)
    assert ((got > 0.3 * exact.max(1)) | (exact.max(1) == 0)).all()
    assert (got <= exact.max(1)).all()
    weight[9, 3] = np.nan
    with pytest.raises(NonFiniteError, match=r"layers\.0\.w: 1 values"):
        weight_ranges("layers.0.w", jnp.asarray(weight), "absmax", granularity=granularity)
