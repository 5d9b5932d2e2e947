"""Norms, rotation and cache write on NVIDIA GPUs as one launch: what the kernel serves, and how it deals out the work.

Owns the configuration and the plan that follows from it and the shapes; the device code is `mosaic_kernel`. Must not know what
was measured: `tuning` keeps that, and dispatch asks it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from pallas_kernels.dispatch import UnsupportedShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
MAX_TOKENS = 65535  # an axis of the grid
HEADS = (1, 2, 4, 8, 16, 32)
MAX_PIECES = 8
"""Heads of a piece, pieces of a CTA: more would not fit into registers."""

CTAS = 1056
"""CTAs that the device runs at once: eight on each of 132 multiprocessors."""


class Config(NamedTuple):
    """How the work of a token is cut.

    Attributes:
        heads: the most heads that are worked on together, a power of two.
        pieces: how many times as many a CTA works on at most; their loads are all under way at once.
    """

    heads: int
    pieces: int


class Cut(NamedTuple):
    """How the heads of one kind are dealt out to CTAs. What moves back where the heads run out is computed again.

    Attributes:
        count: of the heads.
        heads: of a piece, a power of two. One size, and so one register layout: what reads a table in two layouts is beyond the
            compiler's inference of layouts.
        pieces: of a CTA.
    """

    count: int
    heads: int
    pieces: int

    @property
    def ctas(self) -> int:
        """CTAs of a token."""
        return -(-self.count // (self.heads * self.pieces))


class Plan(NamedTuple):
    """The CTAs of a token: first those of the queries, then those of the keys, then those of the values, cut as the keys."""

    queries: Cut
    keys: Cut

    @property
    def ctas(self) -> int:
        """CTAs of a token."""
        return self.queries.ctas + 2 * self.keys.ctas


def shape_key(
    qkv: Array,
    k_cache: Array,
    v_cache: Array,
    cos: Array,
    sin: Array,
    pages: Array,
    offsets: Array,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    *,
    page_offset: int | Array,
    eps: float,
) -> dict[str, int | str]:
    """What a call is tuned by. UnsupportedShape for what the kernel never serves."""
    del offsets, page_offset, eps
    (_, kv_heads, _, head_dim), norms = k_cache.shape, [norm for norm in (q_norm, k_norm) if norm is not None]
    if not qkv.dtype == k_cache.dtype == v_cache.dtype == jnp.bfloat16:
        raise UnsupportedShape(f"bfloat16 only, got {qkv.dtype} q, k, v and {k_cache.dtype}, {v_cache.dtype} caches")
    if any(table.dtype != jnp.float32 for table in (cos, sin, *norms)):
        raise UnsupportedShape("cos, sin and norms must be float32")
    if pages.shape[0] > MAX_TOKENS:
        raise UnsupportedShape(f"at most {MAX_TOKENS} tokens, got {pages.shape[0]}")
    if head_dim not in HEAD_DIMS:
        raise UnsupportedShape(f"head dims {', '.join(map(str, HEAD_DIMS))}, got {head_dim}")
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    return {
        "tokens": pages.shape[0], "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "norm": int(bool(norms)),
    }  # fmt: skip


def candidates(key: Mapping[str, int | str]) -> list[Config]:
    """Configurations worth timing, the one by rule first; no two cut a token alike."""
    first = default_config(key)
    found = {make_plan(key, first): first}
    for heads, pieces in itertools.product((8, 4, 16, 32), (1, 2, 4, 8)):
        config = Config(heads, pieces)
        found.setdefault(make_plan(key, config), config)
    return list(found.values())


def default_config(key: Mapping[str, int | str]) -> Config:
    """Pieces of eight heads, each in a CTA of its own while the device runs all CTAs at once, else as few together as that takes.
    What a call costs is one wait for memory, whose length does not depend on the cut."""
    pieces = 1
    while pieces < MAX_PIECES and int(key["tokens"]) * make_plan(key, Config(8, pieces)).ctas > CTAS:
        pieces *= 2
    return Config(8, pieces)


def make_plan(key: Mapping[str, int | str], config: Config) -> Plan:
    """Deals the heads of a token out to CTAs. UnsupportedShape for a configuration that cannot be."""
    if config.heads not in HEADS or not 1 <= config.pieces <= MAX_PIECES:
        sizes = ", ".join(map(str, HEADS))
        raise UnsupportedShape(f"{sizes} heads a piece and 1 to {MAX_PIECES} pieces, got {config.heads} and {config.pieces}")

    def cut(count: int) -> Cut:
        heads = min(config.heads, 1 << (count.bit_length() - 1))
        return Cut(count, heads, min(config.pieces, -(-count // heads)))

    return Plan(cut(int(key["heads"])), cut(int(key["kv_heads"])))


def rope_kv_write(
    qkv: Array,
    k_cache: Array,
    v_cache: Array,
    cos: Array,
    sin: Array,
    pages: Array,
    offsets: Array,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    *,
    page_offset: int | Array,
    eps: float,
    config: Config | None = None,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.rope_kv_write.rope_kv_write`; bfloat16, rounded where the reference rounds.

    A result may differ from the reference's by the last bit: a sum of squares is added up in another order, and a product and the
    sum it goes into may be rounded once instead of twice. `config` None takes `default_config`.
    Raises UnsupportedShape for what the kernel or the configuration cannot serve.
    """
    key = shape_key(qkv, k_cache, v_cache, cos, sin, pages, offsets, q_norm, k_norm, page_offset=page_offset, eps=eps)
    plan = make_plan(key, config or default_config(key))
    from pallas_kernels.rope_kv_write import mosaic_kernel  # imports Mosaic, which takes seconds: only where it is used

    return mosaic_kernel.rotate_and_write(
        qkv, k_cache, v_cache, cos, sin, pages, offsets, q_norm, k_norm, jnp.asarray(page_offset, jnp.int32).reshape(1),
        plan=plan, eps=eps,
    )  # fmt: skip
