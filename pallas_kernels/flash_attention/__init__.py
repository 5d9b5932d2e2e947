"""Attention of packed, ragged queries over contiguous keys and values, with gradients."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Operation
from pallas_kernels.flash_attention import mosaic, xla, xla_gradient
from pallas_kernels.flash_attention.xla import Biases, Rows

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

FLASH_ATTENTION = Operation("flash_attention", xla.flash_attention)
FLASH_ATTENTION.register(
    "mosaic",
    mosaic.flash_attention,
    shape_key=mosaic.shape_key,
    config_type=mosaic.Config,
    candidates=mosaic.candidates,
    untuned=True,
)


def flash_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    query_starts: Int[Array, "R+1"] | None = None,
    key_starts: Int[Array, "R+1"] | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | Int[Array, ""] = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Float[Array, "N"] | None = None,
    relative_bias: Float[Array, "N W"] | None = None,
    mask: Float[Array, "M T S"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:
    """softmax(scale * q k^T) v for every query over the keys of its own row: [T, N, H] in q's dtype.

    Rows are packed: row r owns q[query_starts[r]:query_starts[r + 1]] and k, v[key_starts[r]:key_starts[r + 1]]. Its last query
    stands at its last key, so that with more keys than queries the first ones are a prefix. Query head n reads kv head
    n // (N / K). Memory beyond operands and results does not grow with T * S (Dao et al., FlashAttention, 2022), in the
    gradient neither.

    Queries from query_starts[R] on, and those of a row without keys, give zeros; so do queries that see no key. NaN in one row
    never reaches another.

    Args:
        query_starts, key_starts: nondecreasing, from 0; None is one row of everything. In a row with fewer keys than queries
            the first queries stand in front of its first key.
        causal: a query sees no key behind its own position.
        scale: None takes 1 / sqrt(H). Static.
        window: a query at position p sees keys p - window + 1 .. p, and without `causal` also p + 1 .. p + window - 1; 0 sees
            all. May be traced.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 leaves them. Biases and masks come after it. Static.
        alibi_slopes: scores become score - slope[n] * |query position - key position| (Press et al., ALiBi, 2021).
        relative_bias: scores become score + bias[n, min(distance, W - 1)] with distance = query position - key position, in the
            units of a scaled score (Raffel et al., T5, 2020; its buckets are spelt out over the distances by the caller).
            Without `causal` distances have a sign: W is odd, the middle belongs to 0, and those beyond either end to that end.
        mask: added to the scores; M is 1 or N, -inf hides a key. T and S are the packed ones: what lies between two rows is not
            read.
        return_lse: also returns the logarithm of the sum of exp(score), float32 [T, N], in which results over different keys
            can be combined; -inf where no key was seen. Static.
        implementation: name of an implementation of the forward pass, None to choose.

    Differentiable (reverse mode) in q, k, v, alibi_slopes, relative_bias and mask, also through the log-sum-exp; the backward
    pass recomputes the scores block by block. Works under `jit` and `vmap`.

    Scores, softmax and sums are float32 whatever the dtypes; float32 operands are multiplied as float32.
    Raises ValueError when shapes do not fit each other.
    """
    query_starts, key_starts = _starts(query_starts, len(q)), _starts(key_starts, len(k))
    _check(q, k, v, query_starts, key_starts)
    _check_biases(q, k, causal, alibi_slopes, relative_bias, mask)
    if not len(q) or not len(k):
        return (jnp.zeros_like(q), jnp.full(q.shape[:2], -jnp.inf)) if return_lse else jnp.zeros_like(q)
    rows = Rows(query_starts, key_starts, jnp.asarray(window, jnp.int32))
    options = (
        ("causal", causal),
        ("scale", q.shape[-1] ** -0.5 if scale is None else float(scale)),
        ("soft_cap", float(soft_cap)),
    )
    biases = Biases(alibi_slopes, relative_bias, mask)
    return _attend(q, k, v, biases, rows, options, return_lse, implementation)


_Options = tuple[tuple[str, bool | float], ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend(
    q: Array, k: Array, v: Array, biases: Biases, rows: Rows, options: _Options, return_lse: bool, implementation: str | None
) -> Any:
    return FLASH_ATTENTION(q, k, v, biases, rows, **dict(options), return_lse=return_lse, implementation=implementation)


def _forward(
    q: Array, k: Array, v: Array, biases: Biases, rows: Rows, options: _Options, return_lse: bool, implementation: str | None
) -> tuple[Any, Any]:
    out, lse = FLASH_ATTENTION(q, k, v, biases, rows, **dict(options), return_lse=True, implementation=implementation)
    return (out, lse) if return_lse else out, (q, k, v, biases, rows, out, lse)


def _backward(options: _Options, return_lse: bool, implementation: str | None, saved: Any, cotangent: Any) -> tuple[Any, ...]:
    del implementation  # there is one backward pass for all forward ones
    q, k, v, biases, rows, out, lse = saved
    d_out, d_lse = cotangent if return_lse else (cotangent, None)
    gradients = xla_gradient.gradients(q, k, v, biases, rows, out, lse, d_out, d_lse, **dict(options))
    return *gradients, None


_attend.defvjp(_forward, _backward)


def _starts(starts: Array | None, size: int) -> Array:
    return jnp.array([0, size], jnp.int32) if starts is None else jnp.asarray(starts, jnp.int32)


def _check(q: Array, k: Array, v: Array, query_starts: Array, key_starts: Array) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(
            "flash_attention takes q [T, N, H] and k, v of one dtype and shape [S, K, H], "
            f"got {q.shape}, {k.dtype}{list(k.shape)}, {v.dtype}{list(v.shape)}; for a batch of equal lengths use jax.vmap"
        )
    if q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"flash_attention: {q.shape[1]} query heads of {q.shape[2]} do not go with {k.shape[1]} kv heads of {k.shape[2]}: "
            "a multiple of heads and the same head dim"
        )
    if query_starts.ndim != 1 or query_starts.shape != key_starts.shape or len(query_starts) < 2:
        raise ValueError(
            f"flash_attention takes query_starts and key_starts [R + 1] of the same rows, got {query_starts.shape} and "
            f"{key_starts.shape}"
        )


def _check_biases(q: Array, k: Array, causal: bool, slopes: Array | None, table: Array | None, mask: Array | None) -> None:
    heads = q.shape[1]
    if slopes is not None and slopes.shape != (heads,):
        raise ValueError(f"flash_attention takes alibi_slopes [N] for {heads} heads, got {slopes.shape}")
    if table is not None and (table.ndim != 2 or table.shape[0] != heads or table.shape[1] == 0):
        raise ValueError(f"flash_attention takes relative_bias [N, W] for {heads} heads, got {table.shape}")
    if table is not None and not causal and table.shape[1] % 2 == 0:
        raise ValueError(
            f"flash_attention without causal takes a relative_bias of odd width, its middle for distance 0, got {table.shape[1]}"
        )
    if mask is not None and (mask.ndim != 3 or mask.shape[0] not in (1, heads) or mask.shape[1:] != (len(q), len(k))):
        raise ValueError(f"flash_attention takes mask [1 or {heads}, {len(q)}, {len(k)}], got {mask.shape}")
