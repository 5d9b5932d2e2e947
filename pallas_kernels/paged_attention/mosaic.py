"""Paged attention for decoding and verification on NVIDIA GPUs: what the kernel serves, with which sizes, and its operands.

Owns the configuration and the plan that follows from it and the shapes; the device code is `mosaic_kernel`. Must not know what
was measured: `tuning` keeps that, and dispatch asks it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.attention_sizes import PAGES, SHARED_BYTES, TILE
from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.paged_attention.mosaic_plan import Operands, Partials, Plan, bias_strips, longest_first, slope_rows
from pallas_kernels.quantized_pages import QuantizedPages

if TYPE_CHECKING:
    from jax import Array

MAX_QUERIES = 9
"""Of a row: eight drafts and the token in front of them."""
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
INT8_HEAD_DIMS = (64, 128, 256)

SCALES = 32
"""Of int8 pages a copy brings some times as many scales, so that the next begins at whole 128 bytes of shared memory."""

HALF_SHARED_BYTES = 115712 - 1024
"""The same, if two CTAs are to share a multiprocessor."""

MAX_SPLITS = 16

MAX_TEAM = 4
"""Warpgroups that compute: more would have too few registers."""

MAX_BARRIERS = 32
"""Blocks in flight that a CTA can tell apart."""

CTAS = 264
"""CTAs that fill the device: two on each of 132 multiprocessors."""


class Config(NamedTuple):
    """How the kernel cuts its work.

    Attributes:
        heads: kv heads of which a CTA reads the keys; divides the number of kv heads.
        keys: keys of each head in a block: some pages, or a part of one. heads * keys is 64, 128, 192 or 256.
        stages: blocks in flight.
        splits: CTAs among which the keys of a row are divided; a program behind the kernel adds up their results.
        team: warpgroups that divide the keys of a CTA among them and add up their results in shared memory.
        copier: copies are issued by a warpgroup of their own. Always so where the queries need more than one tile.
    """

    heads: int
    keys: int
    stages: int
    splits: int = 1
    team: int = 1
    copier: bool = False


class Shape(NamedTuple):
    """What a configuration is chosen by; the fields of the tuning key.

    Attributes:
        rows: R. queries: the most of a row. heads, kv_heads, head_dim: N, K, H. page: tokens of a page.
        context: tokens for which a row of the page table has room. bias: whether there is a relative bias.
        int8: whether keys and values are quantised; only then in the key.
    """

    rows: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    context: int
    bias: int
    int8: int = 0


def shape_key(
    q: Array,
    k_cache: Array | QuantizedPages,
    v_cache: Array | QuantizedPages,
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
    """The tuning key of a call on bfloat16 pages. Raises UnsupportedShape where `paged_attention` does."""
    queries = _queries(decode, max_queries)
    key = _shape(q, k_cache, v_cache, page_table, queries, relative_bias)._asdict()
    if key.pop("int8"):
        raise UnsupportedShape("int8 pages are chosen for under a name of their own")
    return key


def int8_shape_key(
    q: Array,
    k_cache: QuantizedPages,
    v_cache: QuantizedPages,
    page_table: Array,
    *others: Array,
    decode: bool,
    max_queries: int = 0,
    relative_bias: Array | None = None,
    **options: Any,
) -> dict[str, int]:
    """The same of a call on int8 pages. Apart, so that what is known of bfloat16 pages never chooses for these."""
    del others, options
    shape = _shape(q, k_cache, v_cache, page_table, _queries(decode, max_queries), relative_bias)
    if not shape.int8:
        raise UnsupportedShape("int8 pages only")
    return shape._asdict()


def candidates(key: Mapping[str, int | str]) -> list[Config]:
    """Configurations worth timing for a tuning key, the most promising first: the default, then variations of the best blocks
    in depth, splits, teams and who copies."""
    shape = Shape(**{name: int(value) for name, value in key.items()})
    found = [default_config(shape)]
    one_head = [(heads, keys) for heads, keys in _blocks(shape) if heads == 1 and keys in (TILE, 2 * TILE)]
    for heads, keys in dict.fromkeys([*itertools.islice(_blocks(shape), 4), *one_head]):
        base = _configured(shape, heads, keys)
        variations = [base]
        for team in (4, 2):
            variations += [_deepened(shape, base._replace(team=team, splits=n, stages=1), SHARED_BYTES) for n in {1, base.splits}]
        variations += [base._replace(splits=splits) for splits in (base.splits // 2, base.splits * 2)]
        variations += [_deepened(shape, base, SHARED_BYTES), _deepened(shape, base._replace(copier=True), SHARED_BYTES)]
        # Splits that a full batch does not need fill the device where only one of its rows is live.
        variations += [base._replace(splits=n * base.splits, team=team) for n, team in ((4, 1), (2, 2), (4, 2))]
        for config in variations:
            useful = 1 <= config.splits <= MAX_SPLITS and config.splits * config.team * config.keys <= shape.context
            if useful and config not in found and _reason(shape, config) is None:
                found.append(config)
    return found


def default_config(shape: Shape) -> Config:
    """A configuration by rule: the best block (see `_blocks`) with which the device can be filled, two CTAs on each
    multiprocessor; if none can, the one with most CTAs. UnsupportedShape where there is no block."""
    configs = [_configured(shape, heads, keys) for heads, keys in _blocks(shape)]
    if not configs:
        raise UnsupportedShape(
            f"no blocks of {shape.kv_heads} kv heads on pages of {shape.page} tokens serve {shape.heads} heads"
        )

    def ctas(config: Config) -> int:
        return shape.rows * (shape.kv_heads // config.heads) * config.splits

    return next((config for config in configs if 2 * ctas(config) > CTAS), max(configs, key=ctas))


def _configured(shape: Shape, heads: int, keys: int) -> Config:
    """As many splits as fill the device, none of them shorter than four blocks; and stages that leave room for a second CTA on
    the multiprocessor, unless that were only one."""
    ctas = shape.rows * (shape.kv_heads // heads)
    splits = 1
    while 2 * splits <= MAX_SPLITS and ctas * splits * 2 <= CTAS and splits * 2 * 4 * keys <= shape.context:
        splits *= 2
    config = Config(heads, keys, 1, splits)
    shallow = _deepened(shape, config, HALF_SHARED_BYTES)
    return shallow if shallow.stages > 1 else _deepened(shape, config, SHARED_BYTES)


def _deepened(shape: Shape, config: Config, limit: int) -> Config:
    """With the most stages that fit into a limit of bytes, at least one and at most eight."""
    stages = 1
    while stages < 8 and _plan(shape, config._replace(stages=stages + 1), None, by_row=False).shared_bytes <= limit:
        stages += 1
    return config._replace(stages=stages)


def paged_attention(
    q: Array,
    k_cache: Array | QuantizedPages,
    v_cache: Array | QuantizedPages,
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
    """See `pallas_kernels.paged_attention.paged_attention`; bfloat16 queries, one to nine a row, on bfloat16 or int8 pages.

    Weights are rounded to bfloat16 before they multiply the values. A NaN among the values that a row owns may reach all heads
    of that row, not only its own. `config` None takes `default_config`.
    Raises UnsupportedShape for what the kernel or the configuration cannot serve.
    """
    queries = _queries(decode, max_queries)
    shape = _shape(q, k_cache, v_cache, page_table, queries, relative_bias)
    config = config or default_config(shape)
    if reason := _reason(shape, config):
        raise UnsupportedShape(reason)
    return _paged_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        query_starts,
        jnp.asarray(page_offset, jnp.int32).reshape(1),
        jnp.asarray(window, jnp.int32).reshape(1),
        alibi_slopes,
        relative_bias,
        plan=_plan(shape, config, relative_bias, by_row=decode),
        scale=scale,
        soft_cap=soft_cap,
    )


@functools.partial(jax.jit, static_argnames=("plan", "scale", "soft_cap"))
def _paged_attention(
    q: Array,
    k_cache: Array | QuantizedPages,
    v_cache: Array | QuantizedPages,
    page_table: Array,
    seq_lens: Array,
    query_starts: Array,
    page_offset: Array,
    window: Array,
    alibi_slopes: Array | None,
    relative_bias: Array | None,
    *,
    plan: Plan,
    scale: float,
    soft_cap: float,
) -> Array:
    """Jitted so that a model lowers the kernel once, not once a layer."""
    from pallas_kernels.paged_attention.mosaic_kernel import attend  # imports Mosaic, which takes seconds: only where it is used

    tokens, _, head_dim = q.shape
    k, v, k_scale, v_scale = k_cache, v_cache, None, None
    if isinstance(k_cache, QuantizedPages) and isinstance(v_cache, QuantizedPages):
        k, v, k_scale, v_scale = k_cache.qvalue, v_cache.qvalue, k_cache.scale.reshape(-1), v_cache.scale.reshape(-1)
        channels = k_cache.channels_of(page_offset[0])
        if channels is not None:
            q = (q.astype(jnp.float32) * jnp.repeat(channels, q.shape[1] // channels.shape[0], axis=0)).astype(q.dtype)
    operands = Operands(
        _query_rows(q.reshape(tokens * plan.groups, -1, head_dim), plan),
        k.reshape(-1, head_dim),
        v.reshape(-1, head_dim),
        page_table.astype(jnp.int32),
        seq_lens.astype(jnp.int32),
        query_starts.astype(jnp.int32),
        page_offset,
        window,
        longest_first(seq_lens.astype(jnp.int32)) if plan.longest_first else None,
        None if alibi_slopes is None else slope_rows(alibi_slopes, plan),
        None if relative_bias is None else bias_strips(relative_bias, plan),
        k_scale,
        v_scale,
    )
    result = attend(operands, plan, tokens, scale=scale, soft_cap=soft_cap)
    if isinstance(result, Partials):
        return _combine(result, q, seq_lens, query_starts, plan)
    result = result.reshape(q.shape)
    if plan.by_row:
        return result
    row = (jnp.arange(tokens)[:, None] >= query_starts[1:]).sum(axis=1)  # R behind the last row
    owned = jnp.append(seq_lens > 0, False)[row]
    return jnp.where(owned[:, None, None], result, 0)


def _query_rows(q: Array, plan: Plan) -> Array:
    """Operand q of the kernel, from the heads of each group. Only whole eights of rows can be copied to where wgmma reads them:
    fewer than eight are as they are, as the copy fills up with zeros; others are padded, in a launch of its own if a kernel made
    q."""
    if plan.few_heads:
        return q
    padding = plan.rows - q.shape[1]
    return (jnp.pad(q, ((0, 0), (0, padding), (0, 0))) if padding else q).reshape(-1, plan.head_dim)


def _combine(partials: Partials, q: Array, seq_lens: Array, query_starts: Array, plan: Plan) -> Array:
    """Adds up the splits and puts the results where their tokens are; zeros elsewhere."""
    used = plan.used_rows
    peaks, totals = partials.stats[:, :, :, 0, :used], partials.stats[:, :, :, 1, :used]
    factors = jnp.exp2(peaks - peaks.max(axis=2, keepdims=True))
    total = (totals * factors).sum(axis=2)
    acc = jnp.where(totals[..., None] == 0, 0, partials.acc)  # a split without keys has written none
    result = (acc * factors[..., None]).sum(axis=2) / jnp.where(total > 0, total, 1)[..., None]
    rows = q.shape[0] if plan.by_row else seq_lens.shape[0]
    members = plan.heads * plan.members
    result = result.reshape(rows, plan.groups, plan.parts, plan.queries, plan.rows, plan.head_dim)
    result = result[..., :members, :].astype(q.dtype)
    if plan.by_row:
        return result.reshape(q.shape)
    queries = plan.parts * plan.queries
    result = result.transpose(0, 2, 3, 1, 4, 5).reshape(rows, queries, *q.shape[1:])
    token = query_starts[:-1, None] + jnp.arange(queries)
    owned = (token < query_starts[1:, None]) & (seq_lens > 0)[:, None]
    return jnp.zeros_like(q).at[jnp.where(owned, token, q.shape[0])].set(result, mode="drop")


def _queries(decode: bool, max_queries: int) -> int:
    if decode:
        return 1
    if not 0 < max_queries <= MAX_QUERIES:
        raise UnsupportedShape(f"rows of at most {MAX_QUERIES} queries, got {max_queries or 'no limit'}")
    return max_queries


def _shape(
    q: Array,
    k_cache: Array | QuantizedPages,
    v_cache: Array | QuantizedPages,
    page_table: Array,
    queries: int,
    relative_bias: Array | None,
) -> Shape:
    """Raises UnsupportedShape where no configuration serves the call."""
    heads, head_dim = q.shape[1:]
    kv_heads, page = k_cache.shape[1:3]
    quantized = isinstance(k_cache, QuantizedPages) and isinstance(v_cache, QuantizedPages)
    if q.dtype != jnp.bfloat16 or not (quantized or k_cache.dtype == v_cache.dtype == jnp.bfloat16):
        raise UnsupportedShape(f"bfloat16 only, got {q.dtype} queries and {k_cache.dtype} caches")
    head_dims = INT8_HEAD_DIMS if quantized else HEAD_DIMS
    if head_dim not in head_dims:
        raise UnsupportedShape(f"head dims {', '.join(map(str, head_dims))}, got {head_dim}")
    if page not in PAGES:
        raise UnsupportedShape(f"pages of {', '.join(map(str, PAGES))} tokens, got {page}")
    if heads // kv_heads > 2 * TILE:
        raise UnsupportedShape(f"at most {2 * TILE} query heads a kv head, got {heads // kv_heads}")
    context = page_table.shape[1] * page
    bias = int(relative_bias is not None)
    return Shape(page_table.shape[0], queries, heads, kv_heads, head_dim, page, context, bias, int(quantized))


def _blocks(shape: Shape) -> Iterator[tuple[int, int]]:
    """(heads, keys) of possible blocks, the best first: one query tile rather than two, no padded queries, few rows, few
    copies."""
    members = shape.heads // shape.kv_heads
    found = []
    for heads in range(1, shape.kv_heads + 1):
        for keys in (16, 32, 64, 128, 256):
            if _reason(shape, Config(heads, keys, 1)) is None:
                plan = _plan(shape, Config(heads, keys, 1), None, by_row=False)
                found.append((plan.tiles, plan.parts, heads * members % 8 > 0, plan.block_rows, plan.copies, heads, keys))
    return iter([found[-2:] for found in sorted(found)])


def _tiles(shape: Shape, heads: int) -> tuple[int, int, int]:
    """Queries of a CTA, CTAs for the queries of a row, query tiles of a CTA."""
    rows = -(-heads * (shape.heads // shape.kv_heads) // 8) * 8
    limit = TILE if rows * shape.queries <= TILE else 2 * TILE
    queries = min(shape.queries, max(1, limit // rows))
    return queries, -(-shape.queries // queries), -(-queries * rows // TILE)


def _plan(shape: Shape, config: Config, relative_bias: Array | None, *, by_row: bool) -> Plan:
    queries, parts, tiles = _tiles(shape, config.heads)
    members = shape.heads // shape.kv_heads
    groups = shape.kv_heads // config.heads
    return Plan(
        groups=groups,
        heads=config.heads,
        members=members,
        page=shape.page,
        block=config.keys,
        queries=queries,
        parts=parts,
        rows=-(-config.heads * members // 8) * 8,
        tiles=tiles,
        head_dim=shape.head_dim,
        stages=config.stages,
        splits=config.splits,
        copier=config.copier or tiles > 1,
        team=config.team,
        by_row=by_row,
        longest_first=shape.rows * groups * parts * config.splits > CTAS,
        bias_width=0 if relative_bias is None else relative_bias.shape[1],
        quantized=bool(shape.int8),
        interpreted=tuning.target() is None,
    )


def _reason(shape: Shape, config: Config) -> str | None:
    """Why a configuration cannot serve a shape."""
    if shape.kv_heads % config.heads:
        return f"{config.heads} heads a copy do not divide {shape.kv_heads} kv heads"
    if max(config.keys, shape.page) % min(config.keys, shape.page) or config.keys % 16:
        return f"blocks of whole pages of {shape.page} tokens or of a part of one, got {config.keys} keys"
    plan = _plan(shape, config, None, by_row=False)
    if plan.block_rows % TILE or plan.block_rows > 256:
        return f"blocks of 64, 128, 192 or 256 rows, got {plan.block_rows}"
    if plan.tiles > 2 or plan.rows > 2 * TILE:
        return f"{config.heads} heads a copy need {plan.tiles} query tiles, at most 2"
    if shape.int8 and plan.tiles > 1:
        return "int8 pages take one query tile"
    if shape.int8 and plan.block_rows // plan.copies % SCALES:
        return f"a copy of int8 pages brings a multiple of {SCALES} heads of tokens, got {plan.block_rows // plan.copies}"
    if shape.bias and config.heads > 1:
        return "a relative bias takes one head a copy"
    if plan.shared_bytes > SHARED_BYTES:
        return f"{plan.shared_bytes} bytes of shared memory, at most {SHARED_BYTES}"
    if config.team > 2 and max(shape.head_dim, plan.block_rows) > 128:
        return f"a team of {config.team} has registers for head dims and blocks of 128 at most"
    if config.team > 1 and (plan.copier or config.team > MAX_TEAM or config.team * config.stages > MAX_BARRIERS):
        return f"a team of {config.team} takes one query tile, no copier and {MAX_TEAM} members or {MAX_BARRIERS} blocks at most"
    return None
