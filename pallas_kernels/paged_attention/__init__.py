"""Causal attention of new tokens over keys and values that lie in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.dispatch import Operation
from pallas_kernels.paged_attention import xla

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

PAGED_ATTENTION = Operation("paged_attention", xla.paged_attention)


def paged_attention(
    q: Float[Array, "T N H"],
    k_cache: Float[Array, "LP K page H"],
    v_cache: Float[Array, "LP K page H"],
    page_table: Int[Array, "R M"],
    seq_lens: Int[Array, "R"],
    query_starts: Int[Array, "R+1"],
    *,
    page_offset: int | Int[Array, ""],
    scale: float,
    window: int | Int[Array, ""] = 0,
    soft_cap: float = 0.0,
    decode: bool,
    implementation: str | None = None,
) -> Float[Array, "T N H"]:
    """softmax(scale * q k^T) v for every query over the keys of its own row, up to its own position.

    Rows are packed: row r owns q[query_starts[r]:query_starts[r + 1]]. These are the last tokens of a sequence of
    seq_lens[r] tokens, whose keys and values, the new tokens' included, are already in the cache: token p lies in page
    page_table[r, p // page] + page_offset at offset p % page. Query head n reads kv head n // (N / K).

    A row with seq_lens 0 is padding. Its queries, and those from query_starts[R] on, give zeros. What lies in pages or
    slots that a row does not own, in front of the window or in the null page never reaches the output, NaN included.

    Args:
        page_offset: added to every page id; layer * P when one array holds the pages of all layers.
        window: a query at position p sees keys p - window + 1 .. p; 0 sees all. May be traced.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 leaves them.
        decode: promises that T == R and every row that is not padding has exactly one query, row r at q[r]. Static.
        implementation: name of an implementation, None to choose.

    Scores, softmax and sums are float32 whatever the dtypes; float32 operands are multiplied as float32. The result has
    q's dtype. The caches are only read.
    Raises ValueError when shapes or head counts do not fit each other.
    """
    _check(q, k_cache, v_cache, page_table, seq_lens, query_starts, decode)
    return PAGED_ATTENTION(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        query_starts,
        page_offset=page_offset,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        decode=decode,
        implementation=implementation,
    )


def _check(
    q: Array, k_cache: Array, v_cache: Array, page_table: Array, seq_lens: Array, query_starts: Array, decode: bool
) -> None:
    if q.ndim != 3 or k_cache.ndim != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            "paged_attention takes q [T, N, H] and two caches of one dtype and shape [LP, K, page, H], "
            f"got {q.shape}, {k_cache.dtype}{list(k_cache.shape)}, {v_cache.dtype}{list(v_cache.shape)}"
        )
    if q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"paged_attention: {q.shape[1]} query heads are not a multiple of {k_cache.shape[1]} kv heads")
    if q.shape[2] != k_cache.shape[3] or q.shape[2] % 2:
        raise ValueError(
            f"paged_attention: head dims of q and cache must be equal and even, got {q.shape[2]}, {k_cache.shape[3]}"
        )
    rows = page_table.shape[0]
    if page_table.ndim != 2 or seq_lens.shape != (rows,) or query_starts.shape != (rows + 1,):
        raise ValueError(
            "paged_attention takes page_table [R, M], seq_lens [R] and query_starts [R + 1], "
            f"got {page_table.shape}, {seq_lens.shape}, {query_starts.shape}"
        )
    if decode and q.shape[0] != rows:
        raise ValueError(f"paged_attention: decode has one query a row, got {q.shape[0]} queries for {rows} rows")
