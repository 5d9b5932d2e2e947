"""`score_step`: how likely the tokens of prompts were. A program of its own, behind an extend launch whose rows ask for it.

It is no condition inside the extend program: the head goes through many tokens in a loop, and a condition that holds a loop stays
out of a CUDA graph. The host would wait in every extend launch, until the device has decided it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from llmjax.engine.sample import TokenScores, token_scores
from llmjax.model.registry import DecoderConfig, Model

SCORE_CHUNK = 64
"""Tokens whose logits exist at once."""


class Unscored(NamedTuple):
    """What an extend launch leaves to be scored.

    Attributes:
        hidden: of each packed token, as `Model.logits` takes it.
        targets: the prompt token that follows each packed one; -1 where none does, and anything where no prompt is.
    """

    hidden: Float[Array, "T D"]
    targets: Int[Array, "T"]


def score_step(
    params: Any, hidden: Float[Array, "T D"], targets: Int[Array, "T"], *, model: Model, config: DecoderConfig
) -> TokenScores:
    """The scores of an `Unscored`; those without a target mean nothing. The head is computed for `SCORE_CHUNK` tokens at once."""
    tokens = targets.shape[0]
    chunk = min(SCORE_CHUNK, tokens)

    def one(piece: Unscored) -> TokenScores:
        return token_scores(model.logits(params, piece.hidden, config=config), piece.targets)

    def split(array: Array) -> Array:
        padded = jnp.pad(array, [(0, -tokens % chunk)] + [(0, 0)] * (array.ndim - 1))
        return padded.reshape(-1, chunk, *array.shape[1:])

    chunks: TokenScores = jax.lax.map(one, Unscored(split(hidden), split(jnp.maximum(targets, 0))))
    return TokenScores(*(a.reshape(-1, *a.shape[2:])[:tokens] for a in chunks))
