"""`DeviceState`: the one device truth of all rows, and how the host changes it. Pure functions; knows no requests.

The host never reads this state back. It sends small packed int32 vectors: `reset_rows` for rows that get a new request, and a
`StepLayout`-packed vector with every launch (which rows, which tokens, which pages were appended). Row
`max_sequences`, the last one, is the
padding row: never active, its page table all null pages, so that padded entries of a launch harm nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from llmjax.engine.sample import MAX_BIAS, MAX_STOPS, SamplingSettings
from llmjax.engine.token_masks import num_mask_words

ROWS_A_RESET = 8  # rows one `reset_rows` call can take; a burst of new requests takes several calls
MASKS_A_RESET = 16  # masks it can bring
SEEN_A_RESET = 256  # entries of `SeenTokens` it can take; a long cached prefix with penalties takes several calls
HISTORY_A_RESET = 1024  # entries of `KnownTokens` it can take, where the state has a history; likewise


class DeviceState(NamedTuple):
    """All rows of the device batch (B rows and the padding row). Donated to each launch and returned by it.

    Attributes:
        last_token: the row's latest sampled token; its K and V are not in the cache yet.
        seq_lens: tokens whose K and V are in the cache.
        num_output: output tokens so far; num_prompt: prompt tokens; limit: output tokens at most.
        active: the row decodes: its prompt is computed and it has not ended.
        page_table: page ids in order of position; unused entries are the null page.
        settings: sampling settings, one entry a row.
        counts: per row and token id, see `PROMPT_BIT`.
        masked: the row samples only what `allowed` allows: each token takes another mask, from the host, which brings with a
            launch that of its next token and, if it makes drafts for the row, that of the token behind each.
        allowed: the masks, see `mask_slot`; bit i of word w is token 32 w + i.
        history: the row's tokens by position, its last one included, for drafts; of a masked row in a launch with drafts these
            stand behind it. None where nothing is drafted.
    """

    last_token: Int[Array, "B1"]
    seq_lens: Int[Array, "B1"]
    num_output: Int[Array, "B1"]
    num_prompt: Int[Array, "B1"]
    limit: Int[Array, "B1"]
    active: Bool[Array, "B1"]
    page_table: Int[Array, "B1 M"]
    settings: SamplingSettings
    counts: Int[Array, "B1 V"]
    masked: Bool[Array, "B1"]
    allowed: Int[Array, "P*B1 W"]
    history: Int[Array, "B1 C"] | None = None


def mask_slot(rows: Any, places: Any, *, num_rows: int) -> Any:
    """The entry of `DeviceState.allowed` that holds a row's mask of the token `places` behind its next, of numbers or arrays.
    `num_rows` is B1."""
    return places * num_rows + rows


def init_state(
    *, max_sequences: int, max_pages: int, vocab_size: int, history_length: int | None = None, mask_places: int = 1
) -> DeviceState:
    """A state with every row unused, on the default device; with a history of so many tokens a row, if any, and masks of so many
    tokens."""
    rows = max_sequences + 1

    def make() -> DeviceState:
        ints = jnp.zeros((rows,), jnp.int32)
        floats = jnp.zeros((rows,), jnp.float32)
        return DeviceState(
            last_token=ints, seq_lens=ints, num_output=ints, num_prompt=ints, limit=ints,
            active=jnp.zeros((rows,), bool),
            page_table=jnp.zeros((rows, max_pages), jnp.int32),
            settings=SamplingSettings(
                temperature=floats, top_k=ints, top_p=floats + 1, min_p=floats,
                repetition_penalty=floats + 1, presence_penalty=floats, frequency_penalty=floats,
                seed=jnp.zeros((rows, 2), jnp.uint32), choice=ints, num_logprobs=ints - 1,
                processed_logprobs=jnp.zeros((rows,), bool), min_tokens=ints,
                stop_ids=jnp.full((rows, MAX_STOPS), -1, jnp.int32),
                bias_ids=jnp.full((rows, MAX_BIAS), -1, jnp.int32), bias_values=jnp.zeros((rows, MAX_BIAS), jnp.float32),
            ),
            counts=jnp.zeros((rows, vocab_size), jnp.int32),
            masked=jnp.zeros((rows,), bool),
            allowed=jnp.zeros((mask_places * rows, num_mask_words(vocab_size)), jnp.int32),
            history=None if history_length is None else jnp.zeros((rows, history_length), jnp.int32),
        )  # fmt: skip

    return jax.jit(make)()


class RowReset(NamedTuple):
    """What the host tells of one new row, as numpy scalars and vectors; `pack_resets` turns it into int32.

    `num_cached` tokens of it are in its pages already.
    """

    row: int
    num_cached: int
    num_prompt: int
    limit: int
    page_table: np.ndarray  # int32 [M]
    settings: SamplingSettings  # numpy values of one row


_INTS = ("top_k", "choice", "num_logprobs", "processed_logprobs", "min_tokens")
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_NO_ROW = np.iinfo(np.int32).max  # an index beyond every state: the scatter drops it
_HEAD = 4  # row, num_cached, num_prompt, limit


class SeenTokens(NamedTuple):
    """What is to be added to the counts of new rows for tokens that are not computed again, each pair of row and id once.

    `counts` [n] are how often the id occurs in the output, and `PROMPT_BIT` where it occurs in the prompt. Only rows with a
    penalty need them.
    """

    rows: Int[np.ndarray, "n"]
    ids: Int[np.ndarray, "n"]
    counts: Int[np.ndarray, "n"]


def no_seen_tokens() -> SeenTokens:
    """For rows that begin at their first token, or have no penalty."""
    return SeenTokens(*np.zeros((3, 0), np.int32))


class KnownTokens(NamedTuple):
    """What a row's history is to hold of tokens that are not computed again, and of drafts that the host made: `ids` [n] at
    `positions` [n] of `rows` [n]."""

    rows: Int[np.ndarray, "n"]
    positions: Int[np.ndarray, "n"]
    ids: Int[np.ndarray, "n"]


def no_known_tokens() -> KnownTokens:
    """For rows that begin at their first token."""
    return KnownTokens(*np.zeros((3, 0), np.int32))


def reset_width(max_pages: int) -> int:
    """int32 words a row takes in what `pack_resets` makes."""
    return _HEAD + len(_INTS) + len(_FLOATS) + 2 + MAX_STOPS + 2 * MAX_BIAS + max_pages


def pack_resets(resets: list[RowReset], seen: SeenTokens, *, max_pages: int, known: KnownTokens | None = None) -> np.ndarray:
    """At most `ROWS_A_RESET` resets, `SEEN_A_RESET` seen tokens and `HISTORY_A_RESET` known ones as one int32 vector; unused
    entries name no row. `known` is None where the state has no history."""
    assert len(resets) <= ROWS_A_RESET
    width = reset_width(max_pages)
    out = np.zeros((ROWS_A_RESET, width), np.int32)
    out[:, 0] = _NO_ROW
    for line, reset in zip(out, resets, strict=False):
        s = reset.settings
        floats = np.array([getattr(s, name) for name in _FLOATS], np.float32)
        pieces = (
            np.array([reset.row, reset.num_cached, reset.num_prompt, reset.limit], np.int32),
            np.array([int(getattr(s, name)) for name in _INTS], np.int32),
            floats.view(np.int32),
            np.asarray(s.seed, np.uint32).view(np.int32),
            np.asarray(s.stop_ids, np.int32),
            np.asarray(s.bias_ids, np.int32),
            np.asarray(s.bias_values, np.float32).view(np.int32),
            np.asarray(reset.page_table, np.int32),
        )
        line[:] = np.concatenate(pieces)
    lists = [_triples(seen, SEEN_A_RESET)] + ([] if known is None else [_triples(known, HISTORY_A_RESET)])
    return np.concatenate([out.reshape(-1), *lists])


def _triples(entries: SeenTokens | KnownTokens, size: int) -> np.ndarray:
    """int32 [3 * size]: rows, ids or positions, and what belongs there."""
    assert len(entries.rows) <= size
    out = np.zeros((3, size), np.int32)
    out[0] = _NO_ROW
    out[:, : len(entries.rows)] = entries
    return out.reshape(-1)


def pack_masks(slots: Sequence[int], allowed: Sequence[np.ndarray], *, num_words: int) -> np.ndarray:
    """At most `MASKS_A_RESET` masks of `num_words` words, int32 [16, 1 + W]: `mask_slot`, mask; unused entries name none."""
    packed = np.zeros((MASKS_A_RESET, 1 + num_words), np.int32)
    packed[:, 0] = _NO_ROW
    if slots:
        packed[: len(slots), 0] = slots
        packed[: len(slots), 1:] = allowed
    return packed


def reset_rows(state: DeviceState, packed: Int[Array, "width"], masks: Int[Array, "16 W1"]) -> DeviceState:
    """Give rows to new requests: everything of the row is overwritten, but for what its history holds behind its tokens; then
    add the seen and the known tokens and put the masks. `state` is meant to be donated.

    Calls for the same rows that only add seen and known tokens may follow. Masks may be of any rows, new or not; the first of a
    row, which every row that has masks gets, makes it a masked one.
    """
    max_pages = state.page_table.shape[1]
    if state.history is not None:
        packed, known = jnp.split(packed, [-3 * HISTORY_A_RESET])
        known_rows, positions, ids = known.reshape(3, -1)
        state = state._replace(history=state.history.at[known_rows, positions].set(ids, mode="drop"))
    seen_rows, seen_ids, seen_counts = packed[-3 * SEEN_A_RESET :].reshape(3, -1)
    packed = packed[: -3 * SEEN_A_RESET].reshape(ROWS_A_RESET, -1)
    sizes = (_HEAD, len(_INTS), len(_FLOATS), 2, MAX_STOPS, MAX_BIAS, MAX_BIAS, max_pages)
    head, ints, floats, seed, stops, bias_ids, bias_values, pages = jnp.split(packed, np.cumsum(sizes)[:-1], axis=1)
    floats, bias_values = (jax.lax.bitcast_convert_type(a, jnp.float32) for a in (floats, bias_values))
    rows, num_cached, num_prompt = head[:, 0], head[:, 1], head[:, 2]
    new = {name: ints[:, i] for i, name in enumerate(_INTS)} | {name: floats[:, i] for i, name in enumerate(_FLOATS)}
    new |= {
        "seed": jax.lax.bitcast_convert_type(seed, jnp.uint32),
        "stop_ids": stops,
        "bias_ids": bias_ids,
        "bias_values": bias_values,
    }
    old = state.settings._asdict()
    settings = SamplingSettings(**{n: old[n].at[rows].set(new[n].astype(old[n].dtype), mode="drop") for n in new})
    return state._replace(
        last_token=state.last_token.at[rows].set(0, mode="drop"),
        seq_lens=state.seq_lens.at[rows].set(num_cached, mode="drop"),
        num_output=state.num_output.at[rows].set(jnp.maximum(num_cached - num_prompt, 0), mode="drop"),
        num_prompt=state.num_prompt.at[rows].set(num_prompt, mode="drop"),
        limit=state.limit.at[rows].set(head[:, 3], mode="drop"),
        active=state.active.at[rows].set(False, mode="drop"),
        page_table=state.page_table.at[rows].set(pages, mode="drop"),
        settings=settings,
        counts=state.counts.at[rows].set(0, mode="drop").at[seen_rows, seen_ids].add(seen_counts, mode="drop"),
        masked=state.masked.at[rows].set(False, mode="drop").at[masks[:, 0]].set(True, mode="drop"),
        allowed=state.allowed.at[masks[:, 0]].set(masks[:, 1:], mode="drop"),
    )
