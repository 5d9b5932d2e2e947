"""Draft steps: how a draft model, or the target's first layers, make the drafts of a launch. Pure; prompt lookup is in `ngram`.

Knows the rows of a launch and no requests. What the drafts are worth is not decided here: see `speculative`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from llmjax.engine.sample import propose
from llmjax.engine.state import DeviceState
from llmjax.engine.step import FixedRows, MovingRows, slots
from llmjax.model.batch import ModelBatch
from llmjax.model.kv_cache import KVCache
from llmjax.model.registry import DecoderConfig, Model, forward_few, forward_first


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Prompt lookup; see `ngram_drafts`."""

    shortest: int
    longest: int


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Another model, with a cache of its own that the page ids of the target's index too."""

    model: Model
    config: DecoderConfig


@dataclasses.dataclass(frozen=True)
class TruncatedDrafter:
    """The target's own first layers, final norm and head, over its own cache: what they write there is what it writes itself."""

    num_layers: int


Drafter = NgramDrafter | ModelDrafter | TruncatedDrafter


class Drafted(NamedTuple):
    """Drafts of each row in order, -1 from where on there is none, and how likely each token was; None where they are certain."""

    tokens: Int[Array, "R k"]
    log_q: Float[Array, "k R V"] | None


class DraftRows(NamedTuple):
    """The rows of a launch: `wanted` is how many drafts each may have."""

    index: Int[Array, "R"]
    page_table: Int[Array, "R M"]
    fixed: FixedRows
    moving: MovingRows
    wanted: Int[Array, "R"]


class _Drafting(NamedTuple):
    """Between two draft steps. `live`: the rows that draft one more, from `token`, their last one so far."""

    cache: KVCache
    token: Int[Array, "R"]
    live: Array
    drafts: Int[Array, "R k"]


def draft_by_model(
    params: Any, cache: KVCache, state: DeviceState, rows: DraftRows, drafter: ModelDrafter, length: int
) -> tuple[Drafted, KVCache]:
    """The first step takes the last two tokens of every row: the draft model has never seen the one before the last where all
    drafts of the launch before were accepted."""
    model, config, moving = drafter.model, drafter.config, rows.moving
    count = rows.index.shape[0]

    def draw(drafting: _Drafting, hidden: Array, cache: KVCache, step: Array | int) -> tuple[_Drafting, Array]:
        return _draw(drafting, model.logits(params, hidden, config=config), cache, state, rows, step)

    assert state.history is not None
    before = jnp.maximum(moving.seq_lens - 1, 0)
    tokens = jnp.stack([state.history[rows.index, before], moving.last_token], axis=1).reshape(-1)
    positions = jnp.stack([before, moving.seq_lens], axis=1).reshape(-1)
    owner = jnp.repeat(jnp.arange(count), 2)
    batch = ModelBatch(
        tokens=tokens,
        positions=positions,
        slot_mapping=slots(rows.page_table, owner, positions, moving.active[owner], cache.page_size),
        page_table=rows.page_table,
        seq_lens=jnp.where(moving.active, moving.seq_lens + 1, 0),
        query_starts=2 * jnp.arange(count + 1, dtype=jnp.int32),
        logits_indices=2 * jnp.arange(count, dtype=jnp.int32) + 1,
    )
    hidden, cache = forward_few(model, params, batch, cache, config=config, max_queries=2)
    drafting, log_q = draw(_begin(cache, rows, length), hidden[batch.logits_indices], cache, 0)

    def one(drafting: _Drafting, step: Array) -> tuple[_Drafting, Array]:
        batch = _one_token_batch(drafting, rows, step)
        hidden, cache = model.forward(params, batch, drafting.cache, config=config, decode=True)
        return draw(drafting, hidden, cache, step)

    all_log_q = log_q[None]
    if length > 1:
        drafting, more = jax.lax.scan(one, drafting, jnp.arange(1, length))
        all_log_q = jnp.concatenate([all_log_q, more])
    return Drafted(drafting.drafts, all_log_q), drafting.cache


def draft_by_layers(
    params: Any,
    cache: KVCache,
    state: DeviceState,
    rows: DraftRows,
    drafter: TruncatedDrafter,
    model: Model,
    config: DecoderConfig,
    length: int,
) -> tuple[Drafted, KVCache]:
    def one(drafting: _Drafting, step: Array) -> tuple[_Drafting, Array]:
        batch = _one_token_batch(drafting, rows, step)
        hidden, cache = forward_first(params, batch, drafting.cache, config=config, num_layers=drafter.num_layers)
        return _draw(drafting, model.logits(params, hidden, config=config), cache, state, rows, step)

    drafting, log_q = jax.lax.scan(one, _begin(cache, rows, length), jnp.arange(length))
    return Drafted(drafting.drafts, log_q), drafting.cache


def _begin(cache: KVCache, rows: DraftRows, length: int) -> _Drafting:
    none = jnp.full((rows.index.shape[0], length), -1, jnp.int32)
    return _Drafting(cache, rows.moving.last_token, rows.wanted > 0, none)


def _one_token_batch(drafting: _Drafting, rows: DraftRows, step: Array) -> ModelBatch:
    """The token that draft number `step` comes after, of each row that drafts it."""
    count = rows.index.shape[0]
    positions = rows.moving.seq_lens + step
    return ModelBatch(
        tokens=drafting.token,
        positions=positions,
        slot_mapping=slots(rows.page_table, jnp.arange(count), positions, drafting.live, drafting.cache.page_size),
        page_table=rows.page_table,
        seq_lens=jnp.where(drafting.live, positions + 1, 0),
        query_starts=jnp.arange(count + 1, dtype=jnp.int32),
        logits_indices=jnp.arange(count, dtype=jnp.int32),
    )


def _draw(
    drafting: _Drafting, logits: Array, cache: KVCache, state: DeviceState, rows: DraftRows, step: Array | int
) -> tuple[_Drafting, Array]:
    """One draft of each live row. Logits that are not finite end a row's drafts."""
    moving, drafts = rows.moving, drafting.drafts
    proposed = propose(
        _fit(logits, state.counts.shape[1]),
        rows.fixed.settings,
        lambda: count_tokens(state.counts[rows.index], drafts),
        moving.seq_lens + 1 + step,
        moving.num_output + step,
    )
    token = jnp.where(drafting.live, proposed.tokens, -1)
    drafted = token >= 0
    drafting = _Drafting(
        cache=cache,
        token=jnp.where(drafted, token, drafting.token),
        live=drafted & (step + 1 < rows.wanted),
        drafts=drafts.at[:, step].set(token),
    )
    return drafting, proposed.log_q


def _fit(logits: Float[Array, "R D"], vocab: int) -> Float[Array, "R V"]:
    """Both vocabularies have the same tokens; the rows behind them, which are -inf, may differ in number."""
    logits = logits[:, :vocab]
    return jnp.pad(logits, ((0, 0), (0, vocab - logits.shape[1])), constant_values=-jnp.inf)


def count_tokens(counts: Int[Array, "... V"], tokens: Int[Array, "... k"]) -> Int[Array, "... V"]:
    """The counts with the tokens that are not -1 in the output too."""
    flat, ids = counts.reshape(-1, counts.shape[-1]), tokens.reshape(-1, tokens.shape[-1])
    ids = jnp.where(ids >= 0, ids, flat.shape[1])
    return flat.at[jnp.arange(flat.shape[0])[:, None], ids].add(1, mode="drop").reshape(counts.shape)
