"""How many pages the pool gets. Asks the device what it has; owns nothing."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.engine.config import ResolvedConfig
from llmjax.engine.state import init_state
from llmjax.engine.step import extend_layout, extend_step
from llmjax.errors import ConfigError, OutOfMemoryError
from llmjax.model.kv_cache import KVCache, cache_bytes_per_page
from llmjax.model.registry import DecoderConfig, Model

MIB = 2**20
CPU_POOL_BYTES = 1024 * MIB  # at most this much where the device does not tell what it has
DEVICE_RESERVE_BYTES = 1536 * MIB  # code, CUDA graphs, libraries' workspaces
PAGE_STEP = 256  # page counts are rounded down to a multiple, so that small changes of free memory hit the compile cache


def plan_pages(model: Model, config: DecoderConfig, params: Any, engine_config: ResolvedConfig) -> int:
    """Pages a layer for the pool, the null page included.

    With `kv_cache_bytes` as many as fit into it. Else `kv_cache_fraction` of what the device has left after
    everything already on it and the temporaries of the largest extend program; on a CPU, which does not tell, enough
    for every row at full length, within 1 GiB.
    """
    page_bytes = cache_bytes_per_page(config, engine_config.page_size)
    full = 1 + engine_config.max_sequences * -(-engine_config.max_context // engine_config.page_size)
    if engine_config.kv_cache_bytes is not None:
        return _checked(engine_config.kv_cache_bytes // page_bytes, page_bytes, engine_config, "raise the cache's memory")
    stats = jax.devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return _checked(min(full, CPU_POOL_BYTES // page_bytes), page_bytes, engine_config, "set the cache's memory")
    temporaries = _extend_temporaries(model, config, params, engine_config)
    left = stats["bytes_limit"] - stats["bytes_in_use"] - temporaries - DEVICE_RESERVE_BYTES
    pages = int(left * engine_config.kv_cache_fraction) // page_bytes
    if pages > PAGE_STEP:
        pages = pages // PAGE_STEP * PAGE_STEP
    return _checked(min(full, pages), page_bytes, engine_config, "lower max_tokens_per_step, or free device memory")


def _checked(pages: int, page_bytes: int, engine_config: ResolvedConfig, advice: str) -> int:
    if pages < 2:
        kind = ConfigError if engine_config.kv_cache_bytes is not None else OutOfMemoryError
        raise kind(
            f"the KV cache has room for {max(pages, 0)} pages of {page_bytes / MIB:.2f} MiB, it needs at least 2 "
            f"(one is the null page): {advice}"
        )
    return pages


def _extend_temporaries(model: Model, config: DecoderConfig, params: Any, engine_config: ResolvedConfig) -> int:
    """Bytes the largest extend program needs beside its arguments. They do not depend on the pool, so a tiny one is compiled."""
    tokens = engine_config.token_buckets[-1]
    rows = min(tokens, engine_config.max_sequences)
    max_pages = -(-engine_config.max_context // engine_config.page_size)
    state = jax.eval_shape(
        functools.partial(
            init_state, max_sequences=engine_config.max_sequences, max_pages=max_pages, vocab_size=config.vocab_size
        )
    )
    width = extend_layout(tokens=tokens, rows=rows, page_size=engine_config.page_size).width
    shape = (2 * config.num_layers, config.num_kv_heads, engine_config.page_size, config.head_dim)
    leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtype))
    step = functools.partial(extend_step, model=model, config=config, tokens=tokens, rows=rows)
    packed = jax.ShapeDtypeStruct((width,), np.int32)
    compiled = jax.jit(step, donate_argnums=(1, 3)).lower(params, state, packed, KVCache(leaf, leaf)).compile()
    memory = compiled.memory_analysis()
    state_bytes = sum(int(a.size) * a.dtype.itemsize for a in jax.tree.leaves(state))
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + state_bytes)
