"""The static steps: `extend_step` and `decode_steps`, pure functions of (params, state, updates, cache).

Everything a launch needs from the host is one int32 vector, laid out by `DecodeLayout` or `ExtendLayout`; everything else is
already on the device. Options of requests are data in the state, so that one program a bucket serves them all.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from llmjax.engine.prompt_scores import Unscored
from llmjax.engine.sample import PROMPT_BIT, Sampled, SamplingSettings, sample
from llmjax.engine.state import DeviceState
from llmjax.engine.token_masks import TokenMasks
from llmjax.model.batch import ModelBatch
from llmjax.model.kv_cache import KVCache
from llmjax.model.registry import DecoderConfig, Model


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Names and sizes of the consecutive pieces of a packed int32 vector."""

    sizes: tuple[tuple[str, int], ...]

    @property
    def width(self) -> int:
        """int32 words in all."""
        return sum(size for _, size in self.sizes)

    def pack(self, **pieces: np.ndarray) -> np.ndarray:
        """The vector, int32 [width]; every piece must have its declared size."""
        assert set(pieces) == {name for name, _ in self.sizes}
        out = np.concatenate([np.asarray(pieces[name], np.int32) for name, _ in self.sizes])
        assert out.shape == (self.width,)
        return out

    def unpack(self, packed: Int[Array, "width"]) -> dict[str, Array]:
        """The pieces of a device vector, by name."""
        bounds = np.cumsum([size for _, size in self.sizes])[:-1]
        return dict(zip((name for name, _ in self.sizes), jnp.split(packed, bounds), strict=True))


def decode_layout(*, rows: int, num_steps: int, page_size: int) -> Pieces:
    """Updates of a decode launch: the device rows stepped, and (row, index, page) of each page appended before it."""
    pages = rows * -(-num_steps // page_size)
    return Pieces((("rows", rows), ("page_rows", pages), ("page_indices", pages), ("page_ids", pages)))


def extend_layout(*, tokens: int, rows: int, page_size: int) -> Pieces:
    """Updates of an extend launch.

    `tokens` holds the packed ids (anything where the row decodes: the device has its token), `samples` 1 where a
    token is to be sampled after the chunk, `next_tokens` the id that follows each chunk in its prompt (-1 for none),
    to score the chunk's last token.
    """
    pages = tokens // page_size + rows
    return Pieces(
        (
            ("tokens", tokens), ("query_starts", rows + 1), ("rows", rows), ("samples", rows), ("next_tokens", rows),
            ("page_rows", pages), ("page_indices", pages), ("page_ids", pages),
        )
    )  # fmt: skip


class StepTokens(NamedTuple):
    """What a launch gives back, K steps of R rows.

    Attributes:
        summary: int32 [K, R, 4]: token (-1 for none), bits of its float32 logprob, rank, and whether the logits were finite.
            One array, because each one costs a transfer.
        top_ids, top_logprobs: [K, R, 20] alternatives; meaningful for rows that asked for them.
    """

    summary: Int[Array, "K R 4"]
    top_ids: Int[Array, "K R 20"]
    top_logprobs: Float[Array, "K R 20"]


def decode_steps(
    params: Any,
    state: DeviceState,
    packed: Int[Array, "width"],
    kv_cache: KVCache,
    *,
    model: Model,
    config: DecoderConfig,
    rows: int,
    num_steps: int,
) -> tuple[DeviceState, StepTokens, KVCache]:
    """`num_steps` decode steps of `rows` rows in one launch. `state` and `kv_cache` are meant to be donated.

    A row that ends (stop id, limit, non-finite logits) does nothing from the next step on: it writes to the null page
    and samples -1. A masked row does so too, until the next launch, because the host has its next mask only then.
    """
    page_size = kv_cache.page_size
    updates = decode_layout(rows=rows, num_steps=num_steps, page_size=page_size).unpack(packed)
    state = append_pages(state, updates)
    index = updates["rows"]
    page_table = state.page_table[index]
    fixed, moving = gather_rows(state, index)

    def one(carry: tuple[MovingRows, Array, KVCache], step: Array) -> tuple[tuple[MovingRows, Array, KVCache], StepTokens]:
        moving, counts, cache = carry
        active, positions = moving.active & ((step == 0) | ~fixed.masked), moving.seq_lens
        batch = ModelBatch(
            tokens=moving.last_token,
            positions=positions,
            slot_mapping=slots(page_table, jnp.arange(rows), positions, active, page_size),
            page_table=page_table,
            seq_lens=jnp.where(active, positions + 1, 0),
            query_starts=jnp.arange(rows + 1, dtype=jnp.int32),
            logits_indices=jnp.arange(rows, dtype=jnp.int32),
        )
        hidden, cache = model.forward(params, batch, cache, config=config, decode=True)
        moving = moving._replace(seq_lens=positions + active)
        logits = model.logits(params, hidden, config=config)
        moving, counts, tokens = _sample_rows(fixed, moving, counts, state.allowed, index, active, active, logits)
        return (moving, counts, cache), tokens

    carry = (moving, state.counts, kv_cache)
    if num_steps == 1:
        carry, tokens = one(carry, jnp.zeros((), jnp.int32))
        tokens = jax.tree.map(lambda a: a[None], tokens)
    else:
        carry, tokens = jax.lax.scan(one, carry, jnp.arange(num_steps), length=num_steps)
    moving, counts, kv_cache = carry
    state = note_tokens(state, index, state.seq_lens[index] + 1 + jnp.arange(num_steps)[:, None], tokens.summary[..., 0])
    return scatter_rows(state, index, moving, counts), tokens, kv_cache


def extend_step(
    params: Any,
    state: DeviceState,
    packed: Int[Array, "width"],
    kv_cache: KVCache,
    *,
    model: Model,
    config: DecoderConfig,
    tokens: int,
    rows: int,
) -> tuple[DeviceState, StepTokens, Unscored, KVCache]:
    """One launch over ragged chunks of at most `rows` rows and `tokens` tokens; decoding rows join with one token each.

    A decoding row's input is the device's own last token. Such a row that has ended already (the host may not know
    yet) is left alone. Prompts are scored from what comes back, by `score_step`. `state` and `kv_cache` are meant to be
    donated.
    """
    updates = extend_layout(tokens=tokens, rows=rows, page_size=kv_cache.page_size).unpack(packed)
    state = append_pages(state, updates)
    chunks, batch = extend_batch(state, updates, page_size=kv_cache.page_size)
    index, ids, positions = updates["rows"], batch.tokens, batch.positions
    lengths, decoding, live, owner, is_token = chunks
    hidden, kv_cache = model.forward(params, batch, kv_cache, config=config, decode=False)

    is_last = jnp.arange(tokens) + 1 >= updates["query_starts"][owner + 1]
    unscored = Unscored(hidden, jnp.where(is_last, updates["next_tokens"][owner], jnp.roll(ids, -1)))
    state = _count_given_tokens(state, index[owner], ids, positions, is_token & ~decoding[owner])
    state = state._replace(seq_lens=state.seq_lens.at[index].add(jnp.where(live, lengths, 0)))
    last = model.logits(params, hidden[batch.logits_indices], config=config)
    fixed, moving = gather_rows(state, index)
    wants = live & (updates["samples"] > 0)
    moving, counts, sampled = _sample_rows(fixed, moving, state.counts, state.allowed, index, live, wants, last)
    state = note_tokens(state, index[owner], positions, jnp.where(is_token, ids, -1))
    state = note_tokens(state, index, moving.seq_lens, sampled.summary[..., 0])
    return scatter_rows(state, index, moving, counts), jax.tree.map(lambda a: a[None], sampled), unscored, kv_cache


class Chunks(NamedTuple):
    """The entries of an extend launch and its packed tokens.

    Attributes:
        lengths: tokens of each entry. decoding: its token is the device's own last one. live: it is used, and has not ended.
        owner: the entry of each packed token. is_token: whether the token is one, of a live entry.
    """

    lengths: Int[Array, "R"]
    decoding: Bool[Array, "R"]
    live: Bool[Array, "R"]
    owner: Int[Array, "T"]
    is_token: Bool[Array, "T"]


def extend_batch(state: DeviceState, updates: dict[str, Array], *, page_size: int) -> tuple[Chunks, ModelBatch]:
    """What an extend launch computes, by `extend_layout`; the state has its new pages already."""
    starts, index = updates["query_starts"], updates["rows"]
    tokens = updates["tokens"].shape[0]
    lengths = starts[1:] - starts[:-1]

    decoding = state.active[index]
    first = updates["tokens"][jnp.minimum(starts[:-1], tokens - 1)]
    live = (lengths > 0) & (decoding | (first >= 0))

    owner = token_owners(starts, tokens)
    is_token = (jnp.arange(tokens) < starts[-1]) & live[owner]
    positions = jnp.where(is_token, state.seq_lens[index][owner] + jnp.arange(tokens) - starts[owner], 0)
    ids = jnp.where(decoding[owner], state.last_token[index][owner], updates["tokens"])
    ids = jnp.where(is_token, ids, 0)
    page_table = state.page_table[index]
    seq_lens = jnp.where(live, state.seq_lens[index] + lengths, 0)
    batch = ModelBatch(
        tokens=ids,
        positions=positions,
        slot_mapping=slots(page_table, owner, positions, is_token, page_size),
        page_table=page_table,
        seq_lens=seq_lens,
        query_starts=starts,
        logits_indices=jnp.maximum(starts[1:] - 1, 0),
    )
    return Chunks(lengths, decoding, live, owner, is_token), batch


def token_owners(starts: Int[Array, "R+1"], tokens: int) -> Int[Array, "T"]:
    """The entry of each packed token; the last one's for padding."""
    # A comparison with each start, because a search is a loop, which a CUDA graph does not take.
    return jnp.minimum((jnp.arange(tokens)[:, None] >= starts[1:]).sum(axis=1), starts.shape[0] - 2)


def note_tokens(state: DeviceState, rows: Array, positions: Array, ids: Array) -> DeviceState:
    """Write tokens into the history, if there is one; ids of -1 are none."""
    if state.history is None:
        return state
    places = jnp.where(ids >= 0, positions, state.history.shape[1])
    return state._replace(history=state.history.at[rows, places].set(ids, mode="drop"))


def append_pages(state: DeviceState, updates: dict[str, Array]) -> DeviceState:
    # Unused entries name the padding row with page id 0, which keeps its table all null pages.
    table = state.page_table.at[updates["page_rows"], updates["page_indices"]].set(updates["page_ids"])
    return state._replace(page_table=table)


def slots(page_table: Array, owner: Array, positions: Array, valid: Array, page_size: int) -> Array:
    pages = page_table[owner, jnp.minimum(positions // page_size, page_table.shape[1] - 1)]
    return jnp.where(valid, pages, 0) * page_size + positions % page_size


class FixedRows(NamedTuple):
    """What a launch reads of its rows and does not change, in the order of its entries."""

    settings: SamplingSettings
    limit: Int[Array, "R"]
    masked: Bool[Array, "R"]


class MovingRows(NamedTuple):
    """What each step changes of its rows, in the order of the launch's entries: gathered once a launch, not once a step.

    The padding row may be there many times; nothing of it ever changes.
    """

    last_token: Int[Array, "R"]
    seq_lens: Int[Array, "R"]
    num_output: Int[Array, "R"]
    active: Bool[Array, "R"]


def gather_rows(state: DeviceState, index: Array) -> tuple[FixedRows, MovingRows]:
    fixed = FixedRows(jax.tree.map(lambda a: a[index], state.settings), state.limit[index], state.masked[index])
    return fixed, MovingRows(*(getattr(state, name)[index] for name in MovingRows._fields))


def scatter_rows(state: DeviceState, index: Array, moving: MovingRows, counts: Array) -> DeviceState:
    changed = {name: getattr(state, name).at[index].set(rows) for name, rows in moving._asdict().items()}
    return state._replace(counts=counts, **changed)


def _sample_rows(
    fixed: FixedRows,
    moving: MovingRows,
    counts: Array,
    allowed: Array,
    index: Array,
    live: Array,
    wants: Array,
    logits: Array,
) -> tuple[MovingRows, Array, StepTokens]:
    """Sample one token for each entry that `wants` one, and move these rows on; tell of each `live` entry whether its logits are
    finite. `counts` [B1, V] and `allowed` [B1, W] are of all rows."""
    masks = TokenMasks(fixed.masked, lambda: allowed[index])
    sampled: Sampled = sample(logits, fixed.settings, lambda: counts[index], moving.seq_lens, moving.num_output, masks)
    tokens = jnp.where(wants, sampled.tokens, -1)
    taken = tokens >= 0  # finite logits, and wanted
    num_output = moving.num_output + taken
    stopped = (tokens[:, None] == fixed.settings.stop_ids).any(1)
    goes_on = taken & ~stopped & (num_output < fixed.limit)
    moving = moving._replace(
        last_token=jnp.where(taken, tokens, moving.last_token),
        num_output=num_output,
        active=jnp.where(wants, goes_on, moving.active),
    )
    counts = counts.at[index, jnp.where(taken, tokens, counts.shape[1])].add(1, mode="drop")
    bits = jax.lax.bitcast_convert_type(sampled.logprobs, jnp.int32)
    finite = (sampled.finite | ~live).astype(jnp.int32)
    summary = jnp.stack([tokens, bits, sampled.ranks, finite], axis=-1)
    return moving, counts, StepTokens(summary, sampled.top_ids, sampled.top_logprobs)


def _count_given_tokens(state: DeviceState, rows: Array, ids: Array, positions: Array, given: Array) -> DeviceState:
    """Note tokens the host gave: prompt tokens by their bit, and output tokens that are computed again after a preemption."""
    vocab = state.counts.shape[1]
    in_prompt = positions < state.num_prompt[rows]
    counts = state.counts.at[rows, jnp.where(given & in_prompt, ids, vocab)].max(PROMPT_BIT, mode="drop")
    again = given & ~in_prompt
    counts = counts.at[rows, jnp.where(again, ids, vocab)].add(1, mode="drop")
    num_output = state.num_output.at[rows].add(again.astype(jnp.int32))
    return state._replace(counts=counts, num_output=num_output)
