"""Flash attention on NVIDIA GPUs, over contiguous keys and over pages: what the kernel serves, with which sizes, its operands.

Owns the configuration and the plan that follows from it and the shapes; the device code is `mosaic_kernel`. Must not know what
was measured: `tuning` keeps that, and dispatch asks it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.attention_sizes import PAGES, SHARED_BYTES
from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.flash_attention.mosaic_plan import ALIGN, Operands, Plan, bias_strips, ordered, slope_rows
from pallas_kernels.flash_attention.tiles import cut
from pallas_kernels.flash_attention.xla import Biases, Rows

if TYPE_CHECKING:
    from jax import Array

HEAD_DIMS = (64, 128, 192, 256)
"""Single rows of results leave by the copy engine, which wants them at 128 bytes: not 80 and 96."""

MAX_BIAS = 1024
"""Distances with a relative bias of their own: they are written out for each tile row."""

MOST_TOKENS = 8192
"""More than these are tuned as these: each of the CTAs has hundreds of tiles by then."""

INTERPRETED_CTAS = 3


class Config(NamedTuple):
    """How the kernel cuts its work.

    Attributes:
        keys: keys of a block, 64 or 128.
        stages: blocks in flight.
        q_stages: query tiles in flight, 1 or 2. With one, a CTA has its results copied out before it fetches the next queries.
        heads: query heads of a kv head that share a query tile of 64 rows; divides them, and is a power of two.
    """

    keys: int
    stages: int
    q_stages: int
    heads: int


class Shape(NamedTuple):
    """What a configuration is chosen by; the fields of the tuning key.

    Attributes:
        tokens: T. rows: R. heads, kv_heads, head_dim: N, K, H.
        page: tokens of a page; 0 if the keys are contiguous.
        context: tokens for which a row of the page table has room, or S.
        causal, bias: whether it is, and whether there is a relative bias.
    """

    tokens: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    context: int
    causal: int
    bias: int


def _key(shape: Shape) -> dict[str, int]:
    return shape._replace(tokens=min(shape.tokens, MOST_TOKENS))._asdict()


# ---- contiguous keys: an implementation of flash_attention


def shape_key(
    q: Array, k: Array, v: Array, biases: Biases, rows: Rows, *, causal: bool, scale: float, soft_cap: float, return_lse: bool
) -> dict[str, int]:
    """The tuning key of a call. Raises UnsupportedShape where `flash_attention` does."""
    return _key(_contiguous(q, k, biases, rows, causal, scale))


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    biases: Biases,
    rows: Rows,
    *,
    causal: bool,
    scale: float,
    soft_cap: float,
    return_lse: bool,
    config: Config | None = None,
) -> Any:
    """See `pallas_kernels.flash_attention.flash_attention`; bfloat16, no mask.

    Weights are rounded to bfloat16 before they multiply the values. `config` None takes `default_config`.
    Raises UnsupportedShape for what the kernel or the configuration cannot serve.
    """
    shape = _contiguous(q, k, biases, rows, causal, scale)
    config = _checked(shape, config)
    out, lse = _attend(
        q,
        k,
        v,
        rows.key_starts[:-1],
        jnp.diff(rows.key_starts),
        rows.query_starts,
        jnp.zeros((1,), jnp.int32),
        rows.window.reshape(1),
        biases.slopes,
        biases.table,
        plan=_plan(shape, config, biases.table, lse=return_lse),
        scale=scale,
        soft_cap=soft_cap,
    )
    return (out, lse) if return_lse else out


def _contiguous(q: Array, k: Array, biases: Biases, rows: Rows, causal: bool, scale: float) -> Shape:
    if biases.mask is not None:
        raise UnsupportedShape("no additive mask")
    if not causal and (biases.slopes is not None or biases.table is not None):
        raise UnsupportedShape("biases by distance only where causal")
    return _shape(q, k, len(rows.key_starts) - 1, 0, k.shape[0], causal, biases.table, scale)


# ---- paged keys: an implementation of paged_attention, for rows of any number of queries


def paged_shape_key(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    page_table: Array,
    seq_lens: Array,
    query_starts: Array,
    *,
    page_offset: int | Array,
    scale: float,
    window: int | Array = 0,
    soft_cap: float = 0.0,
    decode: bool,
    max_queries: int = 0,
    alibi_slopes: Array | None = None,
    relative_bias: Array | None = None,
) -> dict[str, int]:
    """The tuning key of a call. Raises UnsupportedShape where `paged_attention` does."""
    return _key(_paged(q, k_cache, page_table, decode, max_queries, relative_bias, scale))


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    page_table: Array,
    seq_lens: Array,
    query_starts: Array,
    *,
    page_offset: int | Array,
    scale: float,
    window: int | Array = 0,
    soft_cap: float = 0.0,
    decode: bool,
    max_queries: int = 0,
    alibi_slopes: Array | None = None,
    relative_bias: Array | None = None,
    config: Config | None = None,
) -> Array:
    """See `pallas_kernels.paged_attention.paged_attention`; bfloat16, calls that promise nothing about a row's queries.

    Weights are rounded to bfloat16 before they multiply the values. `config` None takes `default_config`.
    Raises UnsupportedShape for what the kernel or the configuration cannot serve.
    """
    shape = _paged(q, k_cache, page_table, decode, max_queries, relative_bias, scale)
    config = _checked(shape, config)
    out, _ = _attend(
        q,
        k_cache.reshape(-1, shape.head_dim),
        v_cache.reshape(-1, shape.head_dim),
        page_table,
        seq_lens,
        query_starts,
        jnp.asarray(page_offset, jnp.int32).reshape(1),
        jnp.asarray(window, jnp.int32).reshape(1),
        alibi_slopes,
        relative_bias,
        plan=_plan(shape, config, relative_bias, lse=False),
        scale=scale,
        soft_cap=soft_cap,
    )
    result: Array = out
    return result


def _paged(
    q: Array, k_cache: Array, page_table: Array, decode: bool, max_queries: int, relative_bias: Array | None, scale: float
) -> Shape:
    if decode or max_queries:
        raise UnsupportedShape("calls that promise few queries a row have a kernel of their own")
    page = k_cache.shape[2]
    if page not in PAGES:
        raise UnsupportedShape(f"pages of {', '.join(map(str, PAGES))} tokens, got {page}")
    rows, pages = page_table.shape
    return _shape(q, k_cache, rows, page, pages * page, True, relative_bias, scale)


# ---- both


def candidates(key: Mapping[str, int | str]) -> list[Config]:
    """Configurations worth timing for a tuning key, the default first: other blocks, depths, and heads a tile."""
    shape = Shape(**{name: int(value) for name, value in key.items()})
    found = [default_config(shape)]
    for keys in (128, 64):
        for q_stages in (2, 1):
            for heads in _heads(shape):
                config = _deepened(shape, Config(keys, 1, q_stages, heads))
                shallow = config._replace(stages=2)
                for one in (config, shallow):
                    if one not in found and one.stages > 1 and _reason(shape, one) is None:
                        found.append(one)
    return found


def default_config(shape: Shape) -> Config:
    """A configuration by rule: as many heads a tile as can be, blocks of 128 keys up to head dim 128, and of 64 beyond, where
    the accumulators leave no registers for more."""
    keys = 128 if shape.head_dim <= 128 else 64
    return _deepened(shape, Config(keys, 1, 2 if shape.head_dim <= 128 else 1, _heads(shape)[0]))


def _heads(shape: Shape) -> list[int]:
    """Heads that can share a tile, the most first."""
    members = shape.heads // shape.kv_heads
    return [heads for heads in (8, 4, 2, 1) if members % heads == 0]


def _deepened(shape: Shape, config: Config) -> Config:
    """With the most stages that fit into shared memory, at least two and at most four."""
    fits = [n for n in (2, 3, 4) if _plan(shape, config._replace(stages=n), None, lse=False).shared_bytes <= SHARED_BYTES]
    return config._replace(stages=max(fits, default=2))


@functools.partial(jax.jit, static_argnames=("plan", "scale", "soft_cap"))
def _attend(
    q: Array,
    k: Array,
    v: Array,
    places: Array,
    lengths: Array,
    query_starts: Array,
    page_offset: Array,
    window: Array,
    alibi_slopes: Array | None,
    relative_bias: Array | None,
    *,
    plan: Plan,
    scale: float,
    soft_cap: float,
) -> tuple[Array, Array | None]:
    """Jitted so that a model lowers the kernel once, not once a layer."""
    from pallas_kernels.flash_attention.mosaic_kernel import attend  # imports Mosaic, which takes seconds: only where it is used

    query_starts, lengths = query_starts.astype(jnp.int32), lengths.astype(jnp.int32)
    tokens = len(q)
    tiles, count = cut(query_starts, lengths, plan.tile_tokens, tokens, ALIGN)
    order = ordered(tiles, plan.causal)
    strips, far = (None, None) if relative_bias is None else bias_strips(relative_bias, plan)
    slopes = None if alibi_slopes is None else slope_rows(alibi_slopes, plan)
    q, k, v = (_padded(x) for x in (q, k, v))
    operands = Operands(
        q, k, v, order, count.reshape(1).astype(jnp.int32), places.astype(jnp.int32), window, page_offset, slopes, strips, far
    )
    out, stats = attend(operands, plan, scale=scale, soft_cap=soft_cap)
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = (token[:, None] >= query_starts[1:]).sum(axis=1)  # R behind the last row
    owned = jnp.append(lengths > 0, False)[row]
    out = jnp.where(owned[:, None, None], out[:tokens], 0)
    if stats is None:
        return out, None
    # From tiles in the order of work, heads and tokens to tokens and heads.
    offset = jnp.arange(plan.tile_tokens)
    first, dead, live = (field[:, None] for field in order[:3])
    index = jnp.where((offset >= dead) & (offset < live), first + offset, tokens)
    stats = stats.reshape(len(index), plan.groups, -1, plan.heads, plan.tokens)  # [n, groups, warpgroups, heads, tokens]
    stats = stats.transpose(0, 2, 4, 1, 3).reshape(*index.shape, -1) * math.log(2)
    lse = jnp.full((tokens, stats.shape[-1]), -jnp.inf).at[index].set(stats, mode="drop")
    return out, lse


def _padded(x: Array) -> Array:
    """Adds rows so that copies may begin at every multiple of ALIGN: a copy of all, which sizes of whole multiples spare."""
    return jnp.pad(x, ((0, -len(x) % ALIGN), *[(0, 0)] * (x.ndim - 1)))


def _shape(
    q: Array, k: Array, rows: int, page: int, context: int, causal: bool, relative_bias: Array | None, scale: float
) -> Shape:
    """Raises UnsupportedShape where no configuration serves the call."""
    tokens, heads, head_dim = q.shape
    if not q.dtype == k.dtype == jnp.bfloat16:
        raise UnsupportedShape(f"bfloat16 only, got {q.dtype} queries and {k.dtype} keys")
    if head_dim not in HEAD_DIMS:
        raise UnsupportedShape(f"head dims {', '.join(map(str, HEAD_DIMS))}, got {head_dim}")
    if relative_bias is not None and relative_bias.shape[1] > MAX_BIAS:
        raise UnsupportedShape(f"a relative bias of at most {MAX_BIAS} distances, got {relative_bias.shape[1]}")
    if scale <= 0:
        raise UnsupportedShape(f"a positive scale, got {scale}")
    return Shape(tokens, rows, heads, k.shape[1], head_dim, page, context, int(causal), int(relative_bias is not None))


def _checked(shape: Shape, config: Config | None) -> Config:
    config = config or default_config(shape)
    if reason := _reason(shape, config):
        raise UnsupportedShape(reason)
    return config


def _reason(shape: Shape, config: Config) -> str | None:
    """Why a configuration cannot serve a shape."""
    if config.keys not in (64, 128):
        return f"blocks of 64 or 128 keys, got {config.keys}"
    if config.q_stages not in (1, 2) or config.stages < 2:
        return f"one or two query tiles and at least two blocks in flight, got {config.q_stages} and {config.stages}"
    if config.heads not in _heads(shape):
        return f"{config.heads} heads a tile: a power of two that divides {shape.heads // shape.kv_heads}, at most 8"
    used = _plan(shape, config, None, lse=False).shared_bytes
    return None if used <= SHARED_BYTES else f"{used} bytes of shared memory, at most {SHARED_BYTES}"


def _plan(shape: Shape, config: Config, relative_bias: Array | None, *, lse: bool) -> Plan:
    return Plan(
        heads=config.heads,
        groups=shape.heads // config.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        keys=config.keys,
        stages=config.stages,
        q_stages=config.q_stages,
        page=shape.page,
        causal=bool(shape.causal),
        bias_width=0 if relative_bias is None else relative_bias.shape[1],
        lse=lse,
        ctas=tuning.cores() or INTERPRETED_CTAS,
        interpreted=tuning.target() is None,
    )
