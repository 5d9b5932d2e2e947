"""`ForwardModel`: a parameter tree as a `Scorer`, without an engine. Device code's caller: owns no state but the parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from llmjax.model.batch import ModelBatch, pack_sequences
from llmjax.model.kv_cache import init_cache
from llmjax.model.registry import DecoderConfig, get_model
from llmjax.quantization.scores import Scores

_PAGE = 16
_SHORTEST = 64


class ForwardModel:
    """Scores texts with `forward` and `logits` of the model that is registered for the config: whole distributions, exact KL.

    Texts are padded at their end to the next power of two, so that few lengths are compiled; a text may have as many tokens as
    fit in one pass. `params` is used as it is, quantised leaves included, and is not kept from changes.
    """

    def __init__(self, params: Any, config: DecoderConfig) -> None:
        self.params = params
        self.config = config

    def score(self, tokens: Sequence[int], block: int) -> Iterator[Scores]:
        """See `Scorer`. Raises ValueError for fewer than two tokens, and for ids outside the vocabulary."""
        if len(tokens) < 2 or not all(0 <= token < self.config.num_tokens for token in tokens):
            raise ValueError(
                f"score takes two or more token ids from 0 to {self.config.num_tokens - 1}, got {list(tokens)!r:.80}"
            )
        length = max(_SHORTEST, 1 << (len(tokens) - 1).bit_length())
        padded = [*tokens, *[0] * (length - len(tokens))]  # behind the text: causal attention never sees it
        batch, pages = pack_sequences([padded], page_size=_PAGE)
        hidden = _hidden(self.params, batch, pages=pages, config=self.config)
        for start in range(0, len(tokens) - 1, block):
            end = min(start + block, len(tokens) - 1)
            rows = np.minimum(np.arange(start, start + block), length - 1)
            logits = np.asarray(_logits(self.params, hidden[rows], config=self.config))
            yield Scores.of_logits(logits[: end - start], tokens[start + 1 : end + 1])


@functools.partial(jax.jit, static_argnames=("pages", "config"))
def _hidden(params: Any, batch: ModelBatch, *, pages: int, config: Any) -> Float[Array, "T D"]:
    cache = init_cache(config, num_pages=pages, page_size=_PAGE)
    return get_model(config.family).forward(params, batch, cache, config=config, decode=False)[0]


@functools.partial(jax.jit, static_argnames="config")
def _logits(params: Any, hidden: Float[Array, "n D"], *, config: Any) -> Float[Array, "n V"]:
    return get_model(config.family).logits(params, hidden, config=config)
