"""Paged attention in float64 NumPy, written to be read: what every implementation is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    page_table: Array,
    seq_lens: Array,
    query_starts: Array,
    *,
    page_offset: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Array | None = None,
    relative_bias: Array | None = None,
) -> Array:
    """The definition in `pallas_kernels.paged_attention.paged_attention`, one query and head at a time; float64."""
    out = np.zeros(q.shape, np.float64)
    group = q.shape[1] // k_cache.shape[1]
    page = k_cache.shape[2]
    for row, length in enumerate(seq_lens):
        if length == 0:
            continue
        token = np.arange(length)
        slots = (page_table[row, token // page] + page_offset, slice(None), token % page)
        keys, values = k_cache[slots].astype(np.float64), v_cache[slots].astype(np.float64)
        first, end = query_starts[row], query_starts[row + 1]
        for index in range(first, end):
            position = length - (end - index)
            seen = slice(max(0, position - window + 1) if window else 0, position + 1)
            for head in range(q.shape[1]):
                scores = scale * keys[seen, head // group] @ q[index, head].astype(np.float64)
                if soft_cap:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                distance = position - token[seen]
                if alibi_slopes is not None:
                    scores = scores - alibi_slopes[head] * distance
                if relative_bias is not None:
                    scores = scores + relative_bias[head, np.minimum(distance, relative_bias.shape[1] - 1)]
                weights = np.exp(scores - scores.max())
                out[index, head] = weights / weights.sum() @ values[seen, head // group]
    return out
