"""Rows of one query apart from the others: those that decode by the kernel that divides keys, prompts by the one that multiplies.

In a launch of both the second would spend a query tile, and a walk through its pages, on every row that decodes. Owns the split;
must not know when it pays: `tuning` keeps what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from pallas_kernels.flash_attention import mosaic as flash

if TYPE_CHECKING:
    from jax import Array


def via(attend: Callable[..., Array]) -> Callable[..., Array]:
    """`paged_attention` for calls that promise nothing about a row's queries, on bfloat16 pages.

    Args:
        attend: `paged_attention` for rows of one query (`decode=True`).
    """

    def run(
        q: Array,
        k_cache: Array,
        v_cache: Array,
        page_table: Array,
        seq_lens: Array,
        query_starts: Array,
        *,
        config: flash.Config | None = None,
        **options: Any,
    ) -> Array:
        """`config` is of the kernel for several queries. Raises UnsupportedShape where that does."""
        tokens, rows = len(q), len(seq_lens)
        single = (jnp.diff(query_starts) == 1) & (seq_lens > 0)
        # The others first: it says what it cannot serve.
        others = flash.paged_attention(
            q, k_cache, v_cache, page_table, jnp.where(single, 0, seq_lens), query_starts, config=config, **options
        )
        token = jnp.where(single, query_starts[:-1], tokens)
        alone = attend(
            q.at[token].get(mode="fill", fill_value=0),
            k_cache,
            v_cache,
            page_table,
            jnp.where(single, seq_lens, 0),
            jnp.arange(rows + 1, dtype=query_starts.dtype),
            **options | {"decode": True},
        )
        return others.at[token].set(alone, mode="drop")

    return run
