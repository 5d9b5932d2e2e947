"""`ModelBatch`: what a decoder is told about the tokens of one step. Arrays only; knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


class ModelBatch(NamedTuple):
    """T packed tokens of R rows; row r owns tokens `query_starts[r]:query_starts[r+1]`, the last ones of its sequence.

    Attributes:
        tokens: ids. Padding tokens hold any valid id.
        positions: 0-based place of each token in its sequence.
        slot_mapping: where its K and V go: `page id * page_size + offset`; padding goes to the null page (slot < page_size).
        page_table: page ids of each row in order of position; entries beyond its length are never read.
        seq_lens: tokens of each row, this step's included; 0 for an unused row.
        query_starts: non-decreasing; tokens from `query_starts[R]` on are padding.
        logits_indices: for each row the packed token whose logits are wanted (its last one).
    """

    tokens: Int[Array, "T"]
    positions: Int[Array, "T"]
    slot_mapping: Int[Array, "T"]
    page_table: Int[Array, "R M"]
    seq_lens: Int[Array, "R"]
    query_starts: Int[Array, "R+1"]
    logits_indices: Int[Array, "R"]


def pack_sequences(
    sequences: Sequence[Sequence[int]], *, page_size: int, num_cached: Sequence[int] | None = None
) -> tuple[ModelBatch, int]:
    """Lay whole sequences out for the functional `forward`, each row on pages of its own, from page 1 on.

    Args:
        sequences: token ids of each row, none empty.
        page_size: tokens a page of the cache that will be used.
        num_cached: for each row the leading tokens already in that cache (from an earlier call with the same rows in
            the same page layout); only the others become queries. Default none.

    Returns:
        the batch, and the number of pages (null page included) the cache must have at least.
    """
    cached = [0] * len(sequences) if num_cached is None else list(num_cached)
    width = max(-(-len(s) // page_size) for s in sequences)
    table = np.zeros((len(sequences), width), np.int32)
    for row in range(len(sequences)):  # every row gets `width` pages, so that the layout does not depend on the lengths
        table[row] = 1 + row * width + np.arange(width)
    tokens, positions, slots, starts = [], [], [], [0]
    for row, ids in enumerate(sequences):
        where = np.arange(cached[row], len(ids), dtype=np.int32)
        tokens.append(np.asarray(ids[cached[row] :], np.int32))
        positions.append(where)
        slots.append(table[row][where // page_size] * page_size + where % page_size)
        starts.append(starts[-1] + len(where))
    query_starts = np.asarray(starts, np.int32)
    batch = ModelBatch(
        tokens=jnp.asarray(np.concatenate(tokens)),
        positions=jnp.asarray(np.concatenate(positions)),
        slot_mapping=jnp.asarray(np.concatenate(slots).astype(np.int32)),
        page_table=jnp.asarray(table),
        seq_lens=jnp.asarray([len(s) for s in sequences], jnp.int32),
        query_starts=jnp.asarray(query_starts),
        logits_indices=jnp.asarray(query_starts[1:] - 1),
    )
    return batch, 1 + table.size
