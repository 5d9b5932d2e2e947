"""Ranges of weights by the rules of `Observer`, in bounded memory. What is done with them is quantisation's."""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Array, Float

from llmjax.quantization.observers import Observer, Rule
from llmjax.quantization.summaries import observe

_ROWS_AT_ONCE = 1024  # rows whose histograms are held


def weight_ranges(
    name: str, weight: Float[Array, "out in"], rule: Rule, *, granularity: Literal["tensor", "channel"], percent: float = 99.9
) -> np.ndarray:
    """The magnitude that becomes 127: float32 [out] for channels (rows), [1] for the tensor; 0 for nothing but zeros.

    `percent` is read by the rule "percentile" alone. Raises `NonFiniteError` by this name for NaN or infinity, and `ConfigError`
    as `Observer.range` does.
    """
    whole = Observer("tensor")
    ranges = []
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        rows = weight[first : first + _ROWS_AT_ONCE]
        if granularity == "tensor":
            observe(whole, rows, name)
        else:
            block = Observer(granularity, len(rows))
            observe(block, rows, name, channel_axis=0)
            ranges.append(block.range(rule, percent=percent))
    return np.concatenate(ranges) if ranges else whole.range(rule, percent=percent)
