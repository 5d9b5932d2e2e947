"""Speculative decoding on the device: draft a few tokens a row, verify all of them at once, keep what the target would say.

`speculate_step` is one launch, as `decode_steps` is: which drafts are taken and whether a row ends is decided on the device, and
the host reads it a launch later. `extend_with_draft` and `catch_up_step` keep a draft model's cache filled. Pure functions that
know no requests: who drafts, and how many tokens, comes packed with the launch.

What a row gets has exactly the target's distribution, whatever is drafted: see `sample.sample`. Greedy rows, masked ones, and
all rows with prompt lookup get token for token what plain steps give, as far as one program rounds as the other. Sampled rows
with other drafts get other tokens of the same distribution, and which depends on the places that had a draft: a seed alone fixes
them only where launches depend on the request alone (`deterministic`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from llmjax.engine.drafting import (
    Drafted,
    Drafter,
    DraftRows,
    ModelDrafter,
    NgramDrafter,
    count_tokens,
    draft_by_layers,
    draft_by_model,
)
from llmjax.engine.ngram import ngram_drafts
from llmjax.engine.prompt_scores import Unscored
from llmjax.engine.sample import Drafts, sample
from llmjax.engine.state import DeviceState, mask_slot
from llmjax.engine.step import (
    MovingRows,
    Pieces,
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
from llmjax.model.registry import DecoderConfig, Model, forward_few
from llmjax.sampling_params import GREEDY_TEMPERATURE

DRAFTED, ACCEPTED = 2, 4
"""Bits in the last word of `StepTokens.summary`, beside that for finite logits: step i had a draft, and took it."""


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
    drafts takes one token. Keys and values of rejected drafts are overwritten before anyone reads them.

    The drafts of a masked row are the host's, which has put them into its history, behind its last token, with a mask for each
    place. They are no draw, as those of prompt lookup: the row gets token for token what plain steps give.

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
    most = jnp.where(moving.active, jnp.clip(room, 0, length), 0)
    view = DraftRows(index, state.page_table[index], fixed, moving, jnp.where(fixed.masked, 0, most))

    if isinstance(drafter, NgramDrafter):
        assert state.history is not None
        history = state.history[index]
        found = ngram_drafts(history, moving.seq_lens, length=length, shortest=drafter.shortest, longest=drafter.longest)
        drafted = Drafted(jnp.where(jnp.arange(length) < view.wanted[:, None], found, -1), None)
    else:
        factor = jax.lax.bitcast_convert_type(updates["temperature"], jnp.float32)
        warm = jnp.maximum(fixed.settings.temperature * factor, GREEDY_TEMPERATURE)
        warm = jnp.where(fixed.settings.temperature < GREEDY_TEMPERATURE, fixed.settings.temperature, warm)
        view_of_draft = view._replace(fixed=fixed._replace(settings=fixed.settings._replace(temperature=warm)))
        if isinstance(drafter, ModelDrafter):
            assert draft_cache is not None
            drafted, draft_cache = draft_by_model(draft_params, draft_cache, state, view_of_draft, drafter, length)
        else:
            drafted, kv_cache = draft_by_layers(params, kv_cache, state, view_of_draft, drafter, model, config, length)
    given = _given_drafts(state, view, most, length)
    state, tokens, kv_cache = _verify(params, kv_cache, state, view, drafted, given, model, config)
    return state, tokens, kv_cache, draft_cache


def _given_drafts(state: DeviceState, rows: DraftRows, most: Int[Array, "R"], length: int) -> Int[Array, "R k"]:
    """The drafts that the host has made for masked rows, `most` of each; -1 where there is none."""
    assert state.history is not None
    places = jnp.arange(length)
    behind = jnp.minimum(rows.moving.seq_lens[:, None] + 1 + places, state.history.shape[1] - 1)
    given = rows.fixed.masked[:, None] & (places < most[:, None])
    return jnp.where(given, state.history[rows.index[:, None], behind], -1)


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
) -> tuple[DeviceState, StepTokens, Unscored, KVCache, KVCache]:
    """`extend_step`, and the same tokens through the draft model: what is in the target's pages is then in its own."""
    updates = extend_layout(tokens=tokens, rows=rows, page_size=kv_cache.page_size).unpack(packed)
    _, batch = extend_batch(append_pages(state, updates), updates, page_size=kv_cache.page_size)
    _, draft_cache = drafter.model.forward(draft_params, batch, draft_cache, config=drafter.config, decode=False)
    state, sampled, unscored, kv_cache = extend_step(
        params, state, packed, kv_cache, model=model, config=config, tokens=tokens, rows=rows
    )
    return state, sampled, unscored, kv_cache, draft_cache


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


# -- verifying


def _verify(
    params: Any,
    cache: KVCache,
    state: DeviceState,
    rows: DraftRows,
    drafted: Drafted,
    given: Int[Array, "R k"],
    model: Model,
    config: DecoderConfig,
) -> tuple[DeviceState, StepTokens, KVCache]:
    """Each row's last token and its drafts through the target, a token sampled after each, and what of them the row takes. No row
    has both drafts that were drafted here and given ones."""
    index, fixed, moving = rows.index, rows.fixed, rows.moving
    drafts = jnp.maximum(drafted.tokens, given)
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
        return count_tokens(every, before).reshape(logits.shape)

    def masks() -> Array:
        return state.allowed[mask_slot(index[:, None], steps, num_rows=state.masked.shape[0]).reshape(-1)]

    sampled = sample(
        logits,
        jax.tree.map(repeated, fixed.settings),
        counts,
        (moving.seq_lens[:, None] + 1 + steps).reshape(-1),
        (moving.num_output[:, None] + steps).reshape(-1),
        TokenMasks(repeated(fixed.masked), masks),
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


def _as_drafts(drafted: Drafted) -> Drafts | None:
    """As rows of `sample`: the drafts of a row in order, and a row without one behind them. Certain ones need no verdict."""
    log_q = drafted.log_q
    if log_q is None:
        return None
    tokens = jnp.pad(drafted.tokens, ((0, 0), (0, 1)), constant_values=-1)

    def flat_log_q() -> Array:
        by_row = jnp.pad(jnp.swapaxes(log_q, 0, 1), ((0, 0), (0, 1), (0, 0)))
        return by_row.reshape(-1, by_row.shape[-1])

    return Drafts(tokens.reshape(-1), flat_log_q)
