"""Causal attention of new tokens over keys and values that lie in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.dispatch import Operation
from pallas_kernels.flash_attention import mosaic as flash
from pallas_kernels.paged_attention import apart, mosaic, xla
from pallas_kernels.quantized_pages import QuantizedPages, check_cache

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

PAGED_ATTENTION = Operation("paged_attention", xla.paged_attention)
PAGED_ATTENTION.register(
    "mosaic",
    mosaic.paged_attention,
    shape_key=mosaic.shape_key,
    config_type=mosaic.Config,
    candidates=mosaic.candidates,
    untuned=True,
)
# The same kernel on int8 pages, chosen only where the table says so of them.
PAGED_ATTENTION.register(
    "mosaic_int8",
    mosaic.paged_attention,
    shape_key=mosaic.int8_shape_key,
    config_type=mosaic.Config,
    candidates=mosaic.candidates,
)
# Few queries a row are bound by reading their keys, which splits among CTAs; many are bound by multiplying: another kernel.
PAGED_ATTENTION.register(
    "flash",
    flash.paged_attention,
    shape_key=flash.paged_shape_key,
    config_type=flash.Config,
    candidates=flash.candidates,
    untuned=True,
)
# A launch of both has both kernels, where the table says that it pays.
PAGED_ATTENTION.register(
    "apart",
    apart.via(PAGED_ATTENTION),
    shape_key=flash.paged_shape_key,
    config_type=flash.Config,
    candidates=flash.candidates,
)


def paged_attention(
    q: Float[Array, "T N H"],
    k_cache: Float[Array, "LP K page H"] | QuantizedPages,
    v_cache: Float[Array, "LP K page H"] | QuantizedPages,
    page_table: Int[Array, "R M"],
    seq_lens: Int[Array, "R"],
    query_starts: Int[Array, "R+1"],
    *,
    page_offset: int | Int[Array, ""],
    scale: float,
    window: int | Int[Array, ""] = 0,
    soft_cap: float = 0.0,
    decode: bool,
    max_queries: int = 0,
    alibi_slopes: Float[Array, "N"] | None = None,
    relative_bias: Float[Array, "N W"] | None = None,
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
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 leaves them. What depends on positions comes after it: the
            two biases (as in FlashAttention, which caps the product of q and k alone) and the masks.
        decode: promises that T == R and every row that is not padding has exactly one query, row r at q[r]. Static.
        max_queries: promises that no row has more queries, as in a batch that verifies drafts; 0 promises nothing. Static.
        alibi_slopes: scores become score - slope[n] * (query position - key position) (Press et al., ALiBi, 2021).
        relative_bias: scores become score + bias[n, min(query position - key position, W - 1)], in the units of a scaled score
            (Raffel et al., T5, 2020; its buckets are spelt out over the distances by the caller).
        implementation: name of an implementation, None to choose.

    Scores, softmax and sums are float32 whatever the dtypes; float32 operands are multiplied as float32. The result has
    q's dtype. The caches are only read. Quantised pages are multiplied in q's dtype, in which every int8 is exact: q takes the
    factors of the channels of keys, a score the scale of its key, and a weight that of its value.
    Raises ValueError when shapes or head counts do not fit each other.
    """
    _check(q, k_cache, v_cache, page_table, seq_lens, query_starts, decode)
    _check_biases(q.shape[1], decode, max_queries, alibi_slopes, relative_bias)
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
        max_queries=max_queries,
        alibi_slopes=alibi_slopes,
        relative_bias=relative_bias,
        implementation=implementation,
    )


def _check(
    q: Array,
    k_cache: Array | QuantizedPages,
    v_cache: Array | QuantizedPages,
    page_table: Array,
    seq_lens: Array,
    query_starts: Array,
    decode: bool,
) -> None:
    if q.ndim != 3 or k_cache.ndim != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            "paged_attention takes q [T, N, H] and two caches of one dtype and shape [LP, K, page, H], "
            f"got {q.shape}, {k_cache.dtype}{list(k_cache.shape)}, {v_cache.dtype}{list(v_cache.shape)}"
        )
    for cache in (k_cache, v_cache):
        check_cache("paged_attention", cache)
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


def _check_biases(heads: int, decode: bool, max_queries: int, alibi_slopes: Array | None, relative_bias: Array | None) -> None:
    if max_queries < 0 or (decode and max_queries > 1):
        raise ValueError(f"paged_attention: max_queries is positive, or 0, and with decode at most 1, got {max_queries}")
    if alibi_slopes is not None and alibi_slopes.shape != (heads,):
        raise ValueError(f"paged_attention takes alibi_slopes [N] for {heads} heads, got {alibi_slopes.shape}")
    if relative_bias is not None and (relative_bias.ndim != 2 or relative_bias.shape[0] != heads or relative_bias.shape[1] == 0):
        raise ValueError(f"paged_attention takes relative_bias [N, W] for {heads} heads, got {relative_bias.shape}")
