"""Speculative decoding on the device: draft a few tokens a row, verify all of them at once, keep what the target would say.

`speculate_step` is one launch, as `decode_steps` is: which drafts are taken and whether a row ends is decided on the device, and
the host reads it a launch later. `extend_with_draft` and `catch_up_step` keep a draft model's cache filled. Pure functions that
know no requests: who drafts, and how many tokens, comes packed with the launch.

What a row gets has exactly the target's distribution, whatever is drafted: see `sample.sample`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from llmjax.engine.ngram import ngram_drafts
from llmjax.engine.sample import Drafts, propose, sample
from llmjax.engine.state import DeviceState
from llmjax.engine.step import (
    FixedRows,
    MovingRows,
    Pieces,
    PromptScoresOnDevice,
    StepTokens,
    append_pages,
    extend_batch,
    extend_layout,
    extend_step,
    gather_rows,
    note_tokens,
    scatter_rows,
    slots,
    token_owners,
)
from llmjax.engine.token_masks import TokenMasks
from llmjax.model.batch import ModelBatch
from llmjax.model.kv_cache import KVCache
from llmjax.model.registry import DecoderConfig, Model, forward_few, forward_first
from llmjax.sampling_params import GREEDY_TEMPERATURE

DRAFTED, ACCEPTED = 2, 4
"""Bits in the last word of `StepTokens.summary`, beside that for finite logits: step i had a draft, and took it."""


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


def speculate_layout(*, rows: int, length: int, page_size: int) -> Pieces:
    """Updates of a speculate launch: the device rows, the drafts each may have (0 to `length`), the bits of the float32 that the
    rows' temperatures are multiplied by for their drafts, and the pages appended before it."""
    pages = rows * -(-(length + 1) // page_size)
    return Pieces(
        (
            ("rows", rows), ("drafts", rows), ("temperature", 1),
            ("page_rows", pages), ("page_indices", pages), ("page_ids", pages),
        )
    )  # fmt: skip


def catch_up_layout(*, rows: int) -> Pieces:
    """Updates of a catch-up launch: entry i is the `query_starts[i + 1] - query_starts[i]` tokens of a device row from position
    `starts[i]` on."""
    return Pieces((("query_starts", rows + 1), ("rows", rows), ("starts", rows)))


class _Drafted(NamedTuple):
    """Drafts of each row in order, -1 from where on there is none, and how likely each token was; None where they are certain."""

    tokens: Int[Array, "R k"]
    log_q: Float[Array, "k R V"] | None


class _Rows(NamedTuple):
    """The rows of a launch: `wanted` is how many drafts each may have."""

    index: Int[Array, "R"]
    page_table: Int[Array, "R M"]
    fixed: FixedRows
    moving: MovingRows
    wanted: Int[Array, "R"]


def speculate_step(
    params: Any,
    draft_params: Any,
    state: DeviceState,
    packed: Int[Array, "width"],
    kv_cache: KVCache,
    draft_cache: KVCache | None,
    *,
    model: Model,
    config: DecoderConfig,
    drafter: Drafter,
    rows: int,
    length: int,
) -> tuple[DeviceState, StepTokens, KVCache, KVCache | None]:
    """`length` draft steps and one verification of `rows` rows. `state` and the caches are meant to be donated.

    A row takes the drafts that are accepted, up to the first that is not, and one token more: 1 to `length` + 1 tokens. It ends
    among them where plain steps would have ended it: after a stop id, at its limit, at logits that are not finite. A row without
    drafts, as each masked one, takes one token. Keys and values of rejected drafts are overwritten before anyone reads them.

    Args:
        draft_params, draft_cache: of a `ModelDrafter`, else None.

    Returns:
        `StepTokens` of `length` + 1 steps, a row's tokens first.
    """
    updates = speculate_layout(rows=rows, length=length, page_size=kv_cache.page_size).unpack(packed)
    state = append_pages(state, updates)
    index = updates["rows"]
    fixed, moving = gather_rows(state, index)
    room = jnp.minimum(updates["drafts"], fixed.limit - moving.num_output - 1)
    wanted = jnp.where(moving.active & ~fixed.masked, jnp.clip(room, 0, length), 0)
    view = _Rows(index, state.page_table[index], fixed, moving, wanted)

    if isinstance(drafter, NgramDrafter):
        assert state.history is not None
        history = state.history[index]
        found = ngram_drafts(history, moving.seq_lens, length=length, shortest=drafter.shortest, longest=drafter.longest)
        drafted = _Drafted(jnp.where(jnp.arange(length) < wanted[:, None], found, -1), None)
    else:
        factor = jax.lax.bitcast_convert_type(updates["temperature"], jnp.float32)
        warm = jnp.maximum(fixed.settings.temperature * factor, GREEDY_TEMPERATURE)
        warm = jnp.where(fixed.settings.temperature < GREEDY_TEMPERATURE, fixed.settings.temperature, warm)
        view_of_draft = view._replace(fixed=fixed._replace(settings=fixed.settings._replace(temperature=warm)))
        if isinstance(drafter, ModelDrafter):
            assert draft_cache is not None
            drafted, draft_cache = _draft_by_model(draft_params, draft_cache, state, view_of_draft, drafter, length)
        else:
            drafted, kv_cache = _draft_by_layers(params, kv_cache, state, view_of_draft, drafter, model, config, length)
    state, tokens, kv_cache = _verify(params, kv_cache, state, view, drafted, model, config)
    return state, tokens, kv_cache, draft_cache


def extend_with_draft(
    params: Any,
    draft_params: Any,
    state: DeviceState,
    packed: Int[Array, "width"],
    kv_cache: KVCache,
    draft_cache: KVCache,
    *,
    model: Model,
    config: DecoderConfig,
    drafter: ModelDrafter,
    tokens: int,
    rows: int,
) -> tuple[DeviceState, StepTokens, PromptScoresOnDevice, KVCache, KVCache]:
    """`extend_step`, and the same tokens through the draft model: what is in the target's pages is then in its own."""
    updates = extend_layout(tokens=tokens, rows=rows, page_size=kv_cache.page_size).unpack(packed)
    _, batch = extend_batch(append_pages(state, updates), updates, page_size=kv_cache.page_size)
    _, draft_cache = drafter.model.forward(draft_params, batch, draft_cache, config=drafter.config, decode=False)
    state, sampled, scores, kv_cache = extend_step(
        params, state, packed, kv_cache, model=model, config=config, tokens=tokens, rows=rows
    )
    return state, sampled, scores, kv_cache, draft_cache


def catch_up_step(
    draft_params: Any,
    state: DeviceState,
    packed: Int[Array, "width"],
    draft_cache: KVCache,
    *,
    drafter: ModelDrafter,
    tokens: int,
    rows: int,
) -> KVCache:
    """The draft model's keys and values of tokens that plain steps computed, by the rows' histories.

    Only the cache is meant to be donated. Positions that a row has not reached are left alone: the host may not know yet how far
    it is.
    """
    assert state.history is not None
    updates = catch_up_layout(rows=rows).unpack(packed)
    starts, index, first = updates["query_starts"], updates["rows"], updates["starts"]
    owner = token_owners(starts, tokens)
    positions = first[owner] + jnp.arange(tokens) - starts[owner]
    is_token = (jnp.arange(tokens) < starts[-1]) & (positions < state.seq_lens[index][owner])
    positions = jnp.where(jnp.arange(tokens) < starts[-1], positions, 0)
    page_table, lengths = state.page_table[index], starts[1:] - starts[:-1]
    batch = ModelBatch(
        tokens=jnp.where(is_token, state.history[index[owner], positions], 0),
        positions=positions,
        slot_mapping=slots(page_table, owner, positions, is_token, draft_cache.page_size),
        page_table=page_table,
        seq_lens=jnp.where(lengths > 0, first + lengths, 0),
        query_starts=starts,
        logits_indices=jnp.maximum(starts[1:] - 1, 0),
    )
    return drafter.model.forward(draft_params, batch, draft_cache, config=drafter.config, decode=False)[1]


# -- drafting


class _Drafting(NamedTuple):
    """Between two draft steps. `live`: the rows that draft one more, from `token`, their last one so far."""

    cache: KVCache
    token: Int[Array, "R"]
    live: Array
    drafts: Int[Array, "R k"]


def _draft_by_model(
    params: Any, cache: KVCache, state: DeviceState, rows: _Rows, drafter: ModelDrafter, length: int
) -> tuple[_Drafted, KVCache]:
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
    return _Drafted(drafting.drafts, all_log_q), drafting.cache


def _draft_by_layers(
    params: Any,
    cache: KVCache,
    state: DeviceState,
    rows: _Rows,
    drafter: TruncatedDrafter,
    model: Model,
    config: DecoderConfig,
    length: int,
) -> tuple[_Drafted, KVCache]:
    def one(drafting: _Drafting, step: Array) -> tuple[_Drafting, Array]:
        batch = _one_token_batch(drafting, rows, step)
        hidden, cache = forward_first(params, batch, drafting.cache, config=config, num_layers=drafter.num_layers)
        return _draw(drafting, model.logits(params, hidden, config=config), cache, state, rows, step)

    drafting, log_q = jax.lax.scan(one, _begin(cache, rows, length), jnp.arange(length))
    return _Drafted(drafting.drafts, log_q), drafting.cache


def _begin(cache: KVCache, rows: _Rows, length: int) -> _Drafting:
    none = jnp.full((rows.index.shape[0], length), -1, jnp.int32)
    return _Drafting(cache, rows.moving.last_token, rows.wanted > 0, none)


def _one_token_batch(drafting: _Drafting, rows: _Rows, step: Array) -> ModelBatch:
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
    drafting: _Drafting, logits: Array, cache: KVCache, state: DeviceState, rows: _Rows, step: Array | int
) -> tuple[_Drafting, Array]:
    """One draft of each live row. Logits that are not finite end a row's drafts."""
    moving, drafts = rows.moving, drafting.drafts
    proposed = propose(
        _fit(logits, state.counts.shape[1]),
        rows.fixed.settings,
        lambda: _count(state.counts[rows.index], drafts),
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


def _count(counts: Int[Array, "... V"], tokens: Int[Array, "... k"]) -> Int[Array, "... V"]:
    """The counts with the tokens that are not -1 in the output too."""
    flat, ids = counts.reshape(-1, counts.shape[-1]), tokens.reshape(-1, tokens.shape[-1])
    ids = jnp.where(ids >= 0, ids, flat.shape[1])
    return flat.at[jnp.arange(flat.shape[0])[:, None], ids].add(1, mode="drop").reshape(counts.shape)


# -- verifying


def _verify(
    params: Any, cache: KVCache, state: DeviceState, rows: _Rows, drafted: _Drafted, model: Model, config: DecoderConfig
) -> tuple[DeviceState, StepTokens, KVCache]:
    """Each row's last token and its drafts through the target, a token sampled after each, and what of them the row takes."""
    index, fixed, moving = rows.index, rows.fixed, rows.moving
    drafts = drafted.tokens
    count, length = drafts.shape
    steps = jnp.arange(length + 1)
    num_drafts = (drafts >= 0).sum(axis=1)
    queries = jnp.where(moving.active, num_drafts + 1, 0)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(queries).astype(jnp.int32)])

    owner = token_owners(starts, count * (length + 1))
    place = jnp.arange(count * (length + 1)) - starts[owner]
    is_token = jnp.arange(count * (length + 1)) < starts[-1]
    given = jnp.concatenate([moving.last_token[:, None], drafts], axis=1)
    positions = jnp.where(is_token, moving.seq_lens[owner] + place, 0)
    batch = ModelBatch(
        tokens=jnp.where(is_token, given[owner, jnp.clip(place, 0, length)], 0),
        positions=positions,
        slot_mapping=slots(rows.page_table, owner, positions, is_token, cache.page_size),
        page_table=rows.page_table,
        seq_lens=jnp.where(moving.active, moving.seq_lens + queries, 0),
        query_starts=starts,
        logits_indices=jnp.maximum(starts[1:] - 1, 0),
    )
    hidden, cache = forward_few(model, params, batch, cache, config=config, max_queries=length + 1)
    # Behind a row's last draft there is nothing: its last logits stand in, and what is sampled from them is not reached.
    wanted = starts[:-1, None] + jnp.minimum(steps, num_drafts[:, None])
    flat = jnp.minimum(wanted, hidden.shape[0] - 1).reshape(-1)
    logits = model.logits(params, hidden[flat], config=config)

    def repeated(array: Array) -> Array:
        return jnp.repeat(array, length + 1, axis=0)

    def counts() -> Array:
        before = jnp.where(jnp.arange(length) < steps[:, None], drafts[:, None], -1)  # [R, k + 1, k]
        every = jnp.broadcast_to(state.counts[index][:, None], (count, length + 1, state.counts.shape[1]))
        return _count(every, before).reshape(logits.shape)

    sampled = sample(
        logits,
        jax.tree.map(repeated, fixed.settings),
        counts,
        (moving.seq_lens[:, None] + 1 + steps).reshape(-1),
        (moving.num_output[:, None] + steps).reshape(-1),
        TokenMasks(repeated(fixed.masked), lambda: repeated(state.allowed[index])),
        _as_drafts(drafted),
    )
    sampled = jax.tree.map(lambda a: a.reshape(count, length + 1, *a.shape[1:]), sampled)
    is_draft = drafts >= 0
    agrees = is_draft & (sampled.tokens[:, :length] == drafts)
    stops = (sampled.tokens[..., None] == fixed.settings.stop_ids[:, None]).any(axis=-1)
    goes_on = jnp.cumprod(agrees & ~stops[:, :length], axis=1).astype(bool)
    reached = jnp.concatenate([moving.active[:, None], moving.active[:, None] & goes_on], axis=1)
    tokens = jnp.where(reached, sampled.tokens, -1)
    taken = tokens >= 0
    num_taken = taken.sum(axis=1)
    num_output = moving.num_output + num_taken
    ends = (reached & (~taken | stops)).any(axis=1) | (num_output >= fixed.limit)
    last = jnp.take_along_axis(tokens, jnp.maximum(num_taken - 1, 0)[:, None], axis=1)[:, 0]
    after = MovingRows(
        last_token=jnp.where(num_taken > 0, last, moving.last_token),
        seq_lens=moving.seq_lens + num_taken,
        num_output=num_output,
        active=moving.active & ~ends,
    )
    seen = state.counts.at[index[:, None], jnp.where(taken, tokens, state.counts.shape[1])].add(1, mode="drop")
    state = note_tokens(state, index[:, None], moving.seq_lens[:, None] + 1 + steps, tokens)

    flags = (sampled.finite | ~reached).astype(jnp.int32)
    flags = flags.at[:, :length].add(DRAFTED * is_draft + ACCEPTED * (agrees & reached[:, :length]))
    bits = jax.lax.bitcast_convert_type(sampled.logprobs, jnp.int32)
    summary = jnp.stack([tokens, bits, sampled.ranks, flags], axis=-1)
    by_step = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), StepTokens(summary, sampled.top_ids, sampled.top_logprobs))
    return scatter_rows(state, index, after, seen), by_step, cache


def _as_drafts(drafted: _Drafted) -> Drafts | None:
    """As rows of `sample`: the drafts of a row in order, and a row without one behind them. Certain ones need no verdict."""
    log_q = drafted.log_q
    if log_q is None:
        return None
    tokens = jnp.pad(drafted.tokens, ((0, 0), (0, 1)), constant_values=-1)

    def flat_log_q() -> Array:
        by_row = jnp.pad(jnp.swapaxes(log_q, 0, 1), ((0, 0), (0, 1), (0, 0)))
        return by_row.reshape(-1, by_row.shape[-1])

    return Drafts(tokens.reshape(-1), flat_log_q)
