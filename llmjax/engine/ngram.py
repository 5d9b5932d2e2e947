"""Prompt lookup: drafts out of what a row has read or said (Saxena, Prompt Lookup Decoding, 2023). Pure; needs no model."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int


def ngram_drafts(
    history: Int[Array, "R C"], last: Int[Array, "R"], *, length: int, shortest: int, longest: int
) -> Int[Array, "R k"]:
    """What followed each row's last tokens when they occurred before: `length` tokens, or -1 where they did not.

    The most last tokens that occurred before count, `longest` at most and `shortest` at least; of several places the latest. What
    follows may come up to the end of the row: it then goes on as if it repeated itself, so that a row that loops is drafted to go
    on looping.

    Args:
        history: tokens by position; what lies behind `last` is not looked at.
        last: position of each row's last token.
    """
    size = history.shape[1]
    places = jnp.arange(size)
    same, matched = jnp.ones(history.shape, bool), jnp.zeros(history.shape, jnp.int32)
    for back in range(longest):  # matched: how many tokens up to each place are the row's last ones
        token = jnp.take_along_axis(history, jnp.maximum(last - back, 0)[:, None], axis=1)
        same &= (jnp.roll(history, back, axis=1) == token) & (places >= back)
        matched += same
    earlier = places < last[:, None]
    score = jnp.where(earlier & (matched >= shortest), matched * size + places, -1)
    place = jnp.where(score.max(axis=1) >= 0, jnp.argmax(score, axis=1), -1)
    period = jnp.maximum(last - place, 1)
    wanted = place[:, None] + 1 + jnp.arange(length) % period[:, None]
    drafts = jnp.take_along_axis(history, jnp.minimum(wanted, size - 1), axis=1)
    return jnp.where(place[:, None] >= 0, drafts, -1)
