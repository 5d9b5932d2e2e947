"""The functional `forward` of every family equals the naive float64 decoder, whole and in chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, naive_logits, random_params

from llmjax.model.batch import pack_sequences
from llmjax.model.kv_cache import KVCache, init_cache
from llmjax.model.transformer import forward, logits

SEQUENCES = [[5, 7, 11], list(range(3, 40)), [9], list(range(200, 248))]


def poisoned(cache: KVCache) -> KVCache:
    return KVCache(*(jnp.full_like(a, jnp.nan) for a in cache))


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_naive_decoder(name: str) -> None:
    config = CONFIGS[name]
    params = random_params(config)
    batch, pages = pack_sequences(SEQUENCES, page_size=16)
    cache = poisoned(init_cache(config, num_pages=pages, page_size=16))
    hidden, _ = jax.jit(forward, static_argnames=("config", "decode"))(params, batch, cache, config=config)
    got = np.asarray(logits(params, hidden, config=config))
    want = np.concatenate([naive_logits(params, ids, config) for ids in SEQUENCES])
    real = slice(0, config.num_tokens)
    np.testing.assert_allclose(got[:, real], want[:, real], rtol=2e-4, atol=2e-4)
    assert (got[:, config.num_tokens :] == -np.inf).all()


@pytest.mark.parametrize("name", ["llama-9-3-tied", "mixed-window"])
def test_chunks_then_decode_equal_the_whole(name: str) -> None:
    config = CONFIGS[name]
    params = random_params(config)
    step = jax.jit(forward, static_argnames=("config", "decode"))
    _, pages = pack_sequences(SEQUENCES, page_size=16)
    cache = poisoned(init_cache(config, num_pages=pages, page_size=16))
    cut = [[1, 1, 1, 1], [2, 20, 1, 33], [2, 36, 1, 47], [3, 37, 1, 48]]
    cached = [0, 0, 0, 0]
    rows: dict[int, list[np.ndarray]] = {row: [] for row in range(4)}
    for ends in cut:
        going = [row for row in range(4) if ends[row] > cached[row]]
        part = [SEQUENCES[row][: ends[row]] for row in range(4)]
        batch, _ = pack_sequences([[*ids, *[0] * (48 - len(ids))] for ids in part], page_size=16)  # one page layout for all calls
        real, _ = pack_sequences(part, page_size=16, num_cached=cached)
        real = real._replace(page_table=batch.page_table, slot_mapping=_slots(batch.page_table, real, cached, ends))
        hidden, cache = step(params, real, cache, config=config, decode=False)
        out = np.asarray(logits(params, hidden, config=config))
        starts = np.asarray(real.query_starts)
        for row in going:
            rows[row].append(out[starts[row] : starts[row + 1]])
        cached = list(ends)
    for row, ids in enumerate(SEQUENCES):
        np.testing.assert_allclose(
            np.concatenate(rows[row])[:, : config.num_tokens],
            naive_logits(params, ids, config)[:, : config.num_tokens],
            rtol=2e-4,
            atol=2e-4,
        )


def _slots(table: jax.Array, batch: object, cached: list[int], ends: list[int]) -> jax.Array:
    slots = []
    for row in range(4):
        where = np.arange(cached[row], ends[row])
        slots.append(np.asarray(table)[row][where // 16] * 16 + where % 16)
    return jnp.asarray(np.concatenate(slots).astype(np.int32))
