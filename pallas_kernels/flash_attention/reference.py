"""Flash attention and its gradients as dense formulas in float64 NumPy, written to be read: what every implementation is
compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class _Row(NamedTuple):
    """One row: where its queries and keys are, what it computes [N, queries, keys], and distances [queries, keys]."""

    queries: slice
    keys: slice
    weights: Array
    lse: Array
    cap_slope: Array
    distance: Array
    place: Array | None


def flash_attention(q: Array, k: Array, v: Array, query_starts: Array, key_starts: Array, **options: Any) -> tuple[Array, Array]:
    """The definition in `pallas_kernels.flash_attention.flash_attention`, the log-sum-exp included; options are its keyword
    arguments."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    values = np.repeat(v.astype(np.float64), q.shape[1] // v.shape[1], axis=1)
    for row in _rows(q, k, query_starts, key_starts, **options):
        out[row.queries] = np.einsum("nts,snh->tnh", row.weights, values[row.keys])
        lse[row.queries] = row.lse.T
    return out, lse


def gradients(
    q: Array, k: Array, v: Array, query_starts: Array, key_starts: Array, d_out: Array, d_lse: Array, **options: Any
) -> dict[str, Array]:
    """Gradients of sum(out * d_out) + sum(lse * d_lse), by the name of the argument."""
    group = q.shape[1] // k.shape[1]
    queries, keys, values = (x.astype(np.float64) for x in (q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)))
    found = {"q": np.zeros(q.shape), "k": np.zeros(keys.shape), "v": np.zeros(values.shape)}
    found |= {name: np.zeros(options[name].shape) for name in ("alibi_slopes", "relative_bias", "mask") if name in options}
    for row in _rows(q, k, query_starts, key_starts, **options):
        found["v"][row.keys] = np.einsum("nts,tnh->snh", row.weights, d_out[row.queries])
        d_weights = np.einsum("tnh,snh->nts", d_out[row.queries], values[row.keys])
        mean = (row.weights * d_weights).sum(axis=-1, keepdims=True)
        d_scores = row.weights * (d_weights - mean + d_lse[row.queries].T[..., None])
        if "alibi_slopes" in found:
            found["alibi_slopes"] -= (d_scores * abs(row.distance)).sum(axis=(1, 2))
        if "relative_bias" in found:
            np.add.at(found["relative_bias"], (slice(None), row.place), d_scores)
        if "mask" in found:
            part = d_scores if len(found["mask"]) > 1 else d_scores.sum(axis=0)
            found["mask"][:, row.queries, row.keys] = part
        d_scores = d_scores * row.cap_slope * options["scale"]
        found["q"][row.queries] = np.einsum("nts,snh->tnh", d_scores, keys[row.keys])
        found["k"][row.keys] = np.einsum("nts,tnh->snh", d_scores, queries[row.queries])
    return found | {name: found[name].reshape(len(k), k.shape[1], group, -1).sum(axis=2) for name in "kv"}


def _rows(
    q: Array,
    k: Array,
    query_starts: Array,
    key_starts: Array,
    *,
    causal: bool,
    scale: float,
    window: int,
    soft_cap: float,
    alibi_slopes: Array | None = None,
    relative_bias: Array | None = None,
    mask: Array | None = None,
) -> Iterator[_Row]:
    keys = np.repeat(k.astype(np.float64), q.shape[1] // k.shape[1], axis=1)
    for row in range(len(query_starts) - 1):
        mine, theirs = (slice(int(starts[row]), int(starts[row + 1])) for starts in (query_starts, key_starts))
        count, length = mine.stop - mine.start, theirs.stop - theirs.start
        if not length or not count:
            continue
        distance = (np.arange(count) + length - count)[:, None] - np.arange(length)
        scores = np.einsum("tnh,snh->nts", q[mine].astype(np.float64), keys[theirs]) * scale
        cap_slope, place = np.ones_like(scores), None
        if soft_cap:
            bent = np.tanh(scores / soft_cap)
            scores, cap_slope = soft_cap * bent, 1 - bent**2
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None] * abs(distance)
        if relative_bias is not None:
            width = relative_bias.shape[1]
            place = np.clip(distance + (0 if causal else width // 2), 0, width - 1)
            scores = scores + relative_bias[:, place]
        if mask is not None:
            scores = scores + mask[:, mine, theirs]
        hidden = (distance < 0) if causal else np.zeros(distance.shape, bool)
        if window:
            hidden = hidden | (abs(distance) >= window)
        scores = np.where(hidden, -np.inf, scores)
        peak = np.maximum(scores.max(axis=-1, keepdims=True), -1e300)
        weights = np.exp(scores - peak)
        total = weights.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = (peak + np.log(total))[..., 0]
        lse = np.where(total[..., 0] > 0, lse, -np.inf)
        yield _Row(mine, theirs, weights / np.where(total > 0, total, 1), lse, cap_slope, distance, place)
