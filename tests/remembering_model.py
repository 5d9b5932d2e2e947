"""A decoder whose next token depends on every token before it, read back from the paged cache, and on nothing else.

It compiles in a moment, and a plain function says what it must answer: a slot that holds another token, that is written a launch
too late or belongs to somebody else, changes what comes next. What is not written is NaN, and so are then the logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from llmjax.model.batch import ModelBatch
from llmjax.model.kv_cache import KVCache
from llmjax.model.registry import register_model

STATES = 97


@dataclasses.dataclass(frozen=True)
class RememberingConfig:
    family: str = "remembering"
    vocab_size: int = 13
    num_tokens: int = 11
    max_positions: int = 512
    num_layers: int = 2
    num_kv_heads: int = 1
    head_dim: int = 2
    dtype: str = "float32"


class RememberingModel:
    def forward(self, params: Any, batch: ModelBatch, kv_cache: KVCache, *, config: Any, decode: bool) -> tuple[Array, KVCache]:
        size, pages_a_layer = kv_cache.page_size, kv_cache.k.shape[0] // config.num_layers
        offset = (config.num_layers - 1) * pages_a_layer  # the last layer's pages
        pages, places = batch.slot_mapping // size, batch.slot_mapping % size
        k = kv_cache.k.at[offset + pages, 0, places, 0].set(batch.tokens.astype(jnp.float32))
        rows = batch.page_table.shape[0]
        held = k[offset + batch.page_table, 0, :, 0].reshape(rows, -1)  # tokens of each row, by position
        owner = jnp.minimum((jnp.arange(len(batch.tokens))[:, None] >= batch.query_starts[1:]).sum(axis=1), rows - 1)
        before = jnp.arange(held.shape[1]) <= batch.positions[:, None]
        weights = 1 + jnp.arange(held.shape[1]) % 7
        state = jnp.where(before, held[owner] * weights, 0.0).sum(axis=1) % STATES
        return state[:, None], KVCache(k, kv_cache.v)

    def logits(self, params: Any, hidden: Array, *, config: Any) -> Array:
        state = hidden[:, 0]
        logits = params["table"][jnp.nan_to_num(state).astype(jnp.int32)]
        logits = jnp.where(jnp.arange(config.vocab_size) < config.num_tokens, logits, -jnp.inf)
        return jnp.where(jnp.isnan(state)[:, None], jnp.nan, logits)


register_model("remembering", RememberingModel())


def make_table(seed: int, *, like: np.ndarray | None = None, noise: float = 1.0, config: Any = None) -> np.ndarray:
    """Logits by state, float32 [97, V]; or those of `like` with noise added, a draft that is often right."""
    random = np.random.default_rng(seed)
    table = random.standard_normal((STATES, (config or RememberingConfig()).vocab_size)).astype(np.float32)
    return table if like is None else like + np.float32(noise) * table


def logits_after(table: np.ndarray, ids: Sequence[int], num_tokens: int) -> np.ndarray:
    """What follows these tokens: logits of the ids that can be sampled."""
    state = sum(token * (1 + position % 7) for position, token in enumerate(ids)) % STATES
    return table[state, :num_tokens]


def greedy_after(table: np.ndarray, ids: Sequence[int], count: int, num_tokens: int) -> list[int]:
    """The greedy continuation."""
    out: list[int] = []
    for _ in range(count):
        out.append(int(np.argmax(logits_after(table, [*ids, *out], num_tokens))))
    return out
